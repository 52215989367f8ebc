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

// board mirrors the decode ranks of one model, and has the pool of entries (requests) that wait for them.
type board struct {
	*allBoards
	model   string
	pool    *pool.Pool
	waiting map[uint64]waitingEntry // by entry ID: the entries of the pool, and localEntry

	ranks  map[int32]*rank // ranks by worker ID; also ranks that have left the fleet while some of their slots are still charged
	groups []*group        // groups that have a rank in the fleet, sorted by the lowest ID of their ranks
	// lastGroup is the lowest rank ID of the group that took an entry last. Of groups that are equal, the next one in groups takes the next
	// entry.
	lastGroup   int32
	upOrAwaited int // number of ranks of the fleet that are up, or that will soon be up (Worker.Awaited)
	// ranksPrefill: the ranks are mixed, so they prefill and decode. While the fleet has no rank of the model, the value stays.
	ranksPrefill    bool
	outageGraceEnds time.Time // while all ranks are down: when waiting entries are refused; zero: a rank is up
	// largestPrompt is the largest prompt that any rank of the fleet could take if it were idle, in KV tokens.
	largestPrompt int64
	slots         slotTable

	entriesArrived bool // an entry came since the last Tick
	// decideNow: an event other than an arrival has made it possible that a rank takes a waiting entry, so the next Tick runs rounds.
	decideNow bool
	// windowEnds is when the board decides about a burst of free slots: Config.Window after the first. Zero: no burst is under way.
	windowEnds time.Time
	// heldGroupStepped: a group began a step while its policy holds entries back, so the policy must decide about them again.
	heldGroupStepped bool
	pairs            pairs
	recheckHeldAt    time.Time // when a policy wants to decide again about the entries that it holds back; zero: at no set time
	restrictedCount  int       // number of waiting entries that may not go to every rank
	discardedWaiting int       // number of waiting entries that have no client any more, and only make a prefill engine free its KV
	entriesWithHits  int       // number of waiting entries whose prompt is partly in the prefix cache of a rank
	// partlyListedNames has the model names that some ranks list and others do not, with the ranks that list each of them.
	partlyListedNames map[string]*namePlacement
	// firstRankNames is the list of the first rank. A name that is neither in this list nor in partlyListedNames is listed by no rank.
	firstRankNames   *Names
	listersBefore    []lister         // the ranks with their lists of names when partlyListedNames was last computed
	listers          []lister         // the ranks with their lists of names when updatePartlyListedNames last ran
	sortedPlacements []*namePlacement // values of partlyListedNames, sorted by name
	sortedNames      []string         // names of sortedPlacements, in the same order
	sortedPaces      []Throughput     // paces of sortedPlacements, in the same order
	// nameOutageEnds is when the first entry is refused because all ranks that list its model name are down; zero: no such entry waits.
	nameOutageEnds time.Time
	// retryAvoidedAt is when the first entry may go to a rank that has failed it before (Entry.Avoid); zero: no entry waits for that.
	retryAvoidedAt time.Time
	refusingRanks  int  // number of ranks whose engines refused their last request (429 or 503)
	anySpared      bool // the last updateSpared has spared a rank
	// retrySparedAt is when a rank that gets no requests, because it refused several, may get one as a trial; zero: there is none.
	retrySparedAt time.Time
	// keptEmptierUntil is when the first rank that is kept emptier after preemptions (tight.go) may be filled as usual again; zero:
	// there is no such rank.
	keptEmptierUntil time.Time
	// keptKVFreedAt is when an engine next frees the KV that it keeps of an ended answer (kept.go); zero: no engine keeps any.
	keptKVFreedAt time.Time

	waitTimes    waitTimes
	pace         Throughput
	ticks        uint64
	outcomes     [Failed + 1]uint64
	outputTokens int64 // tokens of the answers of all released slots

	counts *Counts // progress of the requests, valid only for the current event and its rounds; nil: the caller gave none

	outputLengths map[uint64]int32 // output lengths by entry ID (Enqueue.Output); only a simulation knows them

	// Buffers that each tick reuses, so that it allocates nothing.
	snapshot       policy.Snapshot
	survival       *predictor.Survival // table from which the snapshot's MeanOutput was computed; nil: the snapshot has no MeanOutput
	assignments    []policy.Assignment
	scores         []float64 // scores of the ranks for one entry, filled by writeTraces
	decidingGroups []*group
	expired        []*pool.Entry

	// State of the rounds of the current tick: one round for each group in decidingGroups.
	//
	// localEntry is the request whose prompt a decode rank may compute itself. The rounds then decide about this request only; nil:
	// they decide about the pool.
	localEntry *pool.Entry
	// leastLocalTokens is the smallest number of tokens of localEntry's prompt that any rank would have to compute. The policy may
	// choose only among the ranks with this number.
	leastLocalTokens   int
	nextGroup          int   // index in decidingGroups of the group that decides next
	fallbackNext       bool  // the policy of the current group has failed, so the fallback policy decides for this group next
	round              Round // what the last round saw and decided, for the decision log
	policyFailure      error // the panic of the policy in the last round; nil: the policy did not panic
	invalidAssignments int   // number of assignments of the last round that broke a hard limit and were not bound
	localBound         bool  // the last round gave localEntry a slot
}

