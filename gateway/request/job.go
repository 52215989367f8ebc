// Package request serves one request: it has an engine prefill the prompt, waits for a
// decode rank, relays that rank's answer, and gives back what the request took, however
// it ends. What is done when is decided in gateway/lifecycle. run.go, which carries that out, is the
// place to start reading.
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

// A job is one prompt that becomes one PD request: a client's request, or one
// leg of a fan-out. serve is its life. How far it has come, what it holds
// and where it may still be served stands in gateway/lifecycle.
type job struct {
	srv      *Server
	req      *openai.Request
	body     mooncake.Body     // dropped once a decode engine has it
	changes  *mooncake.Changes // what a leg of a fan-out changes in the body
	passed   *Passed           // nil: prompts are prefilled and decoded
	client   reader            // whom the answer goes to
	id       string            // request id, the stem of the engines' ids
	model    fleet.Route       // the model that is asked for, and the board of its ranks
	ask      sse.Ask           // what the client gets of the engine's answer, and in which form
	incoming *Incoming         // the client's request as it was admitted
	record   *journal.Request  // of incoming; a leg of a fan-out has its own
	abort    *aborting         // nil: its client cannot end it by a name

	decodeProcess int             // the decode engine's process when the decode call was made
	promptTokens  int             // tokens of the prompt, if resumed with the answer so far, as an engine counted them; 0: none has
	cachedTokens  int             // prompt tokens that the prefill engine found in its prefix cache; -1: unknown
	ticket        *prefill.Ticket // the place in the arrival queue of a leg that has entered it with its siblings; nil: it enters alone
	holder        *prefill.Holder // of the leases that serve is to give back or pass on; nil: it had no turn yet

	mu           sync.Mutex // held for each Step of the life: a prefill leg beside a decode leg has a goroutine of its own
	life         lifecycle.Lifecycle
	tape         recording.Tape
	question     *geo.Question // asks where the request goes; nil: there are no other regions, or that is decided
	ranElsewhere int           // how many proxies of this region may have run the request before they gave it back

	unlistedAnswer *openai.Error // the error of the last engine that did not have the model; nil: there was none

	avoid avoided
	local locally

	doubts  []*handoff.Handoff // hand-offs that an engine may have read, and of which no answer was made
	resume  resumption
	accused []func(lifecycle.Finding) // what to do about engines' 500s once their cause is known
}

// client is the connection the answer goes to: edge.Conn, or a fan-out's share
// of one.
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

// Passed is a request that goes to one engine as it came. It has no slot. Instead it takes a seat: there are as many seats as requests
// may run at once.
type Passed struct {
	Engines  Choice
	Path     string
	Kind     string   // Content-Type of the body
	Body     [][]byte // dropped once no engine is sent it any more
	Most     int64    // tokens that the engine computes at most; 0: it does not run its model
	Estimate int      // tokens that the request costs if no engine counts them
	Seat     *edge.Charge
	Memory   *edge.Charge // for an answer in one piece
	Took     prometheus.Observer

	triedEngines []string       // names of the engines that had the request
	chosen       fleet.Whole    // the engine that was chosen last
	earlierFault *failure.Fault // the fault of the call before the last one
	noEngine     *openai.Error  // why no engine can be chosen; nil: one was
	answer       []byte         // if it comes in one piece
}

// Choice is which engine gets a request that is passed through.
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
	if !j.client.isLeg() { // the legs of one request have one line, and their prompts one by one
		j.record.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}

// locally is what a job needs to be served whole by a decode rank.
type locally struct {
	decided     bool             // true once it was decided whether that may be; a failed attempt is not made again
	endedTokens int              // tokens of a prompt whose answer ends at once, so that probes hand nothing off; 0: they may
	boundSlot   *dispatcher.Slot // the slot that was bound beforehand, with the siblings of a leg; nil: none was
	knownPrompt *prefill.Prompt  // what prefix caches know the prompt by, until its KV is somewhere; nil: no rank needs it
}

