package board

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/forecast"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/engine/circuit"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// board mirrors the decode ranks of one model, and has the pool of entries (requests) that wait for them.
type board struct {
	*allBoards
	model   string
	pool    *pool.Pool
	waiting map[uint64]waitingEntry // by entry ID; the same entries as the pool's

	ranks     map[int32]*rank // by worker ID; also ranks that have left the fleet and still have charged slots
	groups    []*group        // groups with a present rank, by the lowest ID of their ranks
	up        int             // present ranks that are up or awaited
	mixed     bool            // the ranks prefill and decode; an empty list of workers does not change it
	graceEnds time.Time       // end of outageGrace while all ranks are down; zero: a rank is up
	// largest prompt that any present rank could ever take, in KV tokens
	largest int64
	slots   slotTable

	arrived         bool      // entries came since the last Tick
	changed         bool      // another event happened after which a rank may take an entry
	windowEnds      time.Time // end of Config.Window after the first freed slot of a burst; zero: no window is open
	stepped         bool      // a group whose policy holds entries back began a step
	pairs           pairs
	heldUntil       time.Time                 // when a policy wants to look again at entries that it holds back; zero: it has set no time
	restrictedCount int                       // waiting entries that some ranks may not get
	discarding      int                       // waiting entries that are discarded hand-offs
	holders         int                       // waiting entries whose prompt is partly in the prefix cache of a rank
	partial         map[string]*namePlacement // by name: the names that some ranks list and others do not
	common          *Names                    // the list of the first rank: a name that is neither here nor in partial is listed by no rank
	listed          []lister                  // the ranks and their lists when partial was computed
	listers         []lister                  // the present ranks and their lists, to be compared with listed
	names           []*namePlacement          // the values of partial, sorted by name
	named           []string                  // their names
	paces           []Throughput              // their paces
	nameOutageEnds  time.Time                 // end of the earliest outageGrace of a name whose ranks are all down; zero: none waits for one
	wakeAvoiding    time.Time                 // when the first waiting entry may go to ranks that it avoids; zero: no entry waits for that
	refusing        int                       // ranks whose engines refused their last requests
	wakeSpared      time.Time                 // when the first spared rank may be tried; zero: no rank is spared
	wakeTight       time.Time                 // when the first tight rank (tight.go) has its whole room again; zero: no rank is tight
	keptUntil       time.Time                 // when an engine next frees KV that it keeps of answers (kept.go); zero: no engine keeps any

	waits    waits
	pace     Throughput
	ticks    uint64
	outcomes [Failed + 1]uint64
	output   int64 // tokens of all released slots

	counts *Counts // Counts that hold for the event that is applied now; nil: none

	lengths map[uint64]int32 // by entry ID: Enqueue.Output of the entries that wait or run

	// Memory of a tick, which the next tick reuses.
	snapshot    policy.Snapshot
	survival    *predictor.Survival // table of the snapshot's MeanOutput; nil: it has none
	assignments []policy.Assignment
	weights     []float64 // scores of ranks for explain
	order       []*group
	expired     []*pool.Entry

	// State of the rounds that are under way, see deciding.
	asked        *pool.Entry // the entry without a hand-off that the rounds are about; nil: they are about the pool
	leastTokens  int         // the policy may choose a rank that has to compute this many tokens of the asked entry's prompt
	nextGroup    int         // index in order of the group that decides next
	fallbackNext bool        // this group's policy has failed, and the fallback decides next
	round        Round       // the last round, for the decision log
	failure      error       // why the policy of the last round failed; nil: it did not
	invalid      int         // assignments of the last round that were not bound
	askedBound   bool        // the last round bound the asked entry
}

