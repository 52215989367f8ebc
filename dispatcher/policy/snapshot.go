// Package policy decides which waiting request goes to which decode rank.
//
// A policy is a function of a value: it gets a Snapshot the board owns and
// answers with Assignments. It reads no clock, does no I/O, starts no goroutine
// and logs nothing; randomness comes from the seed it was built with. Server,
// simulator and `evenkeel decide` call the same code.
package policy

// Snapshot is one barrier group (or the ranks of a model without barrier) and
// the entries that wait for it, at the instant of a tick. The board fills and
// reuses one; a policy keeps no reference to it and changes nothing in it.
type Snapshot struct {
	Workers  []Worker // one barrier group, ascending ID
	Pool     []Entry  // arrival order, oldest first
	MaxAgeMs float32  // effective guard age in ms, 0 = off; Urgent still counts
	StepMs   float32  // mean step time of the group, 0 = unknown
	C0Ms     float32  // step model of the group: ms a step costs whatever its load
	C1Ms     float32  // ms per KV token of the fullest rank, 0 = unknown
	Budget   int32    // evaluations allowed this tick, 0 = the policy's own
	// RequestTokens is how many KV tokens a request weighs as much as in a step; 0 where a request costs nothing but
	// its tokens, as the policies of papers have it.
	RequestTokens int64
	// RowTokens is how many KV tokens more each request of the rank with most requests weighs as much as, whatever the KV of that
	// rank; 0: nothing.
	RowTokens  int64
	MeanOutput float64 // tokens of a finished answer, in the mean; 0 before enough of them were seen

	Mixed bool    // the ranks prefill and decode: entries come without KV
	OwnMs float32 // of them: ms of a step per prompt token that a rank computes by itself, 0 = unknown
	// Unbegun is how many requests wait for their first token on them or in the pool, and are not held, in the mean of the last minute of
	// steps, and PromptRate is how many tokens of prompts all ranks together computed per second of them; below 0: nobody knows.
	Unbegun    float32
	PromptRate float32
	Waits      []Wait // one for each entry of Pool, in its order, if Mixed or if a rank holds something of a prompt that waits; else none
}

// Worker is one DP rank of the group.
type Worker struct {
	ID       int32
	Free     int32   // slots that may be filled now; negative while an immediate policy has sent more than there are slots
	Up       bool    // false: full, draining or excluded ranks still hold the barrier, but take nothing
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float32 // what a KV token costs on this rank, 1 = the group's mean; 0 reads as 1
	Others   int64   // KV tokens of requests that are not ours, and what is here of requests that other ranks run: they stay as they are
	Running  []Request
	Backlog  int64 // prompt tokens of these that the rank has yet to compute, where it prefills
}

// Request is one that holds a slot: it decodes, or its KV is in flight
// (Generated 0), or it was bound before its prefill and that still runs (Start
// above 0). Lengths are tokens as the engine counted them.
type Request struct {
	Prompt    int32   // of a resumed request: with the tokens already emitted
	Generated int32   // tokens of this leg
	Age       int32   // all tokens generated for the client's request
	Rhat      float32 // predicted steps left, in [1, H]; 0 = unknown, reads as H
	Key       uint64  // exact-match key, 0 = none
	ID        uint64
	Slot      int32 // dense index in the board's slot table, stable while the request runs
	// of its KV tokens, those that other ranks' Others have, because nobody knows its rank. Policies grow it on its worker alone
	Away int32
}

// Tokens are the KV tokens that the request holds on its worker.
func (r *Request) Tokens() int64 { return int64(r.Prompt) + int64(r.Generated) - int64(r.Away) }

// Entry is a request that waits for a rank: a finished prefill or, where the
// rank must be known before the prefill, a request that can be prefilled at once.
type Entry struct {
	ID     uint64
	Prompt int32
	Age    int32 // > 0 after a recompute
	WaitMs float32
	Urgent bool // three quarters of the time it may wait have passed
	Key    uint64
}

// Wait is what ranks that prefill, or that hold a part of its prompt, want to know of an entry. It is not in Entry, because a tick
// copies many of these.
type Wait struct {
	Hits       []Hit   // what ranks hold of its prompt, at most one of each, by worker; it never changes
	HeldMs     float64 // since it could first have been sent; below 0: it never could
	UrgentInMs float64 // until it is Urgent; 0 = it never will be, or is
	Express    bool    // it goes alone and is not held
}

// Hit is a prefix that a worker holds.
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

// Policy is one round of decisions.
type Policy interface {
	// Name is the canonical form of what Parse was given, e.g. "br0:window=8".
	Name() string
	// Immediate policies send a finished prefill on at once, free slot or not;
	// the engine queues. Pooled ones admit into free slots only.
	Immediate() bool
	// MaxAgeMs is the starvation guard the policy was built with, 0 when it needs none; the board turns it into Snapshot.MaxAgeMs.
	MaxAgeMs() float32
	// Decide appends the round's admissions to dst. It allocates nothing in
	// steady state; scratch is owned by the policy value, which therefore
	// serves one goroutine.
	Decide(s *Snapshot, dst []Assignment) []Assignment
}
