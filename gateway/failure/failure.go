// Package failure makes the errors that clients get when an engine, a queue or this proxy did not serve a request.
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

// The errors that are the same for every request. No code changes them.
var (
	NoError       = new(openai.Error) // the error value of an answer that is whole, so without an error
	ClientGone    = openai.NewError(journal.StatusClientClosed, "client_closed", "the client left")
	InternalError = openai.NewError(http.StatusInternalServerError, "internal_error", "internal error; the request may be tried again")
	NotOurs       = openai.Unavailable(geo.RejectOwner, "another proxy admits to the decode group now; send the request again", 1)
	Leaving       = openai.Unavailable("draining", "this proxy is shutting down; use another", 1)
	Deadline      = openai.Unavailable("deadline_unmet", // the request is refused before its prefill, which would be wasted
		"the first token could not have come by x-evenkeel-deadline-ms, so nothing was computed; give the request more time, or send it later", 1)
	// LateKV is the error if a decode engine began its answer so late that its KV may have been another prompt's.
	LateKV = openai.NewError(http.StatusGatewayTimeout, "decode_timeout",
		"the decode engine was silent for so long that its answer could be made of another prompt's KV; send the request again")
	// NoRoute is the error of a request that should be passed through, but whose endpoint no engine has.
	NoRoute = openai.NewError(http.StatusNotFound, "no_such_route",
		"no engine that serves the model has this endpoint; it is one of another kind of model")
	noLocal = openai.Unavailable("decode_unavailable", "no decode engine that may compute this prompt alone has room for it; retry later", 1)
)

// NoLocalRank is the error of a request that needs a decode rank that also computes its prompt, and that got no such rank. clientLeft says
// that the client has left. lastError is the error of the last attempt; nil: there was none.
func NoLocalRank(clientLeft bool, lastError *openai.Error) *openai.Error {
	if clientLeft {
		return ClientGone
	}
	return cmp.Or(lastError, noLocal)
}

// BadGateway is the 502 error of a request whose engine failed, and that gets no retry. side says which engine: prefill, decode or Engine.
// why says how it failed.
func BadGateway(side, why string) *openai.Error {
	return openai.NewError(http.StatusBadGateway, side+"_failed", sideName(side)+" failed: "+why)
}

// Engine is the side of an engine that serves requests alone, so that it is neither a prefill nor a decode engine.
const Engine = "engine"

// Unserved is the 503 error if no prefill engine or no decode engine (side) of a model is up. states describes these engines; empty:
// nothing is known. If noSides is set, each engine of the model computes prompts and writes answers, so there are no sides.
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

// Incomplete is the 503 error if all that could serve a model is a group whose engines wait for one
// of them.
func Incomplete(group, model string) *openai.Error {
	return openai.Unavailable("group_incomplete",
		fmt.Sprintf("group %q waits for one of its engines, so no healthy engine serves %q", group, model), 1)
}

// sideName names an engine of a side in a message to a client.
func sideName(side string) string {
	if side == Engine {
		return "the engine"
	}
	return "the " + side + " engine"
}

