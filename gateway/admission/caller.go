package admission

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/keys"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/service"
)

// Handler serves the public listener.
type Handler struct {
	soleModel func() string // the method value d.soleModelAnywhere, made once and not for each request
	deps      Deps
	routes    map[string]publicRoute
	loadPage  loadPage
}

// Deps is the part of the proxy that a Handler needs.
type Deps struct {
	Started  time.Time
	Ready    func() (ok bool, why string)
	Loads    func(ctx context.Context) []ModelLoad
	Config   *reload.Reloader
	Service  *service.Service
	Fleet    *fleet.Fleet
	Requests *request.Server // serves the requests; has the prefill tier, owner, geo node and journal
	Through  *passthrough.Server
}

// ModelLoad is how busy the proxy is with one model.
type ModelLoad struct {
	Model            string
	Running, Waiting int
	KV               float64 // share of the KV memory of all decode ranks that are up, from 0 to 1
}

// loadPage is the page of metrics for the endpoint picker of the Gateway API. Only one request at a
// time makes a new page.
type loadPage struct {
	last      atomic.Pointer[endpointText]
	beingMade atomic.Bool // a request makes a new page; makePage sets this back
}

type endpointText struct {
	made time.Time
	text []byte
}

type publicRoute struct {
	method string
	serve  func(*fasthttp.RequestCtx)
}

// refusalUnknownKey is the refusal of a caller that sends no API key, or an unknown one.
var refusalUnknownKey = edge.Refusal{
	Status: http.StatusUnauthorized, Code: "invalid_api_key",
	Message: "no or unknown API key; send Authorization: Bearer KEY, or x-api-key: KEY",
}

// keyOf finds the API key in a request's head. Anthropic's clients send the key as x-api-key, which
// is ignored if there is an Authorization header. known is false if the request has an unknown key
// or none; if no key is required, every caller is known, with the zero Key.
func (d *Handler) keyOf(h *fasthttp.RequestHeader) (key keys.Key, known bool) {
	set := d.deps.Config.Keys()
	if value := h.Peek("Authorization"); len(value) > 0 {
		return set.Authenticate(value)
	}
	return set.Find(h.Peek("X-Api-Key"))
}

// Authenticate looks only at a request's head, so that an unknown caller is refused before the body
// is read; nil: the key is known.
func (d *Handler) Authenticate(h *fasthttp.RequestHeader) *edge.Refusal {
	if _, ok := d.keyOf(h); ok {
		return nil
	}
	return &refusalUnknownKey
}

// Caller returns the name of the caller's key. The memory of request bodies is counted by that
// name.
func (d *Handler) Caller(h *fasthttp.RequestHeader) string {
	key, _ := d.keyOf(h)
	return key.Name
}

// authenticate finds the caller's API key. An unknown key is a 401.
func (d *Handler) authenticate(ctx *fasthttp.RequestCtx) (keys.Key, *openai.Error) {
	key, ok := d.keyOf(&ctx.Request.Header)
	if !ok {
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		return keys.Key{}, &openai.Error{Status: refusalUnknownKey.Status, Type: "authentication_error", Code: refusalUnknownKey.Code,
			Message: refusalUnknownKey.Message}
	}
	return key, nil
}

const priorityHeader = "X-Evenkeel-Priority"

// requestContext is a request on its way to being admitted, with the key of its caller and what the
// request has used of the key's limits.
type requestContext struct {
	*request.Incoming
	key            keys.Key
	answersCounted int // answers that count against the key's max_concurrent until stillCounting is 0
	tokensCharged  int // estimated prompt tokens that count against the key's tokens per minute until end gets the exact number

	// stillCounting is how many of two have not come yet: the end of the request, and the end of
	// its handler or, if the handler leaves an answer in one piece that is still to be written, the
	// end of that.
	stillCounting atomic.Int32
}

// applyKey sets the priority of a request. The priority header counts before the objective header,
// and both count before the priority of the API key. Only a trusted caller may send these headers.
// applyKey counts the request, and one answer, against the limits of the key. It returns an error
// if a header is invalid or a limit is reached.
func (r *requestContext) applyKey(ctx *fasthttp.RequestCtx, key keys.Key, objectives map[string]int, now time.Time) *openai.Error {
	r.key, r.Priority = key, key.Priority
	r.readGatewayHeaders(&ctx.Request.Header, objectives)
	if value := ctx.Request.Header.Peek(priorityHeader); len(value) > 0 && key.Trusted {
		priority, err := strconv.Atoi(string(value))
		if err != nil || priority < -keys.MaxPriority || priority > keys.MaxPriority {
			return openai.NewError(http.StatusBadRequest, "bad_priority",
				fmt.Sprintf("%s must be a whole number from %d to %d; leave it out for that of your key", priorityHeader, -keys.MaxPriority,
					keys.MaxPriority))
		}
		r.Priority = priority
	}
	if fail := countRequest(key, now); fail != nil {
		return fail
	}
	return r.countAnswers(1) // further answers are counted once the body has been read
}

