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

// SlowRounds is how long the fallback decides after a round over the limit.
const SlowRounds = 64

// guardWaits: an entry is overdue only at this many mean waits, or the guard
// would turn a saturated pool into first come, first served.
const guardWaits = 6

// advance ends the waits that are over, and begins to decide if anything happened that may
// let an entry in. The rounds themselves follow, one by one, see deciding.
func (b *board) advance(now time.Time) {
	b.outage(now)
	b.expire(now)
	due := b.due(now)
	b.arrived = false
	if !due {
		b.keepPace()
		return
	}
	b.changed, b.stepped, b.windowEnds, b.heldUntil, b.wakeShy, b.pairs.checkAt = false, false, time.Time{}, time.Time{}, time.Time{}, time.Time{}
	if b.pool.Len() > 0 {
		b.tick(now)
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// looks says whether a turn may look at what the ranks hold.
func (b *board) looks(now time.Time) bool {
	return b.pool.Len() > 0 && (b.due(now) || !b.pool.NextDeadline().IsZero() && !now.Before(b.pool.NextDeadline()))
}

// due says whether something happened that may let an entry in.
func (b *board) due(now time.Time) bool {
	over := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	// What arrives while a window is open waits for its end, unless a policy
	// sends everything on at once. Held entries are looked at once a step.
	return b.changed || over(b.windowEnds) || b.arrived && (b.windowEnds.IsZero() || b.immediate()) ||
		b.windowEnds.IsZero() && (b.stepped || over(b.heldUntil)) || over(b.wakeShy) || b.pairs.due(now)
}

// settle ends a turn.
func (b *board) settle(now time.Time) {
	b.at = len(b.order) // nobody decides on what comes later
	b.watchHeld(now)
	b.keepPace()
}

func (b *board) immediate() bool {
	return slices.ContainsFunc(b.groups, func(g *group) bool { return g.inForce().Immediate() })
}

// tick has every group decide that can take an entry, the one with the fewest
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
	b.asked, b.at, b.again = nil, 0, false
}

// deciding says whether a group has yet to decide. Then nothing may happen to the board but
// decide, which is one round of one policy, and after it decided, which is told how long
// the round took: a board has no clock.
func (b *board) deciding() bool {
	return b.at < len(b.order) && (b.asked != nil || b.pool.Len() > 0)
}

// arrange puts the groups that can take an entry in the order in which they
// decide, their ranks refreshed.
func (b *board) arrange() {
	b.order = b.order[:0]
	for _, g := range b.groups {
		if g.open() {
			b.refreshGroup(g)
			b.order = append(b.order, g)
		}
	}
	slices.SortStableFunc(b.order, func(x, y *group) int { // stable: a tie stays with the lower ID
		return cmp.Compare(x.kv*int64(len(y.ranks)), y.kv*int64(len(x.ranks)))
	})
	b.at = len(b.order) // none of them decides yet
}

func (g *group) inForce() *decider {
	if g.slow > 0 {
		return &g.fallback
	}
	return &g.chosen
}

// open says whether the policy in force may admit anything to the group now.
func (g *group) open() bool {
	p := g.inForce()
	for _, r := range g.ranks {
		if r.Up && (p.Immediate() || r.admits(p) > 0) {
			return true
		}
	}
	return false
}

func (b *board) refreshGroup(g *group) {
	g.kv, g.most = 0, 0
	for _, r := range g.ranks {
		b.refresh(r)
	}
	for _, r := range g.ranks {
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

// decide lets the next group's policy admit; where that has failed the fallback decides
// instead, so that a bug in a policy costs balance and never a request.
func (b *board) decide(now time.Time) {
	g := b.order[b.at]
	p := g.inForce()
	if b.again {
		p = &g.fallback
	}
	b.went = went{policy: p}
	if b.asked != nil {
		b.roundLocal(g, p, now)
	} else {
		b.decideRound(g, p, now)
	}
}

// decided takes in how long the last round took, and what follows from how it went.
func (b *board) decided(took time.Duration, now time.Time) {
	switch g := b.order[b.at]; {
	case b.asked != nil:
		b.decidedLocal(g)
		return
	case b.again: // the fallback is as simple as a policy gets: how its own round went changes nothing
		g.held, b.again = 0, false
	default:
		b.judge(g, took)
	}
	if !b.again {
		b.at++
	}
	if !b.deciding() {
		b.settle(now)
	}
}

// judge draws the consequences of a round of the policy in force.
func (b *board) judge(g *group, took time.Duration) {
	p, went := b.went.policy, b.went
	g.held = policy.Held(p.Policy)
	if p == &g.fallback {
		g.slow--
		return
	}
	if change := g.budget.Spent(took); change != "" {
		b.emit(Effect{Kind: EffectBudget, Label: change})
	}
	switch {
	case went.failure != nil:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackPanic})
		g.chosen = b.choose(g.barrier) // its scratch may be half written
		b.again = true
	case went.invalid > 0:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackInvalid})
		b.again = true
	case took > b.cfg.TickLimit:
		b.emit(Effect{Kind: EffectFallback, Label: FallbackSlow, Policy: p.name, Lasts: took})
		g.slow = SlowRounds
	}
}

