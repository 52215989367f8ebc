package board

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/ahead"
	"evenkeel/dispatcher/decision"
	"evenkeel/dispatcher/effort"
	"evenkeel/dispatcher/forecast"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/engine/circuit"
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
	mixed  bool            // the ranks are, as told last
	downTo time.Time       // until then an outage of all ranks is waited out; zero: there is none
	// largest prompt any present rank could ever take, in KV tokens
	largest int64
	ledger  ledger

	arrived    bool      // entries came since the last turn
	changed    bool      // something else did that may let an entry in
	windowEnds time.Time // of the burst of freed slots; zero: none
	stepped    bool      // a group that holds entries for a round began a step
	pairs      pairs
	heldUntil  time.Time           // when to look at held entries although nothing happens; zero: none is held
	avoiding   int                 // waiting entries that do not go to any rank
	discarding int                 // waiting entries that are discarded hand-offs
	holders    int                 // waiting entries of whose prompt a rank holds something
	partial    map[string]*listing // by name, those that some ranks list and others do not
	common     *Names              // what any one rank lists: a name that is not partial is in it, or no rank lists it
	listed     []lister            // what partial follows from
	listers    []lister            // room for the next of these
	names      []*listing          // the same in order, with their names and their paces
	named      []string
	paces      []Pace
	lonelyTo   time.Time // when the first wait ends for a name of which all ranks are down; zero: there is none
	wakeShy    time.Time // when the first of these takes any; zero: none has to wait
	refusing   int       // ranks whose engines refused what they got last
	wakeSpared time.Time // when the first of these that are spared may be tried; zero: none is
	keptTo     time.Time // when an engine gives up the first of the KV that it keeps of answers; zero: none keeps any

	waits    waits
	pace     Pace
	ticks    uint64
	outcomes [Failed + 1]uint64
	output   int64 // tokens of all released slots

	counts *Counts // told with the event that is applied; nil: with none

	lengths map[uint64]int32 // of outputs that were told, by entry ID, of those that wait or run

	// Of the tick, reused by every one.
	snapshot    policy.Snapshot
	survival    *predictor.Survival // what its MeanOutput is of; nil: none
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

	backlog   int64   // prompt tokens that it has yet to compute
	output    int64   // tokens of all released slots
	answers   uint64  // that were whole
	empty     uint64  // of them, those that their engine ended without any text
	unsaid    uint64  // of the answers, those of which their engine told no usage
	prompts   uint64  // that were sent to it so far
	computing []int32 // slots that have no token yet, or none since they were preempted, in the order in which they are computed
	computes  int64   // prompt tokens of the step under way

	engine   []*rank // those of its engine in the fleet; responses that no rank is known of stand on all of them
	strays   int     // of the slots, such responses
	parts    int64   // ranks on which each of them stands
	guests   int64   // KV tokens of those of the other ranks that stand here, in kv
	orphans  []orphan
	orphaned int64   // KV tokens of these, not in kv
	kept     kept.KV // of answers that have ended, not in kv

	group    *group // while present
	pressure pressure
	refusals circuit.Circuit // by its engine, in a row
	spared   bool            // it has refused too many to get any now
}

func (r *rank) free() int { return r.usable() - len(r.slots) }

// usable is how many slots may be in use now.
func (r *rank) usable() int {
	if r.Limit > 0 {
		return min(r.Slots, r.Limit)
	}
	return r.Slots
}

// budget is the largest prompt the rank could take if it were idle, under a
// policy that keeps the watermark's share of it empty.
func (r *rank) budget(watermark float64) int64 {
	return policy.KVBudget(r.Capacity, watermark)
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
	held     int       // entries that the last decision held for a round although they had a slot
	wake     time.Time // when the policy wants to look at these; zero: it does not say so
	gathered gathered
	lately   lately
	tempo    tempo
	steps    step.Times    // what its streams told
	told     *step.Weights // that do not change; nil: half of what a request weighs is either of them
	had      []step.Rank   // what its ranks had in a step, so that hearing of one allocates nothing
	last     Step          // of these; the requests it was made for are known with the next
	gone     int64         // tokens of all requests that were released
	lag      ahead.Lag
	lead     ahead.Lead
	tokens   int64 // these, and of those that run, when the last step was told
}

// gathered is what a group that prefills and decodes did so far.
type gathered struct {
	rounds, filled  uint64 // sent ones, and the ranks that had a prompt to compute then
	steps, prefills uint64 // told ones, and those in which a prompt was computed
	ranks, idle     uint64 // in the latter, and those of them that computed none

	heldSince time.Time     // when the first of those that are held could have been sent
	maxHold   time.Duration // the policy holds no request longer than this
}

