// Package request serves one request: it has an engine prefill the prompt, waits for a decode rank,
// relays that rank's answer, and gives back what the request took, however it ends. The state
// machine in gateway/lifecycle decides each step. Start reading at run.go, which carries the steps
// out.
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
	"evenkeel/gateway/fleet/roster"
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

// A job is one prompt that is to get one answer: a client's request, or one leg of a fan-out. serve
// runs it.
type job struct {
	srv  *Server
	req  *openai.Request
	body mooncake.Body // empty once a decode engine has the request and no retry can need the body
	// changes are what engines get instead of parts of the body; nil: passed through, or only the legs
	// have changes.
	changes       *mooncake.Patch
	passthrough   *Passthrough // one engine serves the request; nil: it is prefilled and decoded
	client        client       // the connection that the answer goes to
	isLeg         bool         // a leg of a fan-out: its end does not conclude the client's request
	ranElsewhere  int32        // proxies of this region that may have run the request
	id            string       // the ids that engines get begin with it
	model         roster.Route // what the client asked for, and the board of decode ranks that serve it
	filterOptions sse.Options  // which parts of the answer the client gets, and in which form
	incoming      *Incoming
	record        *journal.Record // of incoming; a leg has a record of its own
	namedAbort    *abortByName    // nil: the request has no name

	promptTokens int             // as an engine counted them, with the answer so far; 0: not yet
	cachedTokens int             // found in the prefill engine's prefix cache; -1: unknown
	ticket       *prefill.Ticket // of a leg that entered the queue with others; nil: it enters alone
	// leaseOwner is nil until the job has entered the arrival queue.
	leaseOwner *prefill.LeaseOwner

	// mu is held for each Step of life: a prefill call beside a decode call has its own goroutine.
	mu       sync.Mutex
	life     lifecycle.Lifecycle
	recorder recording.Recorder
	// query asks to which dispatcher the request goes; nil: there is no other proxy, or the question
	// is answered.
	query *geo.RoutingQuery

	unlistedAnswer *openai.Error // of the last engine that did not have the model; nil: none

	avoid avoided
	local localDecode

	maybeRead   []*handoff.Handoff // hand-offs that an engine may have read, but without an answer
	resume      resumption
	answered500 *answered500 // what engines that answered 500 leave to be settled; nil: none did
}

func note500(j *job) *answered500 {
	if j.answered500 == nil {
		j.answered500 = &answered500{}
	}
	return j.answered500
}

// client is an edge.Conn, or the share of a connection that one leg of a fan-out has.
type client interface {
	Left() bool
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.record.TraceID != "" {
		enc.AddString("trace_id", j.record.TraceID)
	}
	return nil
}

// Passthrough is a request that goes to one engine unchanged. It takes a seat instead of a slot:
// their number bounds how many such requests run at once.
type Passthrough struct {
	Engines         EngineChooser
	Path            string
	ContentType     string   // of the body
	Body            [][]byte // nil once no engine will be sent the request again
	MaxTokens       int64    // the most that the engine computes; 0: the endpoint does not run the model
	EstimatedTokens int      // count for the request if the engine reports none
	Seat            *edge.Reservation
	Memory          *edge.Reservation // for an answer in one piece
	Duration        prometheus.Observer

	triedEngines []string          // of the engines that had the request
	chosen       roster.SoleEngine // the engine that was chosen last
	earlierFault *failure.Fault    // of the call before the last one
	noEngine     *openai.Error     // why no engine can be chosen; nil: one was
	answer       []byte            // the whole answer, if it comes in one piece
}

// EngineChooser chooses the engine for a request that is passed through.
type EngineChooser interface {
	// Choose looks for an engine that is not in tried, and returns Chosen, NoneLeft or NoRoute. It
	// counts one more call on the engine.
	Choose(model, path string, tried []string) (roster.SoleEngine, lifecycle.EventKind, *openai.Error)
	// AddRunning adds to the calls that run on an engine.
	AddRunning(instance string, calls int)
	// NoteMissingEndpoint makes Choose leave the engine out for this path for a while.
	NoteMissingEndpoint(instance, path string)
}

// parts are what makes the prompt, for hashes and token counts.
func (j *job) parts() *prompt.Source {
	return &prompt.Source{Req: j.req, Body: &j.body, Changes: j.changes, Model: j.model, Resumed: j.life.Resumed()}
}

// promptHash also writes the hash into the record, where `evenkeel fit` finds it. It is 0 if no
// predictor needs it.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	hash := j.parts().Hash(key)
	if !j.isLeg { // the legs share one record line, but each has a prompt of its own
		j.record.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}

// localDecode is the state of a job that a decode rank may serve without a prefill engine.
type localDecode struct {
	decided            bool             // whyLocal has decided: a failed attempt on a decode rank is not repeated
	tokensNotHandedOff int              // of a prompt whose answer ends at once; 0: none
	boundSlot          *dispatcher.Slot // got before by a leg, together with the others; nil: none
	promptHashes       *prefill.Prompt  // for prefix caches, until the KV is on a rank; nil: not needed
}

