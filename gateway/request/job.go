// Package request serves one request: it has an engine prefill the prompt, waits for a
// decode rank, relays that rank's answer, and gives back what the request took, however
// it ends. The state machine in gateway/lifecycle decides each step. Start reading at run.go,
// which carries the steps out.
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

// A job is one prompt that is to get one answer: a client's request, or one
// leg of a request that was fanned out into several. serve runs the job. The field life knows how
// far the job has come, which resources it holds, and where it may still be served.
type job struct {
	srv  *Server
	req  *openai.Request
	body mooncake.Body // empty once a decode engine has the request and no retry can need the body
	// changes are what engines get instead of parts of the body; nil: the request is passed through, or only its legs have changes.
	changes       *mooncake.Patch
	passthrough   *Passthrough    // set for a request that one engine serves alone; nil: the prompt is prefilled and decoded
	client        client          // the connection that the answer goes to
	isLeg         bool            // the job is a leg of a fan-out, so its end does not conclude the client's request
	ranElsewhere  int32           // how many proxies of this region may have run the request before they gave it back
	id            string          // the request id; the ids that engines get begin with it
	model         roster.Route    // the model that the client asked for, and its board: the decode ranks that serve it
	filterOptions sse.Options     // which parts of the engine's answer the client gets, and in which form
	incoming      *Incoming       // the client's request as it was admitted
	record        *journal.Record // the record of incoming; a leg of a fan-out has a record of its own
	namedAbort    *abortByName    // lets the client end the request by name; nil: the request has no name

	promptTokens int             // prompt tokens as an engine counted them, after a resume with the answer so far; 0: none has counted yet
	cachedTokens int             // prompt tokens that the prefill engine found in its prefix cache; -1: unknown
	ticket       *prefill.Ticket // the place of a leg that entered the arrival queue with the other legs; nil: the job enters alone
	// leaseOwner owns the leases that serve must give back or pass on; nil: the job has not entered the arrival queue yet.
	leaseOwner *prefill.LeaseOwner

	mu       sync.Mutex // held for each Step of life, because a prefill call that runs beside a decode call has a goroutine of its own
	life     lifecycle.Lifecycle
	recorder recording.Recorder
	// query asks to which dispatcher the request goes; nil: there is no other proxy, or the question is answered.
	query *geo.RoutingQuery

	unlistedAnswer *openai.Error // the error of the last engine that did not have the model; nil: there was none

	avoid avoided
	local localDecode

	maybeRead   []*handoff.Handoff // hand-offs that an engine may have read, but that led to no answer
	resume      resumption
	answered500 *answered500 // what engines that answered 500 leave to be settled; nil: none has
}

// note500 returns what engines that answered 500 leave to be settled, for one more of them.
func note500(j *job) *answered500 {
	if j.answered500 == nil {
		j.answered500 = &answered500{}
	}
	return j.answered500
}

// client is the connection that the answer goes to: an edge.Conn, or the share of a connection
// that one leg of a fan-out has.
type client interface {
	Left() bool
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

// MarshalLogObject writes the fields by which log lines name the job: its id and, if there is one, its trace id.
func (j *job) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("id", j.id)
	if j.record.TraceID != "" {
		enc.AddString("trace_id", j.record.TraceID)
	}
	return nil
}

// Passthrough is a request that goes to one engine unchanged. It takes no slot of a rank. Instead it takes a seat: the number of seats
// bounds how many such requests run at once.
type Passthrough struct {
	Engines         EngineChooser
	Path            string
	ContentType     string   // Content-Type of the body
	Body            [][]byte // nil once no engine will be sent the request again
	MaxTokens       int64    // tokens that the engine computes at most; 0: the endpoint does not run the model
	EstimatedTokens int      // tokens that count for the request if the engine reports no count
	Seat            *edge.Reservation
	Memory          *edge.Reservation // memory that is reserved for an answer in one piece
	Duration        prometheus.Observer

	triedEngines []string          // names of the engines that had the request
	chosen       roster.SoleEngine // the engine that was chosen last
	earlierFault *failure.Fault    // the fault of the call before the last one
	noEngine     *openai.Error     // why no engine can be chosen; nil: an engine was chosen
	answer       []byte            // the whole answer, if it comes in one piece
}

