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
	soleModel func() string // the method sole as a value, which is made once, not for each request
	host      Host
	routes    map[string]publicRoute
	endpoint  endpointPage
}

// Host is what a Handler needs of its proxy.
type Host struct {
	Started  time.Time
	Ready    func() (ok bool, why string)
	Loads    func(ctx context.Context) []ModelLoad
	Config   *reload.Reloader
	Service  *service.Service
	Fleet    *fleet.Fleet
	Requests *request.Server // with its tier, owner, node and journal
	Through  *passthrough.Server
}

// ModelLoad is how busy the proxy is with a model.
type ModelLoad struct {
	Model            string
	Running, Waiting int
	KV               float64 // share of the KV memory of all decode ranks that are up, from 0 to 1
}

// endpointPage is the page of endpoint metrics. One request at a time makes it anew.
type endpointPage struct {
	last atomic.Pointer[endpointText]
	busy atomic.Bool
}

type endpointText struct {
	made time.Time
	text []byte
}

type publicRoute struct {
	method string
	serve  func(*fasthttp.RequestCtx)
}

// unknownCaller is the refusal of a caller whose key is not known.
var unknownCaller = edge.Refusal{
	Status: http.StatusUnauthorized, Code: "invalid_api_key",
	Message: "no or unknown API key; send Authorization: Bearer KEY, or x-api-key: KEY",
}

// keyOf finds the key in a request's head. Anthropic's clients send it as x-api-key, which is
// ignored if there is an Authorization.
func (d *Handler) keyOf(h *fasthttp.RequestHeader) (keys.Key, bool) {
	set := d.host.Config.Keys()
	if value := h.Peek("Authorization"); len(value) > 0 {
		return set.Authenticate(value)
	}
	return set.Find(h.Peek("X-Api-Key"))
}

// Stranger refuses a request whose key is not known by its head, before its body is read; nil: the key is known.
func (d *Handler) Stranger(h *fasthttp.RequestHeader) *edge.Refusal {
	if _, ok := d.keyOf(h); ok {
		return nil
	}
	return &unknownCaller
}

// Caller is the name of the caller's key. Bodies are charged to that name.
func (d *Handler) Caller(h *fasthttp.RequestHeader) string {
	key, _ := d.keyOf(h)
	return key.Name
}

// authenticate finds the caller's key.
func (d *Handler) authenticate(ctx *fasthttp.RequestCtx) (keys.Key, *openai.Error) {
	key, ok := d.keyOf(&ctx.Request.Header)
	if !ok {
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		return keys.Key{}, &openai.Error{Status: unknownCaller.Status, Type: "authentication_error", Code: unknownCaller.Code,
			Message: unknownCaller.Message}
	}
	return key, nil
}

const priorityHeader = "X-Evenkeel-Priority"

// incoming is a request on its way to being admitted.
type incoming struct {
	*request.Incoming
	caller
}

// caller is who sent a request, and what the request holds of the caller's limits.
type caller struct {
	key     keys.Key
	booked  int // answers charged to key, given back at the end
	metered int // tokens taken of the key's minute before an engine counted them
}

// identify takes one request of the key's minute and one of its answers. It reads the
// priority that a trusted caller may give a request.
func (r *incoming) identify(ctx *fasthttp.RequestCtx, key keys.Key, objectives map[string]int, now time.Time) *openai.Error {
	r.key, r.Priority = key, key.Priority
	r.classify(&ctx.Request.Header, objectives)
	if value := ctx.Request.Header.Peek(priorityHeader); len(value) > 0 && key.Trusted {
		n, err := strconv.Atoi(string(value))
		if err != nil || n < -keys.MaxPriority || n > keys.MaxPriority {
			return openai.NewError(http.StatusBadRequest, "bad_priority",
				fmt.Sprintf("%s must be a whole number from %d to %d; leave it out for that of your key", priorityHeader, -keys.MaxPriority,
					keys.MaxPriority))
		}
		r.Priority = n
	}
	if fail := inRate(key, now); fail != nil {
		return fail
	}
	return r.book(1)
}