// rank is one decode rank with the requests that are charged to it.
type rank struct {
	Worker
	present     bool             // false: the rank has left the fleet, but some of its slots are not released yet
	slots       []int32          // indices in board.slots of the slots on this rank
	running     []policy.Request // the requests of slots, in the same order, as policies see them
	kv          int64            // KV tokens on the rank, with Others and guests: of the last refresh, updated when a request comes or goes
	queued      int              // slots whose requests wait in the engine's own queue, as of the last refresh; it may be too high since
	departed    []departed       // released requests that the step model still needs, see depart
	unreadSlots int              // slots whose requests do not decode yet (unread), as of the last refresh
	unreadKV    int64            // KV tokens of these requests' prompts; they are part of kv

	backlog    int64   // prompt tokens that the rank has yet to compute
	output     int64   // tokens of all released slots
	answers    uint64  // complete answers
	empty      uint64  // answers that the engine ended without any text
	unsaid     uint64  // answers for which the engine reported no token usage
	prompts    uint64  // prompts that were sent to the rank so far, if it is mixed
	toCompute  []int32 // slots that have no token, or none since a preemption, in the order in which the rank computes their prompts
	stepPrompt int64   // prompt tokens that the rank computes in the current step

	engine   []*rank // present ranks of the same engine: the KV of straying requests (strays.go) is divided among them
	strays   int     // slots whose requests stray
	parts    int64   // number of ranks among which the KV of a straying request is divided
	guests   int64   // KV tokens charged here for straying requests whose slots are on other ranks; they are part of kv
	leaked   []leakedKV
	orphaned int64   // KV tokens of the orphans; not part of kv
	kept     kept.KV // KV that the engine keeps of ended answers; not part of kv

	group    *group // set while the rank is present
	pressure kvPressure
	refusals circuit.Circuit // requests that the engine refused in a row
	spared   bool            // the engine refused several requests in a row, so it gets none now (spare.go)
}

// free returns how many more requests may get slots of the rank; below 0: more slots are in use than allowed.
func (r *rank) free() int { return r.usable() - len(r.slots) }

// usable returns how many slots may be in use at one time.
func (r *rank) usable() int {
	if r.Limit > 0 {
		return min(r.Slots, r.Limit)
	}
	return r.Slots
}

// budget returns the largest prompt that the rank could take if it were idle, in KV tokens, under a
// policy that keeps the watermark's share of its capacity empty.
func (r *rank) budget(watermark float64) int64 {
	return policy.KVBudget(r.Capacity, watermark)
}

// group is the set of ranks that one Snapshot shows: a barrier group, or all ranks of the model
// that have no barrier.
type group struct {
	name     string // "" without barrier
	barrier  bool
	members  []*rank // present ranks, ascending ID
	ranks    []*rank // members that are not down: these step, and a Snapshot shows them
	chosen   policyInUse
	fallback policyInUse
	slow     int // how many more rounds the fallback decides, after a round over TickLimit

	kv          int64 // KV tokens of all ranks, as of the last refresh
	largestLoad int64 // largest load of a rank in the group's steps (rank.stepLoad), in KV tokens, as of the last refresh

	forecast       forecast.Running
	budget         searchBudget
	held           int       // entries that the last decision held back although a slot was free for them
	wakeHeld       time.Time // when the policy wants to look at held entries again; zero: it has set no time
	gathered       gathered
	recent         recent
	rate           tokenRate
	steps          step.Times        // what the group's steps have taught
	lawWeights     *step.RequestCost // weights of a SetStepModel event; nil: there was none, and they follow from steps
	stepRanks      []step.Rank       // memory of inStep: what the ranks did in a step
	last           Step              // last step that was reported; see takeSteps
	departedTokens int64             // tokens of all released requests that were in a step
	lag            lag
	lead           lead
	tokensAtStep   int64 // group.generated when the last step was reported
}

// gathered counts how a mixed group, whose ranks prefill and decode, has computed prompts so far. A policy may hold requests back and send
// them together, in a round, so that all ranks compute prompts in the same steps.
type gathered struct {
	rounds, filled  uint64 // rounds that were sent, and the sum over these rounds of the ranks that then had a prompt to compute
	steps, prefills uint64 // steps that were reported, and those of them that computed a prompt
	ranks, idle     uint64 // sums over the steps that computed a prompt: of all ranks, and of the ranks that computed none

	heldSince time.Time     // when the first of the held entries could have been sent
	maxHold   time.Duration // the policy holds no request longer than this
}

