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

// waitReason is the reason why a request cannot be served now; canServe: it can.
type waitReason uint8

const (
	canServe          waitReason = iota
	poolFull                     // the pool of hand-offs has no place left; retries have their place already
	gatesClosed                  // no live candidate has an open KV gate: all requests of the model wait
	noneCanStart                 // all candidates are busy: none can start the request now, nor any other request of the model
	onlyThisWaits                // the request waits for a busy candidate or region; requests behind the request may still be served
	sameTargetWaits              // the candidate that the request names (Target) takes no such request now; others that name it wait, too
	goesElsewhere                // another region serves the request
	firstAttemptsWait            // only retries of the model can be served in this round; its first attempts wait
	deadlineMissed               // no prefill would end before the request's deadline
)

// fillView computes the indicators of the eligible candidates for a request, and stores those of eligible[i] in d.view[i]. It looks up the
// prompt in the prefix index, in which each candidate has slots for its cached blocks, and stores in d.heldBlocks how many of the prompt's
// blocks each slot holds. allTimesKnown is false if the prefill times of one of the candidates are only the configured ones (see
// latencyFor).
func (d *chooser) fillView(m *model, r *Request, eligible []*candidate) (allTimesKnown bool) {
	d.view = slices.Grow(d.view[:0], len(eligible))[:len(eligible)]
	allTimesKnown = true
	tokens := d.tokensOf(r)
	blockTokens := r.Prompt.BlockSize(tokens) // estimated, and so no whole number, if the prompt was cut into blocks of bytes
	lookup := &r.considered.lookup            // keeps the result while the request waits, and is considered again and again
	d.heldBlocks = d.cache.Match(&r.Prompt, lookup, d.now)
	for i, c := range eligible {
		latency, learned := d.latencyFor(m.name, c)
		allTimesKnown = allTimesKnown && learned
		d.setIndicators(&d.view[i], c, latency)
		matchedTokens := math.Floor(blockTokens * float64(c.cache.Blocks(d.heldBlocks, &r.Prompt)))
		d.view[i].SetPrompt(float64(tokens), matchedTokens)
	}
	policy.Aggregate(d.view) // sets the indicators that compare the candidates
	return allTimesKnown
}

// allMissDeadline reports whether all eligible candidates are predicted to end the prefill after the request's deadline. It reads their
// indicators from d.view, which fillView has filled. It is false for a request without a deadline, and if one candidate has no prediction.
func (d *chooser) allMissDeadline(r *Request, eligible []*candidate) bool {
	if r.Deadline.IsZero() {
		return false
	}
	leftMs := float64(r.Deadline.Sub(d.now)) / float64(time.Millisecond)
	for i, c := range eligible {
		latency, learned := d.latencyFor(r.Model, c)
		if c.Aggregated || !learned { // no prediction: for a group of ranks that also decode, no prefill times are ever learned
			return false
		}
		if prefillEndMs(&d.view[i], latency) <= leftMs {
			return false // this candidate is predicted to end the prefill in time
		}
	}
	return true
}

// prefillEndMs predicts in how many ms a candidate ends a request's prefill if its probe is sent now: after the prompts that are ahead,
// the round trip, and the prefill itself. v are the candidate's indicators for the request.
func prefillEndMs(v *policy.Engine, latency policy.Latency) float64 {
	return v.BacklogMs + v.RTTMs + latency.Ms(v.NewTokens, v.HitTokens)
}

// tokensOf is the length of a request's prompt in tokens: counted, or estimated by the learned ratio of bytes to tokens.
func (d *chooser) tokensOf(r *Request) int {
	if r.Counted {
		return max(1, r.PromptTokens)
	}
	return d.cache.PromptTokens(&r.Prompt, r.Model, r.PromptTokens)
}

// maxTraceRows bounds the candidates that a trace lists.
const maxTraceRows = 8

// trace explains the choice among the candidates in d.view; chosen is the index of the chosen one. byPolicy is false if the session stayed
// with its engine, without asking the policy; the trace then has no scores.
func (d *chooser) trace(p *policy.Policy, chosen int, reason string, byPolicy bool) *Trace {
	trace := &Trace{Reason: reason, Eligible: len(d.view)}
	if byPolicy {
		trace.Best = p.Explain(d.view, chosen, maxTraceRows)
	} else {
		trace.Best = []policy.Row{{Candidate: d.view[chosen].ID, Chosen: true}}
	}
	return trace
}

// recordChoice records in the metrics how the candidate of a lease was chosen, and returns the reason in one word: the first one below that
// applies, or "policy". affinity is the outcome of session affinity, such as steer.Kept; it is empty for a request without a session.
// hotspot is the state of the request's class. eligible is the number of candidates that passed the filters.
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
	if choice.Bad > 0 { // candidates whose score was not a finite number
		d.metrics.policyErrors.WithLabelValues(l.Policy).Add(float64(choice.Bad))
	}
	if choice.FilterSkipped { // no candidate passed the policy's own filter
		d.metrics.filterSkipped.WithLabelValues(policyFilter).Inc()
	}
	if affinity != "" { // empty: there was no outcome to count
		d.metrics.affinity.WithLabelValues(affinity).Inc()
	}
	if hotspot == steer.Filter { // the request was kept off the engines that hold its prefix
		d.metrics.hotFiltered.Inc()
	}
	d.metrics.countChoice(l.Policy, reason)
	return reason
}

// canStart reports whether one more probe may be sent to a candidate. It may while fewer than Push.MaxUnanswered requests are
// ahead on the candidate. This number keeps the engine busy; more would not help, because a probe that was sent cannot go to
// another engine. If the request could go to another region, its RemoteRegions decide. For a group of ranks that prefill and
// decode (Aggregated), the number of requests in its pool is bounded instead. A prompt whose decode rank is chosen before its
// prefill may also be sent from the time earlyProbeFrom on, because its decode engine needs time to find room for it.
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
	_, timesKnown := d.fit.Latency(r.Model, c.Hardware) // false: no prefill times are learned, so that any predicted end is a guess
	earliest, maySendEarly := d.earlyProbeFrom(c)
	return timesKnown && maySendEarly && !earliest.After(d.now)
}

// mayEnterPool reports whether one more request for a model may wait for the ranks of a group that prefills and decodes. The requests that
// wait already are those that were charged to the group and not yet sent to a rank (unsent). The limit is 1.5 times the number of free
// slots, and at least 1, so that there is a choice of requests when further slots become free.
func (d *chooser) mayEnterPool(c *candidate, model string) bool {
	if d.cfg.Free == nil { // the number of slots has no bound
		return true
	}
	// onlySomeRanks: not all ranks of the board list the model. free then counts only their slots, and only requests for the model wait
	// for these.
	free, onlySomeRanks := d.cfg.Free(c.Board, model)
	_, unsent := c.chargesAhead(model, onlySomeRanks) // they need a slot before the new request
	return unsent < max(1, free+free/2)
}

// chargesAhead counts the charges that need a decode slot before one more request for a model: unanswered are those whose probe has no
// answer yet, and unsent the part of them whose probe was not even sent. The requests wait in separate groups. A model that only some ranks
// of the board list (onlySomeRanks, see Config.Free) is a group of its own, which waits for the slots of these ranks. The models that all
// ranks list form one group together.
func (c *candidate) chargesAhead(model string, onlySomeRanks bool) (unanswered, unsent int) {
	if onlySomeRanks {
		if counts := c.byModel[model]; counts != nil { // nil: no charge of the model is unanswered
			return counts.Probing, counts.Unsent
		}
		return 0, 0
	}
	// The group of the models that all ranks list: all charges, without those of the models in byModel, each of which is its own group.
	unanswered, unsent = c.load.Leases[ledger.Probing], c.load.Unsent()
	for _, counts := range c.byModel {
		unanswered -= counts.Probing
		unsent -= counts.Unsent
	}
	return unanswered, unsent
}

// countByModel counts a lease's new charge in c.byModel, if only some ranks of the board list its model. c.load counts the charge as well,
// but over all models, and the requests for such a model wait only behind each other (chargesAhead). The charge (inFlight) points to the
// model's counts, and leaves them when its probe is answered or ends.
func (d *chooser) countByModel(c *candidate, l *Lease) {
	onlySomeRanks := false
	if d.cfg.Free != nil { // Free also says this; its number of free slots is not needed here
		_, onlySomeRanks = d.cfg.Free(c.Board, l.model)
	}
	// Models without an unanswered probe are removed, so that the map does not grow.
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

// earlyProbeFrom is the time from which a busy candidate may get one more probe, of a request whose decode rank is chosen before the
// prefill. The engine begins such a prefill only after the decode engine has called back. The probe is therefore sent ahead of the
// predicted end of the candidate's present work, by a lead that is at least the usual time until this call. ok is false if no probe is sent
// ahead: the candidate gets no such requests, the end of its work is not known, or the lead is 0.
func (s *state) earlyProbeFrom(c *candidate) (at time.Time, ok bool) {
	if !c.needsRankFirst() || c.load.Stalled(s.now) { // a stalled engine's work does not end as predicted
		return at, false
	}
	lead := max(s.cfg.Push.Lead, s.fit.CallbackLatencyOf(c.Profile.Name).Mean())
	workEnds, endKnown := c.load.PrefillsDoneAt()
	return workEnds.Add(-lead), endKnown && lead > 0
}

// dropIfOthersUsable removes the unwanted candidates, in place, if at least one of the others is usable. Otherwise it removes none, so
// that the request still has a choice, and the metrics count that this filter was skipped.
func (d *chooser) dropIfOthersUsable(filter string, candidates []*candidate, unwanted, usable func(*candidate) bool) []*candidate {
	if !slices.ContainsFunc(candidates, func(c *candidate) bool { return !unwanted(c) && usable(c) }) {
		d.metrics.filterSkipped.WithLabelValues(filter).Inc()
		return candidates
	}
	return slices.DeleteFunc(candidates, unwanted)
}

// alwaysUsable is the argument usable of dropIfOthersUsable for filters that need no more than one remaining candidate of any kind.
func alwaysUsable(*candidate) bool { return true }

// filterStale drops the candidates whose gauges are stale (their last scrapes failed), because the other work of their engines is not
// known. It drops none unless another candidate can start the request: no request has to wait because an engine is slow to report its
// gauges.
func (d *chooser) filterStale(r *Request, candidates []*candidate) []*candidate {
	hasStaleGauges := func(c *candidate) bool { return c.load.Stale() && !c.Aggregated } // an aggregated candidate has no gauges
	if !slices.ContainsFunc(candidates, hasStaleGauges) {
		return candidates
	}
	canStartNow := func(c *candidate) bool { return d.canStart(r, c) && !c.load.Stalled(d.now) }
	return d.dropIfOthersUsable(staleFilter, candidates, hasStaleGauges, canStartNow)
}

// filterBusy drops the candidates that are busy, so that they cannot start the request now, and that are not worth waiting for. The filter
// is skipped, and counted as "stalled", if it would leave no candidate.
func (d *chooser) filterBusy(p *policy.Policy, r *Request, candidates []*candidate) []*candidate {
	useless := func(c *candidate) bool { return !c.isWorthWaitingFor(p, d.now) && !d.canStart(r, c) }
	return d.dropIfOthersUsable(stalledFilter, candidates, useless, alwaysUsable)
}

// isWorthWaitingFor reports whether a request with the policy may wait for the candidate while it is busy. With most policies, it may
// unless the engine is stalled, because it is then not known when the engine can start the request. With a policy that ignores load, no
// busy engine is worth it: the policy could choose the same one again and again.
func (c *candidate) isWorthWaitingFor(p *policy.Policy, now time.Time) bool {
	if p.LoadBlind() {
		return false
	}
	return c.Aggregated || !c.load.Stalled(now) // a group of ranks never counts as stalled, because no prefill times are learned for it
}

// mayUse reports whether the request may go to the candidate: the request names this candidate or none, and may go to the
// candidate's region. If its decode rank is chosen already, the candidate must reach this rank.
func (r *Request) mayUse(c *candidate) bool {
	if r.Target != "" && r.Target != c.ID || !r.reachesRank(c) {
		return false
	}
	return r.MayGoTo == nil || c.Region == "" || r.MayGoTo(c.Region) // the empty region is the proxy's own
}

// CheckTarget returns an error if id, which a request names, is not a candidate for the model.
func (s *Scheduler) CheckTarget(model, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.models[model]
	if m != nil && slices.ContainsFunc(m.candidates, func(c *candidate) bool { return c.ID == id }) {
		return nil
	}
	return fmt.Errorf("%w: %q is no prefill engine for model %q; GET /prefill lists them", ErrBadTarget, id, model)
}

// filterCircuit keeps the live candidates that the request may go to and that take prompts, without the fallbacks that
// are not needed (dropFallbacks). If none takes prompts, the filter is skipped and keeps all live candidates that
// the request may go to, because trying an engine that failed is better than refusing the request. The result is d.eligible, which the
// next call overwrites.
func (d *chooser) filterCircuit(r *Request, candidates []*candidate) (eligible []*candidate, skipped bool) {
	d.eligible = d.eligible[:0]
	for _, c := range candidates {
		if c.Live && c.takesPrompts(d.now) && r.mayUse(c) {
			d.eligible = append(d.eligible, c)
		}
	}
	// A request that was tried before is no trial: the trials of several engines could use up its attempts.
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

// dropFallbacks removes, in place, the candidates that are only a second choice for the model (Candidate.Fallback and FallbackFor), unless
// they are needed. If the request names a candidate, or if there is no first choice, it removes nothing. If the request has tried all first
// choices already (Exclude), and a rank would fetch the KV of a fallback, this fallback is needed. dropFallbacks then removes only the
// candidates whose KV no rank would fetch (NoDecodeRank), first choices or not.
func (r *Request) dropFallbacks(candidates []*candidate) []*candidate {
	isFallback := func(c *candidate) bool { return c.Fallback || slices.Contains(c.FallbackFor, r.Model) }
	isFirstChoice := func(c *candidate) bool { return !isFallback(c) }
	isUntriedFirstChoice := func(c *candidate) bool { return isFirstChoice(c) && !slices.Contains(r.Exclude, c.ID) }
	isUsefulFallback := func(c *candidate) bool { return isFallback(c) && !c.NoDecodeRank }
	if r.Target != "" || !slices.ContainsFunc(candidates, isFirstChoice) { // the request names a candidate, or there are only fallbacks
		return candidates
	}
	// Fallbacks are not needed while a first choice is untried. If none of them is useful, the request tries a first choice once more.
	if slices.ContainsFunc(candidates, isUntriedFirstChoice) || !slices.ContainsFunc(candidates, isUsefulFallback) {
		return slices.DeleteFunc(candidates, isFallback)
	}
	return slices.DeleteFunc(candidates, func(c *candidate) bool { return c.NoDecodeRank })
}

// filterGate removes, in place, the candidates whose KV gate lets no probe pass, because their KV cache is too full.
func (d *chooser) filterGate(candidates []*candidate) []*candidate {
	return slices.DeleteFunc(candidates, func(c *candidate) bool {
		open, _ := c.load.MayPass(d.now)
		return !open
	})
}

// filterAtProbeLimit drops the candidates that are new in service and have as many probes as they may (Candidate.ProbeLimit).
func (d *chooser) filterAtProbeLimit(candidates []*candidate) []*candidate {
	return d.dropIfOthersUsable(freshFilter, candidates, (*candidate).atProbeLimit, alwaysUsable)
}

// atProbeLimit reports whether the candidate has as many unanswered probes as it may have while it is new in service.
func (c *candidate) atProbeLimit() bool {
	return c.ProbeLimit > 0 && c.load.Leases[ledger.Probing] >= c.ProbeLimit
}

// filterTried drops candidates at which the request has failed before; exclude has their IDs. It is two filters, of which the first one
// that leaves a candidate is used. The first drops every candidate of an engine (instance) that was tried, because these candidates fail
// together. The second drops only the candidates that were tried. If neither leaves one, all are kept. The metrics count each of the two
// that was skipped.
func (d *chooser) filterTried(candidates []*candidate, exclude []string) []*candidate {
	tried := func(c *candidate) bool { return slices.Contains(exclude, c.ID) }
	instanceTried := func(c *candidate) bool {
		return tried(c) || slices.ContainsFunc(exclude, func(id string) bool {
			excluded := d.candidates[id] // nil: it was removed meanwhile
			return excluded != nil && excluded.Instance == c.Instance
		})
	}
	if slices.ContainsFunc(candidates, func(c *candidate) bool { return !instanceTried(c) }) {
		return slices.DeleteFunc(candidates, instanceTried)
	}
	d.metrics.filterSkipped.WithLabelValues(instanceFilter).Inc()
	return d.dropIfOthersUsable(excludedFilter, candidates, tried, alwaysUsable)
}

// makeLease makes and books the lease of a request that goes to candidate c. A lease lasts from here until the engine has freed the
// prompt's KV. Its probe is the call that makes the engine compute the prompt. A canary is a probe that passes a closed KV gate, to find
// out whether the KV is still held. indicators are c's indicators for this request, and waitingSince is when the request entered the
// arrival queue.
func (d *chooser) makeLease(c *candidate, p *policy.Policy, r *Request, indicators *policy.Engine, waitingSince time.Time) *Lease {
	_, canary := c.load.MayPass(d.now)
	weight := ledger.WeightOf(indicators, r.promptBytes())
	d.lastLease++
	lease := &Lease{
		Candidate: c.Candidate,
		Policy:    p.Name(),
		Wait:      d.now.Sub(waitingSince),
		Prompt:    int(indicators.PromptTokens), HitTokens: int(indicators.HitTokens),
		Others:           c.load.Leases[ledger.Probing], // probes without an answer, before bookLease charges this prompt
		scheduler:        d.scheduler,
		chargedTo:        c,
		number:           d.lastLease,
		canary:           canary,
		model:            r.Model,
		hadOthersPrompts: c.load.HasOthersPrompts(c.Decodes, d.now), // then no prefill time is learned from this probe
	}
	if _, known := d.fit.Latency(r.Model, c.Hardware); known { // otherwise PredictedUs comes only from the configured latency
		lease.predictedMs = float64(weight.PredictedUs) / 1000
	}
	d.bookLease(lease, r, weight)
	return lease
}

// bookLease books what a new lease means for its candidate. If a trial of the circuit is due, this probe becomes the trial. The
// prompt counts in the mean of new tokens and in the candidate's load. The prefix cache notes in predictedHit what the prefill is predicted
// to find there, and counts the prompt's blocks as held from now on.
func (d *chooser) bookLease(lease *Lease, r *Request, weight ledger.Weight) {
	c := lease.chargedTo
	c.circuit.Send(lease.number, d.now)
	if !c.trialAt.IsZero() && !d.now.Before(c.trialAt) {
		// This is the trial. AvoidFor tells its result. If the trial has none, another one is sent after a while.
		d.setTrial(c.Instance, d.now.Add(circuit.MaxOut))
		c.trialLease = lease.number
	}
	d.fit.LearnNewTokens(weight.NewTokens)
	lease.charge(r, weight)
	d.countByModel(c, lease)
	c.cache.ExpectHit(&lease.predictedHit, &r.Prompt, r.Model, lease.Prompt, lease.HitTokens, d.heldBlocks, c.load.Capacity(), d.now)
}

// charge adds a request's prompt to the load of the lease's candidate. The probe usually counts as sent now. If the decode rank is chosen
// before the prefill, the probe is sent only after that choice (Lease.MarkSent). charge then keeps a copy of the request, for a lease that
// may replace this one (MoveIfSooner, AcquireAnother).
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

// promptBytes is the length of the prompt in bytes, or four bytes per token if the bytes were not counted.
func (r *Request) promptBytes() int {
	return cmp.Or(r.PromptBytes, 4*r.PromptTokens)
}

// asRetry returns a copy of the request, for a lease of another candidate that replaces the request's lease (see AcquireAnother and
// MoveIfSooner).
func (r *Request) asRetry() *Request {
	retry := *r
	retry.HasPlace = true        // the request got its place in the pool with its first lease
	retry.Returned = true        // like a request that another region gave back, it is accepted even if the queue is full
	retry.Remote = nil           // it stays in this region
	retry.Exclude = nil          // AcquireAnother sets it anew, and MoveIfSooner gets the engines to avoid from its caller
	retry.LeaseOwner = nil       // the audit does not check that the lease of the other candidate ends
	retry.Deadline = time.Time{} // a request whose decode rank is chosen is served even after its deadline
	return &retry
}

// prefiller returns the counts of a candidate by which RemoteRegions.Takes decides whether it may get one more probe. The other fields of
// the result are not set. Counts of the engine's metrics are rounded up, so that the candidate does not look emptier than it is.
func (d *chooser) prefiller(c *candidate) Prefiller {
	p := Prefiller{Region: c.Region, Unanswered: c.load.Leases[ledger.Probing]}
	p.Held = c.load.FetchablePrompts() // prompts that are computed now, or whose KV a decode engine may still fetch
	// ran is how many requests the engine ran at the last scrape that found none waiting. endedLessSent is how many of this proxy's
	// probes have ended since then, less those that were sent. From both, Takes may estimate how many more requests the engine can run.
	ran, endedLessSent := c.load.SinceIdle()
	p.Ran, p.Answered = int(math.Ceil(ran)), endedLessSent
	// On a group of ranks that prefill and decode, only unsent requests count: a request that runs there already keeps no other one
	// waiting, and it holds no KV that a decode engine has yet to fetch.
	if c.Aggregated {
		p.Unanswered, p.Held = c.load.Unsent(), c.load.Unsent()
	}
	if c.Profile != nil {
		p.MaxSeqs = c.Profile.MaxNumSeqs
	}
	p.OthersWaiting, p.WaitingAtScrape = d.waitingRequests(c)
	return p
}

// waitingRequests counts the requests that wait in a candidate's engine: those of other proxies and clients, and all. The first count is by
// the last scrape or by the reports of other dispatchers, whichever are more. A candidate that is new in service may have fewer unanswered
// probes than others (ProbeLimit). The probes that it lacks also count as requests of others, so that it does not get more. The second
// count is by the last scrape; 0 if this is not recent.
func (d *chooser) waitingRequests(c *candidate) (ofOthers, all int) {
	if c.ProbeLimit > 0 { // 0: the candidate is not new
		ofOthers = max(0, d.cfg.Push.MaxUnanswered-c.ProbeLimit)
	}
	if scrapedOthers, scrapedAll, recent := c.load.WaitingCounts(d.now); recent {
		ofOthers, all = max(ofOthers, int(math.Ceil(scrapedOthers))), int(math.Ceil(scrapedAll))
	}
	// Other dispatchers may have sent probes after the scrape, which it does not show.
	return max(ofOthers, c.load.ReportedByOthers.Unanswered), all
}
