package twin

import (
	"time"
)

// history is what became of a model's requests in a window, as far as it is known at the end of the window. A request that loses its rank
// may come back with another ID. Here it counts as one request, because the replay itself makes requests come back when they lose their
// ranks.
type history struct {
	answers           []answer
	index             map[uint64]int32  // by each ID that a request had: its index in answers
	resumptions       map[*arrival]bool // arrivals that are not new requests, because the same request had come before
	stepsToFirstToken int32             // steps from binding to first token, assumed for requests whose own number is not known
	lengths           lengths
}

// answer is all that is known about the answer to one request.
type answer struct {
	key                   uint64
	leftAt                time.Duration // when the request left, since the window began; hasNotLeft: it still ran at the end of the window
	tokensAtStart         int32         // tokens that the answer had when the window began or, if later, when the request came
	tokensBeforeFirstRank int32         // tokens that the answer had before its first rank in the window
	tokensBeforeLastRank  int32         // tokens that the answer had before its last rank
	tokensLastSeen        int32         // tokens that the answer had when last seen; neverHadSlot: the request left before it had a slot
	stepsToFirstToken     int32         // steps between binding and first token, 0: the next step; stepsUnknown: not known
}

// Special values of the fields of an answer. Any number below 0 means the same.
const (
	hasNotLeft   = -1 // leftAt of a request that has not left
	neverHadSlot = -1 // tokensLastSeen of a request that left before it had a slot
	stepsUnknown = -1 // stepsToFirstToken that is not known
)

// failedRequest identifies a request that has lost its rank. If a request arrives with the same key and the same number of tokens, it is
// taken for this request.
type failedRequest struct {
	key    uint64
	tokens int32
}

// historyLearner finds the history from the arrivals and departures of a window.
type historyLearner struct {
	*history
	mayComeBack map[failedRequest]int32 // index in answers of each request that lost its rank and may come back
	knownSteps  []int32                 // observed numbers of steps from the binding of a request to its first token
}

// usualStepsToFirstToken is the assumed number of steps that a request waits for its first token, if neither this window nor an earlier one
// shows a number.
const usualStepsToFirstToken = 1

// answerOf returns what is known about the request that has or had this ID; nil: the window has no record of it.
func (h *history) answerOf(id uint64) *answer {
	if i, known := h.index[id]; known {
		return &h.answers[i]
	}
	return nil
}

// add adds a request that was on a rank or in the pool when the window began, or that arrives. The caller sets key, tokensAtStart and
// tokensBeforeFirstRank of a; add sets the rest.
func (l *historyLearner) add(id uint64, a answer) {
	a.leftAt, a.stepsToFirstToken = hasNotLeft, stepsUnknown
	a.tokensBeforeLastRank, a.tokensLastSeen = a.tokensBeforeFirstRank, a.tokensAtStart
	l.index[id] = int32(len(l.answers))
	l.answers = append(l.answers, a)
}

// recordArrival records an arrival. An arrival with a known ID, or with the key and the number of tokens of a request that has failed, is
// the same request again. Such an arrival is noted in resumptions, and the replay skips it: there, a request that loses its rank comes back
// by itself. Any other arrival is a new request. r.age is the number of tokens that earlier ranks have produced already.
func (l *historyLearner) recordArrival(r *arrival) {
	i, known := l.index[r.id]
	if !known && r.age > 0 { // the request has tokens from a rank that failed, and may come back with another ID
		i, known = l.mayComeBack[failedRequest{r.key, r.age}]
	}
	if !known {
		// A new request. If it has tokens already, they count as those from before its first rank in the window.
		l.add(r.id, answer{key: r.key, tokensAtStart: r.age, tokensBeforeFirstRank: r.age})
		return
	}
	delete(l.mayComeBack, failedRequest{r.key, r.age}) // it has come back
	l.resumptions[r] = true
	l.index[r.id] = i // from now on, this ID stands for the same answer
	a := &l.answers[i]
	a.leftAt = hasNotLeft
	a.tokensBeforeLastRank = r.age // the last rank is now the one that the request waits for; what was before its first rank stays
	a.tokensLastSeen = r.age       // the new rank has added none yet
}

// recordDeparture records that a request has left, at a time since the window began. d.generated is the number of tokens that its last rank
// generated; below 0: it had no slot since it arrived or came back. The number of steps to the first token is learned only from requests
// that had a single rank. If the rank failed, the request may come back with another ID. recordArrival then recognises it by its key and
// the number of its tokens, so both must be known.
func (l *historyLearner) recordDeparture(at time.Duration, d *departure) {
	i, known := l.index[d.id]
	if !known { // the request is of another model
		return
	}
	a := &l.answers[i]
	a.leftAt, a.tokensLastSeen = at, a.tokensBeforeLastRank+max(0, d.generated)
	switch resumed := a.tokensBeforeLastRank > a.tokensBeforeFirstRank; { // its answer has tokens of an earlier rank, which failed
	case resumed: // also if no other rank took it: with those tokens, its answer has a length
		a.stepsToFirstToken = stepsUnknown // d.stepsToFirstToken counts from the binding to the last rank, not to the first
	case d.generated < 0: // it had no slot, so its answer has no length
		a.tokensLastSeen = neverHadSlot
	case d.stepsToFirstToken >= 0:
		a.stepsToFirstToken = d.stepsToFirstToken
		l.knownSteps = append(l.knownSteps, d.stepsToFirstToken)
	}
	recognisable := a.key != 0 && a.tokensLastSeen > 0
	if d.failed && recognisable {
		l.mayComeBack[failedRequest{key: a.key, tokens: a.tokensLastSeen}] = i
	}
}

// remainingTokens returns how many tokens a request will generate after it has age tokens. This is the real number or, if the real length
// of the answer is not known, a random number from the lengths of the other answers.
func (h *history) remainingTokens(id uint64, age int32) int32 {
	switch a := h.answerOf(id); {
	case a == nil: // the window has no record of the request
		return h.lengths.draw(age, id) - age
	case a.leftAt < 0 || a.tokensLastSeen < 0: // the request had not left at the end of the window, or left before it had a slot
		least := max(age, a.tokensLastSeen) // the answer is longer than what was seen of it
		return h.lengths.draw(least, id) - age
	default: // in the replay, the request may have more tokens by now than it really had at its end, so at least 1
		return max(1, a.tokensLastSeen-age)
	}
}
