package geo

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// A Verifier checks that a request on the peer listener comes from another proxy.
type Verifier struct {
	self             string
	process          *process
	maxHops          int
	skew             time.Duration
	keys             atomic.Pointer[Keys] // nil: no signature is required
	nonces           *nonces
	certificateNames func(id string) (sans []string, ok bool) // names that the certificate of a peer may have; false: no peer has this id
}

// Refusal is the answer to a request that the Verifier refuses.
type Refusal struct {
	Status  int
	Reject  string // the value of RejectHeader
	Message string
}

// refuse makes a Refusal. reject is the value of RejectHeader.
func refuse(status int, reject, format string, args ...any) *Refusal {
	return &Refusal{status, reject, fmt.Sprintf(format, args...)}
}

// Credentials are the parts of a request on the peer listener that prove its sender.
type Credentials struct {
	Message
	Body           []byte   // nil for CheckHead, which runs before the body is read
	Hop, Signature string   // values of HopHeader and SignatureHeader; empty: missing
	Names          []string // URI and DNS names in the certificate, whose authority was verified
	Certified      bool     // the request came with a certificate
}

// CheckHead refuses a request that Verify would refuse with any body. The body of a stranger's request is therefore not read.
func (d *Verifier) CheckHead(credentials *Credentials, now time.Time) *Refusal {
	_, refusal := d.verifyHead(credentials, now)
	return refusal
}

// Verify checks which proxy sent a request, and whether the hop is allowed. The request must have a signature or a
// certificate. If there are keys, it must have a signature. If it has a certificate, this must contain a name of the peer. The nonce
// of a signed request that is accepted counts as used from then on.
func (d *Verifier) Verify(credentials *Credentials, now time.Time) (Hop, *Refusal) {
	h, refusal := d.verifyHead(credentials, now)
	if refusal != nil {
		return h, refusal
	}
	isSigned := d.keys.Load() != nil // with keys, verifyHead refuses a request without a good signature
	sans, _ := d.certificateNames(h.Sender())
	namesPeer := slices.ContainsFunc(credentials.Names, func(n string) bool { return slices.Contains(sans, n) })
	switch {
	case !isSigned && !credentials.Certified:
		return h, refuse(http.StatusUnauthorized, RejectSignature, "neither a certificate nor a signature; set geo.tls or geo.hmac on both sides")
	case credentials.Certified && !namesPeer:
		return h, refuse(http.StatusForbidden, RejectPeer, "the certificate is not that of peer %q; see its san", h.Sender())
	case DigestOf(credentials.Body) != h.Digest: // without a signature, this only shows that the body is not the one of this hop header
		return h, refuse(http.StatusUnauthorized, RejectSignature, "the body is not the one that was signed")
	case isSigned && !d.nonces.remember(h.Nonce, now): // the last check, so that a request that is refused uses up no nonce
		return h, refuse(http.StatusUnauthorized, RejectSignature, "the nonce was used before")
	}
	return h, nil
}

// verifyHead checks everything except the body and the certificate. It does not mark the nonce as used.
func (d *Verifier) verifyHead(credentials *Credentials, now time.Time) (Hop, *Refusal) {
	h, err := ParseHop(credentials.Hop)
	switch {
	case errors.Is(err, ErrHopVersion):
		return h, refuse(http.StatusBadRequest, RejectVersion, "%v", err)
	case err != nil: // all refusals for RejectHop have the same status, whether the hop header is unreadable, too long or shows a loop
		return h, refuse(http.StatusLoopDetected, RejectHop, "%v; this listener is for other proxies, clients have their own", err)
	}
	if refusal := d.verifySignature(credentials, &h, now); refusal != nil {
		return h, refusal
	}
	if refusal := d.verifyPeers(&h); refusal != nil {
		return h, refusal
	}
	if !d.addressed(credentials.Target, &h, now) {
		return h, refuse(http.StatusMisdirectedRequest, RejectRecipient,
			"it was sent to %q, or to an earlier run of %q; geo.self.id and the peer's id under geo.peers must agree",
			h.To, d.self)
	}
	return h, d.verifyHops(&h)
}

// verifySignature checks the signature, the age and the nonce of a request. Without keys, it checks nothing.
func (d *Verifier) verifySignature(credentials *Credentials, h *Hop, now time.Time) *Refusal {
	keys := d.keys.Load()
	if keys == nil {
		return nil
	}
	age := now.Sub(time.UnixMilli(h.Time)).Abs()
	switch {
	case !keys.Signed(credentials.Signature, &credentials.Message, h):
		return refuse(http.StatusUnauthorized, RejectSignature, "the signature is not that of a known key; use the same keys on both sides")
	case age > d.skew:
		return refuse(http.StatusUnauthorized, RejectStale, "sent %v ago by the sender's clock, and %v is believed; set the clocks",
			age.Round(time.Millisecond), d.skew)
	case d.nonces.used(h.Nonce):
		return refuse(http.StatusUnauthorized, RejectSignature, "the nonce was used before")
	}
	return nil
}

// verifyPeers checks that the proxy that sent the request here, and the one to which the client sent it, are peers.
func (d *Verifier) verifyPeers(h *Hop) *Refusal {
	if !d.isPeer(h.Sender()) {
		return refuse(http.StatusForbidden, RejectPeer, "no peer is named %q; list it under geo.peers", h.Sender())
	}
	if !d.isPeer(h.Origin) || h.Origin != h.Via[0] {
		return refuse(http.StatusForbidden, RejectPeer, "the origin %q is no peer, or not the first of via", h.Origin)
	}
	return nil
}

// isPeer says whether an entry of geo.peers stands for a proxy with this id.
func (d *Verifier) isPeer(id string) bool {
	_, ok := d.certificateNames(id)
	return ok
}

// verifyHops checks the way of a request between proxies: it must not come back to this proxy, and must not be longer than allowed.
func (d *Verifier) verifyHops(h *Hop) *Refusal {
	countIsWrong := h.N != len(h.Via) // the hop header contradicts itself
	switch {
	case slices.Contains(h.Via, d.self):
		return refuse(http.StatusLoopDetected, RejectHop, "the request was here before")
	case h.N > h.Max || countIsWrong:
		return refuse(http.StatusLoopDetected, RejectHop, "it has made %d hops of %d", h.N, h.Max)
	case h.Max > d.maxHops:
		return refuse(http.StatusLoopDetected, RejectHop, "it may make %d hops and %d are allowed here; set geo.max_hops alike", h.Max,
			d.maxHops)
	}
	return nil
}

// addressed reports whether the request was sent to this process of this proxy. The sender of a probe does not know the
// process yet; and if its entry of geo.peers stands for several proxies, it only knows the prefix of their ids. A probe
// changes nothing, so that answering a recorded probe again does no harm.
func (d *Verifier) addressed(target string, h *Hop, now time.Time) bool {
	if target == ProbePath {
		return h.To == d.self || strings.HasPrefix(d.self, h.To+"-")
	}
	return h.To == d.self && h.Boot == d.process.nameAt(now)
}