// EngineChooser chooses the engine for a request that is passed through.
type EngineChooser interface {
	// Choose looks for an engine that is not in tried, and returns Chosen, NoneLeft or NoRoute. It counts one more call as running on
	// the engine that it chose.
	Choose(model, path string, tried []string) (roster.SoleEngine, lifecycle.EventKind, *openai.Error)
	// AddRunning adds to the number of calls that run on an engine.
	AddRunning(instance string, calls int)
	// NoteMissingEndpoint makes Choose leave the engine out for this path for a while, because the engine does not have it.
	NoteMissingEndpoint(instance, path string)
}

// parts returns the parts of the request that make its prompt, for hashes and token counts.
func (j *job) parts() *prompt.Source {
	return &prompt.Source{Req: j.req, Body: &j.body, Changes: j.changes, Model: j.model, Resumed: j.life.Resumed()}
}

// promptHash returns a hash of the prompt. It also writes the hash into the request's record, where `evenkeel fit` finds it. It returns
// 0 if no predictor needs such hashes.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	hash := j.parts().Hash(key)
	if !j.isLeg { // the legs share one record line of the client's request, but each has a prompt of its own
		j.record.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}

// localDecode is the state of a job that a decode rank may serve without a prefill engine.
type localDecode struct {
	decided            bool             // whyLocal has decided once, so that a failed attempt on a decode rank is not repeated
	tokensNotHandedOff int              // tokens of a prompt that was not handed off, because its answer ends at once; 0: none
	boundSlot          *dispatcher.Slot // the slot that a leg got beforehand, together with the other legs; nil: it got none
	promptHashes       *prefill.Prompt  // hashes of the prompt for prefix caches, kept until the KV is on a rank; nil: none are needed
}

// resumption is what a job keeps so that another engine can continue an answer that its engine lost.
type resumption struct {
	retention    lifecycle.Retention // which parts of the request stay in memory
	method       string              // how the answer can continue, as resumeMethod returns it; empty: it can only begin anew
	promptIDs    json.RawMessage     // token ids of the prompt, as an engine reported them
	chargedBytes int64               // bytes that the job has charged to Server.resumeBytes

	promptTokens     int // tokens of the client's prompt, without any answer, as an engine counted them
	answerTokens     int // tokens of the lost answer that the next attempt sends as part of the prompt
	prefillMustCount int // prompt tokens that the prefill engine must report; 0: any number
	decodeMustCount  int // prompt tokens that the decode engine must report; 0: any number
}

// Incoming is a client's request that was admitted, with its record.
type Incoming struct {
	Record *journal.Record
	Options
	// CorrectEstimate replaces the estimated tokens that were charged to the caller's limits: tokens is how many tokens prompts and
	// answers really had. If tokens is negative, their number is not known, and the estimate stays.
	CorrectEstimate func(tokens int)
	Priority        int               // requests with a higher Priority leave the arrival queue first
	Batch           bool              // the request runs only on capacity that online requests leave free
	Deadline        time.Time         // a trusted caller wants the first token before this time; zero: it set no deadline
	Flow            string            // flows of one priority take turns in the arrival queue; empty: the caller's key is the flow
	Body            *edge.Reservation // the bytes of memory that the body is charged for
	Address         string            // network address of the client
	From            *geo.Hop          // how the request came from another proxy; nil: it came from a client
	servedBy        string            // where the request was served, as routeHeader names it; empty: not served yet
	concluded       atomic.Bool       // set by Conclude, which acts only once
	forgetName      func()            // call it when the client can no longer end the request by name; nil: the request has no name
}

// Classes of requests, as values of ClassHeader. Batch requests only use capacity that online requests leave free.
const (
	ClassBatch  = "batch"
	ClassOnline = "online"
)

// GeoLocal is the value of GeoHeader for a request that must stay in its region.
const GeoLocal = "local"

// Options are what a request asks for outside its body. Of a caller that is not trusted,
// only Session, EndsSession, ClientGivesUpAt and NeverForward are accepted.
type Options struct {
	Explain         bool      // answer headers name engine, policy and reason
	NeverForward    bool      // the request never goes to another region (see newRoutingQuery)
	Session         uint64    // hash of the session's name; 0: no session
	EndsSession     bool      // this is the session's last turn, so the session can be forgotten
	ClientGivesUpAt time.Time // when the client gives up if the answer has not begun by then; zero: unknown
	PrefillPolicy   string    // the policy that chooses the prefill engine; empty: the default
	NoHandOff       bool      // the endpoint takes no hand-off, so a decode rank must compute the prompt, too
	Disaggregate    string    // DisaggregateAuto, Always or Never; empty: as configured
	ToPrefill       string    // id of the prefill engine that must serve the request; empty: any
	ToDecode        []int32   // decode ranks of which one must serve the request; nil: any
}

// namesEngines says whether a trusted caller named the prefill engine or the decode ranks to use.
func (o *Options) namesEngines() bool { return o.ToPrefill != "" || o.ToDecode != nil }

// onPanic must be deferred directly, by code that holds a resource which no other code would give back yet. If the code panics, onPanic
// calls giveBack and panics again with the same value. Package edge recovers from that panic. Without a panic it does nothing.
func onPanic(giveBack func()) {
	if v := recover(); v != nil {
		giveBack()
		panic(v)
	}
}

// step reports an event to the request's lifecycle, appends to effects what the lifecycle wants done about it, and returns the result.
// It holds the job's mutex meanwhile.
func (j *job) step(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stepLocked(event, effects)
}

// stepLocked does what step does, for callers that hold the job's mutex. It also gives the event and its effects to the recorder.
func (j *job) stepLocked(event lifecycle.Event, effects []lifecycle.Effect) []lifecycle.Effect {
	effects = j.life.Step(event, effects)
	j.recorder.Step(event, effects)
	return effects
}

// enterPhase notes in the record that the request enters a phase. call names the call to an engine that begins with the phase; empty: no
// call begins.
func (j *job) enterPhase(phase journal.Phase, call string) {
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: phase, Left: j.client.Left(), Call: call})
}

// noteEnginesFreeIfLeft notes in the record, if the client has left, that the request holds nothing on engines any more. The record then
// shows how long engines held something for a client that was gone. If the client has not left, nothing is noted.
func (j *job) noteEnginesFreeIfLeft() {
	if j.client.Left() {
		j.record.Report(journal.Event{Kind: journal.Freed, At: j.client.GoneAt()})
	}
}

// bodyIsKept says whether the body of the request stays in memory after its answer has begun, so that a lost answer can go on. The
// lifecycle must know this (Copied in its events), because it says when to give the memory back.
func bodyIsKept(j *job) bool { return j.resume.chargedBytes > 0 }

// letAbort lets the client end a job by name, and returns the means for that: its method abort ends the job. If no engine ends the answer,
// the job ends as if share, which stands for the job's client, had left. An answer without tokens repeats outputMode (see answerAborted).
func letAbort(j *job, share *edge.CloseNotifier, outputMode []byte) *abortByName {
	j.namedAbort = &abortByName{endpoint: j.req.Endpoint, endAsIfClientLeft: share.MarkGone, outputMode: outputMode}
	j.filterOptions.Aborted = j.namedAbort.requested.Load // the filter then takes an early end of the answer for a good one
	return j.namedAbort
}

// failedOnlyByAbort says whether the job failed only because the client of conn, which still waits for the answer, has ended the request by
// name. The error of such a job has the status of a client that has left, because endAsIfClientLeft has ended the job.
func failedOnlyByAbort(j *job, conn client, fail *openai.Error) bool {
	return j.namedAbort.endedByClient() && !conn.Left() && fail.Status == failure.ClientGone.Status
}

// leftError returns the error that ends the answer of a client that has left. A client that ended its request by name counts as one that
// has left, but its connection is open, so it gets an error of its own.
func leftError(j *job) *openai.Error {
	if j.namedAbort.endedByClient() {
		return errNotAborted
	}
	return failure.ClientGone
}
