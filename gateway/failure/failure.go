// Package failure makes the errors that clients get when an engine, a queue or this proxy did not
// serve a request.
package failure

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// Errors that are the same for every request. No code changes them.
var (
	NoError       = new(openai.Error) // of a whole answer
	ClientGone    = openai.NewError(journal.StatusClientClosed, "client_closed", "the client left")
	InternalError = openai.NewError(http.StatusInternalServerError, "internal_error", "internal error; the request may be tried again")
	NotOurs       = openai.Unavailable(geo.RejectOwner, "another proxy admits to the decode group now; send the request again", 1)
	Leaving       = openai.Unavailable("draining", "this proxy is shutting down; use another", 1)
	Deadline      = openai.Unavailable("deadline_unmet", // before the prefill, which would be wasted
		"the first token could not have come by x-evenkeel-deadline-ms, so nothing was computed; give the request more time, or send it later", 1)
	// LateKV means that a decode engine began its answer so late that its KV may have been another
	// prompt's.
	LateKV = openai.NewError(http.StatusGatewayTimeout, "decode_timeout",
		"the decode engine was silent for so long that its answer could be made of another prompt's KV; send the request again")
	// NoRoute means that a request should be passed through, but no engine has its endpoint.
	NoRoute = openai.NewError(http.StatusNotFound, "no_such_route",
		"no engine that serves the model has this endpoint; it is one of another kind of model")
	noLocal = openai.Unavailable("decode_unavailable", "no decode engine that may compute this prompt alone has room for it; retry later", 1)
)

// NoLocalRank is the error of a request that got no decode rank to compute its prompt, too.
// lastError is that of the last attempt; nil: there was none.
func NoLocalRank(clientLeft bool, lastError *openai.Error) *openai.Error {
	if clientLeft {
		return ClientGone
	}
	return cmp.Or(lastError, noLocal)
}

// BadGateway is the 502 error of a request that gets no retry. side is prefill, decode or Engine.
func BadGateway(side, why string) *openai.Error {
	return openai.NewError(http.StatusBadGateway, side+"_failed", sideName(side)+" failed: "+why)
}

// Engine is the side of an engine that serves requests alone.
const Engine = "engine"

// Unserved is the 503 error if no engine of the side is up. states describes these engines. With
// noSides, each engine of the model computes prompts and writes answers.
func Unserved(side, model string, noSides bool, states string) *openai.Error {
	engineName := side + " engine"
	if noSides {
		side, engineName = Engine, "engine"
	}
	if states != "" {
		states = " (" + states + ")"
	}
	return openai.Unavailable(side+"_unavailable", "no healthy "+engineName+" serves "+strconv.Quote(model)+states, 1)
}

// Incomplete is the 503 error if all that could serve a model is a group that waits for an engine.
func Incomplete(group, model string) *openai.Error {
	return openai.Unavailable("group_incomplete",
		fmt.Sprintf("group %q waits for one of its engines, so no healthy engine serves %q", group, model), 1)
}

func sideName(side string) string {
	if side == Engine {
		return "the engine"
	}
	return "the " + side + " engine"
}

// NoAnswer is the client's error for a call without an answer: 503 if the engine could not be
// reached, 504 if it was silent, else 502.
func NoAnswer(side string, err error) *openai.Error {
	switch callErr, isCall := errors.AsType[*engine.Error](err); {
	// isCall says that the HTTP call failed, and not the reading of its events.
	case isCall && callErr.Phase == engine.PhaseConnect:
		return openai.Unavailable(side+"_unavailable", sideName(side)+" cannot be reached; retry later", 1)
	case isCall && callErr.Timeout, errors.Is(err, sse.ErrSilent):
		return openai.NewError(http.StatusGatewayTimeout, side+"_timeout", sideName(side)+" was silent for too long")
	}
	return BadGateway(side, causeInWords(err))
}

// StreamBroke is the error at the end of an answer that the engine broke off.
func StreamBroke(code string, err error) *openai.Error {
	return openai.NewError(http.StatusBadGateway, code, "the engine's answer broke off: "+causeInWords(err))
}

