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

// startProber sends the first probe at once. It runs until stopProbing or the end of Peers. ps.mu
// is held.
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

// stopProbing aborts a question under way; then scheduleProbe ends the prober. ps.mu is held.
func (ps *Peers) stopProbing(p *peer) {
	p.cancel()
	if p.cancelNext() { // scheduleProbe will not be called any more
		ps.proberEnded(p)
	}
}

// proberEnded: Peers.Close waits for the ends of all probers.
func (ps *Peers) proberEnded(p *peer) {
	p.link.Close()
	ps.running.Done()
}

// scheduleProbe ends the prober if it was stopped.
func (ps *Peers) scheduleProbe(p *peer, seq uint64) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p.ctx.Err() != nil {
		ps.proberEnded(p)
		return
	}
	// Random, within 10 % of the interval.
	wait := float64(ps.cfg.Probe.Interval) * (0.9 + 0.2*ps.clock.Spread())
	p.cancelNext = ps.clock.After(time.Duration(wait), func() { ps.sendProbe(p, seq) })
}

func (ps *Peers) sendProbe(p *peer, seq uint64) {
	ps.mu.Lock()
	rtt, _ := p.rtt.Ms()
	ps.mu.Unlock()
	// A far peer gets at least three round trips.
	limit := max(ps.cfg.Probe.Interval, 500*time.Millisecond, time.Duration(3*rtt*float64(time.Millisecond)))
	sent := ps.clock.Now()
	// Strings and numbers: Marshal never fails.
	body, _ := json.Marshal(question{
		Version: version, ID: ps.cfg.Self.ID, Boot: ps.process.nameAt(sent), Seq: seq, SentUs: sent.UnixMicro(),
	})
	p.link.Ask(p.ctx, body, limit, func(outcome ProbeOutcome) {
		if isUp := ps.applyOutcome(p, seq, sent, outcome); isUp {
			if err := p.link.Warm(p.ctx, limit); err != nil && !errors.Is(err, context.Canceled) {
				ps.cfg.Log.Debug("no idle connection to a peer", zap.String("peer", p.id), zap.Error(err))
			}
		}
		ps.cfg.Queue.Wake() // requests may be forwarded now, or must be served here
		ps.scheduleProbe(p, seq+1)
	})
}

// applyOutcome updates the peer, and logs when it comes up, goes down or begins to refuse
// questions. If it goes down, its forwards are abandoned.
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
	if p.removed { // while the question was under way
		ps.mu.Unlock()
		return false
	}
	p.isSelf = errors.Is(err, errSelf)
	var changed bool
	// The forwards at a peer that went down, in booking order.
	var lost []*Forward
	// A repeated error is not logged again.
	newRefusal := errors.Is(err, errRefused) && p.probeError != err.Error()
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

// errSelf: a probe came back to this proxy.
var errSelf = fmt.Errorf("%w: the address is this proxy's own", ErrProbe)

func (ps *Peers) checkAnswer(p *peer, a *answer, seq uint64) error {
	ownProcess := ps.process.nameAt(ps.clock.Now()) // it changes if the wall clock is set back
	switch {
	case a.Boot == ownProcess || a.ID == ps.cfg.Self.ID:
		// This process has answered, or an earlier one of this proxy.
		return errSelf
	case !p.conf.AnswersTo(a.ID):
		return fmt.Errorf("%w: it calls itself %q, and geo.peers %q; set geo.self.id there or the peer's id here", ErrProbe, a.ID, p.conf.ID)
	case a.Seq != seq:
		return fmt.Errorf("%w: to question %d, not %d", ErrProbe, a.Seq, seq)
	}
	return nil
}

// AnswerProbe does not check the peer's version: the peer checks the one in the answer.
func (ps *Peers) AnswerProbe(body []byte, arrival time.Time) ([]byte, *Refusal) {
	var q question
	// major is -1 for text that is no version.
	isProbe := len(body) <= maxProbe && json.Unmarshal(body, &q) == nil && major(q.Version) >= 0
	if !isProbe {
		return nil, refuse(http.StatusBadRequest, RejectVersion, "this is no probe of a proxy")
	}
	a := answer{Version: version, ID: ps.cfg.Self.ID, Region: ps.cfg.Self.Region, Boot: ps.process.nameAt(arrival), Seq: q.Seq,
		Draining: ps.cfg.Draining(), Models: ps.localOffers()}
	if ps.cfg.Tenure != nil { // the round trips tell which peer is nearest and takes a region over
		a.Tenure = ps.cfg.Tenure()
		ps.mu.Lock()
		a.RTTMs = ps.roundTripsMs()
		ps.mu.Unlock()
	}
	a.ProcUs = us(ps.clock.Now().Sub(arrival))
	text, err := json.Marshal(a)
	if err != nil || len(text) > maxProbe {
		// The sender knows no reason that fits better.
		return nil, refuse(http.StatusInternalServerError, RejectVersion, "the answer is over %d bytes; serve fewer models here", maxProbe)
	}
	return text, nil
}

func (ps *Peers) localOffers() map[string]policy.Offer {
	all := map[string]policy.Offer{}
	ps.cfg.Queue.Offers(func(model string, l *prefill.Local) { all[model] = localOffer(ps, model, l) })
	return all
}

// localOffer is what this region offers other regions for a model. It also sets the gauges.
func localOffer(ps *Peers, model string, l *prefill.Local) policy.Offer {
	running, maxRunning := ps.cfg.Running(model) // on the least busy decode rank; at most, on all
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := ps.stateOf(model)
	settings := roundSettings(&s.policy, l) // a setting may follow the traffic
	decodes := maxRunning > 0
	// nil: s.candidates is that of a round.
	candidates := localCandidates(nil, &settings, l, running, decodes)
	departureGapMs := s.departureGap.Ms()
	o := policy.NewOffer(candidates, l.Waiting, float64(l.Tokens), departureGapMs, maxRunning)
	// FitN tells operators from how many prefills the times were learned, at the engine with the most.
	for i := range l.Prefillers {
		o.FitN = max(o.FitN, l.Prefillers[i].Samples)
	}
	ps.metrics.available.WithLabelValues(model).Set(float64(o.NAvail))
	ps.metrics.queue.WithLabelValues(model).Set(float64(l.Waiting))
	return o
}

// roundTripsMs is by name. ps.mu is held.
func (ps *Peers) roundTripsMs() map[string]float64 {
	all := map[string]float64{}
	for _, p := range ps.peers {
		if ms, ok := p.rtt.Ms(); ok && p.name != "" { // otherwise the peer has not answered yet
			all[p.name] = ms
		}
	}
	return all
}
