package geo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

// startProber makes the link to a peer and starts the peer's prober, which sends its first probe at once. It runs until stopProbing or
// the end of Peers. startProber is called with ps.mu held.
func (ps *Peers) startProber(p *peer) {
	p.ctx, p.cancel = context.WithCancel(ps.ctx)
	if ps.cfg.Link != nil {
		p.link = ps.cfg.Link(p.conf.ID)
	} else {
		p.link = ps.linkOverHTTP(p)
	}
	ps.running.Add(1) // proberEnded calls Done
	const firstSeq = 1
	p.cancelNext = ps.clock.After(0, func() { ps.sendProbe(p, firstSeq) })
}

// stopProbing stops the prober of a peer. A question that is under way is aborted, and the prober ends once scheduleProbe is called after
// it. stopProbing is called with ps.mu held.
func (ps *Peers) stopProbing(p *peer) {
	p.cancel()          // ends p.ctx: this aborts a question that is under way, and shows scheduleProbe that the prober was stopped
	if p.cancelNext() { // the next question was not sent yet, and will not be: scheduleProbe is not called any more
		ps.proberEnded(p)
	}
}

// proberEnded closes the link to a peer at the end of the peer's prober. Peers.Close waits for the ends of all probers.
func (ps *Peers) proberEnded(p *peer) {
	p.link.Close()
	ps.running.Done()
}

// scheduleProbe schedules the next question to a peer in about one interval. If the prober was stopped, it ends the prober instead.
func (ps *Peers) scheduleProbe(p *peer, seq uint64) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p.ctx.Err() != nil {
		ps.proberEnded(p)
		return
	}
	wait := float64(ps.cfg.Probe.Interval) * (0.9 + 0.2*ps.clock.Spread()) // random, within 10 % of the interval
	p.cancelNext = ps.clock.After(time.Duration(wait), func() { ps.sendProbe(p, seq) })
}

// sendProbe sends one question, with the number seq, to a peer. When the answer has come, or none came in time, it applies the outcome,
// wakes the arrival queue and schedules the next question.
func (ps *Peers) sendProbe(p *peer, seq uint64) {
	ps.mu.Lock()
	rtt, _ := p.rtt.Ms()
	ps.mu.Unlock()
	// A far peer gets at least three round trips.
	limit := max(ps.cfg.Probe.Interval, 500*time.Millisecond, time.Duration(3*rtt*float64(time.Millisecond)))
	sent := ps.clock.Now()
	// The question has only strings and numbers, so that Marshal never fails.
	body, _ := json.Marshal(question{
		Version: version, ID: ps.cfg.Self.ID, Boot: ps.process.nameAt(sent), Seq: seq, SentUs: sent.UnixMicro(),
	})
	p.link.Ask(p.ctx, body, limit, func(outcome ProbeOutcome) {
		if isUp := ps.applyOutcome(p, seq, sent, outcome); isUp {
			if err := p.link.Warm(p.ctx, limit); err != nil && !errors.Is(err, context.Canceled) {
				ps.cfg.Log.Debug("no idle connection to a peer", zap.String("peer", p.id), zap.Error(err))
			}
		}
		ps.cfg.Queue.Wake() // waiting requests may be forwarded now, or must be served here now
		ps.scheduleProbe(p, seq+1)
	})
}

// applyOutcome applies the outcome of a question to the peer's state, and reports whether the peer is up. It passes a good answer on to
// OnProbe, and logs when the peer comes up, goes down or begins to refuse questions. When the peer goes down, applyOutcome also abandons
// the forwards that are at the peer.
func (ps *Peers) applyOutcome(p *peer, seq uint64, sent time.Time, outcome ProbeOutcome) (up bool) {
	a, err := answer{}, outcome.Err
	if err == nil {
		a, err = readAnswer(outcome.Text)
	}
	if err == nil {
		err = ps.checkAnswer(p, &a, seq)
	}
	now := ps.clock.Now()
	ps.mu.Lock()
	if p.removed { // the peer was removed while the question was under way
		ps.mu.Unlock()
		return false
	}
	p.isSelf = errors.Is(err, errSelf)
	var changed bool                                                        // the peer came up or went down
	var lost []*Forward                                                     // forwards at a peer that went down, in booking order
	newRefusal := errors.Is(err, errRefused) && p.probeError != err.Error() // a repeated error is not logged again
	if err == nil {
		changed = p.applyAnswer(&a, now, outcome, ps.sinceStartMs(sent))
	} else if changed = p.countMiss(err.Error(), ps.cfg.Probe.Misses); changed {
		lost = slices.SortedFunc(maps.Keys(p.inflight), func(a, b *Forward) int { return cmp.Compare(a.number, b.number) })
	}
	up = p.up
	ps.recordAvailability(p, now)
	ps.mu.Unlock()
	if err == nil && ps.cfg.OnProbe != nil {
		ps.cfg.OnProbe(ProbeReport{Peer: a.ID, Region: p.conf.Region, Tenure: a.Tenure, RTTMs: a.RTTMs})
	}
	if newRefusal {
		ps.cfg.Log.Warn("a peer refuses the probes of this proxy", zap.String("peer", p.id), zap.Error(err))
	}
	if changed && up {
		ps.cfg.Log.Info("a peer is up", zap.String("peer", p.id), zap.String("boot", a.Boot), zap.String("version", a.Version))
	} else if changed {
		ps.cfg.Log.Warn("a peer is down", zap.String("peer", p.id), zap.Error(err))
		for _, f := range lost {
			f.abandon(causeDown)
		}
	}
	return up
}

