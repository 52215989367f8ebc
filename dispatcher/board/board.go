package board

import (
	"errors"
	"time"

	"evenkeel/dispatcher/ahead"
	"evenkeel/dispatcher/effort"
	"evenkeel/dispatcher/forecast"
	"evenkeel/dispatcher/grounds"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// board mirrors the decode ranks of one model and holds its pool.
type board struct {
	*rules
	model   string
	pool    *pool.Pool
	waiting map[uint64]entrant // by entry ID; the same entries as the pool's

	ranks  map[int32]*rank // by worker ID, with those that are gone but still charged
	groups []*group        // with a present rank, ascending lowest ID
	up     int             // present ranks that take work
	early  bool            // the ranks are, as told last
	starts forecast.Starts // what predictions of first tokens are worth
	downTo time.Time       // until then an outage of all ranks is waited out; zero: there is none
	// largest prompt any present rank could ever take, in KV tokens
	largest int64
	ledger  ledger

	arrived    bool      // entries came since the last turn
	changed    bool      // something else did that may let an entry in
	windowEnds time.Time // of the burst of freed slots; zero: none
	stepped    bool      // a group that holds entries back began a step
	pairs      pairs
	heldUntil  time.Time // when to look at held entries although no step was told; zero: none is held
	avoiding   int       // waiting entries that do not go to any rank
	discarding int       // waiting entries that are discarded hand-offs
	wakeShy    time.Time // when the first of these takes any; zero: none has to wait

	waits    waits
	pace     Pace
	ticks    uint64
	outcomes [Failed + 1]uint64
	output   int64 // tokens of all released slots

	counts *Counts // told with the event that is applied; nil: with none

	lengths map[uint64]int32 // of outputs that were told, by entry ID, of those that wait or run

	// Of the tick, reused by every one.
	snapshot    policy.Snapshot
	survival    *predictor.Survival // of its Outlook; nil: none
	foresight   foresight           // its Outlook, where lengths were told
	assignments []policy.Assignment
	weights     []float64 // see explain
	order       []*group
	expired     []*pool.Entry

	// Of the rounds that are under way, see deciding.
	asked *pool.Entry // the entry without a hand-off that they are about; nil: they are about the pool
	least int         // of the asked entry, the tokens that a rank may have to compute
	at    int         // the group of order that decides next
	again bool        // it decides once more, by the fallback
	round Round       // the last one, for those who look at it afterwards
	went  went        // how the last one went
}

// went is how a round went.
type went struct {
	policy  *decider
	invalid int // assignments that were not bound
	failure error
	bound   bool // the asked entry was
}

// entrant is an entry that waits.
type entrant struct {
	entry   *pool.Entry
	local   *Local           // it has no hand-off, and does not wait; nil: it has one
	output  int32            // that was told; 0: it was not
	grounds *grounds.Grounds // room for what its rank is chosen on, so that the tick allocates nothing; nil: nobody asks
}

func (e entrant) prompt() int32 { return tokens(e.entry.Prompt) }

// rank is one decode rank with what is charged to it.
type rank struct {
	Worker
	present bool             // false: gone from the fleet, waits for its last release
	slots   []int32          // charged now, by their index in the ledger
	running []policy.Request // the same requests, as policies see them
	kv      int64            // KV tokens held, others' too, as of the last refresh and what was bound and released since
	queued  int              // of the slots, those that wait in the engine's own queue, as of the last refresh; never too few
	left    []departed       // released since the last step that is known whole
	early   int              // of the slots, those that are not prefilled yet, as of the last refresh
	later   int64            // KV tokens of these, in kv

	engine   []*rank // those of its engine in the fleet; responses that no rank is known of stand on all of them
	strays   int     // of the slots, such responses
	parts    int64   // ranks on which each of them stands
	guests   int64   // KV tokens of those of the other ranks that stand here, in kv
	orphans  []orphan
	orphaned int64 // KV tokens of these, not in kv

	group    *group // while present
	pressure pressure
}

// group is what one Snapshot shows: a barrier group, or all ranks of the model
// that have no barrier.
type group struct {
	name     string // "" without barrier
	barrier  bool
	members  []*rank // present, ascending ID
	ranks    []*rank // of them, those that step: all that are not down; what a Snapshot shows
	chosen   decider
	fallback decider
	slow     int // rounds the fallback still decides, after one over the limit

	kv   int64 // KV tokens of all ranks, as of the last refresh
	most int64 // of the fullest, by what they cost

	forecast forecast.Running
	budget   effort.Budget
	held     int        // entries the last round held back though they had a slot
	steps    step.Times // what its streams told
	last     Step       // of these; the requests it was made for are known with the next
	gone     int64      // tokens of all requests that were released
	lag      ahead.Lag
	lead     ahead.Lead
	tokens   int64 // these, and of those that run, when the last step was told
}

func newBoard(model string, r *rules) *board {
	return &board{
		rules: r, model: model, pool: pool.New(r.cfg.TTL), waiting: map[uint64]entrant{}, ranks: map[int32]*rank{}, lengths: map[uint64]int32{},
		pace: newPace(), pairs: pairs{suspects: map[Pair]*suspect{}},
	}
}

func (b *board) empty() bool { return len(b.ranks) == 0 && b.pool.Len() == 0 }

func (b *board) enqueue(w entrant, now time.Time) {
	err := b.refusal(w.prompt())
	if b.up == 0 {
		err = ErrNoWorkers
	}
	if _, taken := b.waiting[w.entry.ID]; taken {
		err = ErrDuplicate
	}
	if err != nil {
		b.emit(Effect{Kind: EffectRefuse, Entry: w.entry, Err: err})
		return
	}
	if w.local != nil {
		b.placeLocal(w, now)
		return
	}
	if w.output > 0 {
		b.lengths[w.entry.ID] = w.output
	}
	b.pool.Add(w.entry, now)
	b.waiting[w.entry.ID] = w
	b.arrived = true
	if particular(w.entry) {
		b.avoiding++
	}
	if w.entry.Discard {
		b.discarding++
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
	b.refuse(e, err)
}

// refuse answers an entry that has left the pool, or was never in it.
func (b *board) refuse(e *pool.Entry, err error) {
	b.forget(e)
	delete(b.lengths, e.ID)
	b.emit(Effect{Kind: EffectRefuse, Entry: e, Err: err})
}

// forget ends what is kept of an entry that waited.
func (b *board) forget(e *pool.Entry) {
	w := b.waiting[e.ID]
	delete(b.waiting, e.ID)
	if particular(e) {
		b.avoiding--
	}
	if e.Discard && w.local == nil {
		b.discarding--
	}
}

func (b *board) expire(now time.Time) {
	if b.expired = b.pool.Expire(now, b.expired[:0]); len(b.expired) > 0 {
		for _, g := range b.groups {
			b.refreshGroup(g)
		}
	}
	for i, e := range b.expired {
		_, why := e.Expiry()
		if !errors.Is(why, ErrExpired) || !b.overflow(e, now) {
			b.refuse(e, why)
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

// release takes the charge of a slot back that was so far at its end. Freed slots come in bursts, since the
// ranks of a group finish requests in the same step: the first of a burst
// opens the window at whose end all are decided together.
func (b *board) release(slot int32, o Outcome, generated int32, started bool, now time.Time) {
	c := &b.ledger.table[slot]
	r, left := c.rank, *c
	c.started = c.started || started
	b.learn(c, o)
	delete(b.lengths, c.id)
	b.pairEnded(c, o, now)
	if !c.discard {
		b.pace.ended(now.Sub(c.since), int64(c.prompt)+int64(generated))
	}
	b.discharge(slot)
	if o.Orphaned && left.early && r.present {
		b.orphan(r, &left, now)
	}
	b.promote(r)
	b.rest(r.group)
	b.outcomes[min(o.Kind, Failed)]++
	b.output += int64(max(0, o.Generated))
	if !r.present {
		b.leave(r)
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
	return policy.KVBudget(r.Capacity, watermark)
}

func (c *Counts) generated(slot int32) int32 {
	if int(slot) < len(c.Tokens) {
		return c.Tokens[slot]
	}
	return 0
}

// step is the one that the first tokens of a slot came with; 0: none has come.
func (c *Counts) step(slot int32) uint32 {
	if c != nil && int(slot) < len(c.Joined) {
		return c.Joined[slot]
	}
	return 0
}

func (c *Counts) started(slot int32) bool { return int(slot) < len(c.Began) && c.Began[slot] }

// first is when the first token of a slot is predicted, if that was told since it was bound.
func (c *Counts) first(slot int32) (at time.Time) {
	if c != nil && int(slot) < len(c.First) && c.First[slot] != 0 {
		at = c.Since.Add(c.First[slot])
	}
	return at
}

// refresh takes the counts of the rank's slots in. Without counts, what was told last stands.
func (b *board) refresh(r *rank) {
	kv, lent := r.Others+r.guests, int64(0)
	for i, slot := range r.slots {
		q := &r.running[i]
		if b.counts != nil {
			generated := b.counts.generated(slot)
			q.Age += generated - q.Generated
			q.Generated = generated
		}
		if r.strays > 0 && b.ledger.table[slot].strays {
			lent += r.share(q)
		}
		kv += q.Tokens()
	}
	r.kv = kv
	r.lend(lent)
	if r.Early || r.early > 0 {
		b.seeStarts(r)
	}
	if r.queued == 0 {
		return
	}
	r.queued = 0
	for _, slot := range r.slots {
		if c := &b.ledger.table[slot]; c.waits && b.started(slot) {
			c.waits = false
		} else if c.waits {
			r.queued++
		}
	}
}

// started says whether the first event of a slot has come.
func (b *board) started(slot int32) bool {
	c := &b.ledger.table[slot]
	c.started = c.started || b.counts != nil && b.counts.started(slot)
	return c.started
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