// rank is one decode rank with the requests that are charged to it. It stays on the board until its last slot is released, even after it
// has left the fleet.
type rank struct {
	Worker
	present bool             // false: the rank has left the fleet, but some of its slots are not released yet
	slots   []int32          // the rank's slots that are in use, as indices in board.slots
	running []policy.Request // the request of each slot in slots, in the same order, in the form that policies see
	// kv is the number of KV tokens on the rank, with Others and kvFromOtherRanks. The tokens of answers are as of the last refresh.
	kv int64
	// engineQueued is the number of slots whose requests wait in the engine's own queue, as of the last refresh. Since then, requests
	// may have left the queue.
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
	// promptsToCompute has the slots whose prompts the rank has yet to compute, in the order in which it computes them. A preempted
	// request computes its prompt again.
	promptsToCompute []int32
	stepPromptTokens int64 // prompt tokens that the rank computes in the current step, by estimate

	// engineRanks has the ranks of the same engine. The engine may run an unpinned request (unpinned.go) on any of them, so its KV is
	// divided among all of them.
	engineRanks      []*rank
	unpinnedSlots    int   // number of slots whose requests are unpinned
	kvParts          int64 // number of ranks among which the KV of an unpinned request is divided, 1 or more
	kvFromOtherRanks int64 // KV tokens charged here for unpinned requests whose slots are on other ranks; they are part of kv
	orphans          []orphan
	// orphanedKV is the number of KV tokens that the engine may still hold of requests that ended before their KV had come
	// (orphans.go). They are not part of kv.
	orphanedKV int64
	keptKV     kept.KV // KV that the engine keeps of ended answers for their next turns (kept.go); not part of kv

	group    *group // the rank's group; set while the rank is in the fleet
	pressure kvPressure
	refusals circuit.Circuit // counts the requests that the engine refused in a row
	spared   bool            // the rank gets no requests now, because its engine refuses them or loses hand-offs (spare.go)
}

// freeSlots returns how many more requests may get slots of the rank; below 0: more slots are in use than allowed.
func (r *rank) freeSlots() int { return r.usableSlots() - len(r.slots) }

// usableSlots returns how many slots may be in use at one time: all, or only Limit of them while a limit is set.
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

