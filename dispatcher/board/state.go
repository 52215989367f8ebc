package board

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/forecast"
	"evenkeel/dispatcher/kept"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/engine/circuit"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// board mirrors the decode ranks of one model, with the entries that wait for them.
type board struct {
	*allBoards
	model   string
	pool    *pool.Pool
	waiting map[uint64]waitingEntry // by entry ID: the entries of the pool, and localEntry

	// ranks is by worker ID. A rank that has left the fleet stays until its last slot is released.
	ranks  map[int32]*rank
	groups []*group // those with a rank in the fleet, sorted by the lowest ID of their ranks
	// lastGroup is the lowest rank ID of the group that took an entry last (compareTurns).
	lastGroup   int32
	upOrAwaited int // ranks of the fleet that are up, or soon will be (Worker.Awaited)
	// ranksPrefill: the ranks are mixed. While the fleet has no rank of the model, the value stays.
	ranksPrefill bool
	// outageGraceEnds is when waiting entries are refused in an outage; zero: a rank is up.
	outageGraceEnds time.Time
	// largestPrompt is in KV tokens, for an idle rank.
	largestPrompt int64
	slots         slotTable

	entriesArrived bool // an entry came since the last Tick
	// decideNow: an event other than an arrival may let a rank take an entry.
	decideNow bool
	// windowEnds: Config.Window after the first free slot of a burst; zero: no burst is under way.
	windowEnds time.Time
	// heldGroupStepped: a group with held entries began a step, so its policy must decide again.
	heldGroupStepped  bool
	pairs             pairs
	recheckHeldAt     time.Time // zero: at no set time
	restrictedCount   int       // of entries that may not go to every rank
	discardedWaiting  int       // of entries without a client
	entriesWithHits   int       // of entries with Hits
	partlyListedNames map[string]*namePlacement
	// firstRankNames is the list of the first rank. A name that is neither here nor in
	// partlyListedNames is listed by no rank.
	firstRankNames   *Names
	listersBefore    []lister         // when partlyListedNames was last computed
	listers          []lister         // when updatePartlyListedNames last ran
	sortedPlacements []*namePlacement // sorted by name
	sortedNames      []string         // in the same order
	sortedPaces      []Throughput     // in the same order
	// Of the next five times, zero means that nothing waits for it. nameOutageEnds is when the first
	// entry is refused because all ranks that list its model name are down.
	nameOutageEnds time.Time
	// retryAvoidedAt is when the first entry may go to a rank that has failed it before (Entry.Avoid).
	retryAvoidedAt time.Time
	refusingRanks  int  // ranks whose engines refused their last request (429 or 503)
	anySpared      bool // the last updateSpared has spared a rank
	// retrySparedAt is when a rank that was spared after refusals may get a request as a trial.
	retrySparedAt time.Time
	// keptEmptierUntil is when the first tight rank (tight.go) may be filled as usual again.
	keptEmptierUntil time.Time
	// keptKVFreedAt is when an engine next frees KV that it keeps of an ended answer (kept.go).
	keptKVFreedAt time.Time

	waitTimes    waitTimes
	pace         Throughput
	ticks        uint64
	outcomes     [Failed + 1]uint64
	outputTokens int64 // of all released slots

	counts *Counts // valid only for the current event and its rounds; nil: the caller gave none

	outputLengths map[uint64]int32 // by entry ID (Enqueue.Output); only a simulation knows them

	// Buffers that each tick reuses, so that it allocates nothing.
	snapshot       policy.Snapshot
	survival       *predictor.Survival // table behind snapshot.MeanOutput; nil: the snapshot has none
	assignments    []policy.Assignment
	scores         []float64 // filled by writeTraces
	decidingGroups []*group
	expired        []*pool.Entry

	// State of the rounds of the current tick: one round for each group in decidingGroups.
	//
	// If localEntry is set, the rounds decide about this request only; nil: about the pool.
	localEntry *pool.Entry
	// leastLocalTokens is the least that any rank would have to compute of localEntry's prompt. Only
	// ranks with this number may be chosen.
	leastLocalTokens   int
	nextGroup          int   // index in decidingGroups
	fallbackNext       bool  // the chosen policy has failed, so the fallback decides next
	round              Round // the last round, for the decision log
	policyFailure      error // the panic of the policy in the last round; nil: none
	invalidAssignments int   // broke a hard limit and were not bound
	localBound         bool  // the last round gave localEntry a slot
}