// NoRoomForAnswer means that the answer is ready, but would take more memory than its caller may
// hold.
var NoRoomForAnswer = openai.Unavailable("overloaded",
	"requests and answers, of all callers or of you alone, take all the memory that they may use; read your answers, and retry later", 1)

// FromStream makes the client's error from a failure in an event. Only a refusal of the request
// (4xx) keeps its status. A failure of the engine, or of the proxy's own API key (401 and 403),
// becomes 502.
func FromStream(f sse.Failure) *openai.Error {
	e := &openai.Error{Status: f.Status, Type: f.Type, Code: f.Code, Message: f.Message}
	refusesKey := f.Status == http.StatusUnauthorized || f.Status == http.StatusForbidden
	if f.Status/100 != 4 || refusesKey {
		e.Status = http.StatusBadGateway
	}
	if e.Status == http.StatusTooManyRequests {
		e.RetryAfter = 1 // seconds; an event has no Retry-After
	}
	return e
}

// causeInWords names no addresses to a client: of an *engine.Error, whose text has one, it uses
// only the kind.
func causeInWords(err error) string {
	switch callErr, isCall := errors.AsType[*engine.Error](err); {
	case !isCall: // the proxy's own words
		return err.Error()
	case callErr.Timeout:
		return "silence for too long"
	case errors.Is(err, engine.ErrTooLarge):
		return "more bytes than allowed"
	case errors.Is(err, engine.ErrMalformed):
		return "not valid HTTP"
	}
	return "the connection was lost"
}

// ErrUndelivered means that the KV did not get from the prefill engine to the decode engine. This
// is never the request's fault, even if it happens with many engines.
var ErrUndelivered = errors.New("KV did not arrive")

// undelivered has the words in SGLang's messages about KV that did not arrive (0.5.23):
// prepare_abort in disaggregation/prefill.py and decode.py, and KVTransferError in
// disaggregation/common/conn.py.
var undelivered = []string{"KVTransferError", "transfer failed", "handshake failed", "bootstrap failed", "KVPoll.Bootstrapping"}

// MarkUndelivered adds ErrUndelivered to err if the engine's message is about KV that did not
// arrive.
func MarkUndelivered(err error, message string) error {
	if slices.ContainsFunc(undelivered, func(words string) bool { return strings.Contains(message, words) }) {
		return fmt.Errorf("%w: %w", err, ErrUndelivered)
	}
	return err
}

// RelayedRefusal gives a client an engine's own answer, byte for byte.
func RelayedRefusal(status int, resp *engine.Response, body []byte) *openai.Error {
	e := &openai.Error{
		Status: status, Code: "engine_refused", Raw: body, ContentType: string(resp.ContentType()),
		// The message is the text of the error event, if the stream has begun.
		Message: fmt.Sprintf("an engine refused the request with status %d", status),
	}
	if e.Raw == nil { // so that the client gets the engine's empty body
		e.Raw = []byte{}
	}
	if status == http.StatusTooManyRequests { // even if the engine named no time
		e.RetryAfter = max(1, RetryAfter(resp))
	}
	return e
}

// RefusalBody reads only the beginning of a long or slow body, which must not delay the request. It
// says what is wrong.
func RefusalBody(resp *engine.Response) []byte {
	resp.SetDeadline(time.Now().Add(refusalTimeout))
	return resp.ReadUpTo(maxErrorBody)
}

const (
	maxErrorBody   = 1 << 20
	refusalTimeout = 5 * time.Second
)

// CorrectStatus corrects two statuses of refusals. On /v1/responses, SGLang answers 400 if the
// generation has failed, with the status that a chat would have got at the beginning of the text
// (0.5.23, create_responses in entrypoints/openai/serving_responses.py). On /inference/v1/generate,
// vLLM answers 403 if it runs without --enable-scale-out (0.32.0, register_scale_out_api_routers in
// entrypoints/scale_out/factories.py): the endpoint is missing, and the proxy's API key is not
// wrong.
func CorrectStatus(path string, status int, body []byte) int {
	mayLackEndpoint := status == http.StatusForbidden && path == "/inference/v1/generate"
	if mayLackEndpoint && strings.Contains(string(body), "--enable-scale-out") {
		return http.StatusNotFound
	}
	mayHideStatus := status == http.StatusBadRequest && path == "/v1/responses"
	if !mayHideStatus {
		return status
	}
	// A failed response of SGLang has a message such as "503: ...".
	var answer struct {
		Error struct{ Message string }
	}
	_ = json.Unmarshal(body, &answer) // another form has no message
	statusText, _, hasColon := strings.Cut(answer.Error.Message, ": ")
	realStatus, err := strconv.Atoi(statusText)
	isStatus := hasColon && len(statusText) == 3 && err == nil
	// All other statuses refuse the request, as 400 does.
	ofEngine := realStatus == http.StatusTooManyRequests || realStatus >= 500 && realStatus < 600
	if isStatus && ofEngine {
		return realStatus
	}
	return status
}

// PausedError means that no engine of a side was ready for its request in time.
func PausedError(side string, why error) *openai.Error {
	return openai.Unavailable(side+"_unavailable", sideName(side)+" takes no requests now: "+why.Error()+"; retry later", 1)
}

// RefusalError makes the client's error from an engine's error status. Most 4xx are the request's
// fault and passed on unchanged. 401 and 403 are about the proxy's own API key, and a 5xx is about
// the engine: 502 or 503. id is for the log.
func RefusalError(log *zap.Logger, side, id string, status int, resp *engine.Response, body []byte) *openai.Error {
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		log.Error("ALARM: an engine refuses the API key that the proxy sends; check api_key_env of its profile", zap.String("engine", id),
			zap.Int("status", status))
		return BadGateway(side, "it refused the proxy's credential")
	case status == journal.StatusClientClosed:
		// The engine's client is this proxy, and it has not left.
		return BadGateway(side, "it took its client for gone")
	case status/100 == 4:
		return RelayedRefusal(status, resp, body)
	case status == http.StatusServiceUnavailable:
		return openai.Unavailable(side+"_unavailable", sideName(side)+" is overloaded; retry later", max(1, RetryAfter(resp)))
	default:
		return BadGateway(side, fmt.Sprintf("it answered %d", status))
	}
}

// NoSuchModel is for a model that no engine lists.
func NoSuchModel(name string) *openai.Error {
	return &openai.Error{
		Status: http.StatusNotFound, Code: "model_not_found", Param: "model",
		Message: "the model " + strconv.Quote(name) + " does not exist; GET /v1/models lists those that do",
	}
}

// UnplacedError makes the client's error of a request that got no engine. err comes from
// prefill.Scheduler or from the dispatcher. prompt is in tokens; noSides is as in Unserved.
func UnplacedError(side string, err error, prompt int, model string, noSides bool) *openai.Error {
	switch full, isFull := errors.AsType[*prefill.FullError](err); {
	case isFull:
		return &openai.Error{
			Status: http.StatusTooManyRequests, Code: "queue_full", Message: "too many requests wait already; retry later", RetryAfter: 1,
			Why: fmt.Sprintf("the arrival queue of model %s is full (%s: %d)", full.Model, full.Key, full.Max),
		}
	case errors.Is(err, prefill.ErrKVExhausted):
		return openai.Unavailable("prefill_kv_exhausted", "the KV memory of all engines that compute prompts is taken; retry later", 2)
	case errors.Is(err, prefill.ErrQueueTimeout):
		return openai.Unavailable("queue_timeout", "the request waited too long for an engine that computes its prompt; retry later", 2)
	case errors.Is(err, prefill.ErrDeadline):
		return Deadline
	case errors.Is(err, prefill.ErrModelNotFound), errors.Is(err, board.ErrNotListed):
		return NoSuchModel(model)
	case errors.Is(err, prefill.ErrBadPolicy): // a reload has removed it since the check
		return openai.NewError(http.StatusBadRequest, "bad_policy", err.Error())
	case errors.Is(err, context.Canceled), errors.Is(err, board.ErrDraining):
		return Leaving
	case errors.Is(err, prefill.ErrElsewhere):
		return NotOurs
	case errors.Is(err, board.ErrTooLarge):
		return openai.NewError(http.StatusBadRequest, "prompt_too_long",
			fmt.Sprintf("the prompt's %d tokens are more than any rank's whole KV memory", prompt))
	case errors.Is(err, pool.ErrUnbound):
		return openai.Unavailable("queue_timeout", "the request waited too long for engines to serve it; retry later", 2)
	case errors.Is(err, pool.ErrTimeout), errors.Is(err, pool.ErrExpired):
		return openai.Unavailable("pool_timeout", "no rank had room in time; retry later", 2)
	}
	return Unserved(side, model, noSides, "")
}

