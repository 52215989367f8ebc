package virtual

import (
	"slices"

	"evenkeel/dispatcher/board"
)

// Mixes are groups of mixed ranks of one model, with boards in front of them. Who drives them says what they serve.
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

// Put has a request on a rank from the start, with the tokens that it has got already, the first of them with that step; 0: it has
// none. So many tokens are to be computed before its next one.
func (m *Mixes) Put(g *MixedGroup, rank int, w Work, left int32, first uint32) {
	m.seat(w.Slot)
	w.due, w.joined = w.Prompt, first
	if first != 0 {
		m.progress(w.Slot, w.Gen, first)
	} else {
		left = max(1, left) // the last token is always computed
	}
	if left > 0 {
		w.due += w.Gen
	}
	w.done = max(0, w.due-left)
	r := &g.Ranks[rank]
	if len(r.Running) == g.Slots {
		r.Waiting = append(r.Waiting, w)
		return
	}
	r.Running = append(r.Running, w)
	r.KV += g.holds(w.tokens())
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

// Each tells of all requests, also of those under way.
func (m *Mixes) Each(yield func(g *MixedGroup, rank int, w *Work)) {
	for _, g := range m.Groups {
		for i := range g.Ranks {
			for _, all := range [...][]Work{g.Ranks[i].Running, g.Ranks[i].Waiting} {
				for k := range all {
					yield(g, i, &all[k])
				}
			}
		}
	}
	for i := range m.under {
		yield(m.under[i].group, m.under[i].rank, &m.under[i].work)
	}
}

// Drop takes a request off a rank, or off its way there, and tells the boards what became of it.
func (m *Mixes) Drop(g *MixedGroup, rank int, w Work, kind board.Kind) {
	g.Mixed.Drop(rank, w.Job)
	m.under = slices.DeleteFunc(m.under, func(s sent) bool { return s.work.Job == w.Job })
	m.release(g, &w, kind)
}

// Turn is one instant at which something happens: steps end, and come tells the boards of whatever else there is.
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

// Due is when the engines or the boards have something to do again.
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
		m.heard(&g.StepCounter, m.Now)
	}
}

func (m *Mixes) finished(g *MixedGroup, rank int, w *Work) {
	m.release(g, w, board.Finished)
	m.Finished(g, rank, w)
}

func (m *Mixes) release(g *MixedGroup, w *Work, kind board.Kind) {
	m.given = board.Release{
		Model: m.Model, Slot: w.Slot, Outcome: board.Outcome{Kind: kind, Generated: int(w.Gen)}, Generated: w.Gen, Started: w.Gen > 0,
		First: w.joined,
	}
	if w.joined != 0 {
		m.given.Last = g.Number
	}
	m.Apply(&m.given, m.Now)
}