// The headers with which a gateway of the Gateway API says what a request is, under both of their names.
var (
	objectiveHeaders = [...]string{"X-Gateway-Inference-Objective", "X-Llm-D-Inference-Objective"}
	fairnessHeaders  = [...]string{"X-Gateway-Inference-Fairness-Id", "X-Llm-D-Inference-Fairness-Id"}
)

// mostFlows is how many flows a key may have. If there are more, some of them share their turns, because each turn looks through all
// flows.
const mostFlows = 256

// classify reads the headers in which a trusted gateway describes a request. The objective header has a name, and objectives has the
// priority for each name. The fairness header has the name of a flow. Flows take turns, as if each flow were a key of its own.
func (r *incoming) classify(h *fasthttp.RequestHeader, objectives map[string]int) {
	if !r.key.Trusted {
		return
	}
	if n, ok := objectives[string(firstHeader(h, objectiveHeaders[:]))]; ok {
		r.Priority = n
	}
	if flow := firstHeader(h, fairnessHeaders[:]); len(flow) > 0 {
		r.Flow = r.key.Name + "\x00" + strconv.FormatUint(xxhash.Sum64(flow)%mostFlows, 10) // the same name of another key is another flow
	}
}

// firstHeader is the value of the first of the named headers that the request has; nil: it has none of them.
func firstHeader(h *fasthttp.RequestHeader, names []string) []byte {
	for _, name := range names {
		if value := h.Peek(name); len(value) > 0 {
			return value
		}
	}
	return nil
}

// inRate takes one request of those that the key may send per minute. It returns an error if none is left.
func inRate(key keys.Key, now time.Time) *openai.Error {
	if wait, ok := key.Request(now); !ok {
		return tooFast(fmt.Sprintf("key %s may send %d requests per minute; send the next later", key.Name, key.RPM), wait)
	}
	return nil
}

// book charges n more answers to the caller's key, which may have a limited number at once; GiveBack returns them. It returns an error if
// that number does not suffice: 400 if this request alone asks for more, else 429.
func (r *caller) book(n int) *openai.Error {
	switch limit := r.key.MaxConcurrent; {
	case r.key.Acquire(n):
		r.booked += n
		return nil
	case r.booked+n > limit:
		return &openai.Error{
			Status: http.StatusBadRequest, Code: "too_many_answers",
			Message: fmt.Sprintf("this request asks for %d answers, and key %s may have %d at once; ask for fewer, or for the rest in another "+
				"request", r.booked+n, r.key.Name, limit),
		}
	default:
		e := openai.NewError(http.StatusTooManyRequests, "queue_full",
			fmt.Sprintf("key %s may have %d answers at once, and this request would be beyond that; try again when some have ended", r.key.Name,
				limit))
		e.RetryAfter, e.Own, e.Why = 1, true,
			fmt.Sprintf("key %s has all the answers that it may have at once (max_concurrent in keys_file: %d)", r.key.Name, limit)
		return e
	}
}

// meter takes the tokens of a request's prompts, as estimated, from those that the caller's key may use per minute. It returns an error if
// not enough are left. GiveBack corrects the estimate, and takes the tokens of the answers.
func (r *caller) meter(tokens int, now time.Time) *openai.Error {
	wait, ok := r.key.Tokens(now, tokens)
	if !ok {
		return tooFast(fmt.Sprintf("key %s may use %d tokens a minute, and this request needs about %d for its prompt; send it later", r.key.Name,
			r.key.TPM, tokens), wait)
	}
	r.metered = tokens
	return nil
}

// GiveBack settles what the request took of its key's limits, with the tokens that
// its prompts and answers had in the end.
func (r *caller) GiveBack(tokens int) {
	r.key.Release(r.booked)
	if tokens >= 0 { // below 0, they are not known, and the estimate stands
		r.key.Settle(time.Now(), tokens-r.metered)
	}
}

// tooFast is the error for a key that is over a rate. wait is how long until it may send again.
func tooFast(message string, wait time.Duration) *openai.Error {
	e := openai.NewError(http.StatusTooManyRequests, "rate_limit_exceeded", message)
	e.RetryAfter, e.Own = max(1, int(math.Ceil(wait.Seconds()))), true
	return e
}
