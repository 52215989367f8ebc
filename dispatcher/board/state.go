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

	ranks           map[int32]*rank // by worker ID; also ranks that have left the fleet and still have charged slots
	groups          []*group        // groups with a present rank, by the lowest ID of their ranks
	upOrAwaited     int             // present ranks that are up, or that will be soon (Worker.Awaited)
	mixed           bool            // the ranks prefill and decode; an empty list of workers does not change it
	outageGraceEnds time.Time       // end of outageGrace while all ranks are down; zero: a rank is up
	// largest prompt that any present rank could ever take, in KV tokens
	largestPrompt int64
	slots         slotTable

	entriesArrived   bool      // entries came since the last Tick
	decideNow        bool      // another event happened after which a rank may take an entry, so the next Tick decides
	windowEnds       time.Time // end of Config.Window after the first freed slot of a burst; zero: no window is open
	heldGroupStepped bool      // a group whose policy holds entries back began a step
	pairs            pairs
	recheckHeldAt    time.Time                 // earliest time at which a policy wants to decide again about held entries; zero: none
	restrictedCount  int                       // waiting entries that some ranks may not get
	discardedWaiting int                       // waiting entries that are discarded hand-offs
	entriesWithHits  int                       // waiting entries whose prompt is partly in the prefix cache of a rank
	partialNames     map[string]*namePlacement // by name: the model names that some ranks list and others do not
	firstRankNames   *Names                    // the list of the first rank; a name neither here nor in partialNames is listed by no rank
	listersBefore    []lister                  // the ranks and their lists when partialNames was computed
	listers          []lister                  // the present ranks and their lists, to be compared with listersBefore
	sortedPlacements []*namePlacement          // the values of partialNames, sorted by name
	sortedNames      []string                  // their names
	sortedPaces      []Throughput              // their paces
	nameOutageEnds   time.Time                 // end of the earliest outageGrace of a name whose ranks are all down; zero: none waits for one
	retryAvoidedAt   time.Time                 // when the first waiting entry may go to ranks that it avoids; zero: no entry waits for that
	refusingRanks    int                       // ranks whose engines refused their last requests
	retrySparedAt    time.Time                 // when the first spared rank may be tried; zero: no rank is spared
	tightEndsAt      time.Time                 // when the first tight rank (tight.go) has its whole room again; zero: no rank is tight
	keptKVFreedAt    time.Time                 // when an engine next frees KV that it keeps of answers (kept.go); zero: no engine keeps any

	waitTimes    waitTimes
	pace         Throughput
	ticks        uint64
	outcomes     [Failed + 1]uint64
	outputTokens int64 // tokens of all released slots

	counts *Counts // Counts that hold for the event that is applied now; nil: none

	outputLengths map[uint64]int32 // by entry ID: Enqueue.Output of the entries that wait or run

	// Memory of a tick, which the next tick reuses.
	snapshot       policy.Snapshot
	survival       *predictor.Survival // table of the snapshot's MeanOutput; nil: it has none
	assignments    []policy.Assignment
	scores         []float64 // scores of ranks for writeTraces
	decidingGroups []*group
	expired        []*pool.Entry

	// State of the rounds that are under way, see deciding.
	localEntry         *pool.Entry // the entry without a hand-off that the rounds are about; nil: they are about the pool
	leastLocalTokens   int         // the policy may choose a rank that has to compute this many tokens of localEntry's prompt
	nextGroup          int         // index in decidingGroups of the group that decides next
	fallbackNext       bool        // this group's policy has failed, and the fallback decides next
	round              Round       // the last round, for the decision log
	policyFailure      error       // why the policy of the last round failed; nil: it did not
	invalidAssignments int         // assignments of the last round that were not bound
	localBound         bool        // the last round bound localEntry
}

