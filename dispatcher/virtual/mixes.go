package virtual

import "evenkeel/dispatcher/board"

// Mixes are groups of mixed ranks of one model, with boards before them. Who drives them says what they serve.
type Mixes struct {
	*Driver
	Groups []*MixedGroup
	Now    float64 // ms

	Token    func(g *MixedGroup, rank int, w *Work) // it got one, which the boards know already
	Finished func(g *MixedGroup, rank int, w *Work) // it got its last token, and has left

	given board.Release // used again and again
}

// MixedGroup is a group as the boards know it.
type MixedGroup struct {
	Mixed
	Pulse
	IDs []int32 // of its ranks, ascending

	told bool // of the step that ends
}

// Add takes a group in, which does not step yet. cached says how much of a prompt a rank holds when it is admitted.
func (m *Mixes) Add(key board.GroupKey, engines Mixed, ids []int32, cached func(rank int, w *Work) int32) *MixedGroup {
	g := &MixedGroup{Mixed: engines, Pulse: newPulse(key), IDs: ids}
	g.Mixed.Ranks, g.Mixed.Ends, g.Mixed.Cached = make([]MixedRank, len(ids)), Never, cached
	g.Mixed.Token = func(rank int, w *Work) { m.token(g, rank, w) }
	g.Mixed.Finished = func(rank int, w *Work) { m.finished(g, rank, w) }
	m.Groups = append(m.Groups, g)
	return g
}

// Turn is one instant at which something happens: steps end, and come tells the boards of whatever else there is.
func (m *Mixes) Turn(come func()) {
	for _, g := range m.Groups {
		if g.Ends <= m.Now {
			g.told = false
			g.Finish()
		}
	}
	come()
	m.Look(m.Now)
	for _, g := range m.Groups {
		g.Begin(m.Now)
	}
}

// Due is when the engines or the boards have something to do again.
func (m *Mixes) Due() float64 {
	next := m.Next()
	for _, g := range m.Groups {
		next = min(next, g.Ends)
	}
	return next
}

// token tells the boards of one as a stream would. The first stream that speaks again tells of the step.
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
		m.heard(&g.Pulse, m.Now)
	}
}

func (m *Mixes) finished(g *MixedGroup, rank int, w *Work) {
	m.given = board.Release{
		Model: m.Model, Slot: w.Slot, Outcome: board.Outcome{Kind: board.Finished, Generated: int(w.Gen)},
		Generated: w.Gen, Started: true, First: w.joined, Last: g.Number,
	}
	m.Apply(&m.given, m.Now)
	m.Finished(g, rank, w)
}
