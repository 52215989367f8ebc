// Package policy decides which waiting request goes to which decode rank.
//
// A policy is a function of a value: it gets a Snapshot, which the board owns, and returns
// Assignments. It reads no clock, does no I/O, starts no goroutine and logs nothing. Its random
// numbers come from the seed with which it was built. So the server, the simulator and `evenkeel
// decide` call the same code.
package policy

// Snapshot shows the ranks of one barrier group, or all ranks of a model without a barrier, and the
// entries that wait for a rank. The board reuses it for all rounds, so a policy must keep no
// reference to it, and must not change it.
type Snapshot struct {
	Workers  []Worker // by ascending ID
	Pool     []Entry  // oldest first
	MaxAgeMs float32  // wait in ms from which the starvation guard takes an entry; 0: it takes only Urgent entries
	StepMs   float32  // mean step time in ms; 0: unknown
	C0Ms     float32  // step model: ms of a step that do not depend on the load
	C1Ms     float32  // step model: ms per KV token of the fullest rank; 0: unknown
	Budget   int32    // most changes of placements that a search may try in this round; 0: the policy's own limit
	// RequestTokens is how many KV tokens would lengthen a step as much as one more request on the
	// fullest rank does, apart from its own KV tokens.
	RequestTokens int64
	// RowTokens is the same for one more request on the rank with most requests, whatever KV it has:
	// some engines pad the batches of all ranks to the largest batch.
	RowTokens  int64
	MeanOutput float64 // mean tokens of a finished answer; 0: unknown, too few answers were seen

	Early       bool    // entries get their rank before their prefill, so their KV arrives later
	Aggregated  bool    // the ranks prefill and decode, so entries come without KV
	OwnPromptMs float32 // if Aggregated: ms per prompt token in a step of the rank that computes it; 0: unknown
	// NotStarted is the mean number of requests that waited for their first token during about the
	// last minute of steps, on ranks that also prefill or in the pool, without those that the policy
	// held back. Below 0: not known.
	NotStarted float32
	// PromptRate is how many prompt tokens all ranks together computed per second of these steps.
	// Below 0: not known.
	PromptRate float32
	Waits      []EntryDetails // one per entry of Pool; empty unless Aggregated
}

// Worker is one DP rank of the group, as it is at the beginning of the round.
type Worker struct {
	ID       int32
	Free     int32   // slots that may be filled now; below 0: an immediate policy has sent more requests than there are slots
	Up       bool    // the rank takes requests; false: it takes none, but its group's steps still wait for it
	Capacity int64   // KV tokens that fit on the rank; 0: unlimited
	Cost     float32 // step time per KV token on this rank, as a multiple of the group's mean; 0 means 1
	Others   int64   // KV tokens of requests that are not in Running, such as those of other proxies; policies assume that they stay
	Running  []Request
	Backlog  int64 // prompt tokens of Running that the rank, if it also prefills, has yet to compute
}

// decoding returns how many requests have a token already, so that a longer step delays their next
// one.
func (w *Worker) decoding() (n int) {
	for i := range w.Running {
		if w.Running[i].Generated > 0 {
			n++
		}
	}
	return n
}

// Request is a request that holds a slot. It may have no token yet, because its KV is being pulled
// or its prefill has not ended. Lengths are in tokens.
type Request struct {
	Prompt    int32   // prompt tokens; for a resumed request, with those generated before
	Generated int32   // tokens generated on this rank
	Age       int32   // tokens of the answer, also those from earlier ranks
	Rhat      float32 // predicted steps left, from 1 to the horizon H; 0: unknown, counts as H
	Key       uint64  // same for equal prompts, read by the predictor exact; 0: none
	ID        uint64
	Slot      int32 // index in the board's slot table, the same while the request runs
	// KVElsewhere is how many of its KV tokens are counted on other ranks (in their Others), because
	// the engine may run it on any of its ranks. Policies assume that all later tokens come to this
	// rank.
	KVElsewhere int32
}

// Tokens returns the KV tokens without those that are counted on other ranks.
func (r *Request) Tokens() int64 { return int64(r.Prompt) + int64(r.Generated) - int64(r.KVElsewhere) }

// Entry is a request that waits for a rank. Usually its prefill is finished, but some engines must
// know the rank first, or compute the prefill on it.
type Entry struct {
	ID      uint64
	Prompt  int32
	Age     int32 // tokens generated before the request was resumed; 0: it was not
	WaitMs  float32
	Urgent  bool // three quarters of the time that it may wait have passed
	Express bool // never held back while a slot is free for it
	Key     uint64
}

// EntryDetails has what policies read of an entry only if ranks prefill. They are not in Entry,
// because a tick copies many entries, and most need no EntryDetails.
type EntryDetails struct {
	Hits       []Hit   // workers that have a part of the prompt in their prefix cache, by ID; the slice never changes
	HeldMs     float64 // ms since a slot was first free for it and the policy held it back; below 0: not yet
	UrgentInMs float64 // ms until it becomes Urgent; 0: never, or it is Urgent now
}

// Hit says how many tokens from the start of a prompt a worker has in its prefix cache.
type Hit struct {
	Worker int32
	Tokens int
}

// Assignment is a decision of the policy: the entry goes to the worker.
type Assignment struct {
	Entry  uint64  `json:"entry"`
	Worker int32   `json:"worker"`
	Score  float64 `json:"score"`
	// How the policy chose the rank: 0 by the starvation guard, 1 for this entry alone, 2 for several
	// entries together.
	Stage uint8 `json:"stage"`
}

// Policy decides which waiting entry goes to which rank. The board calls it in rounds.
type Policy interface {
	// Name is the canonical form of the text that Parse was given, e.g. "br0:window=8".
	Name() string
	// Immediate says that the policy binds every entry at once, even to a rank without a free slot,
	// where the engine queues it. Other policies are pooled: entries wait in the pool until a slot is
	// free.
	Immediate() bool
	// MaxAgeMs is the configured wait in ms after which the policy's starvation guard takes an entry;
	// 0: it has no guard. The board computes Snapshot.MaxAgeMs from it.
	MaxAgeMs() float32
	// Decide appends the assignments of the round to dst. It reuses the memory of earlier rounds, so
	// it hardly allocates, and only one goroutine at a time may call it.
	Decide(s *Snapshot, dst []Assignment) []Assignment
}
