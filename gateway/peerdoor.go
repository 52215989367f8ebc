package gateway

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/request"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// hop is what a request on the peer listener showed of its way; nil for a
// client's.
type hop struct {
	geo.Hop
	tenant string
}

// stranger refuses by its head what no dispatcher sent, before its body is read.
func (r *regions) stranger(h *fasthttp.RequestHeader) *edge.Refusal {
	x := r.node.Door().Glance(knockOf(h), time.Now())
	if x == nil {
		return nil
	}
	r.rejected(x.Reject)
	return &edge.Refusal{Status: x.Status, Code: x.Reject, Message: x.Message}
}

// knockOf is what the head of a request shows.
func knockOf(h *fasthttp.RequestHeader) *geo.Knock {
	return &geo.Knock{
		Message: geo.Message{Method: string(h.Method()), Target: string(h.RequestURI()), Tenant: string(h.Peek(geo.TenantHeader))},
		Hop:     string(h.Peek(geo.HopHeader)), Signature: string(h.Peek(geo.SignatureHeader)),
	}
}

// warnEvery is the least time between two warnings that any caller can cause.
const warnEvery = time.Minute

// rejected counts a refusal, and logs those that an operator has to mend.
func (r *regions) rejected(reason string) {
	r.node.Rejected(reason)
	if reason != geo.RejectVersion {
		return
	}
	now := time.Now().UnixNano()
	if last := r.warned.Load(); now-last >= int64(warnEvery) && r.warned.CompareAndSwap(last, now) {
		r.gw.log.Warn("a dispatcher of another version of evenkeel calls and is refused; run the same version on both sides")
	}
}

// turnedAway answers what no handler saw.
func (r *regions) turnedAway(ctx *fasthttp.RequestCtx, x edge.Refusal) {
	r.gw.requests.Fail(ctx, openai.NewError(x.Status, x.Code, x.Message))
	if slices.Contains([]string{geo.RejectHop, geo.RejectPeer, geo.RejectSignature, geo.RejectStale, geo.RejectVersion, geo.RejectRecipient}, x.Code) {
		ctx.Response.Header.Set(geo.RejectHeader, x.Code)
	}
}

// handle serves the peer listener.
func (r *regions) handle(ctx *fasthttp.RequestCtx) {
	came := time.Now()
	from, refusal := r.open(ctx, came)
	if refusal != nil {
		r.reject(ctx, refusal)
		return
	}
	ctx.Response.Header.Set(geo.ServedByHeader, r.node.ID())
	path := string(ctx.Path())
	ep := mooncake.Completions
	switch {
	case string(ctx.Method()) != http.MethodPost:
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusMethodNotAllowed, "method_not_allowed", "dispatchers POST"))
		return
	case path == geo.ProbePath:
		answer, refusal := r.node.Answer(ctx.PostBody(), came)
		if refusal != nil {
			r.reject(ctx, refusal)
			return
		}
		ctx.SetContentType("application/json")
		ctx.SetBody(answer)
		return
	case path == geo.HandBackPath:
		r.handBack(ctx, from)
		return
	case path == geo.PledgePath:
		r.pledge(ctx, from)
		return
	case path == mooncake.Chat.Path():
		ep = mooncake.Chat
	case path != mooncake.Completions.Path():
		r.reject(ctx, &geo.Refusal{Status: http.StatusNotFound, Reject: geo.RejectVersion, Message: "no such path between dispatchers: " + path})
		return
	}
	r.receive(ctx, ep, from, came)
}