// resumption is what a job keeps so that another engine can continue a lost answer.
type resumption struct {
	retention    lifecycle.Retention
	method       string          // as resumeMethod returns it; empty: the answer can only begin anew
	promptIDs    json.RawMessage // token ids of the prompt, as an engine reported them
	chargedBytes int64           // what the job has charged to Server.resumeBytes

	promptTokens     int // tokens of the client's prompt, as an engine counted them
	answerTokens     int // of the lost answer; the next attempt sends them in the prompt
	prefillMustCount int // prompt tokens; 0: any number
	decodeMustCount  int // prompt tokens; 0: any number
}

// Incoming is a client's request that was admitted, with its record.
type Incoming struct {
	Record *journal.Record
	Options
	// CorrectEstimate replaces the estimated tokens that were charged to the caller's limits by those
	// that prompts and answers really had; negative: unknown.
	CorrectEstimate func(tokens int)
	Priority        int               // requests with a higher one leave the arrival queue first
	Batch           bool              // runs only on capacity that online requests leave free
	Deadline        time.Time         // a trusted caller wants the first token before; zero: none
	Flow            string            // flows of one priority take turns; empty: the caller's key
	Body            *edge.Reservation // the memory that the body is charged for
	Address         string            // network address of the client
	From            *geo.Hop          // how another proxy sent the request; nil: a client did
	servedBy        string            // where, as routeHeader names it; empty: not served yet
	concluded       atomic.Bool       // Conclude acts only once
	forgetName      func()            // ends the use of the request's name; nil: it has none
}

// Classes of requests, as values of ClassHeader.
const (
	ClassBatch  = "batch"
	ClassOnline = "online"
)

// GeoLocal is the value of GeoHeader for a request that must stay in its region.
const GeoLocal = "local"

// Options are what a request asks for outside its body. Of a caller that is not trusted, only
// Session, EndsSession, ClientGivesUpAt and NeverForward are accepted.
type Options struct {
	Explain         bool      // answer headers name engine, policy and reason
	NeverForward    bool      // the request never goes to another region (see newRoutingQuery)
	Session         uint64    // hash of the session's name; 0: none
	EndsSession     bool      // this is the last turn, so the session can be forgotten
	ClientGivesUpAt time.Time // when the client gives up an answer that has not begun; zero: unknown
	PrefillPolicy   string    // chooses the prefill engine; empty: the default
	NoHandOff       bool      // the endpoint takes no hand-off, so a decode rank must prefill, too
	Disaggregate    string    // DisaggregateAuto, Always or Never; empty: as configured
	ToPrefill       string    // id of the prefill engine; empty: any
	ToDecode        []int32   // decode ranks of which one must serve the request; nil: any
}

func (o *Options) namesEngines() bool { return o.ToPrefill != "" || o.ToDecode != nil }

// onPanic must be deferred directly, by code that holds a resource which no other code would give
// back yet. It panics again after giveBack, and package edge recovers.
func onPanic(giveBack func()) {
	if v := recover(); v != nil {
		giveBack()
		panic(v)
	}
}

// step reports an event to the lifecycle under the job's mutex.
func (j *job) step(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stepLocked(event, effects)
}

// stepLocked does what step does, for callers that hold the job's mutex.
func (j *job) stepLocked(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	effects = j.life.Step(event, effects)
	j.recorder.Step(event, effects)
	return effects
}

// enterPhase: call names the call to an engine that begins with the phase; empty: none.
func (j *job) enterPhase(phase journal.Phase, call string) {
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: phase, Left: j.client.Left(), Call: call})
}

// noteEnginesFreeIfLeft lets the record show how long engines held something for a client that was
// gone.
func (j *job) noteEnginesFreeIfLeft() {
	if j.client.Left() {
		j.record.Report(journal.Event{Kind: journal.Freed, At: j.client.GoneAt()})
	}
}

// bodyIsKept: the lifecycle must know this (Copied), because it says when to give the memory back.
func bodyIsKept(j *job) bool { return j.resume.chargedBytes > 0 }

// letAbort lets the client end a job by name. If no engine ends the answer, the job ends as if
// share had left.
func letAbort(j *job, share *edge.CloseNotifier, outputMode []byte) *abortByName {
	j.namedAbort = &abortByName{endpoint: j.req.Endpoint, endAsIfClientLeft: share.MarkGone, outputMode: outputMode}
	j.filterOptions.Aborted = j.namedAbort.requested.Load // an early end of the answer is then a good one
	return j.namedAbort
}

// failedOnlyByAbort: the client of conn still waits, but has ended the request by name, so the job
// has the status of a client that has left.
func failedOnlyByAbort(j *job, conn client, fail *openai.Error) bool {
	return j.namedAbort.endedByClient() && !conn.Left() && fail.Status == failure.ClientGone.Status
}

// leftError: a client that ended its request by name still has its connection, so it gets an error
// of its own.
func leftError(j *job) *openai.Error {
	if j.namedAbort.endedByClient() {
		return errNotAborted
	}
	return failure.ClientGone
}
