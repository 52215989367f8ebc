package group

import (
	"sync/atomic"
	"time"
)

// Job is a request in the decode group. What is exported is the connection's, and set before
// Submit, or safe to read.
type Job struct {
	rank    int
	prompt  int  // tokens
	remote  bool // its KV comes from a prefill engine
	ids     []int32
	salt    string
	Beyond  bool          // its proxy knows that the rank has no slot for it
	Keeps   bool          // its blocks stay when it is finished, until it is cancelled
	Granted chan struct{} // closed when it has KV blocks
	Wake    chan struct{} // nudged when Made or End changed

	Made atomic.Int64 // tokens of the answer so far
	End  atomic.Int32

	Cached atomic.Int64 // of a local prefill: tokens it found in the prefix cache

	// The group's own.
	phase  phase
	want   int // tokens after which it is finished
	local  bool
	turn   float64   // when in a step it gets its token: 1 at the end
	number int32     // on mixed ranks
	last   time.Time // when it got its last token
}

type phase uint8

const (
	queued  phase = iota // waits for KV blocks
	pulling              // holds blocks, the KV is on its way
	ready                // holds blocks, waits for a slot
	running
	gone
)

// The values of Job.End.
const (
	GoingOn int32 = iota
	Finished
	Recomputed // preempted, and the recompute scheduler gives it back
)

// NewJob is a request that decodes want tokens. remote: its KV comes from a prefill engine.
func NewJob(rank int, ids []int32, salt string, remote bool, want int) *Job {
	return &Job{rank: rank, prompt: len(ids), ids: ids, salt: salt, remote: remote, want: want, Granted: make(chan struct{}),
		Wake: make(chan struct{}, 1)}
}

func (j *Job) kvTokens() int { return j.prompt + int(j.Made.Load()) }

// message is what a connection tells the group.
type message struct {
	kind  messageKind
	job   *Job
	want  int  // landed: the answer's length is known once the KV is
	local bool // landed: nothing came, prefill here
}

type messageKind uint8

const (
	submit messageKind = iota
	landed
	cancel
	strand // its client has left, and its blocks stay
)

// Submit has a request wait for KV blocks and a slot.
func (g *Group) Submit(j *Job) { g.inbox.post(message{kind: submit, job: j}) }

// Landed says that a remote request's KV is there, or that nothing came (local). want is the length
// of its answer, which is known once the KV is.
func (g *Group) Landed(j *Job, want int, local bool) {
	g.inbox.post(message{kind: landed, job: j, want: want, local: local})
}

// Cancel forgets a request.
func (g *Group) Cancel(j *Job) { g.inbox.post(message{kind: cancel, job: j}) }

// Strand keeps the blocks of a request whose client has left, until it is cancelled.
func (g *Group) Strand(j *Job) { g.inbox.post(message{kind: strand, job: j}) }