// NoAnswer is the client's error for a call to an engine that failed without an answer: 503 if the engine could not be reached at all, 504
// if it was silent, else 502.
func NoAnswer(side string, err error) *openai.Error {
	switch callErr, isCall := errors.AsType[*engine.Error](err); { // isCall: the HTTP call failed, not the reading of its events
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

// NoRoomForAnswer is the error of a request whose answer is ready, but would take more memory than
// its caller may hold.
var NoRoomForAnswer = openai.Unavailable("overloaded",
	"requests and answers, of all callers or of you alone, take all the memory that they may use; read your answers, and retry later", 1)

// FromStream turns a failure that an engine reported in an event into the error that the client gets. Only a refusal of the request (4xx)
// keeps its status. A failure of the engine, or of the proxy's own API key (401 and 403), becomes 502.
func FromStream(f sse.Failure) *openai.Error {
	e := &openai.Error{Status: f.Status, Type: f.Type, Code: f.Code, Message: f.Message}
	refusesKey := f.Status == http.StatusUnauthorized || f.Status == http.StatusForbidden
	if f.Status/100 != 4 || refusesKey {
		e.Status = http.StatusBadGateway
	}
	if e.Status == http.StatusTooManyRequests {
		e.RetryAfter = 1 // seconds; an event has no Retry-After of the engine
	}
	return e
}

// causeInWords says for a client how a call failed. It names no addresses, which only the log may have: so of an *engine.Error, whose
// text has the address of the engine, it uses only the kind.
func causeInWords(err error) string {
	switch callErr, isCall := errors.AsType[*engine.Error](err); {
	case !isCall: // the proxy's own words, for example about an event that is not valid
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

// ErrUndelivered is in the error of an attempt whose KV did not get from the prefill engine to the decode engine. This is never the
// request's fault, even if it happens with many engines.
var ErrUndelivered = errors.New("KV did not arrive")

// undelivered has the words in SGLang's messages (0.5.23) about KV that did not arrive. They are from prepare_abort in
// disaggregation/prefill.py and decode.py, and from KVTransferError in disaggregation/common/conn.py.
var undelivered = []string{"KVTransferError", "transfer failed", "handshake failed", "bootstrap failed", "KVPoll.Bootstrapping"}

// MarkUndelivered adds ErrUndelivered to err if the engine's message is about KV that did not arrive. It returns any other err unchanged.
func MarkUndelivered(err error, message string) error {
	if slices.ContainsFunc(undelivered, func(words string) bool { return strings.Contains(message, words) }) {
		return fmt.Errorf("%w: %w", err, ErrUndelivered)
	}
	return err
}

// RelayedRefusal is the error that gives a client an engine's own answer, byte for byte.
func RelayedRefusal(status int, resp *engine.Response, body []byte) *openai.Error {
	e := &openai.Error{
		Status: status, Code: "engine_refused", Raw: body, ContentType: string(resp.ContentType()),
		// The message is the text of the error event, if the stream of the answer has begun.
		Message: fmt.Sprintf("an engine refused the request with status %d", status),
	}
	if e.Raw == nil { // a body that is empty, but not nil, makes the client get the empty body of the engine
		e.Raw = []byte{}
	}
	if status == http.StatusTooManyRequests { // the client is told to wait, even if the engine named no time
		e.RetryAfter = max(1, RetryAfter(resp))
	}
	return e
}

// RefusalBody reads the body of an answer with an error status: at most maxErrorBody bytes, for at most refusalTimeout. A long or slow body
// must not delay the request, and its beginning says what is wrong.
func RefusalBody(resp *engine.Response) []byte {
	resp.SetDeadline(time.Now().Add(refusalTimeout))
	return resp.ReadUpTo(maxErrorBody)
}

const (
	maxErrorBody   = 1 << 20 // most bytes of a body that RefusalBody reads
	refusalTimeout = 5 * time.Second
)

// CorrectStatus corrects the status of an engine's refusal in two cases. On /v1/responses, SGLang answers 400 if the generation has failed.
// Its text begins with the status that a chat would have got (0.5.23, create_responses in entrypoints/openai/serving_responses.py). On
// /inference/v1/generate, vLLM answers 403 if it runs without --enable-scale-out (0.32.0, register_scale_out_api_routers in
// entrypoints/scale_out/factories.py). This means that the endpoint is missing, not that the proxy's API key is wrong.
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
	_ = json.Unmarshal(body, &answer) // a body of another form has no message
	statusText, _, hasColon := strings.Cut(answer.Error.Message, ": ")
	realStatus, err := strconv.Atoi(statusText)
	isStatus := hasColon && len(statusText) == 3 && err == nil
	ofEngine := realStatus == http.StatusTooManyRequests || realStatus >= 500 && realStatus < 600 // all others refuse the request, as 400 does
	if isStatus && ofEngine {
		return realStatus
	}
	return status
}

// PausedError is the client's error if no engine of a side was ready for its request in time. why is the reason.
func PausedError(side string, why error) *openai.Error {
	return openai.Unavailable(side+"_unavailable", sideName(side)+" takes no requests now: "+why.Error()+"; retry later", 1)
}

// RefusalError maps an engine's error status to the client's error. Most 4xx mean that the request is at fault, so the client gets the
// engine's answer unchanged. But 401 and 403 are about the proxy's own API key, and a 5xx is about the engine, so the client gets 502 or
// 503 instead. id names the engine in the log.
func RefusalError(log *zap.Logger, side, id string, status int, resp *engine.Response, body []byte) *openai.Error {
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		log.Error("ALARM: an engine refuses the API key that the proxy sends; check api_key_env of its profile", zap.String("engine", id),
			zap.Int("status", status))
		return BadGateway(side, "it refused the proxy's credential")
	case status == journal.StatusClientClosed: // the engine's client is this proxy, and it has not left
		return BadGateway(side, "it took its client for gone")
	case status/100 == 4: // the request is at fault
		return RelayedRefusal(status, resp, body)
	case status == http.StatusServiceUnavailable:
		return openai.Unavailable(side+"_unavailable", sideName(side)+" is overloaded; retry later", max(1, RetryAfter(resp)))
	default:
		return BadGateway(side, fmt.Sprintf("it answered %d", status))
	}
}

// NoSuchModel is the error of a request for a model that no engine lists.
func NoSuchModel(name string) *openai.Error {
	return &openai.Error{
		Status: http.StatusNotFound, Code: "model_not_found", Param: "model",
		Message: "the model " + strconv.Quote(name) + " does not exist; GET /v1/models lists those that do",
	}
}

// UnplacedError maps the error of a request that got no engine to the client's error. err comes from prefill.Scheduler or from the
// dispatcher. side is the side on which the request waited for an engine, and prompt is the prompt's length in tokens. noSides says that
// each engine of the model computes prompts and writes answers.
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
	case errors.Is(err, prefill.ErrBadPolicy): // a reload has removed the policy since the request was checked
		return openai.NewError(http.StatusBadRequest, "bad_policy", err.Error())
	case errors.Is(err, context.Canceled), errors.Is(err, board.ErrDraining): // the proxy shuts down
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

// RetryAfter reads an engine's Retry-After in seconds; 0: there is none, or it is a date. The result is at most an hour: an engine cannot
// plan further ahead, and a longer wait would lose the client.
func RetryAfter(resp *engine.Response) int {
	seconds, err := strconv.Atoi(string(resp.Header("Retry-After")))
	if errors.Is(err, strconv.ErrSyntax) || seconds < 0 { // a number too large for an int is no syntax error, and counts as the largest int
		return 0
	}
	return min(seconds, maxRetryAfter)
}

const maxRetryAfter = 3600 // seconds; the longest Retry-After that is taken from an engine

// DescribeContentType describes a content type for a message. It never repeats an unknown type, because an engine may write anything into
// this header.
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

// A Fault describes a call to an engine that ended without its result.
type Fault struct {
	lifecycle.CallEnd
	ClientError  *openai.Error // the client's error if there is no further attempt
	Status       int           // the status of the engine's answer; 0: there was none
	Err          error         // what failed, for the log
	BlamedEngine string        // id of the engine whose failure the monitor must hear of; empty: the monitor hears of none
	RetryAfter   time.Duration
	MostLosses   int // how often one request may lose its answer or be given back for want of KV room
}

// ErrMoved is the error of a call that was ended because its engine was taken out of service.
var ErrMoved = errors.New("the engine was taken out of service")

// NewFault makes the fault of a call that has ended with err, which may be nil.
func NewFault(end lifecycle.CallEnd, answer *openai.Error, err error) *Fault {
	return &Fault{CallEnd: end, ClientError: answer, Err: err}
}

// UnusableAnswer makes the fault of a call whose engine answered with status 200, but whose answer cannot be used. why is the reason,
// answer the client's error, and err the cause for the log.
func UnusableAnswer(kind lifecycle.CallKind, why lifecycle.Reason, answer *openai.Error, err error) *Fault {
	return &Fault{CallEnd: lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: why, Open: true}, ClientError: answer,
		Status: http.StatusOK,
		Err:    err}
}

// RefusedInAnswer makes the fault of a call whose engine refused the request in an answer with status 200. It returns nil if err is not
// such a refusal, or if the engine reported a failure of its own.
func RefusedInAnswer(kind lifecycle.CallKind, err error) *Fault {
	withAnswer, ok := errors.AsType[*mooncake.SaidError](err)
	if !ok {
		return nil
	}
	return FaultOfRefusal(sse.ReadFailure(withAnswer.Answer), kind, err)
}

// FaultOfRefusal makes the fault of a call that was answered with status 200 and, in the answer, with an error of its own status. It
// returns nil if the engine itself failed, and did not refuse the request.
func FaultOfRefusal(f sse.Failure, kind lifecycle.CallKind, err error) *Fault {
	answer := FromStream(f)
	isRefusal := answer.Status == f.Status && f.Status/100 == 4 // FromStream changes 401 and 403, which refuse the proxy's own key
	if !isRefusal {
		return nil
	}
	end := lifecycle.CallEnd{Call: kind, Progress: lifecycle.Headed, Reason: lifecycle.ReasonOfStatus(f.Status)}
	return &Fault{CallEnd: end, ClientError: answer, Status: f.Status, Err: err}
}

// EngineFailed says whether the call's own engine is known to have failed. If KV did not arrive, either engine may be at fault, so it is
// false.
func (f *Fault) EngineFailed() bool {
	return f != nil && f.CallEnd.EngineFailed() && !errors.Is(f.Err, ErrUndelivered)
}

// LosesHandoff says whether the call, which ended before the first event, may have lost its hand-off. Then who is to blame shows only
// from what the prefill and the decode engine did with others (package delivery). If an engine says that the KV did not arrive, this is
// so whichever of the two says it.
func (f *Fault) LosesHandoff() bool {
	return f != nil && (f.MayLoseHandoff() || errors.Is(f.Err, ErrUndelivered))
}

// Cause is why the call failed, in words for receipts and spans.
func (f *Fault) Cause() string {
	if f.Err == nil {
		return f.ClientError.Code
	}
	return f.Err.Error()
}