// rank is one decode rank with the requests that are charged to it.
type rank struct {
	Worker
	present          bool             // false: the rank has left the fleet, but some of its slots are not released yet
	slots            []int32          // indices in board.slots of the slots on this rank
	running          []policy.Request // the requests of slots, in the same order, as policies see them
	kv               int64            // KV tokens, with Others and kvFromOtherRanks: of the last refresh, updated when a request comes or goes
	engineQueued     int              // slots whose requests wait in the engine's own queue, as of the last refresh; it may be too high since
	recentlyEnded    []endedRequest   // released requests that the step model still needs, see rememberEnded
	notDecodingSlots int              // slots whose requests do not decode yet (slotRecord.notDecoding), as of the last refresh
	notDecodingKV    int64            // KV tokens of these requests' prompts; they are part of kv

	backlog             int64   // prompt tokens that the rank has yet to compute
	outputTokens        int64   // tokens of all released slots
	answers             uint64  // complete answers
	emptyAnswers        uint64  // answers that the engine ended without any text
	answersWithoutUsage uint64  // answers for which the engine reported no token usage
	promptsSent         uint64  // prompts that were sent to the rank so far, if it is mixed
	promptsToCompute    []int32 // slots that have no token, or none since a preemption, in the order in which the rank computes their prompts
	stepPromptTokens    int64   // prompt tokens that the rank computes in the current step

	engineRanks      []*rank // present ranks of the same engine: the KV of unpinned requests (unpinned.go) is divided among them
	unpinnedSlots    int     // slots whose requests are unpinned
	kvParts          int64   // number of ranks among which the KV of an unpinned request is divided
	kvFromOtherRanks int64   // KV tokens charged here for unpinned requests whose slots are on other ranks; they are part of kv
	orphans          []orphan
	orphanedKV       int64   // KV tokens of the orphans (orphans.go); not part of kv
	keptKV           kept.KV // KV that the engine keeps of ended answers; not part of kv

	group    *group // set while the rank is present
	pressure kvPressure
	refusals circuit.Circuit // requests that the engine refused in a row
	spared   bool            // the engine refused several requests in a row, so it gets none now (spare.go)
}

// freeSlots returns how many more requests may get slots of the rank; below 0: more slots are in use than allowed.
func (r *rank) freeSlots() int { return r.usableSlots() - len(r.slots) }

// usableSlots returns how many slots may be in use at one time.
func (r *rank) usableSlots() int {
	if r.Limit > 0 {
		return min(r.Slots, r.Limit)
	}
	return r.Slots
}

// largestPrompt returns the largest prompt that the rank could take if it were idle, in KV tokens, under a policy that keeps a share of the
// rank's capacity empty. watermark is this share.
func (r *rank) largestPrompt(watermark float64) int64 {
	return policy.KVBudget(r.Capacity, watermark)
}

// group is the set of ranks that one Snapshot shows: a barrier group, or all ranks of the model
// that have no barrier.
type group struct {
	name           string // "" without barrier
	barrier        bool
	allRanks       []*rank // present ranks, ascending ID
	steppingRanks  []*rank // those of allRanks that are not down: these step, and a Snapshot shows them
	chosenPolicy   policyInUse
	fallbackPolicy policyInUse
	fallbackRounds int // how many more rounds the fallback decides, after a round over TickLimit

	kv          int64 // KV tokens of all ranks, as of the last refresh
	largestLoad int64 // largest load of a rank in the group's steps (rank.stepLoad), in KV tokens, as of the last refresh

	forecast      forecast.Running
	searchBudget  searchBudget
	heldEntries   int       // entries that the last decision held back although a slot was free for them
	recheckHeldAt time.Time // when the policy wants to decide about held entries again; zero: it has set no time
	roundCounts   roundCounts
	recentSteps   recentSteps
	tokenRate     tokenRate
	steps         step.Times        // what the group's steps have taught
	givenWeights  *step.RequestCost // weights of a SetStepModel event; nil: there was none, and they follow from steps
	stepRanks     []step.Rank       // memory of reconstructLastStep: what the ranks did in a step
	lastStep      Step              // last step that was reported; see recordSteps
	endedTokens   int64             // tokens of all released requests that were in a step
	handoffDelay  handoffDelay
	prefillDelay  prefillDelay
	tokensAtStep  int64 // group.generated when the last step was reported
}

