// Package policy decides which waiting request goes to which decode rank.
//
// A policy is a function of a value: it gets a Snapshot, which the board owns, and returns Assignments. It reads no clock, does no I/O,
// starts no goroutine and logs nothing. Its random numbers come from the seed with which it was built. The server, the simulator and
// `evenkeel decide` call the same code.
package policy

// Snapshot shows the ranks of one barrier group, or all ranks of a model without a barrier, and the entries that wait for a rank. The board
// reuses one Snapshot for all rounds, so a policy keeps no reference to it. A policy changes nothing in it.
type Snapshot struct {
	Workers  []Worker // ascending ID
	Pool     []Entry  // arrival order, oldest first
	MaxAgeMs float32  // wait in ms from which the starvation guard takes an entry; 0 = off, but Urgent entries are still overdue
	StepMs   float32  // mean step time of the group, 0 = unknown
	C0Ms     float32  // step model of the group: the part of a step's time that does not depend on the load, in ms
	C1Ms     float32  // step model: ms per KV token of the fullest rank, 0 = unknown
	Budget   int32    // changes of placements that a policy that searches may try in this round, 0 = the policy's own budget
	// RequestTokens is how many KV tokens would lengthen a step as much as one request of the fullest rank does, beside its own KV tokens.
	// 0: a request costs nothing beside its KV tokens.
	RequestTokens int64
	// RowTokens is how many KV tokens would lengthen a step as much as one request of the rank with most requests does, whatever KV this
	// rank has; 0: such a request adds nothing.
	RowTokens  int64
	MeanOutput float64 // mean number of tokens of a finished answer; 0: too few answers were seen

	Early       bool    // entries are bound before their prefill begins, so their KV comes later
	Aggregated  bool    // the ranks prefill and decode: entries come without KV
	OwnPromptMs float32 // if Aggregated: ms that a prompt token adds to a step on its own rank, 0 = unknown
	// NotStarted is the mean number of requests that waited for their first token over about the last minute of steps, on ranks that also
	// prefill or in the pool, without requests that the policy held back. PromptRate is how many prompt tokens all ranks together computed per
	// second of these steps. Below 0: not known.
	NotStarted float32
	PromptRate float32
	Waits      []EntryDetails // one for each entry of Pool; empty unless Aggregated, or a policy that reads Hits has a prompt with some
}

// Worker is one DP rank of the group.
type Worker struct {
	ID       int32
	Free     int32   // slots that may be filled now; negative while an immediate policy has sent more requests than there are slots
	Up       bool    // false: the rank takes no requests, but its group's steps still wait for it
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float32 // step time per KV token on this rank, as a multiple of the group's mean; 0 means 1
	Others   int64   // KV tokens of requests that are not in Running, such as those of other proxies: policies assume that they stay
	Running  []Request
	Backlog  int64 // prompt tokens of Running that an aggregated rank has yet to compute
}

// decoding returns how many of the worker's requests have a token already, and so wait for the tokens of each step.
func (w *Worker) decoding() (n int) {
	for i := range w.Running {
		if w.Running[i].Generated > 0 {
			n++
		}
	}
	return n
}

// Request is a request that holds a slot: it decodes, or it has no token yet (Generated 0) because its KV is in flight
// or its prefill has not ended. Lengths are in tokens.
type Request struct {
	Prompt    int32   // for a resumed request, it includes the tokens that were generated before it was resumed
	Generated int32   // tokens generated on this rank
	Age       int32   // tokens generated for the client's request, also on other ranks before it was resumed
	Rhat      float32 // predicted steps left, from 1 to the horizon H; 0 = unknown, which counts as H
	Key       uint64  // identifies equal prompts for the predictor exact, 0 = none
	ID        uint64
	Slot      int32 // index in the board's slot table, the same while the request runs
	// KVElsewhere is the part of its KV tokens that is in the Others of other ranks, because the engine may run it on any of its ranks.
	// Policies assume that the request grows only on this worker.
	KVElsewhere int32
}

// Tokens returns the KV tokens that the request holds on its worker.
func (r *Request) Tokens() int64 { return int64(r.Prompt) + int64(r.Generated) - int64(r.KVElsewhere) }

// Entry is a request that waits for a rank. Usually its prefill is finished. It has not begun if the rank must be known before the prefill,
// or computes the prefill itself: then it can begin at once when the rank is chosen.
type Entry struct {
	ID      uint64
	Prompt  int32
	Age     int32 // tokens that were generated before the request was resumed on another rank; 0: it was not resumed
	WaitMs  float32
	Urgent  bool // three quarters of the time it may wait have passed
	Express bool // a policy does not hold it back while it has a slot for it
	Key     uint64
}

// EntryDetails has what policies read of an entry only if ranks prefill, or if a rank holds a part of its prompt. It is not a part of
// Entry, because a tick copies many entries, and most need no EntryDetails.
type EntryDetails struct {
	Hits       []Hit   // which workers hold a part of its prompt, sorted by worker; the slice never changes
	HeldMs     float64 // time since a slot was first free for it and the policy held it back; below 0: none was free yet
	UrgentInMs float64 // time until it is Urgent; 0 = it never will be, or is now
}

// Hit says how many tokens of a prompt, from its start, a worker has in its prefix cache.
type Hit struct {
	Worker int32
	Tokens int
}

// Assignment binds an entry to a worker.
type Assignment struct {
	Entry  uint64  `json:"entry"`
	Worker int32   `json:"worker"`
	Score  float64 `json:"score"`
	Stage  uint8   `json:"stage"` // the part of the policy that chose: 0 the starvation guard, 1 one at a time, 2 several together
}

// Policy decides which waiting entry goes to which rank, in rounds.
type Policy interface {
	// Name is the canonical form of what Parse was given, e.g. "br0:window=8".
	Name() string
	// Immediate says that the policy sends every entry on at once, even to a rank without a free slot, where the engine queues it. Other
	// policies are pooled: they only fill free slots.
	Immediate() bool
	// MaxAgeMs is the configured wait in ms after which the policy's starvation guard takes an entry, 0 if it has no guard. The board
	// computes Snapshot.MaxAgeMs from it.
	MaxAgeMs() float32
	// Decide appends the assignments of the round to dst. It reuses the memory of earlier rounds, so it allocates next to nothing, and only
	// one goroutine at a time may call it.
	Decide(s *Snapshot, dst []Assignment) []Assignment
}
