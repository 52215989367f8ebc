package virtual

import (
	"slices"

	"evenkeel/dispatcher/board"
)

// MixedEngines simulates all groups of ranks of one model that prefill and decode.
type MixedEngines struct {
	*Driver
	Groups []*MixedGroup

	Token    func(g *MixedGroup, rank int, q *MixedRequest) // called for each token that a request gets, after Counts has it
	Finished func(g *MixedGroup, rank int, q *MixedRequest) // called when a request has got its last token and has left its rank

	inFlight []inTransit   // requests on their way to an engine's queue, by time of arrival
	release  board.Release // reused, so that releases allocate nothing
}

type inTransit struct {
	at      float64 // time of arrival in the queue, in ms
	group   *MixedGroup
	rank    int
	request MixedRequest
}

// MixedGroup is a Mixed group with what its boards need.
type MixedGroup struct {
	Mixed
	StepCounter
	IDs []int32 // IDs of its ranks, ascending

	stepReported bool // the step that ends now was reported; reset by Turn
}

// Add adds a group in which no step has begun. cached is Mixed.Cached.
func (m *MixedEngines) Add(key board.GroupKey, engines Mixed, ids []int32, cached func(rank int, q *MixedRequest) int32) *MixedGroup {
	g := &MixedGroup{Mixed: engines, StepCounter: newStepCounter(key), IDs: ids}
	g.Mixed.Ranks, g.Mixed.Ends, g.Mixed.Cached = make([]MixedRank, len(ids)), Never, cached
	g.Mixed.Token = func(rank int, q *MixedRequest) { m.reportToken(g, rank, q) }
	g.Mixed.Finished = func(rank int, q *MixedRequest) { m.releaseFinished(g, rank, q) }
	m.Groups = append(m.Groups, g)
	return g
}

// Send gives a request to a rank. It reaches the engine's queue after delay ms, the time that
// connections and tokenizers take.
func (m *MixedEngines) Send(g *MixedGroup, rank int, q MixedRequest, delay float64) {
	q.toCompute = q.Prompt
	t := inTransit{at: m.Now + delay, group: g, rank: rank, request: q}
	i, _ := slices.BinarySearchFunc(m.inFlight, t.at, func(other inTransit, at float64) int {
		if other.at <= at { // equal times: in the order of sending
			return -1
		}
		return 1
	})
	m.inFlight = slices.Insert(m.inFlight, i, t)
}

// Turn does all that happens at the present time. deliver gives the boards the other events that
// are due.
func (m *MixedEngines) Turn(deliver func()) {
	for _, g := range m.Groups {
		if g.Ends <= m.Now {
			g.stepReported = false
			g.Finish() // its tokens may report the step, see reportToken
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
		g.Begin(m.Now)
	}
}

// Due returns when the engines or the boards next have something to do, in ms.
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

// reportToken reports a token to the boards. Only the time between two tokens of a stream shows a
// step, so the first request of a step that gets a token after its first one reports the step.
func (m *MixedEngines) reportToken(g *MixedGroup, rank int, q *MixedRequest) {
	isFirst := q.firstStep == 0 // Number begins at 1
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

func (m *MixedEngines) releaseFinished(g *MixedGroup, rank int, q *MixedRequest) {
	m.release = board.Release{
		Model: m.Model, Slot: q.Slot, Outcome: board.Outcome{Kind: board.Finished, Generated: int(q.Gen)}, Generated: q.Gen, Started: q.Gen > 0,
		FirstStep: q.firstStep,
	}
	if q.firstStep != 0 { // 0 only for a request that had no token to generate when it came
		m.release.LastStep = g.Number
	}
	m.Apply(&m.release, m.Now)
	m.Finished(g, rank, q)
}