// roundCounts counts how a mixed group, whose ranks prefill and decode, has computed prompts so far. A policy may hold requests back and
// send them together, in a round, so that all ranks compute prompts in the same steps.
type roundCounts struct {
	rounds              uint64 // rounds that were sent
	ranksFilled         uint64 // sum over these rounds of the ranks that then had a prompt to compute
	steps               uint64 // steps that were reported
	prefillSteps        uint64 // steps of these in which some rank computed a prompt
	ranksInPrefillSteps uint64 // sum over the prefillSteps of all ranks
	idleInPrefillSteps  uint64 // sum over the prefillSteps of the ranks that computed no prompt

	heldSince time.Time     // when the first of the held entries could have been sent
	maxHold   time.Duration // the policy holds no request longer than this
}

// recentSteps has sums over the steps of a group, in which older steps count for less and less.
type recentSteps struct {
	waitedSeconds float64 // sum over the requests of their waits for the first token, without the time in which a policy held them back
	promptTokens  float64 // prompt tokens that the ranks computed
	seconds       float64 // length of the steps
}

const (
	fadeSeconds = 60 // after so many seconds of steps, older steps count for about a third (1/e)
	longestStep = 5  // seconds; a longer step counts as this long, because a long standstill would dominate the means for minutes
)

// add adds a step of the given length. waiting is how many requests waited for their first token during the step, and promptTokens is how
// many prompt tokens the ranks computed in it.
func (s *recentSteps) add(waiting float64, promptTokens int64, length time.Duration) {
	seconds := min(longestStep, length.Seconds())
	fade := math.Exp(-seconds / fadeSeconds)
	s.waitedSeconds = s.waitedSeconds*fade + waiting*seconds
	s.promptTokens = s.promptTokens*fade + float64(promptTokens)
	s.seconds = s.seconds*fade + seconds
}

// means returns how many requests waited on average, and how many prompt tokens were computed per second; both are below 0 if no step was
// reported.
func (s *recentSteps) means() (waiting, promptTokensPerSecond float32) {
	if s.seconds <= 0 {
		return -1, -1
	}
	return float32(s.waitedSeconds / s.seconds), float32(s.promptTokens / s.seconds)
}

// waitingEntry is an entry that waits, as its event Enqueue brought it.
type waitingEntry struct {
	Enqueue
	restricted    bool      // some ranks may not get it; board.restrictedCount counts it
	sendableSince time.Time // when a mixed rank first had a slot for it, so that its policy has held it back since; zero: none had
}

// prompt returns the length of the prompt, in tokens.
func (w waitingEntry) prompt() int32 { return clampTokens(w.Entry.Prompt) }

// pairs has the pairs of a prefill and a decode engine whose hand-offs fail. If both engines work with other engines, the connection
// between them is broken: one engine may still use a connection from before a restart of the other, or the network may have lost a route.
// Such a pair is quarantined: for one second it gets no hand-off that another rank can take. Then one hand-off is its trial. If the trial
// fails, too, the time doubles, up to 30 s.
type pairs struct {
	suspected        map[Link]*linkHealth
	quarantinedCount int       // how many pairs are quarantined; 0: rounds skip the checks of pairs
	quarantineEndsAt time.Time // when the first quarantine ends for which entries wait in the pool; zero: none wait for that
}

// linkHealth is the state of a pair whose hand-offs have failed since one last worked.
type linkHealth struct {
	circuit        circuit.Circuit
	failures       int       // failures in a row
	prefillerWorks bool      // since the first failure, a hand-off of the prefill engine reached another decode engine
	engineWorks    bool      // since the first failure, a hand-off of another prefill engine reached the decode engine
	lastFailure    time.Time // last failure
}

// quarantined says whether hand-offs avoid the pair. The circuit is in service (InService) as long as it lets hand-offs through.
func (h *linkHealth) quarantined() bool { return !h.circuit.InService() }

// Link is a prefill engine and a decode engine.
type Link struct{ Prefiller, Engine string }

// orphan is the KV room on a rank that the prompt of a request may keep after the request has left, see orphans.go.
type orphan struct {
	tokens int64
	since  time.Time
}

