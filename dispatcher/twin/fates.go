package twin

import (
	"time"
)

// fates are what became of a model's requests in a window, so far as it is known at its end. A request that lost
// its rank and came again for another one is one request here: a replay sends it on by itself where that happens.
type fates struct {
	answers []answer
	at      map[uint64]int32 // where a request is among them, by the id of each of its legs
	again   map[*came]bool   // that are not another request
	lag     int32            // of those whose own is not known
	lengths lengths
}

// answer is what is known of the answer to a request.
type answer struct {
	key    uint64
	left   time.Duration // since the window began; below 0: it has not
	age    int32         // tokens before the window began, and before it came
	first  int32         // tokens before its first leg
	leg    int32         // tokens before its last leg
	tokens int32         // in all, as far as they were seen; below 0: it left before it had a slot
	lag    int32         // steps until its first token; below 0: not known
}

// hasNotLeft is when an answer left that has not.
const hasNotLeft = -1

// failed tells that a leg is the next one of a request: it has the key and the tokens with which that one failed.
type failed struct {
	key    uint64
	tokens int32
}

// learner collects them.
type learner struct {
	*fates
	failed map[failed]int32 // where a request is
	lags   []int32
}

// usualLag is how many steps a request waits for its first token where none has ended yet.
const usualLag = 1

// of is what is known of a request, by the id of one of its legs; nil: nothing.
func (f *fates) of(id uint64) *answer {
	if i, known := f.at[id]; known {
		return &f.answers[i]
	}
	return nil
}

func (l *learner) begin(id uint64, a answer) {
	a.left, a.leg, a.tokens, a.lag = hasNotLeft, a.first, a.age, -1
	l.at[id] = int32(len(l.answers))
	l.answers = append(l.answers, a)
}

func (l *learner) comes(c *came) {
	i, before := l.at[c.id]
	if !before && c.age > 0 {
		i, before = l.failed[failed{c.key, c.age}]
	}
	if !before {
		l.begin(c.id, answer{key: c.key, age: c.age, first: c.age})
		return
	}
	delete(l.failed, failed{c.key, c.age})
	l.again[c], l.at[c.id] = true, i
	a := &l.answers[i]
	a.left, a.leg, a.tokens = hasNotLeft, c.age, c.age
}

func (l *learner) leaves(at time.Duration, f *left) {
	i, ours := l.at[f.id]
	if !ours {
		return
	}
	a := &l.answers[i]
	a.left, a.tokens = at, a.leg+max(0, f.generated)
	switch another := a.leg > a.first; {
	case another:
		a.lag = -1
	case f.generated < 0:
		a.tokens = -1
	case f.lag >= 0:
		a.lag = f.lag
		l.lags = append(l.lags, f.lag)
	}
	if f.failed && a.key != 0 && a.tokens > 0 {
		l.failed[failed{a.key, a.tokens}] = i
	}
}

// rest is how many tokens a request gets from an age on: what it got, or what those get that are like it where
// that was not seen.
func (f *fates) rest(id uint64, age int32) int32 {
	switch a := f.of(id); {
	case a == nil:
		return f.lengths.draw(age, id) - age
	case a.left < 0 || a.tokens < 0:
		return f.lengths.draw(max(age, a.tokens), id) - age
	default:
		return max(1, a.tokens-age)
	}
}