// rank is one decode rank with the requests that are charged to it. It stays on the board until its
// last slot is released, even after it has left the fleet.
type rank struct {
	Worker
	present bool             // false: the rank has left the fleet, but some of its slots are not released yet
	slots   []int32          // the rank's slots that are in use, as indices in board.slots
	running []policy.Request // the request of each slot in slots, in the same order, in the form that policies see
	// kv is the number of KV tokens on the rank, with Others and kvFromOtherRanks. The tokens of
	// answers are as of the last refresh.
	kv int64
	// engineQueued is the number of slots whose requests wait in the engine's own queue, as of the
	// last refresh. Since then, requests may have left the queue.
	engineQueued     int
	recentlyEnded    []endedRequest // requests that were released, but were part of a step that the step model has not learned yet
	notDecodingSlots int            // number of slots whose requests do not decode yet (slotRecord.notDecoding), as of the last refresh
	notDecodingKV    int64          // KV tokens of the prompts of the requests that do not decode yet; they are part of kv

	backlog             int64  // prompt tokens that the rank has yet to compute
	outputTokens        int64  // tokens of the answers of all released slots
	answers             uint64 // complete answers of the rank so far
	emptyAnswers        uint64 // complete answers that the engine ended without any text
	answersWithoutUsage uint64 // complete answers for which the engine reported no token usage
	promptsSent         uint64 // prompts that were sent to the rank so far; 0 if the rank does not prefill
	// promptsToCompute has the slots whose prompts the rank has yet to compute, in the order in which
	// it computes them. A preempted request computes its prompt again.
	promptsToCompute []int32
	stepPromptTokens int64 // prompt tokens that the rank computes in the current step, by estimate

	// engineRanks has the ranks of the same engine. The engine may run an unpinned request
	// (unpinned.go) on any of them, so its KV is divided among all of them.
	engineRanks      []*rank
	unpinnedSlots    int   // number of slots whose requests are unpinned
	kvParts          int64 // number of ranks among which the KV of an unpinned request is divided, 1 or more
	kvFromOtherRanks int64 // KV tokens charged here for unpinned requests whose slots are on other ranks; they are part of kv
	orphans          []orphan
	// orphanedKV is the number of KV tokens that the engine may still hold of requests that ended
	// before their KV had come (orphans.go). They are not part of kv.
	orphanedKV int64
	keptKV     kept.KV // KV that the engine keeps of ended answers for their next turns (kept.go); not part of kv

	group    *group // the rank's group; set while the rank is in the fleet
	pressure kvPressure
	refusals circuit.Circuit // counts the requests that the engine refused in a row
	spared   bool            // the rank gets no requests now, because its engine refuses them or loses hand-offs (spare.go)
}

// freeSlots is below 0 if more slots are in use than allowed.
func (r *rank) freeSlots() int { return r.usableSlots() - len(r.slots) }

func (r *rank) usableSlots() int {
	if r.Limit > 0 {
		return min(r.Slots, r.Limit)
	}
	return r.Slots
}

// largestPrompt is in KV tokens, for an idle rank. watermark is the share of its capacity that the
// policy keeps empty.
func (r *rank) largestPrompt(watermark float64) int64 {
	return policy.KVBudget(r.Capacity, watermark)
}