// kvPressure says whether a rank is tight: its engine has preempted requests for want of KV room, so the rank is kept emptier.
type kvPressure struct {
	lastPreemption time.Time // time of the last preemption
	tightUntil     time.Time // end of the time in which the rank is tight; in the past: it is not tight
}

// Throughput is how fast the slots of a board come free. Dispatcher.Room computes from it how many
// hand-offs would get a slot in time.
type Throughput struct {
	Slots, Free int
	Waiting     int     // entries in the pool without discarded hand-offs, see emitPace
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

// endedRequest is a request that was released, with the numbers of the steps that brought its first and its last tokens.
type endedRequest struct {
	firstStep, lastStep uint32
	kv                  int64
	promptInFirstStep   int64 // tokens of its prompt that the step of its first token computed, on a mixed rank
}

// waitTimes has the times that the last 1000 admitted entries waited in the pool. The starvation guard uses their mean.
type waitTimes struct {
	last    [1000]time.Duration // a ring
	n, next int                 // how many times it has, and the index at which the next one is written
	sum     time.Duration
}

// add adds a time, which replaces the oldest one once the ring is full.
func (w *waitTimes) add(d time.Duration) {
	w.sum += d - w.last[w.next]
	w.last[w.next] = d
	w.next = (w.next + 1) % len(w.last)
	w.n = min(w.n+1, len(w.last))
}

// meanMs returns the mean of the times in ms; 0: no entry was admitted yet.
func (w *waitTimes) meanMs() float32 {
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
	cfg              Config
	policySpec       string          // of the policy of barrier groups, as the settings give it
	policyName       string          // canonical name of this policy
	sharedGroupNames map[string]bool // group names that are used for several models

	twinNeeds []policy.Requirements // needs of the policies that the twin replays

	fit        *predictor.Fit                   // what predictors start from; nil: from nothing
	predictors map[PredictorKey]*predictorState // they stay when the board of their model is removed

	effects []Effect  // effects of the current event, to be carried out
	now     time.Time // time of the current event
}

// emit adds an effect to those of the current event.
func (a *allBoards) emit(e Effect) { a.effects = append(a.effects, e) }

// policyInUse is a policy with what the board needs to run it. Each group has its own, because a policy keeps memory, for example which
// rank is next in turn.
type policyInUse struct {
	policy.Policy
	spec       string
	name       string
	shared     *allBoards      // what the boards share, such as the settings
	sendsAhead bool            // it sends requests before their slots are free (ahead.go)
	readsHits  bool            // it reads which ranks have a part of a prompt in their prefix caches
	predictor  *predictorState // tables for its predictions; nil: it reads none
}

// slotRecord is a request that has a slot of a rank, from its admission until its release.
type slotRecord struct {
	rank                   *rank // nil: the index is free
	pos                    int   // in rank.slots and rank.running
	id, key                uint64
	prefiller              string    // engine that the KV of its prompt comes from; "": there was no hand-off
	prompt                 int32     // tokens, with the tokens of its answer that earlier ranks generated
	age                    int32     // tokens of its answer that earlier ranks generated
	newTokens              int32     // prompt tokens that the rank has to compute
	discard                bool      // no client waits for it: it runs only to make its prefill engine free the KV
	unpinned               bool      // the engine runs it on any of its ranks, so its KV is charged to all of these in equal parts
	started                bool      // its first event has come, as counted last
	inEngineQueue          bool      // it waits in the engine's queue, because the rank has no slot or no KV room for it
	boundAt                time.Time // when it was bound
	boundAtStep            uint32    // number of the group's step that was reported last before it was bound; 0: none was
	early                  bool      // it was bound before its prefill
	notDecoding            bool      // it is early or on a mixed rank, and no decode step has read its KV yet; all others count as decoding
	promptLeft             int32     // tokens of its prompt that a mixed rank has yet to compute
	chunks                 chunks    // how much of its prompt the last steps computed
	tokensBeforePreemption int32     // tokens that its answer had when a mixed rank preempted it; 0: it was not preempted
	estimate               estimate
}

// slotTable has the records of all slots by index, and the totals of what was ever charged and released. The totals do not depend on the
// records, so that drift can compare the two while the program runs, and find mistakes in the accounts.
type slotTable struct {
	records     []slotRecord
	freeIndices []int32 // free indices of records; the last one is used first
	charged     tally
	released    tally
	keptTotal   int64 // total of the KV tokens that engines have ever kept of ended answers
	freedTotal  int64 // total of the kept KV tokens that they have freed since
}

// tally counts slots and the KV tokens of their prompts.
type tally struct{ slots, kvTokens int64 }

// add counts a slot with its prompt.
func (t *tally) add(s *slotRecord) {
	t.slots++
	t.kvTokens += int64(s.prompt)
}

// clampTokens returns a number of tokens as an int32, at least 0.
func clampTokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }

// policyInForce returns the policy that decides now: the chosen one, or the fallback after rounds that were too slow.
func (g *group) policyInForce() *policyInUse {
	if g.fallbackRounds > 0 {
		return &g.fallbackPolicy
	}
	return &g.chosenPolicy
}

// rankWithID returns the rank with an ID; nil: the group has no such rank, or it is down.
func (g *group) rankWithID(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.steppingRanks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.steppingRanks[at]
}

// Gauged reports how many KV tokens were in use on a worker at the time At, by the metrics (gauges) of its engine.
type Gauged struct {
	Worker   int32
	KVTokens int64
	At       time.Time
}

// hasBegun says whether the first event of a slot's answer has come. If the engine reports the answer's tokens only at its end
// (unreported.go), the board's estimate says whether it has its first token.
func (b *board) hasBegun(slot int32) bool {
	return b.firstEventCame(slot) || b.slots.records[slot].estimate.firstStep != 0
}

// firstEventCame says whether the first event of a slot has come, which shows that its KV is on the rank. It notes this in the slot's
// record, because the Counts are dropped after the current event.
func (b *board) firstEventCame(slot int32) bool {
	s := &b.slots.records[slot]
	s.started = s.started || b.counts != nil && b.counts.started(slot)
	return s.started
}

// groupWithKey returns the group with a key, and its board; nil: the group is gone.
func (l *Boards) groupWithKey(key GroupKey) (*board, *group) {
	if b := l.boards[key.Model]; b != nil {
		for _, g := range b.groups {
			if b.key(g) == key {
				return b, g
			}
		}
	}
	return nil, nil
}

// label returns the name of a group in metrics and in the decision log. Ranks without a barrier are labelled dense, because the models that
// need no barrier are dense ones.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.sharedGroupNames[g.name]: // groups of several models have this name, and their labels must differ
		return b.model + "/" + g.name
	}
	return g.name
}

// key returns the key of a group, which effects and events use.
func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// predictorState is what is learned about the output lengths of a model, for one kind of predictor: the tables in force.
type predictorState struct {
	PredictorKey
	*Tables
}

// Names is the set of model names that an engine lists. A set never changes. Engines that list the same names share one value, so that
// sets can be compared by their pointers. nil stands for a list that is not known, and has every name.
type Names struct{ set map[string]struct{} }

// namePlacement has the ranks of a name that some ranks of a board list and others do not.
type namePlacement struct {
	ranks             []*rank  // present ranks that list the name, ascending ID
	wholeGroups       []*group // groups in which all ranks list the name
	partialGroupRanks []*rank  // the others of ranks: not all ranks of their groups list the name

	upOrAwaited     int       // how many of these ranks are up or awaited
	largestPrompt   int64     // largest prompt that any of these ranks could ever take, in KV tokens
	outageGraceEnds time.Time // end of outageGrace while all these ranks are down; zero: one is up
	noFreeSlot      bool      // none of partialGroupRanks has a slot left in this tick
	waiting         int       // entries in the pool that ask for the name, without discarded hand-offs
}

// lister has what partialNames depends on: a rank, its group and the names that it lists.
type lister struct {
	rank  *rank
	group *group
	lists *Names
}
