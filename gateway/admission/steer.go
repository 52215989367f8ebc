package admission

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"
)

// In these headers a client states how its request is to be served.
const (
	explainHeader       = "X-Evenkeel-Explain"
	disaggregateHeader  = "X-Evenkeel-Disaggregate"
	targetPrefillHeader = "X-Evenkeel-Target-Prefill"
	targetDecodeHeader  = "X-Evenkeel-Target-Decode"
)

// longestDeadline bounds x-evenkeel-deadline-ms. It is far longer than any request waits.
const longestDeadline = 24 * time.Hour

// readRoutingHeaders reads from a request how its client wants it to be served. Every caller may
// name or end its session. Only a trusted caller may name the class, the deadline, the prefill
// policy, the engines, and whether the request is split. The result is an error if a value cannot
// be used.
func (d *Handler) readRoutingHeaders(ctx *fasthttp.RequestCtx, in *requestContext, route roster.Route, body *mooncake.Body) *openai.Error {
	h := &ctx.Request.Header
	in.readSession(h, body)
	if fail := in.readSessionEnd(h); fail != nil {
		return fail
	}
	if fail := in.readClassAndDeadline(h); fail != nil {
		return fail
	}
	in.Record.ReportScheduled(in.Batch, in.Priority, in.Deadline)
	if value := h.Peek(disaggregateHeader); len(value) > 0 && in.key.Trusted {
		in.Disaggregate = string(value)
		if !slices.Contains([]string{request.DisaggregateAuto, request.DisaggregateAlways, request.DisaggregateNever}, in.Disaggregate) {
			return openai.NewError(http.StatusBadRequest, "bad_target",
				strconv.Quote(in.Disaggregate)+" is none of the values; write auto, always or never in "+disaggregateHeader+", or leave it out")
		}
	}
	if spec := h.Peek(request.PolicyHeader); len(spec) > 0 && in.key.Trusted {
		in.PrefillPolicy = string(spec)
		if err := d.deps.Requests.Prefill.CheckPolicy(in.PrefillPolicy); err != nil {
			return openai.NewError(http.StatusBadRequest, "bad_policy", err.Error()+"; or leave "+request.PolicyHeader+" out")
		}
	}
	return d.readTargets(ctx, in, route)
}

// readSessionEnd reads whether the request is the last one of its session.
func (r *requestContext) readSessionEnd(h *fasthttp.RequestHeader) *openai.Error {
	value := h.Peek(request.SessionEndHeader)
	if len(value) == 0 {
		return nil
	}
	r.EndsSession = string(value) == "true"
	if !r.EndsSession && string(value) != "false" {
		return openai.NewError(http.StatusBadRequest, "bad_session_end",
			request.SessionEndHeader+" is "+strconv.Quote(string(value))+
				"; write true with the last request of a session, or leave it out")
	}
	return nil
}

// readSession sets the session of a request to a hash of the session's name: the value of the
// session header, or else of the first of two keys in the body that is set.
func (r *requestContext) readSession(h *fasthttp.RequestHeader, body *mooncake.Body) {
	session := h.Peek(request.SessionHeader)
	for _, key := range [...]string{"prompt_cache_key", "user"} {
		value, ok := body.Get(key)
		isText := ok && len(value) > len(`""`) && value[0] == '"' // a JSON string that is not empty
		if isText && len(session) == 0 {
			session = value
		}
	}
	if len(session) == 0 {
		return
	}
	var digest xxhash.Digest
	digest.Reset()
	_, _ = digest.WriteString(r.Record.Key) // in the hash, so that equal session names of two callers are two sessions
	_, _ = digest.Write([]byte{0})
	_, _ = digest.Write(session)
	r.Session = max(1, digest.Sum64()) // 0 means no session
}