// group is the set of ranks for which one policy decides: a barrier group, whose ranks step
// together, or all ranks of the model without a barrier.
type group struct {
	name     string // empty: no barrier
	barrier  bool
	allRanks []*rank // in the fleet, ascending ID
	// steppingRanks has the ranks that are not down. Only these take part in steps, and policies see
	// only them.
	steppingRanks  []*rank
	chosenPolicy   policyInUse
	fallbackPolicy policyInUse
	fallbackRounds int    // rounds that the fallback still decides
	fallbackReason string // FallbackSlow or FallbackBlocked, of the last such round

	kv          int64 // of all stepping ranks, as of the last refresh
	largestLoad int64 // largest rank.stepLoad, as of the last refresh

	forecast     forecast.Running
	searchBudget searchBudget
	// heldEntries: the policy held these back in its last decision, although a slot was free for them.
	heldEntries   int
	recheckHeldAt time.Time // zero: at no set time
	roundCounts   roundCounts
	promptRest    int // coming steps in which ranks with AfterPrompts compute no prompts
	recentSteps   recentSteps
	tokenRate     tokenRate
	steps         step.Times
	// givenWeights is from a SetStepModel event; nil: learned from the steps.
	givenWeights        *step.RequestCost
	stepRanks           []step.Rank // buffer of learnLastStep
	lastStep            Step        // reported last; Number 0: none since the group was last idle
	endedTokens         int64       // tokens of the answers of all released requests
	handoffDelay        handoffDelay
	prefillDelay        prefillDelay
	generatedAtLastStep int64
}

// roundCounts counts the steps and rounds of a mixed group. In a round, a policy sends requests
// that it held back together, so that several ranks compute prompts in the same steps.
type roundCounts struct {
	rounds              uint64
	ranksFilled         uint64 // with a prompt just after a round, summed over the rounds
	steps               uint64 // reported steps
	prefillSteps        uint64 // with a prompt on at least one rank
	ranksInPrefillSteps uint64 // all ranks, summed over the prefillSteps
	idleInPrefillSteps  uint64 // without a prompt, summed over the prefillSteps

	heldSince time.Time     // of the oldest held entry
	maxHold   time.Duration // the longest that the policy allows
}

// recentSteps has sums over the steps of a group, faded so that they describe about the last
// minute.
type recentSteps struct {
	// waitedSeconds sums the waits of all requests for their first token, without the time in which a
	// policy held them back.
	waitedSeconds float64
	promptTokens  float64 // computed by the ranks
	seconds       float64 // length of the steps
}

const (
	fadeSeconds = 60 // seconds after which a step counts for about a third (1/e)
	longestStep = 5  // seconds; a longer standstill would dominate the means for minutes
)

func (s *recentSteps) add(waiting float64, promptTokens int64, length time.Duration) {
	seconds := min(longestStep, length.Seconds())
	fade := math.Exp(-seconds / fadeSeconds)
	s.waitedSeconds = s.waitedSeconds*fade + waiting*seconds
	s.promptTokens = s.promptTokens*fade + float64(promptTokens)
	s.seconds = s.seconds*fade + seconds
}

// means returns -1 for both if no step was reported.
func (s *recentSteps) means() (waiting, promptTokensPerSecond float32) {
	if s.seconds <= 0 {
		return -1, -1
	}
	return float32(s.waitedSeconds / s.seconds), float32(s.promptTokens / s.seconds)
}

type waitingEntry struct {
	Enqueue
	restricted bool // may not go to every rank; counted by board.restrictedCount
	// sendableSince is when a mixed rank first had room for the entry. Since then only its policy has
	// held it back. Zero: no rank had room yet.
	sendableSince time.Time
}

func (w waitingEntry) prompt() int32 { return clampTokens(w.Entry.Prompt) }

// pairs knows which engines lose hand-offs of KV.
type pairs struct {
	delivery.Table
	quarantineEndsAt time.Time // when the next trial is due; zero: no entry waits for that
}

// orphan is KV room that may stay taken after a request has ended (orphans.go).
type orphan struct {
	tokens int64
	since  time.Time
}

// kvPressure says whether a rank is tight (tight.go).
type kvPressure struct {
	lastPreemption time.Time // zero: there was none
	tightUntil     time.Time
}

// Throughput is how fast the slots of a board come free. Dispatcher.Room computes from it how many
// hand-offs would get a slot in time.
type Throughput struct {
	Slots, Free int
	Waiting     int     // entries that have a client (see emitPace)
	Seconds     float64 // mean time for which a request has its slot, in s
	tokens      float64 // mean KV tokens of a request when it ends; 0: none has ended
}