// decideRound is one round about the pool: snapshot, decision, binding.
func (b *board) decideRound(g *group, p *decider, now time.Time) {
	b.fill(g, p, now)
	b.consult(g, p, now)
	for i := range b.assignments {
		if b.pairs.out > 0 && !b.steer(g, p, i, now) {
			continue
		}
		a := b.assignments[i]
		if fault := b.bind(g, p, a, now); fault != "" {
			b.went.invalid++
			b.emit(Effect{Kind: EffectInvalid, Policy: p.name, Label: fault, ID: a.Entry, Worker: a.Worker})
		}
	}
}

// consult asks a policy about the snapshot.
func (b *board) consult(g *group, p *decider, now time.Time) {
	b.foresee(g, p)
	b.assignments, b.went.failure = propose(p, &b.snapshot, b.assignments[:0])
	b.explain(g, p)
	b.round = Round{
		Tick: b.ticks, At: now, Group: b.label(g), Policy: p.name, Survival: b.survival, GuardMs: guardWaits * b.waits.meanMs(),
		Snapshot: b.snapshot, Assign: b.assignments,
	}
	b.emit(Effect{Kind: EffectRound, Group: b.key(g), Policy: p.name, Err: b.went.failure, Round: &b.round})
}

// fill writes the group and the pool into the board's one Snapshot. Running
// lists are the ranks' own, fresh since the tick began. An entry that no rank of
// the group that is up can ever take waits for another: here the starvation
// guard would only keep a rank free for it in vain.
func (b *board) fill(g *group, p *decider, now time.Time) {
	s := &b.snapshot
	s.Workers, s.Pool = s.Workers[:0], s.Pool[:0]
	watermark := policy.Watermark(p.Policy)
	largest := g.largest(watermark, now)
	model, _, _ := g.steps.Model()
	s.C0Ms, s.C1Ms = float32(model.C0Ms), float32(model.C1Ms)
	s.StepMs = g.steps.Ms(model, g.most)
	for _, r := range g.ranks {
		if r.early > 0 {
			b.foreseeStarts(r, s.StepMs, now)
		}
		free := r.admits(p)
		if !r.Up {
			free = min(free, 0)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: r.ID, Free: int32(free), Up: r.Up, Capacity: r.capacity(watermark, now), Cost: r.Cost, Others: r.Others + r.guests, Running: r.running,
		})
	}
	for _, e := range b.pool.Entries() {
		if int64(e.Prompt) > largest || b.avoiding > 0 && b.shy(e, now) {
			continue
		}
		s.Pool = append(s.Pool, b.policyEntry(e, s.StepMs, now))
	}
	s.MaxAgeMs = p.MaxAgeMs()
	if s.MaxAgeMs > 0 {
		s.MaxAgeMs = max(s.MaxAgeMs, guardWaits*b.waits.meanMs())
	}
	s.Budget = g.budget.Evaluations()
}

