package peerserver

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/engine"
	"evenkeel/gateway/certs"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// Hop says where a request on the peer listener came from.
type Hop struct {
	geo.Hop
	Tenant string
}

// checkSender checks the head of a request before its body is read. It returns a refusal if no
// known proxy sent the request; nil: the body may be read.
func (r *Peers) checkSender(h *fasthttp.RequestHeader) *edge.Refusal {
	refusal := r.peers.Verifier().CheckHead(credentialsOf(h), time.Now())
	if refusal == nil {
		return nil
	}
	r.countRejection(refusal.Reject)
	return &edge.Refusal{Status: refusal.Status, Code: refusal.Reject, Message: refusal.Message}
}

// credentialsOf reads the sender's credentials from the head of a request.
func credentialsOf(h *fasthttp.RequestHeader) *geo.Credentials {
	c := &geo.Credentials{
		Message: geo.Message{Method: string(h.Method()), Target: string(h.RequestURI())},
		Hop:     string(h.Peek(geo.HopHeader)), Signature: string(h.Peek(geo.SignatureHeader)),
	}
	for name, value := range h.All() { // also a second header of one name, so that the signature does not hold if one was added
		if geo.Covered(string(name)) {
			c.Headers = append(c.Headers, engine.Header{Name: string(name), Value: string(value)})
		}
	}
	return c
}

// warnEvery is the least time between two warnings that any caller can cause.
const warnEvery = time.Minute

// countRejection counts a refusal. It warns of a peer with another version of evenkeel, because
// only an operator can fix this, but at most once per warnEvery.
func (r *Peers) countRejection(reason string) {
	r.peers.CountRejected(reason)
	if reason != geo.RejectVersion {
		return
	}
	now := time.Now().UnixNano()
	// Of several calls at the same time, only the one that replaces the time of the last warning
	// warns.
	if lastWarned := r.warned.Load(); now-lastWarned >= int64(warnEvery) && r.warned.CompareAndSwap(lastWarned, now) {
		r.deps.Log.Warn("a proxy of another version of evenkeel calls and is refused; run the same version on both sides")
	}
}

// answerRefused answers a request that was refused before any handler saw it: by checkSender, or by
// the limits of the listener.
func (r *Peers) answerRefused(ctx *fasthttp.RequestCtx, refusal edge.Refusal) {
	r.deps.Fail(ctx, openai.NewError(refusal.Status, refusal.Code, refusal.Message))
	byVerifier := []string{geo.RejectHop, geo.RejectPeer, geo.RejectSignature, geo.RejectStale, geo.RejectVersion, geo.RejectRecipient}
	if slices.Contains(byVerifier, refusal.Code) { // the listener's own codes are no values of this header
		ctx.Response.Header.Set(geo.RejectHeader, refusal.Code)
	}
}

// handle serves the requests of other proxies: probes, questions about ownership, and forwarded
// requests of clients.
func (r *Peers) handle(ctx *fasthttp.RequestCtx) {
	arrival := time.Now()
	from, refusal := r.verify(ctx, arrival)
	if refusal != nil {
		r.reject(ctx, refusal)
		return
	}
	ctx.Response.Header.Set(geo.ServedByHeader, r.peers.ID())
	path := string(ctx.Path())
	ep := mooncake.Completions // the endpoint of a forwarded request
	switch {
	case string(ctx.Method()) != http.MethodPost:
		r.deps.Fail(ctx,
			openai.NewError(http.StatusMethodNotAllowed, "method_not_allowed", "only POST is allowed here; other proxies call this listener"))
		return
	case path == geo.ProbePath:
		answer, refusal := r.peers.AnswerProbe(ctx.PostBody(), arrival)
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
	case path == geo.VotePath:
		r.vote(ctx, from)
		return
	case path == mooncake.Chat.Path():
		ep = mooncake.Chat
	case path != mooncake.Completions.Path(): // probably a path that a newer version has
		r.reject(ctx, &geo.Refusal{Status: http.StatusNotFound, Reject: geo.RejectVersion,
			Message: "there is no such path between proxies: " + path})
		return
	}
	r.receive(ctx, ep, from, arrival)
}

