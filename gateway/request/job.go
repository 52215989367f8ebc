// Package request serves one request: it has an engine prefill the prompt, waits for a decode rank, relays this rank's answer, and gives
// back what the request has taken, however it ends. The package gateway/lifecycle decides what is done and when; run.go carries it out, and
// is the file to read first.
package request

import (
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/recording"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A job is one prompt with one answer: a client's request, or one leg of a fan-out. The method serve runs it. Its field life knows how far
// the job has come, what it holds and where it may still be served.
type job struct {
	srv      *Server
	req      *openai.Request
	body     mooncake.Body     // dropped once a decode engine has it
	changes  *mooncake.Changes // what a leg of a fan-out changes in the body
	passed   *Passed           // nil: prompts are prefilled and decoded
	client   reader            // the connection that gets the answer
	id       string            // request id, contained in all ids that engines get
	model    fleet.Route       // the requested model, and the board of its ranks
	ask      sse.Ask           // which parts of the engine's answer the client gets, and in which form
	incoming *Incoming         // the client's request as it was admitted
	record   *journal.Request  // the record of incoming; a leg of a fan-out has a record of its own
	abort    *aborting         // nil: the client cannot end the request by name

	decodeProcess int             // the decode engine's process when the decode call was made
	promptTokens  int             // tokens of the prompt, and of the answer so far if resumed, as an engine counted them; 0: not counted
	cachedTokens  int             // prompt tokens that the prefill engine found in its prefix cache; -1: unknown
	ticket        *prefill.Ticket // the place in the arrival queue, if all legs of a fan-out entered together; nil: the job enters alone
	holder        *prefill.Holder // holds the leases that serve must give back or pass on; nil: the job had no turn in the queue yet

	mu           sync.Mutex // held for each Step of life, because a prefill leg beside a decode leg has a goroutine of its own
	life         lifecycle.Lifecycle
	tape         recording.Tape
	question     *geo.Question // asks where the request should go; nil: there are no other regions, or it is decided already
	ranElsewhere int           // how many proxies of this region may have run the request before they gave it back

	unlistedAnswer *openai.Error // the error of the last engine that did not have the model; nil: there was none

	avoid avoided
	local locally

	doubts  []*handoff.Handoff // hand-offs that a decode engine may have pulled, although it made no answer from them
	resume  resumption
	accused []func(lifecycle.Finding) // called once it is known whether the request or an engine caused the engine's status 500
}

// client is the connection that gets the answer: an edge.Conn, or the share of one that a leg of a fan-out has.
type client interface {
	Left() bool
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

// MarshalLogObject names the job in the log.
func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.record.TraceID != "" {
		enc.AddString("trace_id", j.record.TraceID)
	}
	return nil
}

// Passed is a request that goes to one engine unchanged. It has no slot on a rank. Instead it takes a seat, and the number of seats bounds
// how many such requests run at once.
type Passed struct {
	Engines  Choice
	Path     string
	Kind     string   // Content-Type of the body
	Body     [][]byte // dropped once no further attempt can need it
	Most     int64    // tokens that the engine computes at most; 0: it does not run its model
	Estimate int      // tokens that the request costs if no engine counts them
	Seat     *edge.Charge
	Memory   *edge.Charge // for an answer in one piece
	Took     prometheus.Observer

	triedEngines []string       // names of the engines that had the request
	chosen       fleet.Whole    // the engine that was chosen last
	earlierFault *failure.Fault // the fault of the call before the last one
	noEngine     *openai.Error  // why no engine could be chosen; nil: an engine was chosen
	answer       []byte         // the answer, if it came in one piece
}

// Choice chooses the engine for a request that is passed through.
type Choice interface {
	// Choose looks for an engine that was not tried: Chosen, NoneLeft or NoRoute. It counts a call for the engine that it chose.
	Choose(model, path string, tried []string) (fleet.Whole, lifecycle.What, *openai.Error)
	// Count adds to the calls that an engine has.
	Count(instance string, calls int)
	// Without notes that an engine does not have an endpoint.
	Without(instance, path string)
}

// parts returns the parts of the request that make its prompt.
func (j *job) parts() *prompt.Parts {
	return &prompt.Parts{Req: j.req, Body: &j.body, Changes: j.changes, Model: j.model, Resumed: j.life.Resumed()}
}

// promptHash returns a hash that tells this prompt from others, and notes it in the request's record, from which `evenkeel fit` reads
// it. It returns 0 if no predictor needs such hashes.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	hash := j.parts().Hash(key)
	if !j.client.isLeg() { // all legs share one line of the journal, which has room for one hash only
		j.record.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}

// locally is the state that a job needs if a decode rank may compute its prompt and serve it alone.
type locally struct {
	decided     bool             // it was decided whether a decode rank may serve it alone, and is not decided again after a failure
	endedTokens int              // prompt tokens of a request whose probes return no hand-off, as its answer ends at once; 0: not so
	boundSlot   *dispatcher.Slot // the slot that was bound before serve, together with other legs; nil: there is none
	knownPrompt *prefill.Prompt  // the hashes by which prefix caches know the prompt, until its KV is on a rank; nil: not needed
}

// resumption is what a job keeps so that another engine can continue a lost answer, and from what the next attempt starts.
type resumption struct {
	keeping      lifecycle.Keeping // which parts of the request are kept
	how          string            // how to continue the answer, as howToResume returns it; empty: it can only begin anew
	promptIDs    json.RawMessage   // token ids of the prompt, as the prefill engine had them
	chargedBytes int64             // bytes kept, as counted in Server.resumeBytes

	promptTokens  int // tokens of the client's prompt without any answer, as the prefill engine counts them
	answerTokens  int // tokens of the lost answer that are part of the prompt now
	prefillCounts int // prompt tokens that the prefill engine has to count now; 0: any number
	decodeCounts  int // prompt tokens that the decode engine has to count now; 0: any number
}

// reader is the receiver of the answer: a client's connection, or a leg's share of it.
type reader struct{ client }

// isLeg says whether the job is a leg of a fan-out. The client's request then has a record of its own, apart from the job's.
func (r reader) isLeg() bool { _, ok := r.client.(*edge.Disconnect); return ok }

// Incoming is a request as it was admitted, and its record.
type Incoming struct {
	Record *journal.Request
	Wishes
	Limits     Limits       // the request's share of its caller's limits
	Priority   int          // the priority in the arrival queue
	Batch      bool         // the request takes only capacity that other requests leave free
	Deadline   time.Time    // until when a trusted caller wants the first token; zero: there is no deadline
	Flow       string       // takes turns in the arrival queue with other flows of the same priority; empty: its caller's key
	Body       *edge.Charge // the memory that the body takes, on the account of all bodies
	Address    string       // the client's address
	From       *geo.Hop     // the dispatcher that forwarded the request; nil: it came from a client
	way        string       // where it was served, as routeHeader names it; empty: nowhere
	concluded  atomic.Bool  // Conclude was called
	forgetName func()       // after this call, the client cannot end the request by name; nil: the request has no name
}

// Classes of requests, as ClassHeader names them.
const (
	ClassBatch  = "batch"
	ClassOnline = "online"
)

// Limits is a request's share of its caller's limits.
type Limits interface {
	// GiveBack gives the share back, and replaces the estimated tokens by the number that prompts and answers had; below 0: not known.
	GiveBack(tokens int)
}

// Wishes are what a request asks for besides its body. From a caller that is not trusted,
// only the session, its end, Patience and Stays are taken.
type Wishes struct {
	Explain       bool      // answer headers name engine, policy and reason
	Stays         bool      // the request is never forwarded
	Session       uint64    // hash of its name; 0: none
	Ends          bool      // the session has no further turn, so that its KV need not be remembered
	Patience      time.Time // when the client gives up if its answer has not begun; zero: unknown
	PrefillPolicy string    // the policy that chooses its prefill engine; empty: the default
	Whole         bool      // its endpoint takes no hand-off, so only a decode rank that computes the prompt itself may serve it
	Disaggregate  string    // DisaggregateAuto, Always or Never; empty: as configured
	ToPrefill     string    // the candidate that has to prefill; empty: any
	ToDecode      []int32   // the decode rank that has to decode; nil: any
}

// aimed says whether a trusted caller named the engine that has to prefill, or the rank that has to decode.
func (w *Wishes) aimed() bool { return w.ToPrefill != "" || w.ToDecode != nil }

// onPanic is deferred by code that holds something which no other code would give back after a panic. If the code panics, onPanic calls
// giveBack and lets the panic go on to the edge, which recovers it.
func onPanic(giveBack func()) {
	if v := recover(); v != nil {
		giveBack()
		panic(v)
	}
}

// tell reports an event to the request's lifecycle, appends to effects what the lifecycle wants done about it, and returns the result.
// It holds the job's mutex meanwhile.
func (j *job) tell(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stepped(event, effects)
}

// stepped is tell for callers that hold the job's mutex. It also writes the event and its effects to the tape.
func (j *job) stepped(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	effects = j.life.Step(event, effects)
	j.tape.Step(event, effects)
	return effects
}

// enter notes in the record that the request enters a phase. call names the call to an engine that begins with the phase; empty: none
// does.
func (j *job) enter(phase journal.Phase, call string) {
	j.record.Report(journal.Event{What: journal.Entered, Phase: phase, Left: j.client.Left(), Call: call})
}

// freed reports, if the client has left, that the request holds no engine, slot or KV any more.
func (j *job) freed() {
	if j.client.Left() {
		j.record.Report(journal.Event{What: journal.Freed, At: j.client.GoneAt()})
	}
}

// leftError is the error at the end of an answer whose client has left. A client that has ended the request by name counts as gone too, but
// it still reads the answer.
func leftError(j *job) *openai.Error {
	if j.abort.endedByClient() {
		return errNotAborted
	}
	return failure.Gone
}