// handBack answers the home of a region that we hold.
func (r *regions) handBack(ctx *fasthttp.RequestCtx, from *hop) {
	var ask geo.HandBack
	if err := json.Unmarshal(ctx.PostBody(), &ask); err != nil {
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusBadRequest, "bad_request", err.Error()))
		return
	}
	h, err := r.gw.handBack(from.Sender(), ask)
	switch {
	case errors.Is(err, owner.ErrNotHome):
		r.reject(ctx, &geo.Refusal{Status: http.StatusForbidden, Reject: geo.RejectPeer, Message: err.Error()})
		return
	case err != nil:
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusConflict, "not_holder", err.Error()))
		return
	}
	text, err := json.Marshal(h)
	if err != nil { // of our own numbers and names
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusInternalServerError, "internal", err.Error()))
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBody(text)
}

// pledge answers an owner that cannot reach the store of leases.
func (r *regions) pledge(ctx *fasthttp.RequestCtx, from *hop) {
	var ask geo.Pledge
	if err := json.Unmarshal(ctx.PostBody(), &ask); err != nil {
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusBadRequest, "bad_request", err.Error()))
		return
	}
	if err := r.gw.owner.Promise(from.Sender(), ask); err != nil {
		r.gw.requests.Fail(ctx, openai.NewError(http.StatusConflict, "no_pledge", err.Error()))
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBodyString("{}")
}

// open asks the door.
func (r *regions) open(ctx *fasthttp.RequestCtx, now time.Time) (*hop, *geo.Refusal) {
	k := knockOf(&ctx.Request.Header)
	k.Body = ctx.PostBody()
	if tls := ctx.TLSConnectionState(); tls != nil && len(tls.PeerCertificates) > 0 && r.gw.config.Authority() != nil {
		k.Certified, k.Names = true, certs.Names(tls.PeerCertificates[0])
	}
	got, refusal := r.node.Door().Open(k, now)
	return &hop{got, k.Tenant}, refusal
}

// receive serves a request that another dispatcher sent: its origin has checked
// who sent it and what they may.
func (r *regions) receive(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *hop, came time.Time) {
	g := r.gw
	left := time.UnixMilli(from.Deadline).Sub(came)
	switch {
	case g.service.Refusing():
		r.reject(ctx, &geo.Refusal{Status: http.StatusServiceUnavailable, Reject: geo.RejectDraining, Message: "this region takes no new requests"})
		return
	case left <= 0:
		r.reject(ctx, &geo.Refusal{Status: http.StatusGatewayTimeout, Reject: geo.RejectDeadline, Message: "nobody waits for this any more"})
		return
	}
	if conn, ok := edge.ConnOf(ctx); ok { // the origin has gone on without us by then
		late := time.AfterFunc(left, func() { _ = conn.Close() })
		defer late.Stop()
	}
	in := g.begin(journal.Facts{ID: request.NewID(), ClientID: from.RID, Arrival: came, Key: from.tenant, Origin: from.Origin})
	in.From = &from.Hop
	ctx.Response.Header.Set("X-Request-Id", from.RID)
	in.Told.Witness(headersOf(ctx), true, ep) // another dispatcher has decided what is sampled
	if fail := g.answer(ctx, ep, in); fail != nil {
		g.requests.Refuse(ctx, in.Incoming, fail)
	}
}

// busy refuses a request for whose model too many wait here already.
func (r *regions) busy(from *geo.Hop, m fleet.Route) *openai.Error {
	if from.N >= from.Max && !r.gw.fleet.Begins(m.Board) { // it could only wait here
		return request.ErrNotOurs()
	}
	if r.node.Accepts(from.Sender(), r.gw.tier.Waiting(m.Name)) {
		return nil
	}
	return &openai.Error{Status: http.StatusServiceUnavailable, Code: geo.RejectBusy, Message: "too many requests wait in this region", RetryAfter: 1}
}

// reject answers another dispatcher so that it serves the request itself.
func (r *regions) reject(ctx *fasthttp.RequestCtx, x *geo.Refusal) {
	r.rejected(x.Reject)
	r.gw.requests.Fail(ctx, openai.NewError(x.Status, x.Reject, x.Message))
	ctx.Response.Header.Set(geo.RejectHeader, x.Reject)
}
