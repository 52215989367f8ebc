package board

import (
	"cmp"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// consult calls the policy with the board's snapshot, and emits the round: the snapshot and what the policy decided.
func (b *board) consult(g *group, p *policyInUse, now time.Time) {
	b.foresee(g, p)
	b.assignments, b.failure = propose(p, &b.snapshot, b.assignments[:0])
	b.explain(g, p)
	b.round = Round{
		Tick: b.ticks, At: now, Group: b.label(g), Policy: p.name, Survival: b.survival,
		Snapshot: b.snapshot, Assign: b.assignments,
	}
	b.emit(Effect{Kind: EffectRound, Group: b.key(g), Policy: p.name, Err: b.failure, Round: &b.round})
}

// fill writes the group and the pool into the board's one Snapshot. An entry that is too large for every rank of this group that is up is
// left out: it waits for another group, and the starvation guard would keep a rank free for it here in vain. Entries that this
// group's policy must not place, because it does not know which ranks may get them, are left out, too.
func (b *board) fill(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Pool, s.Waits = s.Pool[:0], s.Waits[:0]
	model, _, _ := g.steps.Model()
	s.C0Ms, s.C1Ms = float32(model.C0Ms), float32(model.C1Ms)
	s.StepMs = g.steps.Ms(model, g.largestLoad)
	weights := g.weights()
	s.RequestTokens, s.RowTokens = int64(math.Round(weights.Request)), int64(math.Round(weights.Row))
	s.Early = slices.ContainsFunc(g.ranks, func(r *rank) bool { return r.Early })
	s.Mixed, s.OwnMs = b.mixed, float32(g.ownMs(&model))
	s.Unbegun, s.PromptRate = g.recent.means()
	b.fillWorkers(g, p, now)
	largest := g.largest(policy.Watermark(p.Policy))
	for _, e := range b.pool.Entries() {
		if tooLarge := int64(e.Prompt) > largest; tooLarge {
			continue
		}
		if hidden := b.restrictedCount > 0 && (b.hiddenFrom(e, g) || b.mustAvoid(e, now)); hidden {
			continue
		}
		b.offer(e, p, now)
	}
	s.MaxAgeMs = p.MaxAgeMs()
	if s.MaxAgeMs > 0 { // else the policy has no starvation guard
		s.MaxAgeMs = max(s.MaxAgeMs, guardWaits*b.waits.meanMs())
	}
	s.Budget = g.budget.evaluations()
}

// fillWorkers writes the ranks of the group into the snapshot. The snapshot shares the lists of running requests with the ranks, which were
// refreshed when the tick began. A rank that takes no requests has no free slot, and a rank on trial (spare.go) has one at most.
func (b *board) fillWorkers(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Workers = s.Workers[:0]
	watermark, longestPrompt := policy.Watermark(p.Policy), int64(0)
	for _, e := range b.pool.Entries() {
		longestPrompt = max(longestPrompt, int64(e.Prompt))
	}
	for _, r := range g.ranks {
		free := r.admits(p)
		switch {
		case !r.takes():
			free = min(free, 0)
		case r.onTrial(now):
			free = min(free, 1)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: r.ID, Free: int32(free), Up: r.takes(), Capacity: r.capacity(watermark, now, longestPrompt), Cost: r.Cost,
			Others: r.Others + r.guests, Running: r.running, Backlog: r.backlog,
		})
	}
}

// offer adds an entry to the snapshot, with its details (Waits) if the policy reads them. Either all entries of a snapshot have details, or
// none has.
func (b *board) offer(e *pool.Entry, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Pool = append(s.Pool, policy.Entry{
		ID: e.ID, Prompt: tokens(e.Prompt), Age: tokens(e.Age), Key: e.Key,
		WaitMs: float32(e.GuardWait(now).Seconds() * 1000), Urgent: e.Urgent(now), Express: e.Express,
	})
	hitsMatter := p.hits && b.holders > 0 // the policy reads prefix hits, and some entry has one
	if b.mixed || hitsMatter {
		w := b.waiting[e.ID]
		s.Waits = append(s.Waits, w.details(now))
	}
}

// propose calls the policy. If the policy panics, failure has the panic and its stack.
func propose(p *policyInUse, s *policy.Snapshot, dst []policy.Assignment) (out []policy.Assignment, failure error) {
	defer func() {
		if r := recover(); r != nil {
			out, failure = dst, fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return p.Decide(s, dst), nil
}

// arrange refreshes the groups that can take an entry, and sorts them into the order in which their policies decide: the group with the
// fewest KV tokens per rank first.
func (b *board) arrange() {
	b.order = b.order[:0]
	for _, g := range b.groups {
		if !g.admitsAny() {
			g.held = 0 // without a free slot, entries wait for one: the policy holds none of them back
			continue
		}
		b.refreshGroup(g)
		b.order = append(b.order, g)
	}
	slices.SortStableFunc(b.order, func(x, y *group) int { // stable: a tie stays with the lower ID
		return cmp.Compare(x.kv*int64(len(y.ranks)), y.kv*int64(len(x.ranks))) // KV tokens per rank, without a division
	})
	b.nextGroup = len(b.order) // no group decides until the caller sets this to 0
}
