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

// A Verifier checks that a request comes from another proxy.
type Verifier struct {
	self    string
	process *process
	maxHops int
	skew    time.Duration
	keys    atomic.Pointer[Keys] // nil: no signature is required
	nonces  *nonces
	// The names that a peer's certificate may have; false: no peer has this id.
	certificateNames func(id string) (sans []string, ok bool)
}

// Refusal answers a request that the Verifier refuses.
type Refusal struct {
	Status  int
	Reject  string // value of RejectHeader
	Message string
}

func refuse(status int, reject, format string, args ...any) *Refusal {
	return &Refusal{status, reject, fmt.Sprintf(format, args...)}
}

// Credentials prove the sender of a request.
type Credentials struct {
	Message
	Body           []byte   // nil for CheckHead
	Hop, Signature string   // HopHeader and SignatureHeader; or empty
	Names          []string // URI and DNS names in the verified certificate
	Certified      bool     // it came with a certificate
}

// CheckHead runs before the body is read: a stranger's is not read at all.
func (d *Verifier) CheckHead(credentials *Credentials, now time.Time) *Refusal {
	_, refusal := d.verifyHead(credentials, now)
	return refusal
}

// Verify requires a signature, if there are keys, or else a certificate. A certificate must name
// the peer. The nonce of an accepted request counts as used.
func (d *Verifier) Verify(credentials *Credentials, now time.Time) (Hop, *Refusal) {
	h, refusal := d.verifyHead(credentials, now)
	if refusal != nil {
		return h, refusal
	}
	isSigned := d.keys.Load() != nil // verifyHead refuses a request without a good signature
	sans, _ := d.certificateNames(h.Sender())
	namesPeer := slices.ContainsFunc(credentials.Names, func(n string) bool { return slices.Contains(sans, n) })
	switch {
	case !isSigned && !credentials.Certified:
		return h, refuse(http.StatusUnauthorized, RejectSignature, "neither a certificate nor a signature; set geo.tls or geo.hmac on both sides")
	case credentials.Certified && !namesPeer:
		return h, refuse(http.StatusForbidden, RejectPeer, "the certificate is not that of peer %q; see its san", h.Sender())
	case DigestOf(credentials.Body) != h.Digest:
		// Without a signature, this only shows that the body does not belong to the header.
		return h, refuse(http.StatusUnauthorized, RejectSignature, "the body is not the one that was signed")
	case isSigned && !d.nonces.remember(h.Nonce, now):
		// This is the last check, so that a refused request uses up no nonce.
		return h, refuse(http.StatusUnauthorized, RejectSignature, "the nonce was used before")
	}
	return h, nil
}

// verifyHead checks all but body and certificate. It does not use up the nonce.
func (d *Verifier) verifyHead(credentials *Credentials, now time.Time) (Hop, *Refusal) {
	h, err := ParseHop(credentials.Hop)
	switch {
	case errors.Is(err, ErrHopVersion):
		return h, refuse(http.StatusBadRequest, RejectVersion, "%v", err)
	case err != nil: // one status for RejectHop, whether the header is unreadable, too long or a loop
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

// verifySignature checks nothing without keys.
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

// verifyPeers checks sender and origin.
func (d *Verifier) verifyPeers(h *Hop) *Refusal {
	if !d.isPeer(h.Sender()) {
		return refuse(http.StatusForbidden, RejectPeer, "no peer is named %q; list it under geo.peers", h.Sender())
	}
	if !d.isPeer(h.Origin) || h.Origin != h.Via[0] {
		return refuse(http.StatusForbidden, RejectPeer, "the origin %q is no peer, or not the first of via", h.Origin)
	}
	return nil
}

func (d *Verifier) isPeer(id string) bool {
	_, ok := d.certificateNames(id)
	return ok
}

func (d *Verifier) verifyHops(h *Hop) *Refusal {
	countIsWrong := h.N != len(h.Via)
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

// addressed: a probe's sender does not know the process yet, nor, for an entry with several
// proxies, more than the prefix of their ids. A recorded probe may be answered again, because it
// changes nothing.
func (d *Verifier) addressed(target string, h *Hop, now time.Time) bool {
	if target == ProbePath {
		return h.To == d.self || strings.HasPrefix(d.self, h.To+"-")
	}
	return h.To == d.self && h.Boot == d.process.nameAt(now)
}