// lately is what came of a group over its steps, the past fading: how many requests waited for their first token and were not held, and
// how many tokens of prompts its ranks computed. Who waits in the arrival queue is not here yet.
type lately struct{ waited, tokens, seconds float64 }

const (
	recently = 60 // after so many seconds of steps the past counts for a third
	longest  = 5  // seconds that a step counts for at most: an engine that stood still says nothing of the minutes after it
)

func (l *lately) add(requests float64, tokens int64, length time.Duration) {
	seconds := min(longest, length.Seconds())
	kept := math.Exp(-seconds / recently)
	l.waited, l.tokens, l.seconds = l.waited*kept+requests*seconds, l.tokens*kept+float64(tokens), l.seconds*kept+seconds
}

// means are how many requests waited, and how many tokens of prompts were computed per second; below 0: no stream has told of a step.
func (l *lately) means() (requests, rate float32) {
	if l.seconds <= 0 {
		return -1, -1
	}
	return float32(l.waited / l.seconds), float32(l.tokens / l.seconds)
}

// entrant is an entry that waits.
type entrant struct {
	entry      *pool.Entry
	local      *Local          // it has no hand-off, and does not wait; nil: it has one
	output     int32           // that was told; 0: it was not
	trace      *decision.Trace // room for what its rank is chosen on, so that the tick allocates nothing; nil: nobody asks
	hits       []Hit           // what ranks hold of its prompt
	particular bool            // it does not go to any rank, and is counted with those
	since      time.Time       // when it could first have been sent to one; zero: it never could
}

func (e entrant) prompt() int32 { return tokens(e.entry.Prompt) }

// pairs are the ways of KV from a prefiller to a decode engine that do not
// work, though both serve others: a connection one of them kept from before a
// restart, a route that is gone. A quarantined pair gets
// no hand-off while another rank can take it, for a second and twice as long
// each time the one hand-off that then tries it fails too, 30 s at most. The
// board owns it; streams read only how many are watched.
type pairs struct {
	suspects map[Pair]*suspect
	out      int       // of them quarantined; 0: a round pays for nothing here
	checkAt  time.Time // when to look at entries that were left for a quarantine's end; zero: none were
}

// suspect is a pair that has failed since it last worked.
type suspect struct {
	circuit circuit.Circuit
	row     int
	from    bool // the prefiller's hand-offs reached others since
	to      bool // others' reached the engine since
	last    time.Time
}

// Pair is a prefiller and a decode engine.
type Pair struct{ Prefiller, Engine string }

// orphan is the prompt of such a request.
type orphan struct {
	tokens int64
	since  time.Time
}

// pressure is what a rank's preemptions tell.
type pressure struct {
	last  time.Time // preemption
	until time.Time // kept emptier
}

// Pace is how fast the slots of a board come free, from which Room tells whether a
// hand-off would get a slot in time.
type Pace struct {
	Slots, Free int
	Waiting     int     // in the pool, discarded hand-offs not counted
	Seconds     float64 // mean time that a request has its slot
	tokens      float64 // mean KV tokens of a request at its end; 0: none has ended
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
	Held       time.Duration // of Wait, for a round
	Step       uint32        // of its group, that was told last; 0: none was

	StepMs    float32 // a step of the group then, of an entry that is bound before its prefill; 0: unknown
	ComputeMs float32 // until a mixed rank has computed the prompt, and those before it; 0: unknown
}

// Local is what a decode rank may compute of a prompt that comes without a
// hand-off.
type Local struct {
	Ranks []LocalRank // that may, and how much of it each would have to compute

	// Threshold is the longest part that a rank may compute, in tokens. 0: what
	// takes longer than a hand-off may not be computed, see BreakEven.
	Threshold int
	// BreakEven is how many tokens an idle rank computes in the time of a
	// hand-off. Each request that runs beside it makes that an eighth longer.
	BreakEven float64
	// InFlight bounds the tokens that a rank has to compute at once, these
	// included.
	InFlight int
}

// LocalRank is a rank with what it would have to compute.
type LocalRank struct {
	Worker int32
	Tokens int // of the prompt, those that its prefix cache does not have
}