// A gateway of the Gateway API describes a request in these headers. Each header has two names.
var (
	objectiveHeaders = [...]string{"X-Gateway-Inference-Objective", "X-Llm-D-Inference-Objective"}
	fairnessHeaders  = [...]string{"X-Gateway-Inference-Fairness-Id", "X-Llm-D-Inference-Fairness-Id"}
)

// mostFlows bounds the flows (fairness ids) of one API key, because the choice of the next request
// takes time for each flow. If a key names more flows, some of them count as one flow and share its
// turns.
const mostFlows = 256

// readGatewayHeaders reads the headers in which a trusted gateway describes a request. The
// objective header names a priority, which objectives lists. The fairness header names a flow.
// Flows take turns as if each of them were a key of its own.
func (r *requestContext) readGatewayHeaders(h *fasthttp.RequestHeader, objectives map[string]int) {
	if !r.key.Trusted {
		return
	}
	if priority, ok := objectives[string(firstHeader(h, objectiveHeaders[:]))]; ok { // an unlisted objective changes nothing
		r.Priority = priority
	}
	if flow := firstHeader(h, fairnessHeaders[:]); len(flow) > 0 {
		r.Flow = r.key.Name + "\x00" + strconv.FormatUint(xxhash.Sum64(flow)%mostFlows, 10) // another key may use the same flow name
	}
}

// firstHeader is the value of the first of the named headers that the request has; nil: it has none
// of them.
func firstHeader(h *fasthttp.RequestHeader, names []string) []byte {
	for _, name := range names {
		if value := h.Peek(name); len(value) > 0 {
			return value
		}
	}
	return nil
}

// countRequest counts one request against the requests per minute of the key. It returns an error
// if the key has no requests left.
func countRequest(key keys.Key, now time.Time) *openai.Error {
	if wait, ok := key.TakeRequest(now); !ok {
		return rateExceeded(fmt.Sprintf("key %s may send %d requests per minute; send the next later", key.Name, key.RPM), wait)
	}
	return nil
}

// countAnswers counts n more answers of the request against the key, which may have a limited
// number of answers at once. It returns 400 if this request alone asks for more than the limit, and
// 429 if other requests use the rest. letGo returns the answers.
func (r *requestContext) countAnswers(n int) *openai.Error {
	switch limit := r.key.MaxConcurrent; {
	case r.key.Acquire(n):
		r.answersCounted += n
		return nil
	case r.answersCounted+n > limit: // this request alone asks for too many, so a retry would not help
		return &openai.Error{
			Status: http.StatusBadRequest, Code: "too_many_answers",
			Message: fmt.Sprintf("this request asks for %d answers, and key %s may have %d at once; ask for fewer, or for the rest in another "+
				"request", r.answersCounted+n, r.key.Name, limit),
		}
	default:
		e := openai.NewError(http.StatusTooManyRequests, "queue_full",
			fmt.Sprintf("key %s may have %d answers at once, and this request would be beyond that; try again when some have ended", r.key.Name,
				limit))
		// ByKeyLimit: only this caller is affected. Why: the reason for operators.
		e.RetryAfter, e.ByKeyLimit, e.Why = 1, true,
			fmt.Sprintf("key %s has all the answers that it may have at once (max_concurrent in keys_file: %d)", r.key.Name, limit)
		return e
	}
}

// chargePrompt counts the estimated tokens of a request's prompts against the tokens per minute of
// the caller's key. It returns an error if too few are left. end corrects the estimate, and counts
// the tokens of the answers.
func (r *requestContext) chargePrompt(tokens int, now time.Time) *openai.Error {
	wait, ok := r.key.TakeTokens(now, tokens)
	if !ok {
		return rateExceeded(fmt.Sprintf("key %s may use %d tokens a minute, and this request needs about %d for its prompt; send it later",
			r.key.Name, r.key.TPM, tokens), wait)
	}
	r.tokensCharged = tokens
	return nil
}

// end corrects the limits of the key at the end of the request: it replaces the estimated tokens by
// the number that its prompts and answers really had. tokens below 0: the number is not known, and
// the estimate stays.
func (r *requestContext) end(tokens int) {
	if tokens >= 0 {
		r.key.AdjustTokens(time.Now(), tokens-r.tokensCharged)
	}
	r.letGo()
}

// letGo takes the request's answers off the running ones of the key, once it was called twice (see
// stillCounting).
func (r *requestContext) letGo() {
	if r.stillCounting.Add(-1) == 0 {
		r.key.Release(r.answersCounted)
	}
}

// rateExceeded is the error for a key that has exceeded a rate. wait is the time until the key may
// send again; it is rounded up to seconds.
func rateExceeded(message string, wait time.Duration) *openai.Error {
	e := openai.NewError(http.StatusTooManyRequests, "rate_limit_exceeded", message)
	e.RetryAfter, e.ByKeyLimit = max(1, int(math.Ceil(wait.Seconds()))), true
	return e
}
