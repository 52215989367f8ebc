package dispatcher

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// board mirrors the decode ranks of one model and holds its pool. The loop's
// goroutine owns it.
type board struct {
	*rules
	model   string
	pool    *pool.Pool
	waiting map[uint64]waiting // by entry ID; the same entries as the pool's

	ranks  map[int32]*rank // by worker ID, with those that are gone but still charged
	groups []*group        // with a present rank, ascending lowest ID
	up     int             // present ranks that take work
	downTo time.Time       // until then an outage of all ranks is waited out; zero: there is none
	// largest prompt any present rank could ever take, in KV tokens
	largest int64
	ledger  ledger

	arrived    bool      // entries came since the last turn
	changed    bool      // something else did that may let an entry in
	windowEnds time.Time // of the burst of freed slots; zero: none
	stepped    bool      // a group that holds entries back began a step
	pairs      *pairs
	heldUntil  time.Time // when to look at held entries although no step was told; zero: none is held
	avoiding   int       // waiting entries that do not go to any rank
	draining   int       // waiting entries that are drains
	wakeShy    time.Time // when the first of these takes any; zero: none has to wait

	waits    waits
	pace     *pace
	ticks    uint64
	outcomes [Failed + 1]uint64
	output   int64 // tokens of all released slots

	// Of the tick, reused by every one.
	snapshot    policy.Snapshot
	survival    *predictor.Survival // of its Outlook; nil: none
	assignments []policy.Assignment
	weights     []float64 // see explain
	order       []*group
	expired     []*pool.Entry

	// Of the rounds that are under way, see deciding.
	asked *pool.Entry // the entry without a hand-off that they are about; nil: they are about the pool
	least int         // of the asked entry, the tokens that a rank may have to compute
	at    int         // the group of order that decides next
	again bool        // it decides once more, by the fallback
	round round       // the last one, for those who look at it afterwards
	went  went        // how the last one went
}

// went is how a round went.
type went struct {
	policy  *decider
	invalid int // assignments that were not bound
	failure error
	bound   bool // the asked entry was
}

// waiting is an entry with what it will be answered with: the slot is made by
// the caller of Enqueue, so that the tick allocates nothing.
type waiting struct {
	entry  *pool.Entry
	slot   *Slot
	result chan Result // room for one, sent to once
	local  *Local      // it has no hand-off, and does not wait; nil: it has one
}

// rank is one decode rank with what is charged to it.
type rank struct {
	Worker
	board   *board
	present bool             // false: gone from the fleet, waits for its last release
	slots   []*Slot          // charged now
	running []policy.Request // the same requests, as policies see them
	kv      int64            // KV tokens held, others' too, as of the last refresh and what was bound and released since
	queued  int              // of the slots, those that wait in the engine's own queue, as of the last refresh; never too few

	group    *group // while present
	pressure pressure
}

// group is what one Snapshot shows: a barrier group, or all ranks of the model
// that have no barrier.
type group struct {
	board    *board
	name     string // "" without barrier
	barrier  bool
	members  []*rank // present, ascending ID
	ranks    []*rank // of them, those that step: all that are not down; what a Snapshot shows
	chosen   decider
	fallback decider
	slow     int // rounds the fallback still decides, after one over the limit

	kv   int64 // KV tokens of all ranks, as of the last refresh
	most int64 // of the fullest, by what they cost

	forecast forecast
	budget   budget
	held     int     // entries the last round held back though they had a slot
	pulse    *pulse  // nil without barrier
	steps    stepper // what it told
	told     []step  // scratch
}

func newBoard(model string, r *rules) *board {
	b := &board{rules: r, model: model, pool: pool.New(r.cfg.TTL), waiting: map[uint64]waiting{}, ranks: map[int32]*rank{}, pace: newPace()}
	r.paces.Store(model, b.pace)
	b.pairs = b.newPairs()
	return b
}

func (b *board) empty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

func (b *board) enqueue(w waiting, now time.Time) {
	err := b.refusal(w.slot.prompt)
	if b.up == 0 {
		err = ErrNoWorkers
	}
	if _, taken := b.waiting[w.entry.ID]; taken {
		err = ErrDuplicate
	}
	if err != nil {
		b.emit(effect{kind: effectAnswer, waiting: w, result: Result{Err: err}})
		return
	}
	if w.local != nil {
		b.placeLocal(w, now)
		return
	}
	b.pool.Add(w.entry, now)
	b.waiting[w.entry.ID] = w
	b.arrived = true
	if particular(w.entry) {
		b.avoiding++
	}
	if w.entry.Drain {
		b.draining++
	}
}