// policyEntry is what policies see of an entry.
func (b *board) policyEntry(e *pool.Entry, stepMs float32, now time.Time) policy.Entry {
	lead := e.Lead
	if lead > 0 {
		lead = b.starts.Correct(lead)
	}
	return policy.Entry{
		ID: e.ID, Prompt: tokens(e.Prompt), Age: tokens(e.Age), Key: e.Key,
		WaitMs: float32(e.GuardWait(now).Seconds() * 1000), Urgent: e.Urgent(now), Start: stepsIn(lead, stepMs),
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
func (b *board) bind(g *group, p *decider, a policy.Assignment, now time.Time) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rank(a.Worker)
	switch {
	case !ok:
		return FaultEntry
	case r == nil:
		return FaultWorker
	case !r.Up:
		return FaultDown
	case p.Immediate(): // the engine queues what is beyond the limits below
	case r.admits(p) <= 0:
		return FaultSlot
	case r.Capacity > 0 && r.kv+int64(w.prompt()) > r.room():
		return FaultRoom
	}
	b.pool.Remove(w.entry)
	how := Bound{Policy: p.name, Stage: a.Stage, Score: a.Score, Beyond: !p.Immediate() && r.free() <= 0}
	if how.Beyond { // it is sent ahead
		r.queued++
	}
	if w.local != nil {
		how.NewTokens = int32(b.least)
	}
	b.admit(r, w, how, now)
	return ""
}

// Bound is how an entry got its slot.
type Bound struct {
	Slot       int32 // index
	Worker     int32
	WorkerName string
	Group      string // as the worker names it
	Policy     string // that decided, the fallback's name where it did
	Stage      uint8  // policy.Assignment's: 0 the starvation guard, 1 singles, 2 subsets
	Score      float64
	Wait       time.Duration // in the pool
	Beyond     bool          // though the rank has no slot or no KV room for it yet
	Full       bool          // likewise, or the policy leaves queues to engines
	NewTokens  int32         // of the prompt that the rank has to compute; 0: its KV comes from a prefill engine
	Step       uint32        // of its group, that was told last; 0: none was

	// Of an entry that is bound before its prefill.
	Start  int32   // steps until its first token, as predicted; 0: nobody knew
	StepMs float32 // a step of the group then; 0: unknown
}

// StartError is by how many steps the first token was predicted too late, below 0 too early, if it
// came so long after the bind.
func (b *Bound) StartError(after time.Duration) (steps int, known bool) {
	if b.Start == 0 || b.StepMs == 0 {
		return 0, false
	}
	return int(b.Start) - int(stepsIn(max(1, after), b.StepMs)), true
}

// admit charges an entry that has left the pool, and has its caller told.
func (b *board) admit(r *rank, w entrant, how Bound, now time.Time) {
	e := w.entry
	c := charge{
		id: e.ID, key: e.Key, prefiller: e.Prefiller, prompt: w.prompt(), age: tokens(e.Age), newTokens: how.NewTokens, discard: e.Discard, waits: how.Beyond, since: now,
		early: e.Early, strays: e.Response && r.Strays && !e.Early, // what is bound before its prefill has its KV where that sends it
	}
	if e.Lead > 0 {
		c.first, c.lead, how.StepMs = now.Add(e.Lead), e.Lead, r.group.stepMs()
		how.Start = stepsIn(e.Lead, how.StepMs)
	}
	how.Full = how.Beyond || r.free() <= 0 || r.Capacity > 0 && r.kv+int64(w.prompt()) > r.room()
	how.Slot = b.charge(r, c)
	how.Step = b.ledger.table[how.Slot].bound
	if b.pairs.out > 0 {
		b.pairs.send(&b.ledger.table[how.Slot], now)
	}
	how.Worker, how.WorkerName, how.Group, how.Wait = r.ID, r.Name, r.Worker.Group, e.Wait(now)
	b.waits.add(how.Wait)
	b.forget(e)
	b.emit(Effect{Kind: EffectBind, Group: b.key(r.group), Entry: e, Bound: how})
}

// tokens is a count as policies hold it.
func tokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }
