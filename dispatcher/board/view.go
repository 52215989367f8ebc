package board

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/step"
)

// GroupView is what the twin needs to replay a barrier group.
type GroupView struct {
	Key     GroupKey
	Line    step.Line
	Weights step.RequestCost
	Steps   uint64   // number of steps that were reported so far
	Seconds float64  // sum of the lengths of these steps, in s
	Last    uint32   // number of the step that was reported last; 0: there was none, or no request runs
	Workers []Worker // ranks of the group, ascending ID
}

// Models returns the names of the boards, sorted.
func (l *Boards) Models() []string {
	names := make([]string, len(l.inOrder))
	for i, b := range l.inOrder {
		names[i] = b.model
	}
	return names
}

// Only drops the boards of all models but one, which must have a board.
func (l *Boards) Only(model string) {
	maps.DeleteFunc(l.boards, func(name string, _ *board) bool { return name != model })
	l.inOrder = []*board{l.boards[model]}
}

// Groups returns the barrier groups of a model. dense says whether the model also has ranks without a barrier, which are in no barrier
// group.
func (l *Boards) Groups(model string) (all []GroupView, dense bool) {
	b := l.boards[model]
	if b == nil {
		return nil, false
	}
	for _, g := range b.groups {
		if !g.barrier {
			dense = true
			continue
		}
		h := g.steps.Histogram()
		v := GroupView{
			Key: b.key(g), Steps: h.Count, Seconds: h.Seconds, Last: g.lastStep.Number, Line: g.steps.Line(), Weights: g.policyWeights(),
		}
		for _, r := range g.allRanks {
			v.Workers = append(v.Workers, r.Worker)
		}
		all = append(all, v)
	}
	return all, dense
}

// Charge is a running request, with the number of tokens that the board read last. An unpinned request, whose KV is charged to several
// ranks, is shown with all its KV on the rank of its slot.
type Charge struct {
	Worker, Slot           int32
	ID, Key                uint64
	Prompt, Generated, Age int32
	Started                bool
	Since                  time.Time
	// Step is the number of the group's step that was reported last before the request was bound; 0: none was.
	Step uint32
	Left int32 // prompt tokens that a mixed rank has yet to compute
}

// Charges returns the running requests of a model, in the order in which they got their slots. It leaves out ranks that have left the
// fleet.
func (l *Boards) Charges(model string) (all []Charge) {
	b := l.boards[model]
	if b == nil {
		return nil
	}
	for _, r := range b.ranks {
		for i, slot := range r.slots {
			if s := &b.slots.records[slot]; r.present {
				all = append(all, Charge{
					Worker: r.ID, Slot: slot, ID: s.id, Key: s.key, Prompt: s.prompt, Generated: r.running[i].Generated,
					Age:     s.tokensFromEarlierRanks, // age of the answer at the binding, without Generated
					Started: b.hasBegun(slot), Since: s.boundAt, Step: s.boundAtStep, Left: s.promptLeft,
				})
			}
		}
	}
	slices.SortFunc(all, func(x, y Charge) int { return cmp.Or(x.Since.Compare(y.Since), int(x.Slot-y.Slot)) })
	return all
}

// Kept returns a copy of the list of KV that a rank's engine keeps of ended answers; empty if there is no such rank.
func (l *Boards) Kept(model string, worker int32) kept.KV {
	if b := l.boards[model]; b != nil && b.ranks[worker] != nil {
		return b.ranks[worker].keptKV.Clone()
	}
	return kept.KV{}
}

// Waiting returns the waiting entries of a model, which must have a board.
func (l *Boards) Waiting(model string) []*Entry { return l.boards[model].pool.Entries() }

// ApproxRequests returns roughly how many requests run and wait on all boards. The duration of a Clone grows with this number.
func (l *Boards) ApproxRequests() (n int) {
	for _, b := range l.inOrder {
		n += len(b.slots.records) + b.pool.Len()
	}
	return n
}
