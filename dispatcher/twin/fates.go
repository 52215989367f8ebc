package twin

import (
	"time"
)

// fates say what became of a model's requests in a window, as far as it is known at the end of the window. A request may lose its rank and
// come back for another rank: it then has several legs, one for each rank. Here such a request counts as one, because the replay itself
// makes requests come back if they lose their ranks.
type history struct {
	answers []answer
	index      map[uint64]int32 // by the ID of each leg: the index of its request in answers
	resumptions   map[*arrival]bool   // arrivals that are a further leg of a known request
	stepsToFirstToken     int32            // assumed lag of requests whose own lag is not known, in steps
	lengths lengths
}

// answer has all that is known about the answer to a request.
type answer struct {
	key    uint64
	leftAt   time.Duration // when the request left, since the window began; hasNotLeft: it was still there at the end of the window
	tokensAtStart    int32         // tokens that it had when the window began, or when it came
	tokensBefore  int32         // tokens that it had before its first leg
	tokensBeforeRank    int32         // tokens that it had before its last leg
	lastTokens int32         // tokens that it was last seen with; below 0: it left before it had a slot
	stepsToFirstToken    int32         // steps between its binding and the step of its first token, 0 if this is the next step; below 0: not known
}

// hasNotLeft is the value of answer.left for a request that has not left.
const hasNotLeft = -1

// failed identifies a request whose leg failed. An arrival with the same key and the same number of tokens is the request's next leg.
type failedRequest struct {
	key    uint64
	tokens int32
}

// learner finds the fates from the arrivals and departures of a window.
type historyLearner struct {
	*history
	mayComeBack map[failedRequest]int32 // requests that may come back: their indices in answers
	knownSteps   []int32          // known lags, in steps
}

// usualLag is the assumed number of steps that a request waits for its first token, if the lag of no request is known.
const usualStepsToFirstToken = 1

// of returns what is known about a request, by the ID of one of its legs; nil: nothing.
func (f *history) of(id uint64) *answer {
	if i, known := f.index[id]; known {
		return &f.answers[i]
	}
	return nil
}

// add adds a request that was on a rank or in the pool when the window began, or that comes now.
func (l *historyLearner) add(id uint64, a answer) {
	a.leftAt, a.tokensBeforeRank, a.lastTokens, a.stepsToFirstToken = hasNotLeft, a.tokensBefore, a.tokensAtStart, -1
	l.index[id] = int32(len(l.answers))
	l.answers = append(l.answers, a)
}

// comes records an arrival. If it has a known ID, or the key and the number of tokens of a request that has failed, it is a further leg of
// this request. Any other arrival is a new request.
func (l *historyLearner) recordArrival(c *arrival) {
	i, known := l.index[c.id]
	if !known && c.age > 0 { // it was resumed: it comes with the tokens of its failed leg
		i, known = l.mayComeBack[failedRequest{c.key, c.age}]
	}
	if !known {
		l.add(c.id, answer{key: c.key, tokensAtStart: c.age, tokensBefore: c.age})
		return
	}
	delete(l.mayComeBack, failedRequest{c.key, c.age})
	l.resumptions[c], l.index[c.id] = true, i
	a := &l.answers[i]
	a.leftAt, a.tokensBeforeRank, a.lastTokens = hasNotLeft, c.age, c.age
}

// leaves records that a request has left, at a time since the window began. It learns the lag only of a request with a single leg.
func (l *historyLearner) recordDeparture(at time.Duration, f *departure) {
	i, known := l.index[f.id]
	if !known { // of another model
		return
	}
	a := &l.answers[i]
	a.leftAt, a.lastTokens = at, a.tokensBeforeRank+max(0, f.generated)
	switch resumed := a.tokensBeforeRank > a.tokensBefore; {
	case resumed: // f.lag is that of the last leg only
		a.stepsToFirstToken = -1
	case f.generated < 0: // it never had a slot
		a.lastTokens = -1
	case f.stepsToFirstToken >= 0:
		a.stepsToFirstToken = f.stepsToFirstToken
		l.knownSteps = append(l.knownSteps, f.stepsToFirstToken)
	}
	recognisable := a.key != 0 && a.lastTokens > 0
	if f.failed && recognisable { // its next leg may come with another ID
		l.mayComeBack[failedRequest{a.key, a.lastTokens}] = i
	}
}

// rest returns how many tokens a request still gets after it has so many (age): the real number or, if the request had not left, or left
// before it had a slot, a random number from the lengths of the other answers.
func (f *history) remainingTokens(id uint64, age int32) int32 {
	switch a := f.of(id); {
	case a == nil:
		return f.lengths.draw(age, id) - age
	case a.leftAt < 0 || a.lastTokens < 0:
		return f.lengths.draw(max(age, a.lastTokens), id) - age
	default:
		return max(1, a.lastTokens-age)
	}
}
