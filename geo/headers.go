package geo

import (
	"crypto/rand"
	"encoding/hex"
	"slices"
	"time"

	"evenkeel/engine"
)

// hopRecipient names the recipient of a request between proxies: the id of a proxy, and its
// process. No other process accepts the request, so that a request which was recorded on the
// network cannot be sent again to a later process. Only a probe names no process.
type hopRecipient struct{ proxy, process string }

// recipientOf names a peer, with its present process, as the recipient of a request. Both names are
// from its last answer to a probe.
func (ps *Peers) recipientOf(p *peer) hopRecipient {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return hopRecipient{proxy: p.name, process: p.boot}
}

// hopHeaders returns the headers of a request to another proxy: those of m, the hop, and the
// signature. rid is the request's id at its origin. inbound is the hop of the proxy that sent the
// request here; nil: a client sent it, or the request is this proxy's own. deadline is when this
// proxy stops waiting for the answer.
func (ps *Peers) hopHeaders(m *Message, body [][]byte, recipient hopRecipient, inbound *Hop, rid string,
	now, deadline time.Time,
) []engine.Header {
	hop := Hop{
		N: 1, Max: ps.cfg.MaxHops, Origin: ps.cfg.Self.ID, Via: []string{ps.cfg.Self.ID}, RID: rid,
		Time: now.UnixMilli(), Nonce: randomHex(), Deadline: deadline.UnixMilli(),
		To: recipient.proxy, Boot: recipient.process, Digest: DigestOf(body...),
	}
	if inbound != nil { // the request was forwarded here, so its hop is continued
		hop.N, hop.Max, hop.Origin, hop.Via = inbound.N+1, inbound.Max, inbound.Origin, append(slices.Clone(inbound.Via), ps.cfg.Self.ID)
	}
	headers := append([]engine.Header{{Name: HopHeader, Value: hop.String()}, {Name: "Content-Type", Value: "application/json"}},
		m.Headers...)
	if keys := ps.verifier.keys.Load(); keys != nil {
		headers = append(headers, engine.Header{Name: SignatureHeader, Value: keys.Sign(m, &hop)})
	}
	return headers
}

// randomHex returns 32 random hex digits, as the name of this process or as a nonce.
func randomHex() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // Read of crypto/rand never returns an error
	return hex.EncodeToString(b[:])
}
