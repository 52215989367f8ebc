package geo

import (
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"
)

// A Door decides which requests on the peer listener are another dispatcher's.
type Door struct {
	self    string
	maxHops int
	skew    time.Duration
	keys    atomic.Pointer[Keys] // nil: none are asked for
	nonces  *nonces
	known   func(id string) (sans []string, ok bool)
}

// Refusal is why the door stays shut.
type Refusal struct {
	Status  int
	Reject  string // of RejectHeader
	Message string
}

func refuse(status int, reject, format string, args ...any) *Refusal {
	return &Refusal{status, reject, fmt.Sprintf(format, args...)}
}

// Knock is what a request on the peer listener shows.
type Knock struct {
	Message
	Hop, Signature string   // headers, empty if there are none
	Names          []string // URI and DNS names of its certificate, which was verified
	Certified      bool     // it has one
}

// Glance refuses by its head what Open would refuse whatever its body is, so
// that a body of which no dispatcher is the sender is not read.
func (d *Door) Glance(k *Knock, now time.Time) *Refusal {
	h, err := ParseHop(k.Hop)
	if err != nil {
		return refuse(http.StatusLoopDetected, RejectHop, "this listener is for other dispatchers; clients have their own")
	}
	if _, ok := d.known(h.Sender()); !ok {
		return refuse(http.StatusForbidden, RejectPeer, "no such peer")
	}
	if keys := d.keys.Load(); keys != nil {
		switch {
		case !keys.known(k.Signature):
			return refuse(http.StatusUnauthorized, RejectSignature, "the signature is not that of a known key")
		case now.Sub(millis(h.Time)).Abs() > d.skew:
			return refuse(http.StatusUnauthorized, RejectStale, "sent too long ago, or in the future; set the clocks")
		}
	}
	return nil
}

// Open checks who sent a request, and then whether it may have come this way.
// With keys a signature is needed, with a certificate the peer's own name in
// it; the listener sees to it that there is one of both (geo R23).
func (d *Door) Open(k *Knock, now time.Time) (Hop, *Refusal) {
	h, err := ParseHop(k.Hop)
	if err != nil {
		return h, refuse(http.StatusLoopDetected, RejectHop, "%v", err)
	}
	keys := d.keys.Load()
	if keys == nil && !k.Certified {
		return h, refuse(http.StatusUnauthorized, RejectSignature, "neither a certificate nor a signature; set geo.tls or geo.hmac on both sides")
	}
	if keys != nil {
		age := now.Sub(millis(h.Time)).Abs()
		switch {
		case !keys.Signed(k.Signature, &k.Message, &h):
			return h, refuse(http.StatusUnauthorized, RejectSignature, "the signature is not that of a known key; use the same keys on both sides")
		case age > d.skew:
			return h, refuse(http.StatusUnauthorized, RejectStale, "sent %v ago by the sender's clock, and %v is believed; set the clocks", age.Round(time.Millisecond), d.skew)
		case !d.nonces.first(h.Nonce, now):
			return h, refuse(http.StatusUnauthorized, RejectSignature, "the nonce was used before")
		}
	}
	sans, ok := d.known(h.Sender())
	if !ok {
		return h, refuse(http.StatusForbidden, RejectPeer, "no peer is named %q; list it under geo.peers", h.Sender())
	}
	if k.Certified && !slices.ContainsFunc(k.Names, func(n string) bool { return slices.Contains(sans, n) }) {
		return h, refuse(http.StatusForbidden, RejectPeer, "the certificate is not that of peer %q; see its san", h.Sender())
	}
	if _, ok := d.known(h.Origin); !ok || h.Origin != h.Via[0] {
		return h, refuse(http.StatusForbidden, RejectPeer, "the origin %q is no peer, or not the first of via", h.Origin)
	}
	switch {
	case slices.Contains(h.Via, d.self):
		return h, refuse(http.StatusLoopDetected, RejectHop, "the request was here before")
	case h.N > h.Max || h.N != len(h.Via):
		return h, refuse(http.StatusLoopDetected, RejectHop, "it has made %d hops of %d", h.N, h.Max)
	case h.Max > d.maxHops:
		return h, refuse(http.StatusLoopDetected, RejectHop, "it may make %d hops and %d are allowed here; set geo.max_hops alike", h.Max, d.maxHops)
	}
	return h, nil
}