// refusal says why a prompt can never be admitted, whatever is released.
// Ranks that are down may come back, so they count: a prefill that is done
// already is worth the wait.
func (b *board) refusal(prompt int32) error {
	switch {
	case len(b.groups) == 0:
		return ErrNoWorkers
	case int64(prompt) > b.largest:
		return ErrTooLarge
	}
	return nil
}

// fail takes a waiting entry out of the pool and tells its caller why.
func (b *board) fail(e *pool.Entry, err error) {
	b.pool.Remove(e)
	b.answer(e, Result{Err: err})
}

func (b *board) answer(e *pool.Entry, r Result) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if particular(e) {
		b.avoiding--
	}
	if e.Drain && w.local == nil {
		b.draining--
	}
	b.emit(effect{kind: effectAnswer, waiting: w, result: r})
}

func (b *board) expire(now time.Time) {
	if b.expired = b.pool.Expire(now, b.expired[:0]); len(b.expired) > 0 {
		for _, g := range b.groups {
			g.refresh()
		}
	}
	for i, e := range b.expired {
		_, why := e.Expiry()
		if !errors.Is(why, ErrExpired) || !b.overflow(e, now) {
			b.answer(e, Result{Err: why})
		}
		b.expired[i] = nil
	}
}

// outageGrace is how long those that wait outlast an outage of all ranks. An
// engine that is gone for longer restarts, which takes minutes: its clients had
// better know.
const outageGrace = 10 * time.Second

// outage ends the waits that no rank will end.
func (b *board) outage(now time.Time) {
	switch {
	case b.up > 0:
		b.downTo = time.Time{}
	case b.downTo.IsZero():
		b.downTo = now.Add(outageGrace)
	case !now.Before(b.downTo):
		for len(b.pool.Entries()) > 0 {
			b.fail(b.pool.Entries()[0], ErrNoWorkers)
		}
	}
}

// release takes a slot's charge back. Freed slots come in bursts, since the
// ranks of a group finish requests in the same step: the first of a burst
// opens the window at whose end all are decided together.
func (b *board) release(s *Slot, o Outcome, now time.Time) {
	r := s.rank
	b.learn(s, o)
	b.pairEnded(s, o, now)
	if !s.drain {
		b.pace.ended(now.Sub(s.since), int64(s.prompt)+int64(s.generated.Load()))
	}
	b.discharge(s)
	s.rank.promote()
	r.group.rest()
	b.outcomes[min(o.Kind, Failed)]++
	b.output += int64(max(0, o.Generated))
	if !r.present {
		if len(r.slots) == 0 {
			delete(b.ranks, r.ID)
		}
		return
	}
	switch {
	case b.pool.Len() == 0: // nobody to place
	case b.cfg.Window == 0:
		b.changed = true
	case b.windowEnds.IsZero():
		b.windowEnds = now.Add(b.cfg.Window)
	}
}

func (b *board) setWorkers(ws []Worker) {
	for _, r := range b.ranks {
		r.present = false
	}
	for _, w := range ws {
		r := b.ranks[w.ID]
		switch {
		case r == nil:
			r = &rank{board: b}
			b.ranks[w.ID] = r
		case r.present:
			b.emit(effect{kind: effectDuplicate, worker: w.ID, names: [2]string{r.Name, w.Name}})
			continue
		}
		w.Slots, w.Up = max(0, w.Slots), w.Up && !w.Down
		r.Worker, r.present = w, true
		r.refresh()
		r.promote()
		if grow := w.Slots + w.Beyond - len(r.slots); grow > 0 { // room now, so that the tick need not make it
			r.slots, r.running = slices.Grow(r.slots, grow), slices.Grow(r.running, grow)
		}
	}
	for id, r := range b.ranks {
		if !r.present && len(r.slots) == 0 {
			delete(b.ranks, id)
		}
	}
	b.regroup()
	b.recheck()
}