// errSelf is the error for a probe that came back to this proxy.
var errSelf = fmt.Errorf("%w: the address is this proxy's own", ErrProbe)

// checkAnswer returns an error unless the answer comes from this peer and belongs to this question.
func (ps *Peers) checkAnswer(p *peer, a *answer, seq uint64) error {
	ownProcess := ps.process.nameAt(ps.clock.Now()) // the name changes if the wall clock is set back
	switch {
	case a.Boot == ownProcess || a.ID == ps.cfg.Self.ID: // this process has answered, or an earlier one of this proxy
		return errSelf
	case !p.conf.AnswersTo(a.ID):
		return fmt.Errorf("%w: it calls itself %q, and geo.peers %q; set geo.self.id there or the peer's id here", ErrProbe, a.ID, p.conf.ID)
	case a.Seq != seq:
		return fmt.Errorf("%w: to question %d, not %d", ErrProbe, a.Seq, seq)
	}
	return nil
}

// AnswerProbe answers a probe that a peer sent, which arrived at the time arrival. It does not check the peer's version, because the
// peer checks the version in the answer.
func (ps *Peers) AnswerProbe(body []byte, arrival time.Time) ([]byte, *Refusal) {
	var q question
	isProbe := len(body) <= maxProbe && json.Unmarshal(body, &q) == nil && major(q.Version) >= 0 // major is -1 for text that is no version
	if !isProbe {
		return nil, refuse(http.StatusBadRequest, RejectVersion, "this is no probe of a proxy")
	}
	a := answer{Version: version, ID: ps.cfg.Self.ID, Region: ps.cfg.Self.Region, Boot: ps.process.nameAt(arrival), Seq: q.Seq,
		Draining: ps.cfg.Draining(), Models: ps.localOffers()}
	if ps.cfg.Tenure != nil { // regions or groups have owners; the round trips tell which peer is nearest and takes a region over
		a.Tenure = ps.cfg.Tenure()
		ps.mu.Lock()
		a.RTTMs = ps.roundTripsMs()
		ps.mu.Unlock()
	}
	a.ProcUs = us(ps.clock.Now().Sub(arrival))
	text, err := json.Marshal(a)
	if err != nil || len(text) > maxProbe {
		// The sender knows no reason that fits better; the message says what is wrong.
		return nil, refuse(http.StatusInternalServerError, RejectVersion, "the answer is over %d bytes; serve fewer models here", maxProbe)
	}
	return text, nil
}

// localOffers returns, for each model that this region serves, its offer for requests of other regions.
func (ps *Peers) localOffers() map[string]policy.Offer {
	all := map[string]policy.Offer{}
	ps.cfg.Queue.Offers(func(model string, l *prefill.Local) { all[model] = localOffer(ps, model, l) })
	return all
}

// localOffer returns the offer of this region for a model: how many requests its engines take now, and how long a request waits
// and is prefilled here. l is the state of this region for the model. localOffer also sets the gauges of the metrics.
func localOffer(ps *Peers, model string, l *prefill.Local) policy.Offer {
	running, maxRunning := ps.cfg.Running(model) // requests on the least busy decode rank; how many all ranks can run at once
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := ps.stateOf(model)
	settings := roundSettings(&s.policy, l) // made anew for each offer, as for each round, because a setting may follow the traffic
	decodes := maxRunning > 0
	// nil: a list of its own, because s.candidates is that of a round.
	candidates := localCandidates(nil, &settings, l, running, decodes)
	departureGapMs := s.departureGap.Ms() // mean time between two departures of requests from the arrival queue
	o := policy.NewOffer(candidates, l.Waiting, float64(l.Tokens), departureGapMs, maxRunning)
	// FitN tells operators from how many prefills the engines' prefill times were learned. It is the number of the engine with the
	// most.
	for i := range l.Prefillers {
		o.FitN = max(o.FitN, l.Prefillers[i].Samples)
	}
	ps.metrics.available.WithLabelValues(model).Set(float64(o.NAvail))
	ps.metrics.queue.WithLabelValues(model).Set(float64(l.Waiting))
	return o
}

// roundTripsMs returns the round trips to the peers in ms, by name. It is called with ps.mu held.
func (ps *Peers) roundTripsMs() map[string]float64 {
	all := map[string]float64{}
	for _, p := range ps.peers {
		if ms, ok := p.rtt.Ms(); ok && p.name != "" { // otherwise the peer has not answered yet
			all[p.name] = ms
		}
	}
	return all
}
