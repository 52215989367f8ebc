package twin

import (
	"time"
)

// history is what became of a model's requests in a window, as far as it is known at the end of the window. A request may lose its rank and
// come back for another rank. Here it counts as one request, because the replay itself makes requests come back if they lose their ranks.
// Each time when it comes, it may have another ID.
type history struct {
	answers           []answer
	index             map[uint64]int32  // by each ID of a request: its index in answers
	resumptions       map[*arrival]bool // arrivals of requests that had come before
	stepsToFirstToken int32             // assumed for requests whose own number is not known
	lengths           lengths
}

// answer is all that is known about the answer to a request.
type answer struct {
	key               uint64
	leftAt            time.Duration // when the request left, since the window began; hasNotLeft: it was still there at the end of the window
	tokensAtStart     int32         // tokens that it had when the window began, or when it came
	tokensBefore      int32         // tokens that it had before its first rank
	tokensBeforeRank  int32         // tokens that it had before its last rank
	lastTokens        int32         // tokens that it was last seen with; below 0: it left before it had a slot
	stepsToFirstToken int32         // as in departure
}

// hasNotLeft is the value of answer.leftAt for a request that has not left.
const hasNotLeft = -1

// failedRequest identifies a request that has lost its rank. An arrival with the same key and the same number of tokens is this request
// again.
type failedRequest struct {
	key    uint64
	tokens int32
}

// historyLearner finds the history from the arrivals and departures of a window.
type historyLearner struct {
	*history
	mayComeBack map[failedRequest]int32 // requests that may come back: their indices in answers
	knownSteps  []int32                 // numbers of steps from the binding of a request to its first token, where it is known
}

// usualStepsToFirstToken is the assumed number of steps that a request waits for its first token, if no request of the window and of
// the windows before shows it.
const usualStepsToFirstToken = 1

// of returns what is known about the request that had an ID; nil: nothing.
func (h *history) of(id uint64) *answer {
	if i, known := h.index[id]; known {
		return &h.answers[i]
	}
	return nil
}

// add adds a request that was on a rank or in the pool when the window began, or that comes now. The caller sets key, tokensAtStart and
// tokensBefore of a.
func (l *historyLearner) add(id uint64, a answer) {
	a.leftAt, a.tokensBeforeRank, a.lastTokens, a.stepsToFirstToken = hasNotLeft, a.tokensBefore, a.tokensAtStart, -1
	l.index[id] = int32(len(l.answers))
	l.answers = append(l.answers, a)
}

// recordArrival records an arrival. If it has a known ID, or the key and the number of tokens of a request that has failed, it is this
// request again. Any other arrival is a new request.
func (l *historyLearner) recordArrival(r *arrival) {
	i, known := l.index[r.id]
	if !known && r.age > 0 { // it was resumed: it comes with the tokens that it got on the rank that failed
		i, known = l.mayComeBack[failedRequest{r.key, r.age}]
	}
	if !known {
		l.add(r.id, answer{key: r.key, tokensAtStart: r.age, tokensBefore: r.age})
		return
	}
	delete(l.mayComeBack, failedRequest{r.key, r.age})
	l.resumptions[r], l.index[r.id] = true, i
	a := &l.answers[i]
	a.leftAt, a.tokensBeforeRank, a.lastTokens = hasNotLeft, r.age, r.age
}

// recordDeparture records that a request has left, at a time since the window began. It learns the steps to the first token only
// from a request that had a single rank.
func (l *historyLearner) recordDeparture(at time.Duration, d *departure) {
	i, known := l.index[d.id]
	if !known { // of another model
		return
	}
	a := &l.answers[i]
	a.leftAt, a.lastTokens = at, a.tokensBeforeRank+max(0, d.generated)
	switch resumed := a.tokensBeforeRank > a.tokensBefore; {
	case resumed: // d.stepsToFirstToken is that of the last rank only
		a.stepsToFirstToken = -1
	case d.generated < 0: // it never had a slot
		a.lastTokens = -1
	case d.stepsToFirstToken >= 0:
		a.stepsToFirstToken = d.stepsToFirstToken
		l.knownSteps = append(l.knownSteps, d.stepsToFirstToken)
	}
	recognisable := a.key != 0 && a.lastTokens > 0
	if d.failed && recognisable { // it may come back with another ID
		l.mayComeBack[failedRequest{a.key, a.lastTokens}] = i
	}
}

// remainingTokens returns how many tokens a request still gets after it has so many tokens (age). This is the real number or, if the real
// length of the answer is not known, a random number from the lengths of the other answers.
func (h *history) remainingTokens(id uint64, age int32) int32 {
	switch a := h.of(id); {
	case a == nil: // the window has no record of it
		return h.lengths.draw(age, id) - age
	case a.leftAt < 0 || a.lastTokens < 0: // it had not left at the end of the window, or left before it had a slot
		return h.lengths.draw(max(age, a.lastTokens), id) - age
	default: // in the replay, it may have more tokens already than it really had at its end
		return max(1, a.lastTokens-age)
	}
}