// group is the set of ranks for which one policy decides: the ranks of a barrier group, which step together, or all ranks of the model that
// have no barrier.
type group struct {
	name     string // empty: the ranks have no barrier
	barrier  bool
	allRanks []*rank // ranks of the group that are in the fleet, ascending ID
	// steppingRanks has the ranks of allRanks that are not down. Only these ranks take part in steps, and policies see only them.
	steppingRanks  []*rank
	chosenPolicy   policyInUse
	fallbackPolicy policyInUse
	fallbackRounds int    // how many more rounds the fallback policy decides, after a round of the chosen policy was too slow
	fallbackReason string // FallbackSlow or FallbackBlocked, of the last such round

	kv          int64 // KV tokens of all stepping ranks, as of the last refresh
	largestLoad int64 // largest load of a rank in the group's steps (rank.stepLoad), in KV tokens, as of the last refresh

	forecast     forecast.Running
	searchBudget searchBudget
	// heldEntries is the number of entries that the policy held back in its last decision, although a slot was free for them.
	heldEntries   int
	recheckHeldAt time.Time // when the policy wants to decide again about these entries; zero: at no set time
	roundCounts   roundCounts
	promptRest    int // number of steps, from the next one on, in which ranks with AfterPrompts compute no prompts
	recentSteps   recentSteps
	tokenRate     tokenRate
	steps         step.Times // the step times so far, and the step model learned from them
	// givenWeights says how many KV tokens a request counts as, by a SetStepModel event; nil: the number is learned from the steps.
	givenWeights *step.RequestCost
	stepRanks    []step.Rank // buffer of learnLastStep: what each rank did in a step
	lastStep     Step        // the last step that was reported; Number 0: none since the group was last idle
	endedTokens  int64       // tokens that all released requests had generated on the group
	handoffDelay handoffDelay
	prefillDelay prefillDelay
	// generatedAtLastStep is the result of group.generated when the last step was reported.
	generatedAtLastStep int64
}

// roundCounts counts the steps of a group whose ranks prefill and decode (a mixed group), and the rounds of requests sent to it. A policy
// may hold requests back and send them together, in a round, so that several ranks compute prompts in the same steps.
type roundCounts struct {
	rounds              uint64 // rounds in which held requests were sent together
	ranksFilled         uint64 // ranks that had a prompt to compute just after a round was sent, summed over the rounds
	steps               uint64 // steps that were reported
	prefillSteps        uint64 // reported steps in which at least one rank computed a prompt
	ranksInPrefillSteps uint64 // ranks of the group, summed over the prefillSteps
	idleInPrefillSteps  uint64 // ranks that computed no prompt, summed over the prefillSteps

	heldSince time.Time     // since when the policy has held back the oldest held entry
	maxHold   time.Duration // longest time for which the policy holds a request back
}

// recentSteps has sums over the steps of a group. Each new step scales the older sums down, so that they describe about the last minute.
type recentSteps struct {
	// waitedSeconds is the sum over all requests: the seconds that each waited for its first token, without the time in which a policy
	// held it back.
	waitedSeconds float64
	promptTokens  float64 // sum of the prompt tokens that the ranks computed
	seconds       float64 // sum of the lengths of the steps, in seconds
}