// recent has sums over the steps of a group, in which older steps count for less and less.
type recent struct {
	waited  float64 // seconds that all requests together waited for their first token, without the time in which a policy held them back
	tokens  float64 // prompt tokens that the ranks computed
	seconds float64 // length of the steps
}

const (
	fadeSeconds = 60 // after so many seconds of steps, older steps count for about a third (1/e)
	longestStep = 5  // seconds; a longer step counts as this long, because a long standstill would dominate the means for minutes
)

// add adds a step of the given length, during which so many requests waited and the ranks computed so many prompt tokens.
func (l *recent) add(requests float64, tokens int64, length time.Duration) {
	seconds := min(longestStep, length.Seconds())
	fade := math.Exp(-seconds / fadeSeconds)
	l.waited = l.waited*fade + requests*seconds
	l.tokens = l.tokens*fade + float64(tokens)
	l.seconds = l.seconds*fade + seconds
}

// means returns how many requests waited on average, and how many prompt tokens were computed per second; both are below 0 if no step was
// reported.
func (l *recent) means() (requests, rate float32) {
	if l.seconds <= 0 {
		return -1, -1
	}
	return float32(l.waited / l.seconds), float32(l.tokens / l.seconds)
}

// waitingEntry is an entry that waits, as its event Enqueue brought it.
type waitingEntry struct {
	Enqueue
	restricted bool      // some ranks may not get it; board.restrictedCount counts it
	since      time.Time // when a mixed rank first had a slot for it, so that its policy has held it back since; zero: none had
}

func (w waitingEntry) prompt() int32 { return tokens(w.Entry.Prompt) }

// pairs has the pairs of a prefill and a decode engine whose hand-offs fail. If both engines work with other engines, the connection
// between them is broken: one engine may still use a connection from before a restart of the other, or the network may have lost a route.
// Such a pair is quarantined: for one second it gets no hand-off that another rank can take. Then one hand-off is its trial. If the trial
// fails, too, the time doubles, up to 30 s.
type pairs struct {
	links       map[Link]*linkHealth
	quarantined int       // how many pairs are quarantined; 0: rounds skip the checks of pairs
	checkAt     time.Time // when the first quarantine ends for which entries wait in the pool; zero: none wait for that
}

// linkHealth is the state of a pair whose hand-offs have failed since one last worked.
type linkHealth struct {
	circuit   circuit.Circuit
	failures  int       // failures in a row
	fromWorks bool      // since the first failure, a hand-off of the prefill engine reached another decode engine
	toWorks   bool      // since the first failure, a hand-off of another prefill engine reached the decode engine
	last      time.Time // last failure
}

// Link is a prefill engine and a decode engine.
type Link struct{ Prefiller, Engine string }

// leakedKV is the KV room on a rank that the prompt of a request may keep after the request has left, see orphans.go.
type leakedKV struct {
	tokens int64
	since  time.Time
}

// kvPressure says whether a rank is tight: its engine has preempted requests for want of KV room, so the rank is kept emptier.
type kvPressure struct {
	last  time.Time // time of the last preemption
	until time.Time // end of the time in which the rank is tight; in the past: it is not tight
}

// Throughput is how fast the slots of a board come free. Dispatcher.Room computes from it how many
// hand-offs would get a slot in time.
type Throughput struct {
	Slots, Free int
	Waiting     int     // entries in the pool without discarded hand-offs, see keepPace
	Seconds     float64 // mean time that a request has its slot
	tokens      float64 // mean KV tokens of a request at its end; 0: none has ended
}