// RetryAfter is in seconds; 0: none, or a date. At most an hour: an engine cannot plan further
// ahead, and a longer wait would lose the client.
func RetryAfter(resp *engine.Response) int {
	seconds, err := strconv.Atoi(string(resp.Header("Retry-After")))
	if errors.Is(err, strconv.ErrSyntax) || seconds < 0 { // a number too large is no syntax error
		return 0
	}
	return min(seconds, maxRetryAfter)
}

const maxRetryAfter = 3600 // seconds

// DescribeContentType never repeats an unknown type: an engine may write anything into the header.
func DescribeContentType(contentType []byte) string {
	kind, _, _ := strings.Cut(string(contentType), ";")
	switch kind = strings.TrimSpace(kind); kind {
	case "":
		return "no content type"
	case "application/json", "text/html", "text/plain":
		return "content type " + kind
	}
	return "a content type that we do not know"
}

// A Fault is how a call to an engine ended without its result.
type Fault struct {
	lifecycle.CallEnd
	ClientError  *openai.Error // the client's error if there is no further attempt
	Status       int           // the status of the engine's answer; 0: there was none
	Err          error         // what failed, for the log
	BlamedEngine string        // whose failure the monitor must hear of; empty: none
	RetryAfter   time.Duration
	MostLosses   int // how often one request may lose its answer or be given back for want of KV room
}

// ErrMoved means that the call's engine was taken out of service.
var ErrMoved = errors.New("the engine was taken out of service")

// NewFault makes the fault of a call that has ended with err, which may be nil.
func NewFault(end lifecycle.CallEnd, answer *openai.Error, err error) *Fault {
	return &Fault{CallEnd: end, ClientError: answer, Err: err}
}

// UnusableAnswer is for an answer with status 200 that cannot be used.
func UnusableAnswer(kind lifecycle.CallKind, why lifecycle.Reason, answer *openai.Error, err error) *Fault {
	return &Fault{CallEnd: lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: why, Open: true}, ClientError: answer,
		Status: http.StatusOK,
		Err:    err}
}

// RefusedInAnswer is for an answer with status 200 in which the engine refused the request; nil: it
// did not, or it failed itself.
func RefusedInAnswer(kind lifecycle.CallKind, err error) *Fault {
	withAnswer, ok := errors.AsType[*mooncake.SaidError](err)
	if !ok {
		return nil
	}
	return FaultOfRefusal(sse.ReadFailure(withAnswer.Answer), kind, err)
}

// FaultOfRefusal is for an error in an answer with status 200; nil: the engine itself failed.
func FaultOfRefusal(f sse.Failure, kind lifecycle.CallKind, err error) *Fault {
	answer := FromStream(f)
	// FromStream changes 401 and 403, which refuse the proxy's own key.
	isRefusal := answer.Status == f.Status && f.Status/100 == 4
	if !isRefusal {
		return nil
	}
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: lifecycle.ReasonOfStatus(f.Status)}
	return &Fault{CallEnd: end, ClientError: answer, Status: f.Status, Err: err}
}

// EngineFailed is false if KV did not arrive, because either engine may be at fault.
func (f *Fault) EngineFailed() bool {
	return f != nil && f.CallEnd.EngineFailed() && !errors.Is(f.Err, ErrUndelivered)
}

// LosesHandoff says whether the call may have lost its hand-off before the first event. Who is to
// blame shows only from what both engines did with others (package delivery), whichever of them
// says that the KV did not arrive.
func (f *Fault) LosesHandoff() bool {
	return f != nil && (f.MayLoseHandoff() || errors.Is(f.Err, ErrUndelivered))
}

// Cause is for receipts and spans.
func (f *Fault) Cause() string {
	if f.Err == nil {
		return f.ClientError.Code
	}
	return f.Err.Error()
}