// handBack answers a proxy that asks for a region or a group whose lease this proxy holds.
func (r *Peers) handBack(ctx *fasthttp.RequestCtx, from *Hop) {
	var ask geo.HandBack
	if err := json.Unmarshal(ctx.PostBody(), &ask); err != nil {
		r.deps.Fail(ctx, openai.NewError(http.StatusBadRequest, "bad_request", err.Error()))
		return
	}
	h, err := r.giveBack(from.Sender(), ask)
	switch {
	case errors.Is(err, owner.ErrNotHome): // the sender should not own what it asks for
		r.reject(ctx, &geo.Refusal{Status: http.StatusForbidden, Reject: geo.RejectPeer, Message: err.Error()})
		return
	case err != nil:
		r.deps.Fail(ctx, openai.NewError(http.StatusConflict, "not_holder", err.Error()))
		return
	}
	text, err := json.Marshal(h)
	if err != nil { // cannot happen: h has only numbers and names
		r.deps.Fail(ctx, openai.NewError(http.StatusInternalServerError, "internal", err.Error()))
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBody(text)
}

// vote answers the owner of a region or group that cannot reach the store of leases. The owner asks
// for the promise that this proxy does not take over.
func (r *Peers) vote(ctx *fasthttp.RequestCtx, from *Hop) {
	var ask geo.Vote
	if err := json.Unmarshal(ctx.PostBody(), &ask); err != nil {
		r.deps.Fail(ctx, openai.NewError(http.StatusBadRequest, "bad_request", err.Error()))
		return
	}
	if err := r.deps.Owner.Promise(from.Sender(), ask); err != nil {
		r.deps.Fail(ctx, openai.NewError(http.StatusConflict, "no_pledge", err.Error()))
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBodyString("{}")
}

// verify checks which proxy sent a request, and whether the way that the request has taken between
// proxies (its hop header) is allowed.
func (r *Peers) verify(ctx *fasthttp.RequestCtx, now time.Time) (*Hop, *geo.Refusal) {
	credentials := credentialsOf(&ctx.Request.Header)
	credentials.Body = ctx.PostBody()
	tls := ctx.TLSConnectionState()
	hasCertificate := tls != nil && len(tls.PeerCertificates) > 0
	if hasCertificate && r.deps.Config.Authority() != nil { // without an authority, nothing has verified the certificate
		credentials.Certified = true
		credentials.Names = certs.Names(tls.PeerCertificates[0])
	}
	hop, refusal := r.peers.Verifier().Verify(credentials, now)
	return &Hop{hop, string(ctx.Request.Header.Peek(geo.TenantHeader))}, refusal
}

// receive serves a forwarded request, unless this proxy takes no more requests or the request's
// deadline has passed. At the deadline it closes the connection.
func (r *Peers) receive(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *Hop, arrival time.Time) {
	remaining := time.UnixMilli(from.Deadline).Sub(arrival)
	switch {
	case r.refusing():
		r.reject(ctx, &geo.Refusal{Status: http.StatusServiceUnavailable, Reject: geo.RejectDraining,
			Message: "this region takes no new requests"})
		return
	case remaining <= 0:
		r.reject(ctx, &geo.Refusal{Status: http.StatusGatewayTimeout, Reject: geo.RejectDeadline,
			Message: "the deadline of this request has passed, so its caller does not wait any more"})
		return
	}
	if conn, ok := edge.ConnOf(ctx); ok { // at the deadline, the proxy that forwarded the request has gone on without this one
		late := time.AfterFunc(remaining, func() { _ = conn.Close() })
		defer late.Stop()
	}
	r.deps.Serve(ctx, ep, from, arrival)
}

// refusing says whether requests of other proxies are refused. While this proxy hands its groups
// over, it still serves these requests, although it already refuses those of clients.
func (r *Peers) refusing() bool { return r.deps.Service.Refusing() && !r.deps.Owner.HandingOver() }

// reject answers another proxy with a refusal. That proxy then serves the request itself.
func (r *Peers) reject(ctx *fasthttp.RequestCtx, refusal *geo.Refusal) {
	r.countRejection(refusal.Reject)
	r.deps.Fail(ctx, openai.NewError(refusal.Status, refusal.Reject, refusal.Message))
	ctx.Response.Header.Set(geo.RejectHeader, refusal.Reject)
}
