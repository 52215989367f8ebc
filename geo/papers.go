package geo

import (
	"crypto/rand"
	"encoding/hex"
	"slices"
	"time"

	"evenkeel/engine"
)

// address names the recipient of a request: a dispatcher, and the run of its process.
type address struct{ to, boot string }

// addressOf is the address of a peer, as its last probe reported it.
func (n *Node) addressOf(p *peer) address {
	n.mu.Lock()
	defer n.mu.Unlock()
	return address{p.name, p.boot}
}

// papersOf returns the headers with the hop and its signature, which another dispatcher verifies. came is
// the hop with which the request came here; nil: it came from a client.
func (n *Node) papersOf(m *Message, body [][]byte, at address, came *Hop, rid string, now, deadline time.Time) []engine.Header {
	h := Hop{
		N: 1, Max: n.cfg.MaxHops, Origin: n.cfg.Self.ID, Via: []string{n.cfg.Self.ID}, RID: rid,
		Time: now.UnixMilli(), Nonce: newBoot(), Deadline: deadline.UnixMilli(),
		To: at.to, Boot: at.boot, Digest: DigestOf(body...),
	}
	if came != nil {
		h.N, h.Max, h.Origin, h.Via = came.N+1, came.Max, came.Origin, append(slices.Clone(came.Via), n.cfg.Self.ID)
	}
	hdr := []engine.Header{{Name: HopHeader, Value: h.String()}, {Name: TenantHeader, Value: m.Tenant},
		{Name: "Content-Type", Value: "application/json"}}
	if k := n.verifier.keys.Load(); k != nil {
		hdr = append(hdr, engine.Header{Name: SignatureHeader, Value: k.Sign(m, &h)})
	}
	return hdr
}

func newBoot() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}