// Binding says which slot an entry got, and how.
type Binding struct {
	Slot       int32 // index in the table of the board
	Worker     int32
	WorkerName string
	Group      string
	Policy     string // may be the fallback policy
	// Stage is Assignment.Stage: 0 the starvation guard, 1 one entry at a time, 2 sets of entries.
	Stage uint8
	Score float64
	Wait  time.Duration // time in the pool
	// InEngineQueue: the rank has no slot or no KV room yet, so the entry waits in the engine's own
	// queue. Keys, metrics and headers call such requests those beyond the slots.
	InEngineQueue bool
	NewTokens     int32         // prompt tokens that the rank computes; 0: a prefill engine did
	Held          time.Duration // part of Wait in which the policy held the entry back
	// StepMs is the length of a step, for an entry that is bound before its prefill; 0: unknown.
	StepMs float32
	// ComputeMs is the time until the rank has computed this prompt and all before it; 0: unknown.
	ComputeMs float32
}

// Local says which decode ranks may compute the prompt of an entry that has no hand-off.
type Local struct {
	Ranks []LocalRank // the policy may choose only among these

	// Threshold is the largest number of tokens of one prompt that a rank may compute; 0: as many as
	// it computes in the time of a hand-off.
	Threshold int
	// BreakEven is the number of prompt tokens that an idle rank computes in the time of a hand-off.
	BreakEven float64
	// InFlight bounds the prompt tokens that a rank has yet to compute, with those of this prompt.
	InFlight int
}

// LocalRank is a rank that may compute a prompt.
type LocalRank struct {
	Worker int32
	Tokens int // prompt tokens that are not in the rank's prefix cache
}

// endedRequest is a released request. firstStep and lastStep brought the first and the last tokens
// of its answer.
type endedRequest struct {
	firstStep, lastStep uint32
	kv                  int64
	// promptInFirstStep: prompt tokens that a mixed rank computed in firstStep; 0: no mixed rank.
	promptInFirstStep int64
}

// waitTimes has the waits of the last 1000 admitted entries. The starvation guard uses the mean.
type waitTimes struct {
	waits       [1000]time.Duration // ring buffer
	count, next int                 // next is the index that is written next
	sum         time.Duration
}

func (w *waitTimes) add(d time.Duration) {
	w.sum += d - w.waits[w.next] // the replaced wait is 0 until the buffer is full
	w.waits[w.next] = d
	w.next = (w.next + 1) % len(w.waits)
	w.count = min(w.count+1, len(w.waits))
}

// meanMs is 0 while no entry was admitted.
func (w *waitTimes) meanMs() float32 {
	if w.count == 0 {
		return 0
	}
	return float32(w.sum.Seconds() * 1000 / float64(w.count))
}

// Boards has one board for each model. It has no lock: its owner applies one event at a time.
type Boards struct {
	*allBoards
	boards   map[string]*board // by model
	inOrder  []*board          // sorted by model
	round    *board            // waits for Decided; nil: none
	draining bool
}

// allBoards is what all boards share.
type allBoards struct {
	cfg              Config
	policySpec       string          // of barrier groups, as the settings give it
	policyName       string          // canonical name of the policy of barrier groups
	sharedGroupNames map[string]bool // of groups of several models

	fit        *predictor.Fit                   // where new predictors start; nil: from nothing
	predictors map[PredictorKey]*predictorState // stays when the board of its model is removed

	effects []Effect  // of the current event
	now     time.Time // of the current event
}

func (a *allBoards) emit(e Effect) { a.effects = append(a.effects, e) }

// policyInUse is a policy of one group. It is not shared, because a policy has state, such as which
// rank is next in turn.
type policyInUse struct {
	policy.Policy
	name       string
	shared     *allBoards
	sendsAhead bool            // the policy sends requests before their slots are free (ahead.go)
	predictor  *predictorState // nil: the policy needs none
}

