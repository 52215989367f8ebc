package geo

import (
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/geo/policy"
	"evenkeel/prefill/index"
)

// goodsUp is the number of answered probes in a row after which a peer counts as up again.
const goodsUp = 2

// newPeer returns a peer that was not probed yet. conf is its entry in geo.peers.
func (ps *Peers) newPeer(conf *PeerConfig, id string, target *engine.Target) *peer {
	p := &peer{
		conf: conf, id: id, target: target, rtt: policy.NewRTT(rttAlpha), inflight: map[*Forward]struct{}{},
		offers: map[string]policy.Offer{}, reasons: map[string]policy.Reason{}, major: -1, spent: &spending{},
		sibling: ps.cfg.Siblings && conf.Region == ps.cfg.Self.Region,
	}
	p.forget()
	p.prompts = index.New(index.Config{MaxBytes: ps.snapshot, Evict: index.Oldest})
	p.slot = p.prompts.Add(id, 0)
	ps.metrics.createPeerSeries(id)
	return p
}

// forget drops the state that belongs to the peer's earlier process.
func (p *peer) forget() {
	p.reserved.Forget()
	if p.prompts != nil {
		p.prompts.Clear(p.slot, index.Removed)
	}
}

// answered applies the answer to a probe. The answer counts all requests that were written before sentMs, when the probe was
// sent. If another process answers than before, answered first drops the state that belongs to the earlier process. It reports
// whether the peer came up by this answer.
func (p *peer) answered(a *answer, now time.Time, e Echo, sentMs float64) (up bool) {
	if p.boot != a.Boot {
		if p.boot != "" { // else this is the first answer of all
			p.forget()
			p.goodsInRow, p.circuit = 0, circuit.Circuit{}
		}
		p.boot = a.Boot
	}
	p.name, p.major, p.draining, p.offers, p.decoded = a.ID, major(a.Version), a.Draining, a.Models, a.Decodes
	p.probed, p.good, p.misses, p.fault = true, now, 0, ""
	p.rtt.Add(ms(e.Trip), min(a.ProcUs, us(e.Trip)), e.Dialled) // the peer cannot have computed for longer than the whole trip
	p.reserved.Answered(sentMs)
	p.goodsInRow++
	if !p.up && p.goodsInRow >= goodsUp {
		p.up = true
		return true
	}
	return false
}

// missed counts a probe without a valid answer. It reports whether the peer went down by it.
func (p *peer) missed(why string, misses int) (down bool) {
	p.goodsInRow, p.fault = 0, why
	p.misses++
	if p.up && p.misses >= misses {
		p.up = false
		return true
	}
	return false
}

// usable reports whether the peer is up and speaks this proxy's version of the protocol. A peer of another version answers
// probes, but gets no requests.
func (p *peer) usable() bool { return p.up && p.major == policy.Protocol }

// view returns the state of the peer for a policy. The next probe is sent one interval after an answer, so that the time
// between two answers is the interval plus the round trip.
func (p *peer) view(ps *Peers, model string, now time.Time) policy.Peer {
	offer, offers := p.offers[model]
	reserved, tokens := p.reserved.Reserved()
	rtt, _ := p.rtt.Ms()
	return policy.Peer{
		ID: p.id, Probed: p.probed, Down: !p.up, Major: p.major,
		AgeMs: ms(now.Sub(p.good)), IntervalMs: ms(ps.cfg.Probe.Interval) + rtt, Draining: p.draining, Offers: offers && p.decodes(model),
		CircuitOpen: !p.circuit.Allows(now), BudgetSpent: ps.cfg.Egress.DailyUSD > 0 && p.spent.add(0, now) >= ps.cfg.Egress.DailyUSD,
		Offer: offer, RTTMs: rtt, Reserved: reserved, UnseenTokens: tokens, DistrustMs: p.distrust.Ms(ps.at(now)), ResidualMs: p.residual.Ms(now),
		Unanswered: p.unanswered, Window: p.trust.Window(ps.at(now)),
	}
}

// expire drops reservations that are too old: probes have not been answered since.
func (p *peer) expire(ps *Peers, now time.Time) {
	rtt, _ := p.rtt.Ms()
	p.reserved.Expire(ps.at(now), ms(ps.cfg.Probe.Interval), rtt)
}

// forgetGone drops the metrics of a removed peer without forwards. Otherwise the metrics of old addresses would pile up. It is
// called with ps.mu held.
func (ps *Peers) forgetGone(p *peer) {
	if !p.gone || len(p.inflight) > 0 {
		return
	}
	cameBack := slices.ContainsFunc(ps.peers, func(o *peer) bool { return o != p && o.id == p.id })
	if cameBack {
		return
	}
	ps.metrics.forget("peer", p.id)
	if !slices.ContainsFunc(ps.peers, func(o *peer) bool { return o.name == p.name }) { // it has no other address
		ps.metrics.forget("origin", p.name)
	}
}