// departed is a request that was released, and the steps it was in.
type departed struct {
	first, last uint32
	kv          int64
	prompt      int64 // tokens of its prompt that the step of its first token computed, on a mixed rank
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

// Boards are the boards of all models: the mirror of their decode ranks, what these hold, and
// the pools of entries that wait for them. They have no goroutine, clock, log, metric or lock:
// whoever owns them tells events with the time, and carries out the effects that come back.
type Boards struct {
	*rules
	boards   map[string]*board // by model
	inOrder  []*board          // the same, by name
	round    *board            // whose round was decided, until it is told how long that took
	draining bool
}

// rules are the settings all boards share; only the owner changes them.
type rules struct {
	cfg    Config
	spec   string          // policy of barrier groups
	name   string          // of that policy
	shared map[string]bool // names of groups that several models have

	replayed []policy.Needs // what the policies that the twin replays want to know

	fit      *predictor.Fit     // what predictors start from; nil: from nothing
	subjects map[Subject]*known // outlive the boards

	effects []Effect  // to be carried out
	now     time.Time // of the last event
}

func (r *rules) emit(e Effect) { r.effects = append(r.effects, e) }

// decider is a policy in use: a value of its own for each group, since it
// keeps scratch and turns.
type decider struct {
	policy.Policy
	spec   string
	name   string
	rules  *rules
	ahead  bool   // it sends requests ahead of the slots they will have
	hits   bool   // it asks what ranks hold of prompts
	source *known // of what it wants to know of the future; nil: nothing
}

// charge is a request's place on a rank, from its admission until its release.
type charge struct {
	rank        *rank // nil: the index is free
	pos         int   // in rank.slots and rank.running
	id, key     uint64
	prefiller   string
	prompt, age int32
	newTokens   int32 // of the prompt that the rank has to compute
	discard     bool
	strays      bool // its engine runs it on any of its ranks: its KV stands on all of them
	started     bool // its first event has come, as was told last
	waits       bool // in the engine's queue, beyond the rank's slots or KV room
	since       time.Time
	bound       uint32 // number of the step that was told last before it
	early       bool   // it was bound before its prefill
	unread      bool   // likewise, or on a mixed rank, and no step has read its KV yet
	left        int32  // of its prompt, what a mixed rank has yet to compute
	chunks      chunks // in which that is done
	had         int32  // tokens that it had got when it was preempted there; 0: it never was
	unheard     unheard
}

// ledger is every charge by its dense index, and what was charged and
// released in all. The two are kept apart so that the program can check one
// against the other while it runs.
type ledger struct {
	table    []charge
	unused   []int32 // free indices, the last is taken first
	charged  tally
	released tally
	kept     int64 // KV tokens that engines kept of answers that had ended
	givenUp  int64 // of these, those that they keep no longer
}

// tally counts slots and the KV tokens they were admitted with.
type tally struct{ slots, kvTokens int64 }

func (t *tally) add(c *charge) {
	t.slots++
	t.kvTokens += int64(c.prompt)
}

// tokens is a count as policies hold it.
func tokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }

func (g *group) inForce() *decider {
	if g.slow > 0 {
		return &g.fallback
	}
	return &g.chosen
}

func (g *group) rank(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.ranks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.ranks[at]
}

// went is how a round went.
type went struct {
	policy  *decider
	invalid int // assignments that were not bound
	failure error
	bound   bool // the asked entry was
}

// Gauged tells how many KV tokens are in use on a worker, as its engine's gauges said at an instant.
type Gauged struct {
	Worker   int32
	KVTokens int64
	At       time.Time
}

// examined are settings that work.
type examined struct {
	cfg     Config
	fit     *predictor.Fit
	spec    string
	decides bool // policies are made anew
}

// started says whether the first event of a slot has come, or would have come if its engine told of any.
func (b *board) started(slot int32) bool {
	return b.seen(slot) || b.ledger.table[slot].unheard.first != 0
}

// seen says whether the first event of a slot has come, so that its KV is there.
func (b *board) seen(slot int32) bool {
	c := &b.ledger.table[slot]
	c.started = c.started || b.counts != nil && b.counts.started(slot)
	return c.started
}

// group is the one that a key names, and its board; nil: it is gone.
func (l *Boards) group(key GroupKey) (*board, *group) {
	if b := l.boards[key.Model]; b != nil {
		for _, g := range b.groups {
			if b.key(g) == key {
				return b, g
			}
		}
	}
	return nil, nil
}

// label names a group in metrics and in the decision log.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.shared[g.name]:
		return b.model + "/" + g.name
	}
	return g.name
}

// key names a group in effects.
func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// known is what is known of a subject.
type known struct {
	Subject
	*Tables
}

// Names are what an engine lists. They never change. Engines that list the same have the same value, so that two can be compared by
// their pointers. nil has every name: nobody has told.
type Names struct{ all map[string]struct{} }

// listing is a name that some ranks of a board list and others do not.
type listing struct {
	ranks []*rank  // present ones that list it, ascending ID
	whole []*group // groups of which all ranks do
	parts []*rank  // of ranks, those of the other groups

	up      int       // of ranks, those that take requests, or are waited for
	largest int64     // prompt that any of ranks could ever take, in KV tokens
	downTo  time.Time // until then an outage of all ranks is waited out; zero: there is none
	full    uint64    // tick in which none of parts had a slot left
	waiting int       // entries
}

// lister is a rank as far as the listings follow from it.
type lister struct {
	rank  *rank
	group *group
	lists *Names
}