const (
	fadeSeconds = 60 // seconds of steps after which an older step counts for about a third (1/e)
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

// means returns the mean number of requests that waited for their first token, and the prompt tokens computed per second. Both are -1 if no
// step was reported.
func (s *recentSteps) means() (waiting, promptTokensPerSecond float32) {
	if s.seconds <= 0 {
		return -1, -1
	}
	return float32(s.waitedSeconds / s.seconds), float32(s.promptTokens / s.seconds)
}

type waitingEntry struct {
	Enqueue
	restricted bool // the entry may not go to every rank; board.restrictedCount counts such entries
	// sendableSince is when a mixed rank first had a slot and KV room for the entry, so that only its policy has held it back since
	// then. Zero: no rank had both yet.
	sendableSince time.Time
}

// prompt returns the length of the prompt in tokens, at least 0.
func (w waitingEntry) prompt() int32 { return clampTokens(w.Entry.Prompt) }

// pairs knows which engines lose hand-offs of KV.
type pairs struct {
	delivery.Table
	quarantineEndsAt time.Time // when the next trial is due, if waiting entries could then be sent; zero: no entry waits for that
}

// orphan is KV room on a rank that may stay taken after a request has ended, because its prefill engine was still writing the KV (see
// orphans.go).
type orphan struct {
	tokens int64
	since  time.Time
}

// kvPressure says whether a rank is tight: its engine has preempted requests because KV room ran out, so for a while the board fills the
// rank less (tight.go).
type kvPressure struct {
	lastPreemption time.Time // zero: there was none
	tightUntil     time.Time // the rank is tight until this time
}

// Throughput is how fast the slots of a board come free. Dispatcher.Room computes from it how many
// hand-offs would get a slot in time.
type Throughput struct {
	Slots, Free int
	Waiting     int     // waiting entries that have a client (see emitPace)
	Seconds     float64 // mean time for which a request has its slot, in s
	tokens      float64 // mean KV tokens of a request when it ends; 0: none has ended
}

// Binding says which slot on which rank an entry got, and how the policy chose the rank.
type Binding struct {
	Slot       int32 // index of the slot in the table of the board
	Worker     int32
	WorkerName string
	Group      string // group of the rank (Worker.Group)
	Policy     string // name of the policy that decided; it may be the fallback policy
	// Stage is the part of the policy that chose the rank (Assignment.Stage): 0 the starvation guard, 1 one entry at a time, 2 sets of
	// entries.
	Stage uint8
	Score float64
	Wait  time.Duration // time that the entry waited in the pool
	// InEngineQueue: the rank has no slot or no KV room for the entry yet, so the entry waits in the engine's own queue. Keys, metrics
	// and headers call such requests those beyond the slots.
	InEngineQueue bool
	NewTokens     int32         // prompt tokens that the rank computes itself; 0: the KV comes from a prefill engine
	Held          time.Duration // part of Wait in which the policy held the entry back, to send it together with others
	// StepMs is the length of a step of the group, in ms, for an entry that is bound before its prefill; 0: unknown.
	StepMs float32
	// ComputeMs is the time until a rank that prefills has computed the entry's prompt and all prompts before it, in ms; 0: unknown.
	ComputeMs float32
}

// Local says which decode ranks may compute the prompt of an entry that has no hand-off, and how many tokens of it a rank may compute.
type Local struct {
	Ranks []LocalRank // the policy may choose only among these ranks

	// Threshold is the largest number of tokens of one prompt that a rank may compute. 0: as many as the rank computes in the time that
	// a hand-off would take (see BreakEven).
	Threshold int
	// BreakEven is the number of prompt tokens that an idle rank computes in the time of a hand-off. Each request that runs on the rank
	// makes the computation longer, by an eighth of its time on an idle rank.
	BreakEven float64
	// InFlight is the largest number of prompt tokens that a rank may have to compute at one time: those of this prompt, and of the
	// prompts that it has not finished.
	InFlight int
}

// LocalRank says how many tokens of a prompt a rank would have to compute itself.
type LocalRank struct {
	Worker int32
	Tokens int // prompt tokens that are not in the rank's prefix cache
}

// endedRequest is a released request. firstStep and lastStep are the numbers of the group's steps that brought the first and the last
// tokens of its answer.
type endedRequest struct {
	firstStep, lastStep uint32
	kv                  int64
	// promptInFirstStep is the number of its prompt tokens that a mixed rank computed in firstStep; 0 on a rank that does not prefill.
	promptInFirstStep int64
}

// waitTimes has the times that the last 1000 admitted entries waited in the pool. The starvation guard, which serves overdue entries first,
// uses the mean.
type waitTimes struct {
	waits       [1000]time.Duration // ring buffer
	count, next int                 // number of times in waits, and the index at which the next time is written
	sum         time.Duration
}

// add adds a wait. Once 1000 are stored, it replaces the oldest one.
func (w *waitTimes) add(d time.Duration) {
	w.sum += d - w.waits[w.next] // the replaced wait is 0 until the buffer is full
	w.waits[w.next] = d
	w.next = (w.next + 1) % len(w.waits)
	w.count = min(w.count+1, len(w.waits))
}

// meanMs returns the mean wait in ms; 0: no entry was admitted yet.
func (w *waitTimes) meanMs() float32 {
	if w.count == 0 {
		return 0
	}
	return float32(w.sum.Seconds() * 1000 / float64(w.count))
}

// Boards has one board for each model. A board mirrors the model's decode ranks with their requests, and has the pool of entries that wait
// for a rank. Boards has no goroutine, clock, log, metric or lock: its owner applies events with the current time, and carries out the
// effects that Apply returns.
type Boards struct {
	*allBoards
	boards   map[string]*board // boards by model
	inOrder  []*board          // values of boards, sorted by model
	round    *board            // the board whose policy has decided, until the event Decided brings the duration; nil: none
	draining bool
}

// allBoards is what all boards share: the settings, the learned tables, and the effects of the current event.
type allBoards struct {
	cfg              Config
	policySpec       string          // spec of the policy of barrier groups, as the settings give it
	policyName       string          // canonical name of the policy of barrier groups
	sharedGroupNames map[string]bool // names that groups of several models have

	fit        *predictor.Fit                   // fit file that new predictors start from; nil: they start from nothing
	predictors map[PredictorKey]*predictorState // a predictor stays when the board of its model is removed

	effects []Effect  // effects of the current event, which Apply returns
	now     time.Time // time that the owner passed with the current event
}

// emit adds an effect to those that Apply returns for the current event.
func (a *allBoards) emit(e Effect) { a.effects = append(a.effects, e) }

// policyInUse is a policy with what the board needs to run it. Each group has a policyInUse of its own, because a policy has state: for
// example, which rank is next in turn.
type policyInUse struct {
	policy.Policy
	name       string
	shared     *allBoards      // settings and tables of all boards
	sendsAhead bool            // the policy sends requests before their slots are free (ahead.go)
	predictor  *predictorState // tables of the output lengths that the policy predicts; nil: the policy needs none
}

// slotRecord is a request that has a slot of a rank, from its admission until its release.
type slotRecord struct {
	rank      *rank // rank of the request; nil: no request has this index
	pos       int   // index of the request in rank.slots and rank.running
	id, key   uint64
	prefiller string // prefill engine that the KV of the prompt comes from; empty: there was no hand-off
	prompt    int32  // prompt tokens; for a resumed request, with the tokens of the answer that earlier ranks generated
	// tokensFromEarlierRanks is the number of tokens of the answer that earlier ranks generated, before the request was resumed here.
	tokensFromEarlierRanks int32
	newTokens              int32 // prompt tokens that the rank has to compute; 0: the KV comes from a prefill engine
	discard                bool  // no client waits for the answer: the request runs only to make its prefill engine free the KV
	// engineChoosesRank: the request is unpinned. The engine may run it on any of its ranks, so its KV is charged to all of these in
	// equal parts (unpinned.go).
	engineChoosesRank bool
	started           bool      // the first event of the answer has come, as the board read it last
	inEngineQueue     bool      // the request waits in the engine's own queue, because the rank has no slot or no KV room for it
	boundAt           time.Time // when the request got this slot
	process           uint64    // process of the rank's engine then (Worker.Process); 0: not known
	// boundAtStep is the number of the group's step that was reported last before the request was bound; 0: none was.
	boundAtStep        uint32
	boundBeforePrefill bool
	// notDecoding: no decode step has read the KV of the request yet. It can be true only for requests that were bound before their
	// prefill and on mixed ranks; all other requests count as decoding from the start.
	notDecoding bool
	promptLeft  int32          // prompt tokens that a mixed rank has yet to compute
	progress    promptProgress // how many prompt tokens the last steps computed, on a mixed rank
	// tokensBeforePreemption is how many tokens the answer had when a mixed rank preempted the request; 0: it was not preempted.
	tokensBeforePreemption int32
	estimate               estimate
}

// slotTable has the records of all slots by index, and the totals of all slots and KV tokens that were ever charged and released. The
// totals are counted apart from the records. So drift can compare the two while the program runs, and find mistakes in the accounts.
type slotTable struct {
	records     []slotRecord
	freeIndices []int32 // indices of records that no request uses; the last of them is used next
	charged     tally
	released    tally
	keptTotal   int64 // KV tokens that engines have kept of ended answers, in total since the start
	freedTotal  int64 // KV tokens of keptTotal that the engines have freed since
}

// tally counts slots and the KV tokens of their prompts.
type tally struct{ slots, kvTokens int64 }

// add counts the slot of a request, and the KV tokens of its prompt.
func (t *tally) add(s *slotRecord) {
	t.slots++
	t.kvTokens += int64(s.prompt)
}

// clampTokens converts a number of tokens to an int32 between 0 and the largest int32.
func clampTokens(n int) int32 { return int32(min(max(0, n), math.MaxInt32)) }

// policyInForce returns the policy that decides now: the chosen policy, or the fallback policy for some rounds after the chosen policy was
// too slow.
func (g *group) policyInForce() *policyInUse {
	if g.fallbackRounds > 0 {
		return &g.fallbackPolicy
	}
	return &g.chosenPolicy
}

// rankWithID returns the rank of the group with a worker ID; nil: the group has no such rank, or the rank is down.
func (g *group) rankWithID(id int32) *rank {
	at, ok := slices.BinarySearchFunc(g.steppingRanks, id, func(r *rank, id int32) int { return cmp.Compare(r.ID, id) })
	if !ok {
		return nil
	}
	return g.steppingRanks[at]
}

// Gauged is the event that an engine's metrics (gauges) were read: at the time At, KVTokens were in use on a worker.
type Gauged struct {
	Worker   int32
	KVTokens int64
	At       time.Time
}

// hasBegun says whether the first event of a slot's answer has come. If the engine reports the tokens of the answer only at its end, the
// board's estimate decides instead: whether the answer has its first token (unreported.go).
func (b *board) hasBegun(slot int32) bool {
	return b.firstEventCame(slot) || b.slots.records[slot].estimate.firstStep != 0
}

// firstEventCame says whether the first event of a slot's answer has come, which shows that the KV is on the rank. It stores a true in the
// slot's record, because the Counts are dropped after the current event.
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

// label returns the name of a group in metrics and in the decision log. The group of ranks without a barrier is called dense, because dense
// models need no barrier.
func (b *board) label(g *group) string {
	switch {
	case !g.barrier:
		return "dense"
	case b.sharedGroupNames[g.name]: // groups of several models have this name, and their labels must differ
		return b.model + "/" + g.name
	}
	return g.name
}

// key returns the key by which events and effects name the group.
func (b *board) key(g *group) GroupKey { return GroupKey{b.model, g.name, g.barrier} }

// predictorState has the tables in use for predictions of the output lengths of one model, by one kind of predictor.
type predictorState struct {
	PredictorKey
	*Tables
}

// Names is the set of model names that an engine lists. A set never changes. Engines that list the same names share one *Names, so that
// lists can be compared by their pointers. A nil *Names stands for a list that is not known, and counts as having every name.
type Names struct{ set map[string]struct{} }

// namePlacement says where a model name is listed that some ranks of a board list and others do not.
type namePlacement struct {
	ranks             []*rank  // ranks of the fleet that list the name, ascending ID
	wholeGroups       []*group // groups in which all ranks list the name
	partialGroupRanks []*rank  // ranks that list the name, in groups in which another rank does not list it

	upOrAwaited int // number of ranks that list the name and are up, or will soon be up
	// largestPrompt is the largest prompt that any rank that lists the name could take if it were idle, in KV tokens.
	largestPrompt int64
	// outageGraceEnds is when waiting entries are refused while all ranks that list the name are down; zero: one of these ranks is up.
	outageGraceEnds time.Time
	noFreeSlot      bool // no rank of partialGroupRanks has a free slot left in this tick
	waitingForName  int  // waiting entries that ask for the name, without discarded hand-offs, for which no client waits
}

// lister is a rank with its group and the names that it lists. If no lister has changed, partlyListedNames need not be computed anew.
type lister struct {
	rank  *rank
	group *group
	lists *Names
}
