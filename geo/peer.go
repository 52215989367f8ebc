package geo

import (
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/geo/policy"
	"evenkeel/prefill/index"
)

// answersUntilUp is how many answered probes in a row bring a peer up again.
const answersUntilUp = 2

// newPeer also makes the peer's series.
func (ps *Peers) newPeer(conf *PeerConfig, id string, target *engine.Target) *peer {
	p := &peer{
		conf: conf, id: id, target: target, rtt: policy.NewRTT(rttAlpha), inflight: map[*Forward]struct{}{},
		offers: map[string]policy.Offer{}, reasons: map[string]policy.Reason{}, egress: &spending{},
		major:   -1, // not known yet
		sibling: ps.cfg.Siblings && conf.Region == ps.cfg.Self.Region,
	}
	p.prompts = index.New(index.Config{MaxBytes: ps.maxPromptBytes, Evict: index.Oldest})
	const unknownCapacity = 0 // of the peer's region
	p.indexSlot = p.prompts.Add(id, unknownCapacity)
	ps.metrics.createPeerSeries(id)
	return p
}

func (p *peer) forgetProcessState() {
	p.reserved.Clear()
	p.prompts.Clear(p.indexSlot, index.Removed)
}

// applyAnswer: the answer counts all requests that were written before sentMs. If another process
// answers, state of the one before is dropped.
func (p *peer) applyAnswer(a *answer, now time.Time, outcome ProbeOutcome, sentMs float64) (cameUp bool) {
	if p.boot != a.Boot {
		if p.boot != "" {
			p.forgetProcessState()
			p.answersInRow, p.circuit = 0, circuit.Circuit{}
		}
		p.boot = a.Boot
	}
	p.name, p.major, p.draining, p.offers, p.decodedModels = a.ID, major(a.Version), a.Draining, a.Models, a.Decodes
	p.probed, p.lastAnsweredAt, p.missesInRow, p.probeError = true, now, 0, ""
	// It cannot have computed for longer than the whole trip.
	procUs := min(a.ProcUs, us(outcome.RoundTrip))
	p.rtt.Add(ms(outcome.RoundTrip), procUs, outcome.Dialled)
	p.reserved.DropCounted(sentMs)
	p.answersInRow++
	if !p.up && p.answersInRow >= answersUntilUp {
		p.up = true
		return true
	}
	return false
}

func (p *peer) countMiss(probeError string, missesUntilDown int) (wentDown bool) {
	p.answersInRow, p.probeError = 0, probeError
	p.missesInRow++
	if p.up && p.missesInRow >= missesUntilDown {
		p.up = false
		return true
	}
	return false
}

// usable: a peer of another version answers probes, but gets no requests.
func (p *peer) usable() bool { return p.up && p.major == policy.Protocol }

// policyView: the next probe is sent one interval after an answer, so that answers are an interval
// and a round trip apart.
func (p *peer) policyView(ps *Peers, model string, now time.Time) policy.Peer {
	offer, hasOffer := p.offers[model]
	reserved, unseenTokens := p.reserved.Reserved() // not counted by the last answer
	rtt, _ := p.rtt.Ms()
	budget := ps.cfg.Egress.DailyUSD // USD per day; 0: no limit
	// By how much first tokens came too late: distrust raises the gain that a forward must promise,
	// the residual corrects predictions.
	distrustMs, residualMs := p.distrust.Ms(ps.sinceStartMs(now)), p.residual.Ms(now)
	window := p.trust.Window(ps.sinceStartMs(now))
	return policy.Peer{
		ID: p.id, Probed: p.probed, Down: !p.up,
		Major: p.major,
		AgeMs: ms(now.Sub(p.lastAnsweredAt)), IntervalMs: ms(ps.cfg.Probe.Interval) + rtt,
		Draining: p.draining, OffersModel: hasOffer && p.decodesModel(model),
		CircuitOpen: !p.circuit.Allows(now), BudgetSpent: budget > 0 && p.egress.today(now) >= budget,
		Offer: offer, RTTMs: rtt, Reserved: reserved, UnseenTokens: unseenTokens,
		DistrustMs: distrustMs, ResidualMs: residualMs,
		Unanswered: p.unanswered, Window: window,
	}
}

// expireReservations: an answer to a probe would have dropped them by now. None came, and they must
// not stay for ever.
func (p *peer) expireReservations(ps *Peers, now time.Time) {
	rtt, _ := p.rtt.Ms()
	p.reserved.Expire(ps.sinceStartMs(now), ms(ps.cfg.Probe.Interval), rtt)
}

// dropRemovedSeries keeps series of old addresses from piling up. ps.mu is held.
func (ps *Peers) dropRemovedSeries(p *peer) {
	if !p.removed || len(p.inflight) > 0 {
		return
	}
	cameBack := slices.ContainsFunc(ps.peers, func(other *peer) bool { return other != p && other.id == p.id })
	if cameBack { // with the same series
		return
	}
	ps.metrics.dropSeries("peer", p.id)
	hasOtherAddress := slices.ContainsFunc(ps.peers, func(other *peer) bool { return other.name == p.name })
	if !hasOtherAddress {
		ps.metrics.dropSeries("origin", p.name) // about requests that it forwarded here
	}
}