// slotRecord is a request that has a slot of a rank.
type slotRecord struct {
	rank      *rank // nil: no request has this index
	pos       int   // index in rank.slots and rank.running
	id, key   uint64
	prefiller string // engine that the KV comes from; empty: there was no hand-off
	prompt    int32  // tokens; for a resumed request, with the tokens that earlier ranks generated
	// tokensFromEarlierRanks is part of prompt, and of the answer.
	tokensFromEarlierRanks int32
	newTokens              int32 // prompt tokens to compute; 0: a prefill engine computed them
	discard                bool  // no client: the request only makes its prefill engine free the KV
	// engineChoosesRank: the request is unpinned (unpinned.go).
	engineChoosesRank bool
	started           bool // the first event of the answer has come, as the board read it last
	inEngineQueue     bool // the rank has no slot or no KV room for it yet
	boundAt           time.Time
	process           uint64 // Worker.Process when it was bound; 0: not known
	// boundAtStep is the step that was reported last before the request was bound; 0: none was.
	boundAtStep        uint32
	boundBeforePrefill bool
	// notDecoding: no decode step has read the KV yet. It is true only on mixed ranks and for requests
	// that were bound before their prefill; all others count as decoding from the start.
	notDecoding bool
	promptLeft  int32          // prompt tokens that a mixed rank has yet to compute
	progress    promptProgress // on a mixed rank
	// tokensBeforePreemption: tokens of the answer when a mixed rank preempted it; 0: it was not
	// preempted.
	tokensBeforePreemption int32
	estimate               estimate
}

// slotTable has all slots by index, and totals of what was ever charged and released. The totals
// are counted apart from the records, so that drift can find mistakes in the accounts.
type slotTable struct {
	records     []slotRecord
	freeIndices []int32 // the last of them is used next
	charged     tally
	released    tally
	keptTotal   int64 // KV tokens that engines have ever kept of ended answers
	freedTotal  int64 // part of keptTotal that was freed since
}

// tally counts slots and the KV tokens of their prompts.
type tally struct{ slots, kvTokens int64 }

func (t *tally) add(s *slotRecord) {
	t.slots++
	t.kvTokens += int64(s.prompt)
}

func clampTokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }

// policyInForce is the fallback policy for some rounds after the chosen policy was too slow.
func (g *group) policyInForce() *policyInUse {
	if g.fallbackRounds > 0 {
		return &g.fallbackPolicy
	}
	return &g.chosenPolicy
}

// rankWithID returns nil also for a rank that is down.
func (g *group) rankWithID(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.steppingRanks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.steppingRanks[at]
}

// Gauged is the event that an engine's gauges were read: at the time At, KVTokens were in use.
type Gauged struct {
	Worker   int32
	KVTokens int64
	At       time.Time
}

// hasBegun says whether the first event of the answer has come. For an engine that reports tokens
// only at the end, the board's estimate decides (unreported.go).
func (b *board) hasBegun(slot int32) bool {
	return b.firstEventCame(slot) || b.slots.records[slot].estimate.firstStep != 0
}

// firstEventCame stores a true in the slot's record, because the Counts are dropped after the
// event.
func (b *board) firstEventCame(slot int32) bool {
	s := &b.slots.records[slot]
	s.started = s.started || b.counts != nil && b.counts.started(slot)
	return s.started
}

// groupWithKey returns nil if the group is gone.
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

// label is the name of a group in metrics and in the decision log. Ranks without a barrier are
// called dense, because dense models need none.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.sharedGroupNames[g.name]: // the labels of two models must differ
		return b.model + "/" + g.name
	}
	return g.name
}

func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// predictorState has the tables in use for one model and kind of predictor.
type predictorState struct {
	PredictorKey
	*Tables
}

// Names is the set of model names that an engine lists. It never changes, and engines with the same
// names share one *Names, so that pointers can be compared. A nil *Names is a list that is not
// known; it counts as having every name.
type Names struct{ set map[string]struct{} }

// namePlacement says where a model name is listed that only some ranks list.
type namePlacement struct {
	ranks             []*rank  // ascending ID
	wholeGroups       []*group // all ranks of these list the name
	partialGroupRanks []*rank  // in groups in which another rank does not list the name

	upOrAwaited int
	// largestPrompt is in KV tokens, for an idle rank.
	largestPrompt int64
	// outageGraceEnds is as in board, for the ranks that list the name.
	outageGraceEnds time.Time
	noFreeSlot      bool // of partialGroupRanks, in this tick
	waitingForName  int  // entries that ask for the name, without those that have no client
}

// lister is a rank as it was when the names were compared. If no lister has changed,
// partlyListedNames need not be computed anew.
type lister struct {
	rank  *rank
	group *group
	lists *Names
}
