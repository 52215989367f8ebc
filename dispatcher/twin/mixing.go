package twin

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// mixing are ranks that prefill and decode. What a rank holds of a prompt is what it really held when the request came, also
// under a policy that would have sent the chat elsewhere before.
type mixing struct {
	*Replay
	behind virtual.Mixes
	at     map[int32]rankState // of ranks, by ID
}

// seat is where a rank is; one that is not up has nothing to do.
type rankState struct {
	group *virtual.MixedGroup
	rank  int
	up    bool
}

// A request takes so many ms from its bind into its engine's queue, as tokenizers make it. What is bound when a step ends is not
// in the next one, and a round may be scattered over two steps.
const lateFrom, lateTo = 2, 20

func newMixing(r *Replay) *mixing {
	m := &mixing{Replay: r, at: map[int32]rankState{}, behind: virtual.Mixes{Driver: r.Driver}}
	m.behind.Token, m.behind.Finished = m.token, func(_ *virtual.MixedGroup, _ int, w *virtual.Work) { r.left(w.Job) }
	m.OnEvent = func(e board.Event, _ time.Time) {
		if s, ok := e.(*board.Steps); ok { // as the real ones are told: a step in which no answer goes on is a part of the next one
			for _, told := range s.List {
				if told.Length > 0 {
					m.note(ms(told.Length))
				}
			}
		}
	}
	return m
}

func (m *mixing) build(v *board.GroupView, law board.StepModel) error {
	if law.OwnMs <= 0 {
		return fmt.Errorf("the time that a prompt adds to a step of %s is not known yet", v.Key.Name)
	}
	w := &v.Workers[0]
	engines := virtual.Mixed{Budget: int32(w.StepBudget()), Interval: int64(w.Interval), Lasts: m.lasts}
	engines.Law.Model = law
	for i := range v.Workers {
		engines.Slots = max(engines.Slots, v.Workers[i].Slots)
		if c := v.Workers[i].Capacity; c > 0 && (engines.Room == 0 || c < engines.Room) {
			engines.Room = c
		}
	}
	m.behind.Add(v.Key, engines, nil, m.cached).Number = max(1, v.Last)
	return nil
}

func (m *mixing) cached(_ int, w *virtual.Work) int32 { return m.jobs[w.Job].cached }

func (m *mixing) join(w *board.Worker) {
	k, known := m.at[w.ID]
	if !known {
		i := slices.IndexFunc(m.behind.Groups, func(g *virtual.MixedGroup) bool { return g.Key.Name == w.Group })
		if i < 0 {
			return
		}
		g := m.behind.Groups[i]
		k = rankState{group: g, rank: len(g.Ranks)}
		g.Ranks, g.IDs = append(g.Ranks, virtual.MixedRank{}), append(g.IDs, w.ID)
	}
	if k.up = !w.Down; !k.up {
		m.leave(k)
	}
	m.at[w.ID] = k
}

// leave has what is on a rank come again.
func (m *mixing) leave(k rankState) {
	var all []virtual.Work
	m.behind.Each(func(g *virtual.MixedGroup, rank int, w *virtual.Work) {
		if g == k.group && rank == k.rank {
			all = append(all, *w)
		}
	})
	for _, w := range all {
		m.behind.Drop(k.group, k.rank, w, board.Failed)
		m.again(w.Job, w.Prompt, w.Gen, w.Left)
	}
}

func (m *mixing) keep(groups map[int32]string) {
	for _, id := range slices.Sorted(maps.Keys(m.at)) {
		k := m.at[id]
		if in, there := groups[id]; k.up && (!there || in != k.group.Key.Name) {
			k.up = false
			m.at[id] = k
			m.leave(k)
		}
	}
}

func (m *mixing) resume(bool) (queued []board.Charge) {
	for _, c := range m.Boards.Charges(m.Model) {
		k, known := m.at[c.Worker]
		if !known || !k.up { // what runs there fails and comes again
			queued = append(queued, c)
			continue
		}
		w := virtual.Work{Slot: c.Slot, Prompt: c.Prompt, Gen: c.Generated}
		w.Job, w.Left = m.goesOn(&c)
		first := uint32(0)
		if c.Started {
			if first = max(1, c.Step+1); int32(first-k.group.Number) > 0 {
				first = k.group.Number
			}
		}
		m.behind.Put(k.group, k.rank, w, c.Left, first)
	}
	return queued
}

func (m *mixing) place(at int32, b *board.Bound) bool {
	k, known := m.at[b.Worker]
	if !known {
		return false
	}
	j := &m.jobs[at]
	j.cached = max(0, j.prompt-b.NewTokens)
	m.behind.Send(k.group, k.rank, virtual.Work{Job: at, Slot: b.Slot, Prompt: j.real, Left: j.left},
		lateFrom+(lateTo-lateFrom)*m.chance.Float64())
	return true
}

// token corrects the length of a prompt where the real one was corrected.
func (m *mixing) token(_ *virtual.MixedGroup, _ int, w *virtual.Work) {
	if w.Gen == 1 && w.Prompt != m.jobs[w.Job].prompt {
		m.Apply(board.Recount{Model: m.Model, Slot: w.Slot, Prompt: int(w.Prompt)}, m.Now)
	}
}

func (m *mixing) drop(id uint64) bool {
	var on *virtual.MixedGroup
	var at int
	var found virtual.Work
	m.behind.Each(func(g *virtual.MixedGroup, rank int, w *virtual.Work) {
		if m.jobs[w.Job].id == id {
			on, at, found = g, rank, *w
		}
	})
	if on == nil {
		return false
	}
	m.behind.Drop(on, at, found, board.Cancelled)
	m.left(found.Job)
	return true
}

func (m *mixing) turn() { m.behind.Turn(m.come) }

func (m *mixing) due() float64 { return m.behind.Due() }

func (m *mixing) each(yield func(job, left int32)) {
	m.behind.Each(func(_ *virtual.MixedGroup, _ int, w *virtual.Work) { yield(w.Job, w.Left) })
}