func (b *board) newGroup(name string, barrier bool) *group {
	g := &group{board: b, name: name, barrier: barrier, chosen: b.choose(barrier), fallback: b.make(fallbackSpec)}
	if barrier {
		g.steps.configured = b.cfg.StepModel
		heard := func(*runner) { b.hear(g) } // made once: telling a step allocates nothing
		g.pulse = newPulse(func() { b.wake(heard) })
	}
	b.emit(effect{kind: effectGroup, group: g})
	return g
}

// regroup sorts the present ranks into groups; a group that was there before
// keeps its policy's state.
func (b *board) regroup() {
	type key struct {
		name    string
		barrier bool
	}
	groups := make(map[key]*group, len(b.groups))
	for _, g := range b.groups {
		g.members, g.ranks = g.members[:0], g.ranks[:0]
		groups[key{g.name, g.barrier}] = g
	}
	b.up = 0
	for _, r := range b.ranks {
		if !r.present {
			continue
		}
		k := key{barrier: r.Barrier}
		if r.Barrier {
			k.name = r.Group
		}
		g := groups[k]
		if g == nil {
			g = b.newGroup(k.name, k.barrier)
			groups[k] = g
		}
		r.group = g
		g.members = append(g.members, r)
		if r.Up {
			b.up++
		}
	}
	b.groups = b.groups[:0]
	for _, g := range groups {
		if len(g.members) == 0 {
			g.held = 0 // its last streams may still tell steps
			b.emit(effect{kind: effectGroupGone, group: g})
			continue
		}
		slices.SortFunc(g.members, func(x, y *rank) int { return cmp.Compare(x.ID, y.ID) })
		for _, r := range g.members {
			if !r.Down {
				g.ranks = append(g.ranks, r)
			}
		}
		b.groups = append(b.groups, g)
	}
	slices.SortFunc(b.groups, func(x, y *group) int { return cmp.Compare(x.members[0].ID, y.members[0].ID) })
}

func (b *board) setPolicy() {
	for _, g := range b.groups {
		if g.barrier {
			g.chosen, g.slow, g.budget = b.choose(true), 0, budget{}
		}
	}
	b.recheck()
}

// recheck turns away the entries that no rank of the fleet can take any more,
// and lets the next turn decide anew.
func (b *board) recheck() {
	b.largest = 0
	for _, g := range b.groups {
		for _, r := range g.members { // one that is down may come back
			b.largest = max(b.largest, r.budget(policy.Watermark(g.chosen.Policy)))
		}
	}
	for _, w := range b.waiting {
		if err := b.refusal(w.slot.prompt); err != nil {
			b.fail(w.entry, err)
		}
	}
	b.changed = true
}

// usable is how many slots may be in use now.
func (r *rank) usable() int {
	if r.Limit > 0 {
		return min(r.Slots, r.Limit)
	}
	return r.Slots
}

func (r *rank) free() int { return r.usable() - len(r.slots) }

// budget is the largest prompt the rank could take if it were idle, under a
// policy that keeps the watermark's share of it empty.
func (r *rank) budget(watermark float64) int64 {
	return room(r.Capacity, watermark)
}

func room(capacity int64, watermark float64) int64 {
	if capacity == 0 {
		return math.MaxInt64
	}
	return int64(math.Floor(float64(capacity) * (1 - watermark)))
}

// refresh reads every request's counter: the rank's mirror is as fresh as the
// last event its streams saw.
func (r *rank) refresh() {
	r.kv, r.queued = r.Others, 0
	for i, s := range r.slots {
		n := s.generated.Load()
		q := &r.running[i]
		q.Generated, q.Age = n, s.age+n
		r.kv += int64(q.Prompt) + int64(n)
		if s.waits.Load() {
			r.queued++
		}
	}
}

// waits are the pool times of the last admissions, for the starvation guard.
type waits struct {
	last    [1000]time.Duration
	n, next int
	sum     time.Duration
}

func (w *waits) add(d time.Duration) {
	w.sum += d - w.last[w.next]
	w.last[w.next] = d
	w.next = (w.next + 1) % len(w.last)
	w.n = min(w.n+1, len(w.last))
}

func (w *waits) meanMs() float32 {
	if w.n == 0 {
		return 0
	}
	return float32(w.sum.Seconds() * 1000 / float64(w.n))
}