// resumption is what a job keeps so that a lost answer can go on, and what its
// next attempt starts from.
type resumption struct {
	keeping      lifecycle.Keeping // which parts of the request are kept
	how          string            // the way to go on, as howToResume returns it; empty: the answer can only begin anew
	promptIDs    json.RawMessage   // token ids of the prompt, as the prefill engine had them
	chargedBytes int64             // bytes kept, as the gateway's account of them has it

	promptTokens  int // tokens of the client's prompt without any answer, as the prefill engine counts them
	answerTokens  int // tokens of the lost answer that are part of the prompt now
	prefillCounts int // prompt tokens that the prefill engine has to count now; 0: any number
	decodeCounts  int // prompt tokens that the decode engine has to count now; 0: any number
}

// reader is who reads the answer: a client's connection, or a leg's share of it.
type reader struct{ client }

// isLeg says whether the job is a leg of a fan-out. The client's request then has a record of its own, apart from the job's.
func (r reader) isLeg() bool { _, ok := r.client.(*edge.Disconnect); return ok }

// Incoming is a request as it was admitted, and its record.
type Incoming struct {
	Record *journal.Request
	Wishes
	Limits     Limits       // of its caller
	Priority   int          // in the arrival queue
	Batch      bool         // it takes only what others leave
	Deadline   time.Time    // until when a trusted caller wants the first token; zero: it did not say
	Flow       string       // takes turns in the arrival queue with other flows of the same priority; empty: its caller's key
	Body       *edge.Charge // what the body takes of the account of bodies in memory
	Address    string       // of the client
	From       *geo.Hop     // how it came from another dispatcher; nil: from a client
	way        string       // where it was served, as routeHeader names it; empty: nowhere
	concluded  atomic.Bool  // Conclude has settled it, which happens once
	forgetName func()       // ends the client's power to end the request by name; nil: the request has no name
}

// Classes of requests, as ClassHeader names them.
const (
	ClassBatch  = "batch"
	ClassOnline = "online"
)

// Limits are what a request holds of its caller's limits.
type Limits interface {
	// GiveBack settles them with the tokens that prompts and answers had in the end. Below 0, these are not known, and the estimate stands.
	GiveBack(tokens int)
}

// Wishes are what a request asks for besides its body. From a caller that is not trusted,
// only the session, its end, Patience and Stays are taken.
type Wishes struct {
	Explain       bool      // answer headers name engine, policy and reason
	Stays         bool      // the request is never forwarded
	Session       uint64    // hash of its name; 0: none
	Ends          bool      // the session has no further turn, so that nothing of it need be remembered
	Patience      time.Time // when the client gives up by itself, for an answer that has not begun; zero: unknown
	PrefillPolicy string    // the policy that chooses its prefill engine; empty: the default
	Whole         bool      // its endpoint takes no hand-off: only a decode rank that computes it alone may serve it
	Disaggregate  string    // DisaggregateAuto, Always or Never; empty: as configured
	ToPrefill     string    // the candidate that has to prefill; empty: any
	ToDecode      []int32   // the decode rank that has to decode; nil: any
}

// aimed says whether a trusted caller named the engine that has to prefill, or the rank that has to decode.
func (w *Wishes) aimed() bool { return w.ToPrefill != "" || w.ToDecode != nil }

// onPanic is deferred by a step that has taken something which nothing else would give back yet. If the step panics, onPanic calls
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

// freed reports that nothing of a request is held any more, if its client left.
func (j *job) freed() {
	if j.client.Left() {
		j.record.Report(journal.Event{What: journal.Freed, At: j.client.GoneAt()})
	}
}

// leftError is the end of an answer whose client has left. A client that has ended the request by its name still reads.
func leftError(j *job) *openai.Error {
	if j.abort.endedByClient() {
		return errNotAborted
	}
	return failure.Gone
}