// Binding says which slot an entry got, and how.
type Binding struct {
	Slot          int32 // index of the slot in the board
	Worker        int32
	WorkerName    string
	Group         string // Worker.Group
	Policy        string // name of the policy that decided; the fallback's if that decided
	Stage         uint8  // Assignment.Stage, the part of the policy that chose: 0 the starvation guard, 1 one by one, 2 sets of entries
	Score         float64
	Wait          time.Duration // in the pool
	InEngineQueue bool          // the rank has no slot or no KV room for the entry yet, so it waits in the engine's queue
	Full          bool          // the rank has no slot or no KV room for the entry; unlike InEngineQueue, also set under immediate policies
	NewTokens     int32         // prompt tokens that the rank has to compute; 0: the KV comes from a prefill engine
	Held          time.Duration // the part of Wait in which the policy held the entry back, to send it together with others
	Step          uint32        // number of the group's step that was reported last; 0: none was

	StepMs    float32 // for an entry that is bound before its prefill: length of a step of the group, in ms; 0: unknown
	ComputeMs float32 // time until a mixed rank has computed the prompt and those before it, in ms; 0: unknown
}

// Local says which decode ranks may compute a prompt that comes without a hand-off, and how much of it a
// rank may compute.
type Local struct {
	Ranks []LocalRank // ranks that may compute the prompt

	// Threshold is the longest part of a prompt that a rank may compute, in tokens. 0: a part may be computed if that
	// takes no longer than a hand-off, see BreakEven.
	Threshold int
	// BreakEven is how many tokens an idle rank computes in the time of a
	// hand-off. Each request that runs on the rank makes the computation longer, by an eighth of its time on an idle rank.
	BreakEven float64
	// InFlight bounds the prompt tokens that a rank may have to compute at one time, with those of this prompt.
	InFlight int
}

// LocalRank is a rank with the part of a prompt that it would have to compute.
type LocalRank struct {
	Worker int32
	Tokens int // tokens of the prompt that are not in its prefix cache
}

// departed is a request that was released, with the numbers of the steps that brought its first and its last tokens.
type departed struct {
	first, last uint32
	kv          int64
	prompt      int64 // tokens of its prompt that the step of its first token computed, on a mixed rank
}

// waits has the times that the last 1000 admitted entries waited in the pool. The starvation guard uses their mean.
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

// Boards are the boards of all models. They mirror the decode ranks with their requests, and have the pools of entries that wait for ranks.
// They have no goroutine, clock, log, metric or lock: their owner applies events with the current time, and carries out the effects that
// Apply returns.
type Boards struct {
	*allBoards
	boards   map[string]*board // by model
	inOrder  []*board          // the same boards, sorted by model
	round    *board            // the board whose round was decided, until the event Decided; nil: none
	draining bool
}

// allBoards is shared by all boards: it has the settings, the learned tables, and the effects of the current event.
type allBoards struct {
	cfg    Config
	spec   string          // of the policy of barrier groups, as the settings give it
	name   string          // canonical name of this policy
	shared map[string]bool // group names that are used for several models

	replayed []policy.Requirements // needs of the policies that the twin replays

	fit      *predictor.Fit          // what predictors start from; nil: from nothing
	subjects map[PredictorKey]*known // they stay when the board of their model is removed

	effects []Effect  // effects of the current event, to be carried out
	now     time.Time // time of the current event
}

func (a *allBoards) emit(e Effect) { a.effects = append(a.effects, e) }

// policyInUse is a policy with what the board needs to run it. Each group has its own, because a policy keeps memory, for example which
// rank is next in turn.
type policyInUse struct {
	policy.Policy
	spec   string
	name   string
	all    *allBoards
	ahead  bool   // it sends requests before their slots are free (ahead.go)
	hits   bool   // it reads which ranks have a part of a prompt in their prefix caches
	source *known // tables for its predictions; nil: it reads none
}

