// Package policy decides which waiting request goes to which decode rank.
//
// A policy is a function of a value: it gets a Snapshot, which the board owns, and
// returns Assignments. It reads no clock, does no I/O, starts no goroutine
// and logs nothing. Random numbers come from the seed with which it was built. Server,
// simulator and `evenkeel decide` call the same code.
package policy

// Snapshot is one barrier group (or the ranks of a model without barrier) and
// the entries that wait for it, at the instant of a tick. The board reuses one Snapshot for all
// rounds, so a policy keeps no reference to it. A policy changes nothing in it.
type Snapshot struct {
	Workers  []Worker // one barrier group, ascending ID
	Pool     []Entry  // arrival order, oldest first
	MaxAgeMs float32  // wait in ms from which the starvation guard takes an entry; 0 = off, but Urgent entries are still overdue
	StepMs   float32  // mean step time of the group, 0 = unknown
	C0Ms     float32  // step model of the group: the part of a step's time that does not depend on the load, in ms
	C1Ms     float32  // step model: ms per KV token of the fullest rank, 0 = unknown
	Budget   int32    // evaluations that the policy may spend in this round, 0 = the policy's own budget
	// RequestTokens is the weight of a request in a step, in KV tokens: the load of a rank has it for each request. 0: a request
	// costs nothing beside its KV tokens.
	RequestTokens int64
	// RowTokens is what each request of the rank with most requests adds to a step, in KV tokens, whatever the KV of that
	// rank; 0: nothing.
	RowTokens  int64
	MeanOutput float64 // mean number of tokens of a finished answer; 0: too few answers were seen

	Mixed bool    // the ranks prefill and decode: entries come without KV
	OwnMs float32 // for mixed ranks: ms that a prompt token adds to a step on its own rank, 0 = unknown
	// Unbegun is the mean number of requests that waited for their first token on mixed ranks or in the pool, and were not held, over about
	// the last minute of steps. PromptRate is how many prompt tokens all ranks together computed per second of these steps. Below 0: not
	// known.
	Unbegun    float32
	PromptRate float32
	Waits      []Wait // one for each entry of Pool, in its order, if Mixed, or if hits are needed and known for a prompt; else empty
}

// Worker is one DP rank of the group.
type Worker struct {
	ID       int32
	Free     int32   // slots that may be filled now; negative while an immediate policy has sent more than there are slots
	Up       bool    // false: the rank takes no requests, but its group's steps still wait for it
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float32 // what a KV token costs on this rank, 1 = the group's mean; 0 reads as 1
	Others   int64   // KV tokens of requests that are not ours, and of straying requests of other ranks: policies take them as constant
	Running  []Request
	Backlog  int64 // prompt tokens of Running that a mixed rank has yet to compute
}

// Request is a request that holds a slot: it decodes, or it has no token yet (Generated 0) because its KV is in flight
// or its prefill has not ended. Lengths are in tokens.
type Request struct {
	Prompt    int32   // tokens; for a resumed request, with the tokens that earlier legs generated
	Generated int32   // tokens of this leg
	Age       int32   // tokens of all legs, generated for the client's request
	Rhat      float32 // predicted steps left, in [1, H]; 0 = unknown, reads as H
	Key       uint64  // exact-match key, 0 = none
	ID        uint64
	Slot      int32 // dense index in the board's slot table, stable while the request runs
	// Away is how many of its KV tokens are in other ranks' Others, because it strays. Policies let it grow on its own worker alone
	Away int32
}

// Tokens returns the KV tokens that the request holds on its worker.
func (r *Request) Tokens() int64 { return int64(r.Prompt) + int64(r.Generated) - int64(r.Away) }

// Entry is a request that waits for a rank. Its prefill is finished or, if the rank must be known
// before the prefill or computes the prefill itself, can begin at once.
type Entry struct {
	ID     uint64
	Prompt int32
	Age    int32 // tokens that earlier legs generated; above 0 for a request resumed after a recompute
	WaitMs float32
	Urgent bool // three quarters of the time it may wait have passed
	Key    uint64
}

// Wait has what policies need of an entry only where ranks prefill, or hold a part of its prompt. It is not in Entry, because a tick
// copies many entries, and most need no Wait.
type Wait struct {
	Hits       []Hit   // what ranks hold of its prompt, at most one for each worker, sorted by worker; the slice never changes
	HeldMs     float64 // time since it could first have been sent; below 0: it never could
	UrgentInMs float64 // time until it is Urgent; 0 = it never will be, or is now
	Express    bool    // it is sent alone and never held for a round
}

// Hit is how many tokens of a prompt, from its start, a worker holds.
type Hit struct {
	Worker int32
	Tokens int
}

// Assignment binds an entry to a worker.
type Assignment struct {
	Entry  uint64  `json:"entry"`
	Worker int32   `json:"worker"`
	Score  float64 `json:"score"`
	Stage  uint8   `json:"stage"` // 0 the starvation guard, 1 singles, 2 several chosen together
}

// Policy decides rounds.
type Policy interface {
	// Name is the canonical form of what Parse was given, e.g. "br0:window=8".
	Name() string
	// Immediate says that the policy sends a finished prefill on at once, even without a free slot:
	// the engine then queues it. Other policies are pooled: they admit into free slots only.
	Immediate() bool
	// MaxAgeMs is the wait in ms with which the policy's starvation guard was configured, 0 if it has none. The board makes Snapshot.MaxAgeMs
	// of it.
	MaxAgeMs() float32
	// Decide appends the round's admissions to dst. In steady state it allocates nothing, because
	// the policy value keeps its memory. So only one goroutine may use it.
	Decide(s *Snapshot, dst []Assignment) []Assignment
}
