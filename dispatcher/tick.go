package dispatcher

import (
	"cmp"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// slowRounds is how long the fallback decides after a round over the limit
// (algorithm 8).
const slowRounds = 64

// guardWaits: an entry is overdue only at this many mean waits, or the guard
// would turn a saturated pool into first come, first served (algorithm 4.3).
const guardWaits = 6

// turn ends the waits that are over and decides, if anything happened that may
// let an entry in.
func (b *board) turn(now time.Time) {
	b.outage(now)
	b.expire(now)
	windowOver := !b.windowEnds.IsZero() && !now.Before(b.windowEnds)
	// What arrives while a window is open waits for its end, unless a policy
	// sends everything on at once.
	arrived := b.arrived && (b.windowEnds.IsZero() || b.immediate())
	// Held entries are looked at once a step.
	step := b.windowEnds.IsZero() && (b.stepped || !b.heldUntil.IsZero() && !now.Before(b.heldUntil))
	shy := !b.wakeShy.IsZero() && !now.Before(b.wakeShy)
	due := b.changed || windowOver || arrived || step || shy || b.pairs.due(now)
	b.arrived = false
	defer b.keepPace()
	if !due {
		return
	}
	b.changed, b.stepped, b.windowEnds, b.heldUntil, b.wakeShy, b.pairs.checkAt = false, false, time.Time{}, time.Time{}, time.Time{}, time.Time{}
	if b.pool.Len() > 0 {
		b.tick(now)
	}
	b.watchHeld(now)
}

func (b *board) immediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.inForce().Immediate() })
}

// tick decides for every group that can take an entry, the one with the fewest
// KV tokens a rank first; each sees the pool that is left.
func (b *board) tick(now time.Time) {
	b.arrange()
	if len(b.order) == 0 {
		return
	}
	b.ticks++
	if b.avoiding > 0 {
		b.placeShy(now)
	}
	for _, g := range b.order {
		if b.pool.Len() == 0 {
			break
		}
		b.decide(g, now)
	}
}

// arrange puts the groups that can take an entry in the order in which they
// decide, their ranks refreshed.
func (b *board) arrange() {
	b.order = b.order[:0]
	for _, g := range b.groups {
		if g.open() {
			g.refresh()
			b.order = append(b.order, g)
		}
	}
	slices.SortStableFunc(b.order, func(x, y *group) int { // stable: a tie stays with the lower ID
		return cmp.Compare(x.kv*int64(len(y.ranks)), y.kv*int64(len(x.ranks)))
	})
}

func (g *group) inForce() *decider {
	if g.slow > 0 {
		return &g.fallback
	}
	return &g.chosen
}

// open says whether the policy in force may admit anything to the group now.
func (g *group) open() bool {
	immediate := g.inForce().Immediate()
	for _, r := range g.ranks {
		if r.Up && (immediate || r.free() > 0) {
			return true
		}
	}
	return false
}

func (g *group) refresh() {
	g.kv, g.most = 0, 0
	for _, r := range g.ranks {
		r.refresh()
		g.kv += r.kv
		g.most = max(g.most, r.cost())
	}
}

func (g *group) rank(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.ranks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.ranks[at]
}

// decide lets the group's policy admit; where that fails the fallback decides
// instead, so that a bug in a policy costs balance and never a request.
func (b *board) decide(g *group, now time.Time) {
	p := g.inForce()
	took, invalid, failure := b.round(g, p, now)
	g.held = policy.Held(p.Policy)
	if p == &g.fallback {
		g.slow--
		return
	}
	if change := g.budget.spent(took); change != 0 {
		b.metrics.budgetChanges.WithLabelValues(direction(change)).Inc()
	}
	switch {
	case failure != nil:
		b.metrics.fallbacks.WithLabelValues(fallbackPanic).Inc()
		g.chosen = b.choose(g.barrier) // its scratch may be half written
		b.fallBack(g, now)
	case invalid > 0:
		b.metrics.fallbacks.WithLabelValues(fallbackInvalid).Inc()
		b.fallBack(g, now)
	case took > b.cfg.TickLimit:
		b.metrics.fallbacks.WithLabelValues(fallbackSlow).Inc()
		g.slow = slowRounds
		b.cfg.Log.Warn("dispatcher: a tick was over dispatch.tick_limit, "+fallbackSpec+" decides the next ones",
			zap.String("policy", p.name), zap.Duration("took", took), zap.Duration("limit", b.cfg.TickLimit), zap.Int("ticks", slowRounds))
	}
}

// fallBack decides by the fallback. It is as simple as a policy gets: how its own
// round went changes nothing.
func (b *board) fallBack(g *group, now time.Time) {
	_, _, _ = b.round(g, &g.fallback, now)
	g.held = 0
}

// round is one call of a policy: snapshot, decision, binding.
func (b *board) round(g *group, p *decider, now time.Time) (took time.Duration, invalid int, failure error) {
	start := time.Now()
	b.fill(g, p, now)
	took, failure = b.consult(g, p, start, now)
	for i := range b.assignments {
		if b.pairs.out > 0 && !b.steer(g, p, i, now) {
			continue
		}
		a := b.assignments[i]
		if fault := b.bind(g, p, a, now, took); fault != "" {
			invalid++
			b.metrics.invalid.WithLabelValues(fault).Inc()
			b.cfg.Log.Error("dispatcher: the policy made an assignment that cannot be bound", zap.String("policy", p.name),
				zap.String("fault", fault), zap.Uint64("entry", a.Entry), zap.Int32("worker", a.Worker))
		}
	}
	return took, invalid, failure
}

