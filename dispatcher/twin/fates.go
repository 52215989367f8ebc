package twin

import (
	"cmp"
	"slices"
	"time"
)

// fates are what became of a model's requests in a window, so far as it is known at its end. A request that lost
// its rank and came again for another one is one request here: a replay sends it on by itself where that happens.
type fates struct {
	left    map[uint64]fate
	stay    map[uint64]int32  // tokens of the answers of those that have not left, as far as they were seen
	again   map[*came]bool    // that are not another request
	first   map[uint64]uint64 // id of the first leg, by that of a later one
	lag     int32             // of those whose own is not known
	lengths lengths
}

// fate is that of a request that left.
type fate struct {
	at     time.Duration // since the window began
	tokens int32         // of the whole answer; below 0: it never had a slot
	lag    int32         // steps until its first token; below 0: not known
}

// leg is a request on its way to a rank or on it.
type leg struct {
	id  uint64
	age int32 // tokens that it had before
}

// answer is what is known of a request: its first leg, and its tokens when the window began or it came.
type answer struct {
	leg
	tokens int32
}

// ended tells that a leg is the next one of a request: it has the key and the tokens with which that one ended.
type ended struct {
	key uint64
	age int32
}

// learner collects them.
type learner struct {
	*fates
	answers map[uint64]answer // by their first leg
	legs    map[uint64]leg    // the last one of each request: by its id, the first one's id and its own age
	keys    map[uint64]uint64 // likewise
	ended   map[ended]uint64  // id of the first leg
	lags    []int32
}

// usualLag is how many steps a request waits for its first token where none has ended yet.
const usualLag = 1

// learn collects what became of a model's requests.
func (w *Window) learn(model string) *fates {
	l := &learner{
		fates:   &fates{left: map[uint64]fate{}, stay: map[uint64]int32{}, again: map[*came]bool{}, first: map[uint64]uint64{}},
		answers: map[uint64]answer{}, legs: map[uint64]leg{}, keys: map[uint64]uint64{}, ended: map[ended]uint64{},
	}
	begin := w.Stretches[0].Boards
	for c := range begin.Charges(model) {
		l.begin(leg{c.ID, c.Age}, c.Age+c.Generated, c.Key)
	}
	for _, e := range begin.Waiting(model) {
		l.begin(leg{e.ID, int32(e.Age)}, int32(e.Age), e.Key)
	}
	w.each(0, model, func(_ time.Duration, c *came) { l.comes(c) }, l.leaves)
	for c := range w.End.Charges(model) {
		l.stays(c.ID, c.Generated)
	}
	for _, e := range w.End.Waiting(model) {
		l.stays(e.ID, 0)
	}
	all := make([]seen, 0, len(l.answers))
	for id, a := range l.answers {
		if f, known := l.left[id]; !known {
			all = append(all, seen{a.tokens, l.stay[id], false})
		} else if f.tokens >= 0 {
			all = append(all, seen{a.tokens, f.tokens, true})
		}
	}
	l.lengths = learnLengths(all)
	if l.lag = cmp.Or(w.Lag, usualLag); len(l.lags) > 0 {
		slices.Sort(l.lags)
		l.lag = l.lags[len(l.lags)/2]
	}
	return l.fates
}

func (l *learner) begin(first leg, tokens int32, key uint64) {
	l.answers[first.id], l.legs[first.id], l.keys[first.id] = answer{first, tokens}, first, key
}

func (l *learner) comes(c *came) {
	g, before := l.legs[c.id]
	first := g.id
	if !before && c.age > 0 {
		first, before = l.ended[ended{c.key, c.age}]
	}
	if !before {
		l.begin(leg{c.id, c.age}, c.age, c.key)
		return
	}
	l.again[c], l.legs[c.id], l.first[c.id] = true, leg{first, c.age}, first
	delete(l.left, first)
	delete(l.ended, ended{c.key, c.age})
}

func (l *learner) leaves(at time.Duration, f *left) {
	g, ours := l.legs[f.id]
	if !ours {
		return
	}
	now := fate{at, g.age + max(0, f.generated), f.lag}
	switch another := g.age > l.answers[g.id].age; {
	case another:
		now.lag = -1
	case f.generated < 0:
		now.tokens = -1
	case f.lag >= 0:
		l.lags = append(l.lags, f.lag)
	}
	l.left[g.id] = now
	if key := l.keys[g.id]; key != 0 && now.tokens > 0 {
		l.ended[ended{key, now.tokens}] = g.id
	}
}

func (l *learner) stays(id uint64, generated int32) {
	if g, ours := l.legs[id]; ours {
		l.stay[g.id] = g.age + generated
	}
}

// rest is how many tokens a request gets from an age on: what it got, or what those get that are like it where
// that was not seen.
func (f *fates) rest(id uint64, age int32) int32 {
	if first, another := f.first[id]; another {
		id = first
	}
	l, known := f.left[id]
	if !known || l.tokens < 0 {
		return f.lengths.draw(max(age, f.stay[id]), id) - age
	}
	return max(1, l.tokens-age)
}