// readClassAndDeadline reads how long a request may wait: its class (batch or online) and its
// deadline. The class is that of the key, unless a trusted caller names another one. Only a trusted
// caller, or another proxy, may give a deadline.
func (r *requestContext) readClassAndDeadline(h *fasthttp.RequestHeader) *openai.Error {
	r.Batch = r.key.Batch
	if !r.key.Trusted && r.From == nil {
		return nil
	}
	if value := h.Peek(request.ClassHeader); len(value) > 0 {
		r.Batch = string(value) == request.ClassBatch
		if !r.Batch && string(value) != request.ClassOnline {
			return openai.NewError(http.StatusBadRequest, "bad_class",
				strconv.Quote(string(value))+" is no class; write batch or online in "+request.ClassHeader+
					", or leave it out for that of your key")
		}
	}
	if value := h.Peek(request.DeadlineHeader); len(value) > 0 {
		ms, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil || ms < 1 || ms > longestDeadline.Milliseconds() {
			return openai.NewError(http.StatusBadRequest, "bad_deadline",
				fmt.Sprintf("%s must be a whole number from 1 to %d; leave it out if the first token may come at any time", request.DeadlineHeader,
					longestDeadline.Milliseconds()))
		}
		r.Deadline = r.Record.Arrival.Add(time.Duration(ms) * time.Millisecond)
	}
	return nil
}

// readTargets reads which prefill engine (ToPrefill) and which decode rank (ToDecode) a trusted
// caller wants for the request. If the decode rank also prefills, its group of ranks becomes the
// target of the prefill, whatever else the caller has named: such a rank computes its prompts
// itself.
func (d *Handler) readTargets(ctx *fasthttp.RequestCtx, in *requestContext, route roster.Route) *openai.Error {
	if id := ctx.Request.Header.Peek(targetPrefillHeader); len(id) > 0 && in.key.Trusted {
		in.ToPrefill = string(id)
		if err := d.deps.Requests.Prefill.CheckTarget(route.Name, in.ToPrefill); err != nil {
			return openai.NewError(http.StatusBadRequest, "bad_target", err.Error()+"; or leave "+targetPrefillHeader+" out")
		}
	}
	if name := ctx.Request.Header.Peek(targetDecodeHeader); len(name) > 0 && in.key.Trusted {
		engines := d.deps.Fleet.Now()
		worker, ok := engines.WorkerByName(string(name), route.Board, route.Name)
		if !ok {
			return openai.NewError(http.StatusBadRequest, "bad_target",
				strconv.Quote(string(name))+" is no decode rank for the model; GET /workers lists them; or leave "+targetDecodeHeader+" out")
		}
		in.ToDecode = []int32{worker}
		if r := engines.Rank(worker); r != nil && r.Group != "" { // only ranks that also prefill have a group here
			in.ToPrefill = r.Group
		}
	}
	return nil
}

// readLocality reads how long a request's client waits for an answer. If there are other regions,
// it also reads where the client is, and whether the request must stay in this region. If another
// proxy forwarded the request, its hop says how long it waits, and a client's header is not read:
// the signature of a forwarded request does not cover it.
func (r *requestContext) readLocality(ctx *fasthttp.RequestCtx, otherRegions bool) {
	if otherRegions {
		r.Address = ctx.RemoteIP().String()
		r.NeverForward = string(ctx.Request.Header.Peek(request.GeoHeader)) == request.GeoLocal
	}
	if r.From == nil {
		r.ClientGivesUpAt = patienceOf(&ctx.Request.Header, r.Record.Arrival)
	}
}

// patienceOf returns when the client gives up waiting for the first byte. The OpenAI libraries send
// this time in seconds; zero: the client did not send it.
func patienceOf(h *fasthttp.RequestHeader, arrival time.Time) time.Time {
	for _, name := range [...]string{"X-Stainless-Read-Timeout", "X-Stainless-Timeout"} {
		value := h.Peek(name)
		if len(value) == 0 {
			continue
		}
		seconds, err := strconv.ParseFloat(string(value), 64)
		if err == nil && seconds > 0 && seconds < 1e6 { // 0 means no timeout, and a million seconds are as good as none
			return arrival.Add(time.Duration(seconds * float64(time.Second)))
		}
	}
	return time.Time{}
}
