package virtual

import (
	"slices"

	"evenkeel/dispatcher/board"
)

// MixedEngines simulates all groups of mixed ranks (ranks that prefill and decode) of one model. The caller provides the requests.
type MixedEngines struct {
	*Driver
	Groups []*MixedGroup

	Token    func(g *MixedGroup, rank int, q *MixedRequest) // called for each token that a request gets, after Counts has the token
	Finished func(g *MixedGroup, rank int, q *MixedRequest) // called when a request has got its last token and has left its rank

	inFlight []inTransit   // requests on their way to an engine's queue, ordered by time of arrival
	release  board.Release // reused for each release, so that releases allocate nothing
}

// inTransit is a request that was bound to a rank, but has not reached its engine's queue yet.
type inTransit struct {
	at      float64 // time at which it will be in the queue, in ms
	group   *MixedGroup
	rank    int
	request MixedRequest
}

// MixedGroup is a Mixed group with what its boards need: a step counter and the IDs of its ranks.
type MixedGroup struct {
	Mixed
	StepCounter
	IDs []int32 // IDs of its ranks, ascending

	stepReported bool // the step that ends now was already reported to the boards, so no further token reports it; reset by Turn
}

// Add adds a group in which no step has begun. cached returns how many tokens of a request's prompt are in a rank's prefix cache when the
// rank admits the request.
func (m *MixedEngines) Add(key board.GroupKey, engines Mixed, ids []int32, cached func(rank int, q *MixedRequest) int32) *MixedGroup {
	g := &MixedGroup{Mixed: engines, StepCounter: newStepCounter(key), IDs: ids}
	g.Mixed.Ranks, g.Mixed.Ends, g.Mixed.Cached = make([]MixedRank, len(ids)), Never, cached
	g.Mixed.Token = func(rank int, q *MixedRequest) { m.reportToken(g, rank, q) }
	g.Mixed.Finished = func(rank int, q *MixedRequest) { m.releaseFinished(g, rank, q) }
	m.Groups = append(m.Groups, g)
	return g
}

// Send gives a request to a rank. The request reaches the queue of the rank's engine after delay ms, the time that connections and
// tokenizers take.
func (m *MixedEngines) Send(g *MixedGroup, rank int, q MixedRequest, delay float64) {
	q.toCompute = q.Prompt
	t := inTransit{at: m.Now + delay, group: g, rank: rank, request: q}
	i, _ := slices.BinarySearchFunc(m.inFlight, t.at, func(other inTransit, at float64) int {
		if other.at <= at { // equal times: requests arrive in the order in which they were sent
			return -1
		}
		return 1
	})
	m.inFlight = slices.Insert(m.inFlight, i, t)
}

// Turn does all that happens at the present time: steps end, requests arrive in queues, deliver gives the boards the other events that are
// due, the boards decide, and steps begin.
func (m *MixedEngines) Turn(deliver func()) {
	for _, g := range m.Groups {
		if g.Ends <= m.Now { // false for an idle group, whose Ends is Never
			g.stepReported = false // the boards do not know of this step yet
			g.Finish()             // one of the tokens that this brings may report the step to the boards, see reportToken
		}
	}
	for len(m.inFlight) > 0 && m.inFlight[0].at <= m.Now {
		t := &m.inFlight[0]
		t.group.Mixed.Add(t.rank, t.request)
		m.inFlight = m.inFlight[1:]
	}
	deliver()
	m.Tick(m.Now)
	for _, g := range m.Groups {
		g.Begin(m.Now) // does nothing while a step is in progress
	}
}

// Due returns the time at which the engines or the boards next have something to do, in ms.
func (m *MixedEngines) Due() float64 {
	next := m.Next()
	if len(m.inFlight) > 0 {
		next = min(next, m.inFlight[0].at)
	}
	for _, g := range m.Groups {
		next = min(next, g.Ends)
	}
	return next
}

// reportToken reports a token of a request to the boards, as a stream would: how many tokens the request has (Gen), and which step brought
// the first of them. Then it passes the token to the caller (Token). Number counts the steps as the proxy sees them in the streams: only
// the time between two tokens of a stream shows a step. So in each step of the engines, the first request that gets a token after its first
// one raises Number and reports the step. Turn resets stepReported at the end of each step.
func (m *MixedEngines) reportToken(g *MixedGroup, rank int, q *MixedRequest) {
	isFirst := q.firstStep == 0 // Number begins at 1, so 0 says that the request has no token yet
	reportsStep := !isFirst && !g.stepReported
	if reportsStep {
		g.Number++
	}
	if isFirst {
		q.firstStep = g.Number
	}
	m.setCounts(q.Slot, q.Gen, q.firstStep)
	m.Token(g, rank, q)
	if reportsStep {
		g.stepReported = true
		m.reportStep(&g.StepCounter, m.Now)
	}
}

// releaseFinished gives the slot of a request that has all its tokens back to the boards, and tells the caller by Finished. The outcome has
// the tokens that the rank generated, and the release those that the stream has brought; in the simulation, no token is lost between the
// two.
func (m *MixedEngines) releaseFinished(g *MixedGroup, rank int, q *MixedRequest) {
	m.release = board.Release{
		Model: m.Model, Slot: q.Slot, Outcome: board.Outcome{Kind: board.Finished, Generated: int(q.Gen)}, Generated: q.Gen, Started: q.Gen > 0,
		FirstStep: q.firstStep,
	}
	if q.firstStep != 0 { // it is 0 only for a request that had no token to generate (Left 0) when it came
		m.release.LastStep = g.Number
	}
	m.Apply(&m.release, m.Now)
	m.Finished(g, rank, q)
}