// consult asks a policy about the snapshot, which was begun at start.
func (b *board) consult(g *group, p *decider, start, now time.Time) (took time.Duration, failure error) {
	b.foresee(g, p)
	b.assignments, failure = propose(p, &b.snapshot, b.assignments[:0])
	took = time.Since(start)
	p.seconds.Observe(took.Seconds())
	b.explain(g, p)
	b.publish(g, p, now)
	if failure != nil {
		b.cfg.Log.Error("dispatcher: the policy failed", zap.String("policy", p.name), zap.Error(failure))
	}
	return took, failure
}

// fill writes the group and the pool into the board's one Snapshot. Running
// lists are the ranks' own, fresh since the tick began. An entry that no rank of
// the group that is up can ever take waits for another: here the starvation
// guard would only keep a rank free for it in vain (algorithm 3).
func (b *board) fill(g *group, p *decider, now time.Time) {
	s := &b.snapshot
	s.Workers, s.Pool = s.Workers[:0], s.Pool[:0]
	watermark := policy.Watermark(p.Policy)
	largest := g.largest(watermark, now)
	for _, r := range g.ranks {
		free := r.free()
		if !r.Up {
			free = min(free, 0)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: r.ID, Free: int32(free), Up: r.Up, Capacity: r.capacity(watermark, now), Cost: r.Cost, Others: r.Others, Running: r.running,
		})
	}
	for _, e := range b.pool.Entries() {
		if int64(e.Prompt) > largest || b.avoiding > 0 && b.shy(e, now) {
			continue
		}
		s.Pool = append(s.Pool, policyEntry(e, now))
	}
	s.MaxAgeMs = p.MaxAgeMs()
	if s.MaxAgeMs > 0 {
		s.MaxAgeMs = max(s.MaxAgeMs, guardWaits*b.waits.meanMs())
	}
	model, _, _ := g.steps.model()
	s.C0Ms, s.C1Ms = float32(model.C0Ms), float32(model.C1Ms)
	s.StepMs = g.steps.stepMs(model, g.most)
	s.Budget = g.budget.evaluations()
}

// policyEntry is what policies see of an entry.
func policyEntry(e *pool.Entry, now time.Time) policy.Entry {
	return policy.Entry{
		ID: e.ID, Prompt: tokens(e.Prompt), Age: tokens(e.Age), Key: e.Key,
		WaitMs: float32(e.GuardWait(now).Seconds() * 1000), Urgent: e.Urgent(now),
	}
}

// publish shows a round to those who look at it afterwards. They copy it.
func (b *board) publish(g *group, p *decider, now time.Time) {
	if b.declog == nil && g.shadows == nil {
		return
	}
	head := round{
		tick: b.ticks, at: now, group: b.label(g), policy: p.name, survival: b.survival, guardMs: guardWaits * b.waits.meanMs(),
	}
	if b.declog != nil {
		b.declog.record(&head, &b.snapshot, b.assignments)
	}
	if g.shadows != nil {
		b.shadows.show(g.shadows, &head, &b.snapshot, b.assignments)
	}
}

// propose asks the policy; what it panics with becomes the failure.
func propose(p *decider, s *policy.Snapshot, dst []policy.Assignment) (out []policy.Assignment, failure error) {
	defer func() {
		if r := recover(); r != nil {
			out, failure = dst, fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return p.Decide(s, dst), nil
}

// bind charges the entry to the rank and hands its caller the slot. It trusts
// no policy: one that breaks a hard limit is told which, and nothing is bound.
func (b *board) bind(g *group, p *decider, a policy.Assignment, now time.Time, took time.Duration) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rank(a.Worker)
	switch {
	case !ok:
		return faultEntry
	case r == nil:
		return faultWorker
	case !r.Up:
		return faultDown
	case p.Immediate(): // the engine queues what is beyond the limits below
	case r.free() <= 0:
		return faultSlot
	case r.Capacity > 0 && r.kv+int64(w.slot.prompt) > r.Capacity:
		return faultRoom
	}
	w.slot.Stage, w.slot.Score = a.Stage, a.Score
	b.pool.Remove(w.entry)
	b.admit(r, p.name, w, now, took)
	return ""
}

// admit charges an entry that has left the pool and hands its caller the slot.
func (b *board) admit(r *rank, policy string, w waiting, now time.Time, took time.Duration) {
	s := w.slot
	b.charge(r, s)
	if b.pairs.out > 0 {
		b.pairs.send(s, now)
	}
	s.since = now
	s.Worker, s.WorkerName, s.Group, s.Policy = r.ID, r.Name, r.Group, policy
	s.Wait, s.Decide = w.entry.Wait(now), took
	b.waits.add(s.Wait)
	b.answer(w.entry, Result{Slot: s})
}

// tokens is a count as policies hold it.
func tokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }
