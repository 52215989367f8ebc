package prefill

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/engine/circuit"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// waitReason is why a request cannot be served now; canServe: it can.
type waitReason uint8

const (
	canServe          waitReason = iota
	poolFull                     // retries have their place already
	gatesClosed                  // no live candidate has an open KV gate: all requests of the model wait
	noneCanStart                 // all candidates are busy: no request of the model can start now
	onlyThisWaits                // for a busy candidate or region; requests behind it may still be served
	sameTargetWaits              // the candidate that the request names (Target) takes none now; others that name it wait, too
	goesElsewhere                // another region serves the request
	firstAttemptsWait            // only retries of the model can be served in this round
	deadlineMissed               // no prefill would end before the request's deadline
)

// fillView stores in d.view[i] the indicators of eligible[i] for a request, and in d.heldBlocks the
// result of Cache.Match. allTimesKnown is false if the prefill times of a candidate are only the
// configured ones.
func (d *chooser) fillView(m *model, r *Request, eligible []*candidate) (allTimesKnown bool) {
	d.view = slices.Grow(d.view[:0], len(eligible))[:len(eligible)]
	allTimesKnown = true
	tokens := d.tokensOf(r)
	blockTokens := r.Prompt.BlockSize(tokens) // estimated, and no whole number, for blocks of bytes
	lookup := &r.considered.lookup            // keeps the result while the request waits
	d.heldBlocks = d.cache.Match(&r.Prompt, lookup, d.now)
	for i, c := range eligible {
		latency, learned := d.latencyFor(m.name, c)
		allTimesKnown = allTimesKnown && learned
		d.setIndicators(&d.view[i], c, latency)
		matchedTokens := math.Floor(blockTokens * float64(c.cache.Blocks(d.heldBlocks, &r.Prompt)))
		d.view[i].SetPrompt(float64(tokens), matchedTokens)
	}
	policy.Aggregate(d.view)
	return allTimesKnown
}

// allMissDeadline reports whether all eligible candidates are predicted to end the prefill after
// the deadline. It reads d.view, and is false if one candidate has no prediction.
func (d *chooser) allMissDeadline(r *Request, eligible []*candidate) bool {
	if r.Deadline.IsZero() {
		return false
	}
	leftMs := float64(r.Deadline.Sub(d.now)) / float64(time.Millisecond)
	for i, c := range eligible {
		latency, learned := d.latencyFor(r.Model, c)
		if c.Aggregated || !learned { // for a group of ranks that also decode, no prefill times are ever learned
			return false
		}
		if prefillEndMs(&d.view[i], latency) <= leftMs {
			return false
		}
	}
	return true
}

// prefillEndMs predicts in how many ms a candidate ends a prefill if its probe is sent now.
func prefillEndMs(v *policy.Engine, latency policy.Latency) float64 {
	return v.BacklogMs + v.RTTMs + latency.Ms(v.NewTokens, v.HitTokens)
}

func (d *chooser) tokensOf(r *Request) int {
	if r.Counted {
		return max(1, r.PromptTokens)
	}
	return d.cache.PromptTokens(&r.Prompt, r.Model, r.PromptTokens)
}

const maxTraceRows = 8

// trace explains the choice among the candidates in d.view. Without byPolicy, the session stayed
// with its engine, and there are no scores.
func (d *chooser) trace(p *policy.Policy, chosen int, reason string, byPolicy bool) *Trace {
	trace := &Trace{Reason: reason, Eligible: len(d.view)}
	if byPolicy {
		trace.Best = p.Explain(d.view, chosen, maxTraceRows)
	} else {
		trace.Best = []policy.Row{{Candidate: d.view[chosen].ID, Chosen: true}}
	}
	return trace
}

// recordChoice also returns the reason of the choice in one word: the first one below that applies,
// or "policy". affinity is empty for a request without a session.
func (d *chooser) recordChoice(l *Lease, choice policy.Choice, affinity string, hotspot steer.State, eligible int) (reason string) {
	reason = "policy"
	switch {
	case l.canary:
		reason = "canary"
	case affinity == steer.Kept:
		reason = "affinity"
	case eligible == 1:
		reason = "only"
	case choice.Fallback:
		reason = "fallback"
	}
	if choice.Bad > 0 {
		d.metrics.policyErrors.WithLabelValues(l.Policy).Add(float64(choice.Bad))
	}
	if choice.FilterSkipped {
		d.metrics.filterSkipped.WithLabelValues(policyFilter).Inc()
	}
	if affinity != "" {
		d.metrics.affinity.WithLabelValues(affinity).Inc()
	}
	if hotspot == steer.Filter {
		d.metrics.hotFiltered.Inc()
	}
	d.metrics.countChoice(l.Policy, reason)
	return reason
}

// canStart reports whether one more probe may be sent to a candidate: while fewer than
// Push.MaxUnanswered requests are ahead. This keeps the engine busy; more would not help, because a
// probe that was sent cannot go to another engine. RemoteRegions decide if the request could go to
// another region. If the decode rank is chosen before the prefill, the probe may be sent earlier,
// because the decode engine needs time to find room.
func (d *chooser) canStart(r *Request, c *candidate) bool {
	if c.Aggregated {
		return d.mayEnterPool(c, r.Model)
	}
	if r.Remote != nil {
		p := d.prefiller(c)
		return r.Remote.Takes(&p)
	}
	if c.load.RequestsAhead(d.now) < float64(d.cfg.Push.MaxUnanswered) {
		return true
	}
	_, timesKnown := d.fit.Latency(r.Model, c.Hardware) // else any predicted end is a guess
	earliest, maySendEarly := d.earlyProbeFrom(c)
	return timesKnown && maySendEarly && !earliest.After(d.now)
}

// mayEnterPool bounds the requests that wait for the ranks of a group that prefills and decodes: at
// most 1.5 times the free slots, and at least 1, so that there is a choice of requests when further
// slots become free.
func (d *chooser) mayEnterPool(c *candidate, model string) bool {
	if d.cfg.Free == nil { // no bound
		return true
	}
	free, onlySomeRanks := d.cfg.Free(c.Board, model)
	_, unsent := c.chargesAhead(model, onlySomeRanks) // they need a slot before the new request
	return unsent < max(1, free+free/2)
}

// chargesAhead counts the charges that need a decode slot before one more request for a model:
// those whose probe has no answer, and of these the unsent ones. A model that only some ranks of
// the board list (see Config.Free) waits for the slots of these ranks alone. The models that all
// ranks list form one group.
func (c *candidate) chargesAhead(model string, onlySomeRanks bool) (unanswered, unsent int) {
	if onlySomeRanks {
		if counts := c.byModel[model]; counts != nil {
			return counts.Probing, counts.Unsent
		}
		return 0, 0
	}
	// All charges, without those of the models that are their own group.
	unanswered, unsent = c.load.Leases[ledger.Probing], c.load.Unsent()
	for _, counts := range c.byModel {
		unanswered -= counts.Probing
		unsent -= counts.Unsent
	}
	return unanswered, unsent
}

// countByModel counts a lease's new charge in c.byModel, if only some ranks of the board list its
// model (chargesAhead). The charge leaves these counts when its probe is answered or ends.
func (d *chooser) countByModel(c *candidate, l *Lease) {
	onlySomeRanks := false
	if d.cfg.Free != nil {
		_, onlySomeRanks = d.cfg.Free(c.Board, l.model)
	}
	// So that the map does not grow.
	maps.DeleteFunc(c.byModel, func(_ string, counts *ledger.ModelCounts) bool { return counts.Probing == 0 })
	if !onlySomeRanks {
		return
	}
	if c.byModel == nil {
		c.byModel = map[string]*ledger.ModelCounts{}
	}
	if c.byModel[l.model] == nil {
		c.byModel[l.model] = &ledger.ModelCounts{}
	}
	l.inFlight.CountByModel(c.byModel[l.model])
}

// earlyProbeFrom is the time from which a busy candidate may get one more probe of a request whose
// decode rank is chosen first. The engine begins such a prefill only after the decode engine has
// called back. The probe is therefore sent ahead of the predicted end of the present work, by at
// least the usual time until the callback.
func (s *state) earlyProbeFrom(c *candidate) (at time.Time, ok bool) {
	if !c.needsRankFirst() || c.load.Stalled(s.now) { // a stalled engine's work does not end as predicted
		return at, false
	}
	lead := max(s.cfg.Push.Lead, s.fit.CallbackLatencyOf(c.Profile.Name).Mean())
	workEnds, endKnown := c.load.PrefillsDoneAt()
	return workEnds.Add(-lead), endKnown && lead > 0
}

// dropIfOthersUsable removes the unwanted candidates, in place, if one of the others is usable.
// Otherwise it counts a skipped filter.
func (d *chooser) dropIfOthersUsable(filter string, candidates []*candidate, unwanted, usable func(*candidate) bool) []*candidate {
	if !slices.ContainsFunc(candidates, func(c *candidate) bool { return !unwanted(c) && usable(c) }) {
		d.metrics.filterSkipped.WithLabelValues(filter).Inc()
		return candidates
	}
	return slices.DeleteFunc(candidates, unwanted)
}

// alwaysUsable is for filters that need only any one remaining candidate.
func alwaysUsable(*candidate) bool { return true }

// filterStale drops the candidates whose gauges are stale, because the other work of their engines
// is not known. No request has to wait because an engine is slow to report its gauges.
func (d *chooser) filterStale(r *Request, candidates []*candidate) []*candidate {
	hasStaleGauges := func(c *candidate) bool { return c.load.Stale() && !c.Aggregated } // an aggregated candidate has no gauges
	if !slices.ContainsFunc(candidates, hasStaleGauges) {
		return candidates
	}
	canStartNow := func(c *candidate) bool { return d.canStart(r, c) && !c.load.Stalled(d.now) }
	return d.dropIfOthersUsable(staleFilter, candidates, hasStaleGauges, canStartNow)
}

// filterBusy drops the busy candidates that are not worth waiting for.
func (d *chooser) filterBusy(p *policy.Policy, r *Request, candidates []*candidate) []*candidate {
	useless := func(c *candidate) bool { return !c.isWorthWaitingFor(p, d.now) && !d.canStart(r, c) }
	return d.dropIfOthersUsable(stalledFilter, candidates, useless, alwaysUsable)
}

// isWorthWaitingFor is false for a stalled engine, because it is not known when this can start the
// request. With a policy that ignores load, it is false for all: the policy could choose the same
// busy engine again and again.
func (c *candidate) isWorthWaitingFor(p *policy.Policy, now time.Time) bool {
	if p.LoadBlind() {
		return false
	}
	return c.Aggregated || !c.load.Stalled(now) // no prefill times are learned for a group of ranks, so that it never counts as stalled
}

// mayUse reports whether the request may go to the candidate, by its Target, its region and a
// decode rank that is chosen already.
func (r *Request) mayUse(c *candidate) bool {
	if r.Target != "" && r.Target != c.ID || !r.reachesRank(c) {
		return false
	}
	return r.MayGoTo == nil || c.Region == "" || r.MayGoTo(c.Region) // the empty region is the proxy's own
}

// CheckTarget returns an error if id is not a candidate for the model.
func (s *Scheduler) CheckTarget(model, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.models[model]
	if m != nil && slices.ContainsFunc(m.candidates, func(c *candidate) bool { return c.ID == id }) {
		return nil
	}
	return fmt.Errorf("%w: %q is no prefill engine for model %q; GET /prefill lists them", ErrBadTarget, id, model)
}

// filterCircuit keeps the live candidates that the request may go to and that take prompts. If none
// takes prompts, it keeps them all (skipped), because trying an engine that failed is better than
// refusing the request. The next call overwrites the result.
func (d *chooser) filterCircuit(r *Request, candidates []*candidate) (eligible []*candidate, skipped bool) {
	d.eligible = d.eligible[:0]
	for _, c := range candidates {
		if c.Live && c.takesPrompts(d.now) && r.mayUse(c) {
			d.eligible = append(d.eligible, c)
		}
	}
	// A retry is no trial: the trials of several engines could use up its attempts.
	losesHandoffs := func(c *candidate) bool { return !c.trialAt.IsZero() }
	isRetry := len(r.Exclude) > 0
	if isRetry && slices.ContainsFunc(d.eligible, func(c *candidate) bool { return !losesHandoffs(c) }) {
		d.eligible = slices.DeleteFunc(d.eligible, losesHandoffs)
	}
	if len(d.eligible) > 0 {
		return r.dropFallbacks(d.eligible), false
	}
	for _, c := range candidates {
		if c.Live && r.mayUse(c) {
			d.eligible = append(d.eligible, c)
		}
	}
	return d.eligible, true
}

// dropFallbacks removes, in place, the candidates that are only a second choice for the model,
// unless they are needed. If the request has tried all first choices, and a rank would fetch the KV
// of a fallback, only the candidates whose KV no rank would fetch are removed.
func (r *Request) dropFallbacks(candidates []*candidate) []*candidate {
	isFallback := func(c *candidate) bool { return c.Fallback || slices.Contains(c.FallbackFor, r.Model) }
	isFirstChoice := func(c *candidate) bool { return !isFallback(c) }
	isUntriedFirstChoice := func(c *candidate) bool { return isFirstChoice(c) && !slices.Contains(r.Exclude, c.ID) }
	isUsefulFallback := func(c *candidate) bool { return isFallback(c) && !c.NoDecodeRank }
	if r.Target != "" || !slices.ContainsFunc(candidates, isFirstChoice) {
		return candidates
	}
	// If no fallback is useful, the request tries a first choice once more.
	if slices.ContainsFunc(candidates, isUntriedFirstChoice) || !slices.ContainsFunc(candidates, isUsefulFallback) {
		return slices.DeleteFunc(candidates, isFallback)
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return c.NoDecodeRank })
}

// filterGate removes, in place, the candidates whose KV cache is too full.
func (d *chooser) filterGate(candidates []*candidate) []*candidate {
	return slices.DeleteFunc(candidates, func(c *candidate) bool {
		open, _ := c.load.MayPass(d.now)
		return !open
	})
}

func (d *chooser) filterAtProbeLimit(candidates []*candidate) []*candidate {
	return d.dropIfOthersUsable(freshFilter, candidates, (*candidate).atProbeLimit, alwaysUsable)
}

func (c *candidate) atProbeLimit() bool {
	return c.ProbeLimit > 0 && c.load.Leases[ledger.Probing] >= c.ProbeLimit
}

// filterTried drops the candidates of all engines (instances) that were tried, because these fail
// together. If none would be left, it drops only the candidates that were tried.
func (d *chooser) filterTried(candidates []*candidate, exclude []string) []*candidate {
	tried := func(c *candidate) bool { return slices.Contains(exclude, c.ID) }
	instanceTried := func(c *candidate) bool {
		return tried(c) || slices.ContainsFunc(exclude, func(id string) bool {
			excluded := d.candidates[id] // nil: removed meanwhile
			return excluded != nil && excluded.Instance == c.Instance
		})
	}
	if slices.ContainsFunc(candidates, func(c *candidate) bool { return !instanceTried(c) }) {
		return slices.DeleteFunc(candidates, instanceTried)
	}
	d.metrics.filterSkipped.WithLabelValues(instanceFilter).Inc()
	return d.dropIfOthersUsable(excludedFilter, candidates, tried, alwaysUsable)
}

// makeLease makes and books the lease of a request that goes to candidate c.
func (d *chooser) makeLease(c *candidate, p *policy.Policy, r *Request, indicators *policy.Engine, waitingSince time.Time) *Lease {
	_, canary := c.load.MayPass(d.now)
	weight := ledger.WeightOf(indicators, r.promptBytes())
	d.lastLease++
	lease := &Lease{
		Candidate: c.Candidate,
		Policy:    p.Name(),
		Wait:      d.now.Sub(waitingSince),
		Prompt:    int(indicators.PromptTokens), HitTokens: int(indicators.HitTokens),
		Others:           c.load.Leases[ledger.Probing], // before bookLease charges this prompt
		scheduler:        d.scheduler,
		chargedTo:        c,
		number:           d.lastLease,
		canary:           canary,
		model:            r.Model,
		hadOthersPrompts: c.load.HasOthersPrompts(c.Decodes, d.now), // then no prefill time is learned from this probe
	}
	if _, known := d.fit.Latency(r.Model, c.Hardware); known { // else PredictedUs comes only from the configured latency
		lease.predictedMs = float64(weight.PredictedUs) / 1000
	}
	d.bookLease(lease, r, weight)
	return lease
}

func (d *chooser) bookLease(lease *Lease, r *Request, weight ledger.Weight) {
	c := lease.chargedTo
	c.circuit.Send(lease.number, d.now)
	if !c.trialAt.IsZero() && !d.now.Before(c.trialAt) {
		// AvoidFor tells the result of this trial. If it has none, another one is sent after a while.
		d.setTrial(c.Instance, d.now.Add(circuit.MaxOut))
		c.trialLease = lease.number
	}
	d.fit.LearnNewTokens(weight.NewTokens)
	lease.charge(r, weight)
	d.countByModel(c, lease)
	c.cache.ExpectHit(&lease.predictedHit, &r.Prompt, r.Model, lease.Prompt, lease.HitTokens, d.heldBlocks, c.load.Capacity(), d.now)
}

// charge keeps a copy of the request if the probe is sent later (MarkSent), for a lease that may
// replace this one.
func (l *Lease) charge(r *Request, weight ledger.Weight) {
	load, now := &l.chargedTo.load, l.scheduler.now
	if l.chargedTo.needsRankFirst() {
		l.request = r.asRetry()
		l.request.replaces = &l.Candidate
		load.Reserve(&l.inFlight, weight, r.LeaseOwner, now)
	} else {
		load.Charge(&l.inFlight, weight, r.LeaseOwner, now)
	}
}

// promptBytes takes four bytes per token if the bytes were not counted.
func (r *Request) promptBytes() int {
	return cmp.Or(r.PromptBytes, 4*r.PromptTokens)
}

// asRetry is for a lease that replaces the request's lease (AcquireAnother, MoveIfSooner).
func (r *Request) asRetry() *Request {
	retry := *r
	retry.HasPlace = true        // with its first lease
	retry.Returned = true        // it is accepted even if the queue is full
	retry.Remote = nil           // it stays in this region
	retry.Exclude = nil          // AcquireAnother and MoveIfSooner know the engines to avoid
	retry.LeaseOwner = nil       // the audit does not check the new lease
	retry.Deadline = time.Time{} // a request whose decode rank is chosen is served even after its deadline
	return &retry
}

// prefiller returns what RemoteRegions.Takes needs; other fields are not set. Counts of the
// engine's metrics are rounded up, so that the candidate does not look emptier than it is.
func (d *chooser) prefiller(c *candidate) Prefiller {
	p := Prefiller{Region: c.Region, Unanswered: c.load.Leases[ledger.Probing]}
	p.Held = c.load.FetchablePrompts()
	ran, endedLessSent := c.load.SinceIdle()
	p.Ran, p.Answered = int(math.Ceil(ran)), endedLessSent
	// A request that runs on such a group keeps no other one waiting, and holds no KV that is yet to
	// be fetched.
	if c.Aggregated {
		p.Unanswered, p.Held = c.load.Unsent(), c.load.Unsent()
	}
	if c.Profile != nil {
		p.MaxSeqs = c.Profile.MaxNumSeqs
	}
	p.OthersWaiting, p.WaitingAtScrape = d.waitingRequests(c)
	return p
}

// waitingRequests counts the requests that wait in a candidate's engine: those of other proxies and
// clients, as scraped or reported, whichever are more, and all. The probes that a new candidate
// lacks (ProbeLimit) count as requests of others, so that it does not get more.
func (d *chooser) waitingRequests(c *candidate) (ofOthers, all int) {
	if c.ProbeLimit > 0 { // the candidate is new
		ofOthers = max(0, d.cfg.Push.MaxUnanswered-c.ProbeLimit)
	}
	if scrapedOthers, scrapedAll, recent := c.load.WaitingCounts(d.now); recent {
		ofOthers, all = max(ofOthers, int(math.Ceil(scrapedOthers))), int(math.Ceil(scrapedAll))
	}
	// A scrape does not show later probes of other dispatchers.
	return max(ofOthers, c.load.ReportedByOthers.Unanswered), all
}
