package twin

import (
	"time"
)

// fates say what became of a model's requests in a window, as far as it is known at the end of the window. A request may lose its rank and
// come back for another rank: it then has several legs, one for each rank. Here such a request counts as one, because the replay itself
// makes requests come back if they lose their ranks.
type fates struct {
	answers []answer
	at      map[uint64]int32 // by the ID of each leg: the index of its request in answers
	again   map[*came]bool   // arrivals that are a further leg of a known request
	lag     int32            // assumed lag of requests whose own lag is not known, in steps
	lengths lengths
}

// answer has all that is known about the answer to a request.
type answer struct {
	key    uint64
	left   time.Duration // when the request left, since the window began; hasNotLeft: it was still there at the end of the window
	age    int32         // tokens that it had when the window began, or when it came
	first  int32         // tokens that it had before its first leg
	leg    int32         // tokens that it had before its last leg
	tokens int32         // tokens that it was last seen with; below 0: it left before it had a slot
	lag    int32         // steps between its binding and the step of its first token, 0 if this is the next step; below 0: not known
}

// hasNotLeft is the value of answer.left for a request that has not left.
const hasNotLeft = -1

// failed identifies a request whose leg failed. An arrival with the same key and the same number of tokens is the request's next leg.
type failed struct {
	key    uint64
	tokens int32
}

// learner finds the fates from the arrivals and departures of a window.
type learner struct {
	*fates
	failed map[failed]int32 // requests that may come back: their indices in answers
	lags   []int32          // known lags, in steps
}

// usualLag is the assumed number of steps that a request waits for its first token, if the lag of no request is known.
const usualLag = 1

// of returns what is known about a request, by the ID of one of its legs; nil: nothing.
func (f *fates) of(id uint64) *answer {
	if i, known := f.at[id]; known {
		return &f.answers[i]
	}
	return nil
}

// add adds a request that was on a rank or in the pool when the window began, or that comes now.
func (l *learner) add(id uint64, a answer) {
	a.left, a.leg, a.tokens, a.lag = hasNotLeft, a.first, a.age, -1
	l.at[id] = int32(len(l.answers))
	l.answers = append(l.answers, a)
}

// comes records an arrival. If it has a known ID, or the key and the number of tokens of a request that has failed, it is a further leg of
// this request. Any other arrival is a new request.
func (l *learner) comes(c *came) {
	i, known := l.at[c.id]
	if !known && c.age > 0 { // it was resumed: it comes with the tokens of its failed leg
		i, known = l.failed[failed{c.key, c.age}]
	}
	if !known {
		l.add(c.id, answer{key: c.key, age: c.age, first: c.age})
		return
	}
	delete(l.failed, failed{c.key, c.age})
	l.again[c], l.at[c.id] = true, i
	a := &l.answers[i]
	a.left, a.leg, a.tokens = hasNotLeft, c.age, c.age
}

// leaves records that a request has left, at a time since the window began. It learns the lag only of a request with a single leg.
func (l *learner) leaves(at time.Duration, f *left) {
	i, known := l.at[f.id]
	if !known { // of another model
		return
	}
	a := &l.answers[i]
	a.left, a.tokens = at, a.leg+max(0, f.generated)
	switch resumed := a.leg > a.first; {
	case resumed: // f.lag is that of the last leg only
		a.lag = -1
	case f.generated < 0: // it never had a slot
		a.tokens = -1
	case f.lag >= 0:
		a.lag = f.lag
		l.lags = append(l.lags, f.lag)
	}
	recognisable := a.key != 0 && a.tokens > 0
	if f.failed && recognisable { // its next leg may come with another ID
		l.failed[failed{a.key, a.tokens}] = i
	}
}

// rest returns how many tokens a request still gets after it has so many (age): the real number or, if the request had not left, or left
// before it had a slot, a random number from the lengths of the other answers.
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
