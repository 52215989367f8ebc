package virtual

import (
	"slices"

	"evenkeel/dispatcher/board"
)

// Mixes are groups of mixed ranks of one model, with boards in front of them. The caller provides the requests.
type Mixes struct {
	*Driver
	Groups []*MixedGroup

	Token    func(g *MixedGroup, rank int, w *Work) // it got one, which the boards know already
	Finished func(g *MixedGroup, rank int, w *Work) // it got its last token, and has left

	under []sent        // under way to an engine's queue, the next first
	given board.Release // used again and again
}

// sent is a request that was bound, and will be in its engine's queue.
type sent struct {
	at    float64 // ms
	group *MixedGroup
	rank  int
	work  Work
}

// MixedGroup is a group as the boards know it.
type MixedGroup struct {
	Mixed
	StepCounter
	IDs []int32 // of its ranks, ascending

	told bool // of the step that ends
}

// Add takes a group in, which does not step yet. cached says how much of a prompt a rank holds when it is admitted.
func (m *Mixes) Add(key board.GroupKey, engines Mixed, ids []int32, cached func(rank int, w *Work) int32) *MixedGroup {
	g := &MixedGroup{Mixed: engines, StepCounter: newStepCounter(key), IDs: ids}
	g.Mixed.Ranks, g.Mixed.Ends, g.Mixed.Cached = make([]MixedRank, len(ids)), Never, cached
	g.Mixed.Token = func(rank int, w *Work) { m.token(g, rank, w) }
	g.Mixed.Finished = func(rank int, w *Work) { m.finished(g, rank, w) }
	m.Groups = append(m.Groups, g)
	return g
}

// Send gives a request to a rank, whose engine has it in its queue so many ms later: connections and tokenizers take that.
func (m *Mixes) Send(g *MixedGroup, rank int, w Work, late float64) {
	w.due = w.Prompt
	s := sent{at: m.Now + late, group: g, rank: rank, work: w}
	at, _ := slices.BinarySearchFunc(m.under, s.at, func(o sent, at float64) int {
		if o.at <= at {
			return -1
		}
		return 1
	})
	m.under = slices.Insert(m.under, at, s)
}

// Turn runs one instant at which something happens: steps end, come gives the boards the other events of this instant, and the boards
// decide.
func (m *Mixes) Turn(come func()) {
	for _, g := range m.Groups {
		if g.Ends <= m.Now {
			g.told = false
			g.Finish()
		}
	}
	for len(m.under) > 0 && m.under[0].at <= m.Now {
		s := &m.under[0]
		s.group.Mixed.Add(s.rank, s.work)
		m.under = m.under[1:]
	}
	come()
	m.Look(m.Now)
	for _, g := range m.Groups {
		g.Begin(m.Now)
	}
}

// Due returns when the engines or the boards have something to do again.
func (m *Mixes) Due() float64 {
	next := m.Next()
	if len(m.under) > 0 {
		next = min(next, m.under[0].at)
	}
	for _, g := range m.Groups {
		next = min(next, g.Ends)
	}
	return next
}

// token reports a token to the boards as a stream would. The first stream that gets a further token also reports the step.
func (m *Mixes) token(g *MixedGroup, rank int, w *Work) {
	again := w.joined != 0 && !g.told
	if again {
		g.Number++
	}
	if w.joined == 0 {
		w.joined = g.Number
	}
	m.progress(w.Slot, w.Gen, w.joined)
	m.Token(g, rank, w)
	if again {
		g.told = true
		m.heard(&g.StepCounter, m.Now)
	}
}

func (m *Mixes) finished(g *MixedGroup, rank int, w *Work) {
	m.given = board.Release{
		Model: m.Model, Slot: w.Slot, Outcome: board.Outcome{Kind: board.Finished, Generated: int(w.Gen)}, Generated: w.Gen, Started: w.Gen > 0,
		First: w.joined,
	}
	if w.joined != 0 {
		m.given.Last = g.Number
	}
	m.Apply(&m.given, m.Now)
	m.Finished(g, rank, w)
}
