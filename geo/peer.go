package geo

import (
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/geo/policy"
	"evenkeel/prefill/index"
)

// answersUntilUp is the number of answered probes in a row after which a peer counts as up again.
const answersUntilUp = 2

// newPeer returns a peer that was not probed yet, and makes its series in the metrics. conf is its entry in geo.peers.
func (ps *Peers) newPeer(conf *PeerConfig, id string, target *engine.Target) *peer {
	p := &peer{
		conf: conf, id: id, target: target, rtt: policy.NewRTT(rttAlpha), inflight: map[*Forward]struct{}{},
		offers: map[string]policy.Offer{}, reasons: map[string]policy.Reason{}, egress: &spending{},
		major:   -1, // the peer's major version is not known before its first answer
		sibling: ps.cfg.Siblings && conf.Region == ps.cfg.Self.Region,
	}
	p.prompts = index.New(index.Config{MaxBytes: ps.maxPromptBytes, Evict: index.Oldest})
	const unknownCapacity = 0 // how many KV blocks the peer's region can hold is not known
	p.indexSlot = p.prompts.Add(id, unknownCapacity)
	ps.metrics.createPeerSeries(id)
	return p
}

// forgetProcessState drops what is known about the peer's earlier process: forwards that its probes did not count yet, and prompts that
// were predicted to be cached in its region.
func (p *peer) forgetProcessState() {
	p.reserved.Clear()
	p.prompts.Clear(p.indexSlot, index.Removed)
}

// applyAnswer applies the answer to a probe. The answer counts all requests that were written before sentMs, when the probe was
// sent. If another process answers than before, applyAnswer first drops the state that belongs to the earlier process. It reports
// whether the peer came up by this answer.
func (p *peer) applyAnswer(a *answer, now time.Time, outcome ProbeOutcome, sentMs float64) (cameUp bool) {
	if p.boot != a.Boot { // another process answers
		if p.boot != "" { // otherwise this is the peer's first answer
			p.forgetProcessState()
			p.answersInRow, p.circuit = 0, circuit.Circuit{}
		}
		p.boot = a.Boot
	}
	p.name, p.major, p.draining, p.offers, p.decodedModels = a.ID, major(a.Version), a.Draining, a.Models, a.Decodes
	p.probed, p.lastAnsweredAt, p.missesInRow, p.probeError = true, now, 0, ""
	procUs := min(a.ProcUs, us(outcome.RoundTrip)) // the peer cannot have computed for longer than the whole trip
	p.rtt.Add(ms(outcome.RoundTrip), procUs, outcome.Dialled)
	p.reserved.DropCounted(sentMs)
	p.answersInRow++
	if !p.up && p.answersInRow >= answersUntilUp {
		p.up = true
		return true
	}
	return false
}

// countMiss counts a probe without a valid answer. probeError says why it had none. After missesUntilDown such probes in a row the peer
// goes down; countMiss reports whether it did so now.
func (p *peer) countMiss(probeError string, missesUntilDown int) (wentDown bool) {
	p.answersInRow, p.probeError = 0, probeError
	p.missesInRow++
	if p.up && p.missesInRow >= missesUntilDown {
		p.up = false
		return true
	}
	return false
}

// usable reports whether the peer is up and speaks this proxy's version of the protocol. A peer of another version answers
// probes, but gets no requests.
func (p *peer) usable() bool { return p.up && p.major == policy.Protocol }

// policyView returns the state of the peer for a policy. The next probe is sent one interval after an answer, so that the time
// between two answers is the interval plus the round trip.
func (p *peer) policyView(ps *Peers, model string, now time.Time) policy.Peer {
	offer, hasOffer := p.offers[model]
	reserved, unseenTokens := p.reserved.Reserved() // of forwards that the peer's last answer to a probe did not count
	rtt, _ := p.rtt.Ms()
	budget := ps.cfg.Egress.DailyUSD // USD per day; 0: no limit
	// Both say, in ms, by how much first tokens came later than predicted. Distrust raises the gain that a forward must promise. The
	// residual corrects the next predictions.
	distrustMs, residualMs := p.distrust.Ms(ps.sinceStartMs(now)), p.residual.Ms(now)
	window := p.trust.Window(ps.sinceStartMs(now)) // how many requests may be unanswered at the peer; late first events make it smaller
	return policy.Peer{
		ID: p.id, Probed: p.probed, Down: !p.up,
		Major: p.major, // of the peer's protocol: a peer of another major version gets no requests
		AgeMs: ms(now.Sub(p.lastAnsweredAt)), IntervalMs: ms(ps.cfg.Probe.Interval) + rtt,
		Draining: p.draining, OffersModel: hasOffer && p.decodesModel(model),
		CircuitOpen: !p.circuit.Allows(now), BudgetSpent: budget > 0 && p.egress.today(now) >= budget,
		Offer: offer, RTTMs: rtt, Reserved: reserved, UnseenTokens: unseenTokens,
		DistrustMs: distrustMs, ResidualMs: residualMs,
		Unanswered: p.unanswered, Window: window,
	}
}

// expireReservations drops the reservations of forwards that were sent longer ago than two probe intervals and a round trip. The answer to
// a probe would have counted them, and so dropped them, within this time. No such answer came, and they must not stay for ever.
func (p *peer) expireReservations(ps *Peers, now time.Time) {
	rtt, _ := p.rtt.Ms()
	p.reserved.Expire(ps.sinceStartMs(now), ms(ps.cfg.Probe.Interval), rtt)
}

// dropRemovedSeries drops the series of a peer in the metrics, once the peer is removed and no forward is at it any more. Otherwise the
// series of old addresses would pile up. It is called with ps.mu held.
func (ps *Peers) dropRemovedSeries(p *peer) {
	if !p.removed || len(p.inflight) > 0 {
		return
	}
	cameBack := slices.ContainsFunc(ps.peers, func(other *peer) bool { return other != p && other.id == p.id })
	if cameBack { // the new peer goes on with the same series
		return
	}
	ps.metrics.dropSeries("peer", p.id)
	hasOtherAddress := slices.ContainsFunc(ps.peers, func(other *peer) bool { return other.name == p.name })
	if !hasOtherAddress {
		ps.metrics.dropSeries("origin", p.name) // the series about the requests that it forwarded here
	}
}