// slotRecord is a request that has a slot of a rank, from its admission until its release.
type slotRecord struct {
	rank         *rank // nil: the index is free
	pos          int   // in rank.slots and rank.running
	id, key      uint64
	prefiller    string
	prompt, age  int32
	newTokens    int32 // prompt tokens that the rank has to compute
	discard      bool
	strays       bool      // the engine runs it on any of its ranks, so its KV is charged to all of these in equal parts
	started      bool      // its first event has come, as counted last
	waits        bool      // it waits in the engine's queue, because the rank has no slot or no KV room for it
	since        time.Time // when it was bound
	bound        uint32    // number of the group's step that was reported last before it was bound; 0: none was
	early        bool      // it was bound before its prefill
	unread       bool      // it is early or on a mixed rank, and no step has read its KV yet
	promptLeft   int32     // tokens of its prompt that a mixed rank has yet to compute
	chunks       chunks    // how much of its prompt the last steps computed
	tokensBefore int32     // tokens that its answer had when a mixed rank preempted it; 0: it was not preempted
	estimated    estimated
}

// slotTable has the records of all slots by index, and the totals of what was ever charged and released. The totals do not depend on the
// records, so that drift can compare the two while the program runs, and find mistakes in the accounts.
type slotTable struct {
	records  []slotRecord
	unused   []int32 // free indices of records; the last one is used first
	charged  tally
	released tally
	kept     int64 // total of the KV tokens that engines have ever kept of ended answers
	givenUp  int64 // total of the kept KV tokens that they have freed since
}

// tally counts slots and the KV tokens of their prompts.
type tally struct{ slots, kvTokens int64 }

func (t *tally) add(s *slotRecord) {
	t.slots++
	t.kvTokens += int64(s.prompt)
}

// tokens returns a number of tokens as an int32, at least 0.
func tokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }

// inForce returns the policy that decides now: the chosen one, or the fallback after rounds that were too slow.
func (g *group) inForce() *policyInUse {
	if g.slow > 0 {
		return &g.fallback
	}
	return &g.chosen
}

// rank returns the rank of the group with an ID; nil: the group has none that is not down.
func (g *group) rank(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.ranks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.ranks[at]
}

// Gauged reports how many KV tokens were in use on a worker at the time At, by the metrics (gauges) of its engine.
type Gauged struct {
	Worker   int32
	KVTokens int64
	At       time.Time
}

// started says whether the first event of a slot's answer has come. If the engine reports the answer's tokens only at its end (unheard.go),
// the board's estimate says whether it has its first token.
func (b *board) started(slot int32) bool {
	return b.seen(slot) || b.slots.records[slot].estimated.first != 0
}

// seen says whether the first event of a slot has come, which shows that its KV is on the rank.
func (b *board) seen(slot int32) bool {
	s := &b.slots.records[slot]
	s.started = s.started || b.counts != nil && b.counts.started(slot)
	return s.started
}

// group returns the group with a key, and its board; nil: the group is gone.
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

// label returns the name of a group in metrics and in the decision log.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.shared[g.name]:
		return b.model + "/" + g.name
	}
	return g.name
}

// key returns the key of a group, which effects and events use.
func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// known is a subject with its tables in force.
type known struct {
	PredictorKey
	*Tables
}

// Names is the set of model names that an engine lists. A set never changes. Engines that list the same names share one value, so that
// sets can be compared by their pointers. nil stands for a list that is not known, and has every name.
type Names struct{ all map[string]struct{} }

// namePlacement has the ranks of a name that some ranks of a board list and others do not.
type namePlacement struct {
	ranks []*rank  // present ranks that list the name, ascending ID
	whole []*group // groups in which all ranks list the name
	parts []*rank  // those of ranks that are in other groups

	up        int       // how many of these ranks are up or awaited
	largest   int64     // largest prompt that any of these ranks could ever take, in KV tokens
	graceEnds time.Time // end of outageGrace while all these ranks are down; zero: one is up
	full      bool      // none of parts has a slot left in this tick
	waiting   int       // entries in the pool that ask for the name, without discarded hand-offs
}

// lister has what the listings depend on: a rank, its group and the names that it lists.
type lister struct {
	rank  *rank
	group *group
	lists *Names
}
