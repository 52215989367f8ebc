package ledger

import (
	"math"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Sums are the totals of all charges on an engine. They are integers, because adding and
// subtracting the same float leaves a rounding error.
type Sums struct {
	Leases [Phases]int
	Tokens [Phases]int64
	Work   [Phases]int64

	NewTokens, PredictedUs, Attention int64
}

// book adds a prompt if sign is 1, and subtracts it if sign is -1. The load of the prefill itself
// counts only until the probe is answered.
func (s *Sums) book(phase Phase, weight Weight, sign int64) {
	s.Leases[phase] += int(sign)
	s.Tokens[phase] += sign * weight.Tokens
	s.Work[phase] += sign * weight.Work
	if phase == Probing {
		s.NewTokens += sign * weight.NewTokens
		s.PredictedUs += sign * weight.PredictedUs
		s.Attention += sign * weight.Attention
	}
}

// FetchablePrompts counts the prompts whose KV a decode engine may still fetch.
func (s *Sums) FetchablePrompts() int {
	return s.Leases[Probing] + s.Leases[Pooled] + s.Leases[Dispatched]
}

// HeldPrompts counts the prompts of this proxy whose KV the engine holds.
func (s *Sums) HeldPrompts() int { return s.FetchablePrompts() + s.Leases[Orphaned] }

// KVTokens is how many tokens the engine's KV cache holds for this proxy. A prompt counts until the
// first decode event, or until the engine's own timeout.
func (s *Sums) KVTokens() int64 { return sum(s.Tokens) }

// KVWork is the same load in the weight of vllm-ascend's proxy, in millionths.
func (s *Sums) KVWork() int64 { return sum(s.Work) }

func sum(v [Phases]int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// Share is the load that one dispatcher has put on a candidate that several dispatchers use.
type Share struct {
	Unanswered int   `json:"n"`             // probes that the engine has not answered
	NewTokens  int64 `json:"new,omitempty"` // prompt tokens of these probes that are predicted not to be cached
	KVTokens   int64 `json:"kv,omitempty"`  // tokens of these probes' prompts, and of prefilled prompts that were not fetched yet
}

func (s Share) Plus(other Share) Share {
	return Share{s.Unanswered + other.Unanswered, s.NewTokens + other.NewTokens, s.KVTokens + other.KVTokens}
}

// EngineLoad holds the charges of one candidate, and the last values of its engine's gauges.
type EngineLoad struct {
	Sums
	Gauges
	gate
	Owner            string
	Waiting          Sums      // prompts that wait for this candidate in the present round of decisions; empty between rounds
	ReportedByOthers Share     // the load of other dispatchers
	AnsweredAt       time.Time // when it last answered a probe of this proxy

	ledger     *Ledger
	freedPace  freedPace
	capacity   int64       // KV tokens; 0: not known
	unanswered []*InFlight // probes, the oldest first
	// previousEndedAt is when the engine last ended a prompt, as far as the ends of probes show; zero:
	// never.
	previousEndedAt time.Time
}

func (l *Ledger) NewLoad(owner string) EngineLoad {
	return EngineLoad{ledger: l, Owner: owner, Gauges: Gauges{gaugeUsage: math.NaN(), gaugeHeld: math.NaN()}}
}

// SetCapacity sets the KV tokens that fit on the candidate; 0: not known.
func (e *EngineLoad) SetCapacity(tokens int64, now time.Time) {
	e.capacity = tokens
	e.UpdateGate(now)
}

func (e *EngineLoad) Capacity() int64 { return e.capacity }

// AddWaiting adds a prompt that waits for the candidate in this round. It counts like one that is
// Probing.
func (e *EngineLoad) AddWaiting(w Weight) {
	e.Waiting.Leases[Probing]++
	e.Waiting.NewTokens += w.NewTokens
	e.Waiting.PredictedUs += w.PredictedUs
	e.Waiting.Attention += w.Attention
}

func (e *EngineLoad) Share() Share { return Share{e.Leases[Probing], e.NewTokens, e.KVTokens()} }

func (e *EngineLoad) SetReportedByOthers(s Share, now time.Time) {
	if e.ReportedByOthers != s {
		e.ReportedByOthers = s
		e.UpdateGate(now)
	}
}

// probeEnded also notes when the engine began another prompt (previousEndedAt): at the answer to
// this one. A probe without an answer, for example because the client left, shows this only if the
// engine computed it and does not hang.
func (e *EngineLoad) probeEnded(f *InFlight, answered bool, now time.Time) {
	if f.sent.IsZero() { // it is not in unanswered
		return
	}
	i := slices.Index(e.unanswered, f)
	if answered {
		e.AnsweredAt = now
	}
	wasComputed := i == 0 && !e.Stalled(now) // an engine computes its oldest prompt
	if answered || wasComputed {
		e.previousEndedAt = now
	}
	e.unanswered = slices.Delete(e.unanswered, i, i+1)
	e.probesEnded++
	e.discountEndedProbe()
}

// OldestSent is when the oldest unanswered probe was sent; zero: there is none.
func (e *EngineLoad) OldestSent() time.Time {
	if len(e.unanswered) == 0 {
		return time.Time{}
	}
	return e.unanswered[0].sent
}

// NextSent is when the oldest unanswered probe other than f was sent; zero: there is none.
func (e *EngineLoad) NextSent(f *InFlight) time.Time {
	for _, probe := range e.unanswered[:min(2, len(e.unanswered))] { // only one of them can be f
		if probe != f {
			return probe.sent
		}
	}
	return time.Time{}
}

// oldestUnanswered returns nil if all probes are answered. since is the latest time at which the
// engine can have begun to compute it.
func (e *EngineLoad) oldestUnanswered() (oldest *InFlight, since time.Time) {
	if len(e.unanswered) == 0 {
		return nil, time.Time{}
	}
	oldest = e.unanswered[0]
	if e.previousEndedAt.After(oldest.sent) {
		return oldest, e.previousEndedAt
	}
	return oldest, oldest.sent
}

// A probe counts as stuck after stallFactor times its predicted duration plus stallSlack: the
// engine hangs, or the prediction is useless.
const (
	stallFactor = 4
	stallSlack  = time.Second
)

// StallsAt is the time from which the candidate counts as stalled, unless it answers a probe
// before.
func (e *EngineLoad) StallsAt() (at time.Time, known bool) {
	oldest, since := e.oldestUnanswered()
	if oldest == nil {
		return at, false
	}
	return since.Add(stallFactor*oldest.Predicted() + stallSlack), true
}

func (e *EngineLoad) Stalled(now time.Time) bool {
	at, known := e.StallsAt()
	return known && !now.Before(at)
}

func (e *EngineLoad) Unsent() int { return e.Leases[Probing] - len(e.unanswered) }

// Backlog is this proxy's part of the indicator backlog_ms, in ms. Prompts that wait in this round
// count like those that the engine computes; of the oldest unanswered probe, only the time that it
// still needs counts.
func (e *EngineLoad) Backlog(now time.Time) float64 {
	waitingMs := float64(e.Waiting.PredictedUs) / 1000
	oldest, since := e.oldestUnanswered()
	if oldest == nil {
		return waitingMs
	}
	unansweredMs, oldestMs := float64(e.PredictedUs)/1000, float64(oldest.Weight.PredictedUs)/1000
	oldestRanMs := float64(now.Sub(since)) / float64(time.Millisecond)
	return waitingMs + policy.Backlog(unansweredMs, oldestMs, oldestRanMs)
}

// PrefillsDoneAt is the time by which the engine is predicted to have computed all charged prompts.
func (e *EngineLoad) PrefillsDoneAt() (at time.Time, known bool) {
	oldest, since := e.oldestUnanswered()
	if oldest == nil || e.PredictedUs == 0 {
		return at, false
	}
	if e.Unsent() > 0 { // it is not known when the engine can begin with this prompt
		return at, false
	}
	predicted := time.Duration(e.PredictedUs) * time.Microsecond
	return since.Add(predicted), true
}

// PredictEnd predicts the end of a charged prompt's prefill in two parts: currentEnds is when the
// engine ends the prompt that it computes now (zero: none), and rest is how long it then takes for
// the prompts up to and including f. corrected adds the recent error of the engine's predictions. A
// prompt that was not sent yet comes last.
func (e *EngineLoad) PredictEnd(f *InFlight, corrected func(predicted time.Duration) time.Duration) (
	currentEnds time.Time, rest time.Duration,
) {
	oldest, since := e.oldestUnanswered()
	if oldest != nil {
		currentEnds = since.Add(corrected(oldest.Predicted()))
	}
	if f == oldest {
		return currentEnds, 0
	}
	for _, probe := range e.unanswered {
		if probe == f { // the probes behind f do not delay it
			break
		}
		if probe != oldest {
			rest += corrected(probe.Predicted())
		}
	}
	return currentEnds, rest + corrected(f.Predicted())
}

// OthersBacklog is the part of backlog_ms, in ms, that comes from other dispatchers, which report
// their prompts, and from clients that bypass all dispatchers. Each request that a current sample
// shows beyond the reported ones counts as long as a usual prompt of this proxy, with usualTokens
// new tokens; a running one counts half, because on average half of it is done. decodes: the engine
// also decodes, so that its running requests may be decodes, and only waiting ones count.
func (e *EngineLoad) OthersBacklog(latency policy.Latency, usualTokens float64, decodes bool, now time.Time) float64 {
	reportedMs := float64(e.ReportedByOthers.Unanswered)*latency.T0Ms + latency.TPMs*float64(e.ReportedByOthers.NewTokens)
	if e.ObservedOthers == 0 || !e.Current(now) {
		return reportedMs
	}
	waiting, running := e.unreportedRequests(decodes)
	const cachedTokens = 0 // not known for a prompt that no dispatcher reports
	return reportedMs + (waiting+running/2)*latency.Ms(usualTokens, cachedTokens)
}

// unreportedRequests subtracts the reported requests from the waiting ones first, and the rest from
// the running ones.
func (e *EngineLoad) unreportedRequests(decodes bool) (waiting, running float64) {
	reported := float64(e.ReportedByOthers.Unanswered)
	waiting, running = e.observedOthersWaiting, e.ObservedOthers-e.observedOthersWaiting
	if decodes {
		running = 0
	}
	return max(0, waiting-reported), max(0, running-max(0, reported-waiting))
}

// BatchSize is the indicator bs: this proxy's probes and waiting prompts, plus the requests of
// others, as reported or as a current sample shows them, whichever are more.
func (e *EngineLoad) BatchSize(now time.Time) float64 {
	others := float64(e.ReportedByOthers.Unanswered)
	if e.ObservedOthers > 0 && e.Current(now) {
		others = max(others, e.ObservedOthers)
	}
	return float64(e.Leases[Probing]+e.Waiting.Leases[Probing]) + others
}

// ConcurrentRequests is how many requests run on the engine that are not probes of this proxy; 0
// without a current sample.
func (e *EngineLoad) ConcurrentRequests(now time.Time) float64 {
	if !e.Current(now) {
		return 0
	}
	return e.ObservedOthers - e.observedOthersWaiting
}

// HasOthersPrompts reports whether dispatchers report prompts of others, or a current sample shows
// some. decodes: the engine also decodes.
func (e *EngineLoad) HasOthersPrompts(decodes bool, now time.Time) bool {
	prompts := e.ObservedOthers
	if decodes { // the running requests may all be decodes
		prompts = e.observedOthersWaiting
	}
	sampled := prompts > 0 && e.Current(now)
	return e.ReportedByOthers.Unanswered > 0 || sampled
}

// RequestsAhead is how many requests the engine would serve before one more probe: the unanswered
// probes, and the waiting requests of others.
func (e *EngineLoad) RequestsAhead(now time.Time) float64 {
	others := float64(e.ReportedByOthers.Unanswered)
	if e.observedOthersWaiting > 0 && e.Current(now) {
		others = max(others, e.observedOthersWaiting)
	}
	return float64(e.Leases[Probing]) + others
}

// Charge books a prompt whose probe is sent now. The caller must not copy f afterwards.
func (e *EngineLoad) Charge(f *InFlight, w Weight, o *LeaseOwner, now time.Time) {
	e.Reserve(f, w, o, now)
	f.MarkSent(now)
}

// Reserve books a prompt whose probe is sent later. o must end this charge, and Audit counts the
// charge as lost if it does not; nil: the audit does not check it. The caller must not copy f
// afterwards, because the EngineLoad points to it.
func (e *EngineLoad) Reserve(f *InFlight, w Weight, o *LeaseOwner, now time.Time) {
	if o != nil {
		o.openCharges++
		if o.ended { // no code will end this charge
			e.ledger.lostCharges++
		}
	}
	*f = InFlight{Weight: w, load: e, phase: Probing, owner: o, since: now}
	e.book(Probing, w, 1)
	e.freedPace.fadeTo(now) // the measurement begins with the first charge; later this changes no result
	e.ledger.charged++
	e.UpdateGate(now)
}

// UpdateGate must be called after every change of charges, reports and gauges.
func (e *EngineLoad) UpdateGate(now time.Time) {
	e.updateState(kvState{
		own: e.CountedUsage(), scraped: e.GaugeUsage(now), promptsOnEngine: e.FetchablePrompts() + e.ReportedByOthers.Unanswered,
		gaugeCountsUntil: e.gaugeCountsUntil(),
	}, e.ledger.cfg.KVThreshold, now)
}

// Stale reports whether the gauges no longer count. The engine may only be too busy to answer
// scrapes. It stays in service with this proxy's own counts, but engines with readable gauges are
// preferred.
func (e *EngineLoad) Stale() bool { return e.FailedInRow >= staleAfter }

// Current reports whether the last sample is recent enough to count the requests of others: at most
// three scrape intervals old, or three times the duration of a scrape if that is longer.
func (e *EngineLoad) Current(now time.Time) bool {
	interval := max(e.ledger.cfg.Interval, e.scrapeTook)
	if !e.scrapeSentAt.IsZero() { // a scrape under way has taken this long already
		interval = max(interval, now.Sub(e.scrapeSentAt))
	}
	return now.Sub(e.SampledAt) <= 3*interval
}

// CountedUsage is the share of the KV cache, 0 to 1, that this and other dispatchers use by their
// counts. While the capacity is unknown it is 0, and only the gauge can close the gate.
func (e *EngineLoad) CountedUsage() float64 {
	if capacity := e.Capacity(); capacity > 0 {
		return float64(e.KVTokens()+e.ReportedByOthers.KVTokens) / float64(capacity)
	}
	return 0
}

// gaugeCountsUntil is when the KV gauge becomes too old to count; zero: never, because there was no
// scrape. It counts for staleAfter + 1 scrapes: the last good one, and those that may fail after
// it. A scrape under way does not extend the time, because it may wait for its whole timeout.
func (e *EngineLoad) gaugeCountsUntil() time.Time {
	if e.SampledAt.IsZero() {
		return time.Time{}
	}
	return e.SampledAt.Add((staleAfter + 1) * max(e.ledger.cfg.Interval, e.goodScrapeTook))
}

// GaugeUsage is the share of the KV cache, 0 to 1, in use by the engine's gauge; NaN: not reported,
// or too old.
func (e *EngineLoad) GaugeUsage(now time.Time) float64 { return e.unlessOld(e.gaugeUsage, now) }

func (e *EngineLoad) unlessOld(gauge float64, now time.Time) float64 {
	until := e.gaugeCountsUntil() // zero: there was no good scrape yet, so nothing is too old
	tooOld := !until.IsZero() && !now.Before(until)
	if e.Stale() || tooOld {
		return math.NaN()
	}
	return gauge
}

// Usage is the share of the KV cache in use, 0 to 1: by the charges or by the gauge, whichever is
// larger. The gauge does not count while no KV of this proxy may still be fetched, because an idle
// engine does not update it.
func (e *EngineLoad) Usage() float64 {
	usage := e.CountedUsage()
	hasOwnPrompts := e.FetchablePrompts() > 0
	if hasOwnPrompts && e.gaugeUsage > usage { // false if gaugeUsage is NaN
		usage = e.gaugeUsage
	}
	return usage
}

// RequestCounts are the counts of the last scrape, corrected by the probes that were sent or have
// ended since.
func (e *EngineLoad) RequestCounts() (waiting, running float64) { return e.waitingNow, e.runningNow }

// WaitingCounts is how many requests waited in the engine at the last scrape.
func (e *EngineLoad) WaitingCounts(now time.Time) (ofOthers, all float64, recent bool) {
	return e.observedOthersWaiting, e.waitingAtScrape, e.Current(now)
}

// SinceIdle looks back to the last scrape that found no request waiting. ran is how many requests
// ran then; ended is how many of this proxy's probes have ended since, less those sent since.
func (e *EngineLoad) SinceIdle() (ran float64, ended int) {
	return e.idle.ran, (e.probesEnded - e.idle.probesEnded) - (e.probesSent - e.idle.probesSent)
}

func (e *EngineLoad) StartScrape(now time.Time) ScrapeStart {
	e.scrapeSentAt = now
	return ScrapeStart{
		sent: now, unansweredProbes: len(e.unanswered), probesSent: e.probesSent, probesEnded: e.probesEnded, kvTokens: float64(e.KVTokens()),
		unansweredTokens: float64(e.Tokens[Probing]),
	}
}

// AbandonScrape notes that the scrape under way was cancelled. It counts neither as good nor as
// failed.
func (e *EngineLoad) AbandonScrape() { e.scrapeSentAt = time.Time{} }

// RecordFailedScrape makes the gauges stale after staleAfter failures in a row.
func (e *EngineLoad) RecordFailedScrape(start ScrapeStart, now time.Time) {
	e.scrapeSentAt, e.scrapeTook = time.Time{}, now.Sub(start.sent)
	e.FailedInRow++
	e.FailedScrapes++
	e.UpdateGate(now)
}

// StoreSample stores the result of a scrape. What the scrape did not report keeps its last value,
// except KVUsage and the request counts. If the engine restarted, the orphans from before the last
// good scrape end, because the old process still ran then, and their KV is gone with it.
func (e *EngineLoad) StoreSample(s Sample, start ScrapeStart, now time.Time) (restarted bool) {
	e.scrapeSentAt, e.scrapeTook = time.Time{}, now.Sub(start.sent)
	restarted = e.startTime > 0 && s.StartTime > 0 && s.StartTime != e.startTime
	if restarted {
		lastGoodScrape := e.SampledAt // not the scrape of s
		e.ledger.freeOrphans(e, lastGoodScrape, now)
	}
	if s.StartTime > 0 {
		e.startTime = s.StartTime
	}
	if s.RTT > 0 {
		e.RTT = s.RTT
	}
	e.gaugeUsage, e.gaugeHeld = s.KVUsage, s.KVHeld
	e.sampledTokens = start.tokensInGauge(s.Waiting)
	e.countRequests(s, start)
	e.SampledAt, e.goodScrapeTook, e.FailedInRow = start.sent, e.scrapeTook, 0
	e.UpdateGate(now)
	return restarted
}

// tokensInGauge estimates how many KV tokens of this proxy's prompts a scraped gauge includes. The
// gauge does not count prompts that still wait. As many of this proxy's prompts are taken to wait
// as the scrape shows waiting.
func (s ScrapeStart) tokensInGauge(waitingRequests float64) float64 {
	tokens := s.kvTokens
	if s.unansweredProbes > 0 && waitingRequests > 0 { // false if waitingRequests is NaN
		waitingShare := min(1, waitingRequests/float64(s.unansweredProbes))
		tokens -= s.unansweredTokens * waitingShare
	}
	return tokens
}

// countRequests takes requests beyond this proxy's unanswered probes as those of others. All probes
// may be among the waiting requests, so only waiting requests in excess of the probes certainly
// came from elsewhere.
func (e *EngineLoad) countRequests(s Sample, start ScrapeStart) {
	e.ObservedOthers, e.observedOthersWaiting, e.waitingAtScrape = 0, 0, 0
	requests, ownProbes := s.Running+s.Waiting, float64(start.unansweredProbes)
	if math.IsNaN(requests) {
		return
	}
	e.ObservedOthers = max(0, requests-ownProbes)
	e.observedOthersWaiting, e.waitingAtScrape = max(0, s.Waiting-ownProbes), s.Waiting
	if s.Waiting == 0 {
		e.idle = idle{ran: s.Running, probesSent: start.probesSent, probesEnded: start.probesEnded}
	}
	e.correctCounts(s, start)
}

func (e *EngineLoad) correctCounts(s Sample, start ScrapeStart) {
	sentSince, endedSince := e.probesSent-start.probesSent, e.probesEnded-start.probesEnded
	e.waitingNow, e.runningNow = s.Waiting+float64(sentSince), s.Running
	for range endedSince {
		e.discountEndedProbe()
	}
}

func (e *EngineLoad) discountEndedProbe() {
	if e.runningNow >= 1 {
		e.runningNow--
	} else {
		e.waitingNow = max(0, e.waitingNow-1)
	}
}

// RoomForecast predicts when the KV cache has room for more prompts, from the recent pace at which
// its tokens were freed. The pace counts only this proxy's prompts, because other dispatchers fill
// the room that their own prompts leave.
func (e *EngineLoad) RoomForecast(now time.Time) (r Room, known bool) {
	capacity, tokensPerMs := float64(e.Capacity()), e.freedPace.perMs(now)
	if capacity == 0 || tokensPerMs == 0 {
		return r, false
	}
	usedTokens := e.usedTokens(capacity, now)
	r.TokenMs = 1 / tokensPerMs
	if !e.Closed(now) { // InMs is negative if some room is free now
		r.InMs = (usedTokens - capacity) / tokensPerMs
		return r, true
	}
	// A closed gate opens below the threshold by Hysteresis, and not before the next scrape shows
	// this.
	opensAtTokens := capacity * (e.ledger.cfg.KVThreshold - Hysteresis)
	nextScrapeMs := float64(e.ledger.cfg.Interval-now.Sub(e.SampledAt)) / float64(time.Millisecond)
	r.InMs = max((usedTokens-opensAtTokens)/tokensPerMs, nextScrapeMs, 0)
	return r, true
}

// usedTokens estimates how many tokens the KV cache holds now: those that the dispatchers count, or
// those that the gauge showed and this proxy has charged since, whichever are more. An idle engine
// does not update its gauge.
func (e *EngineLoad) usedTokens(capacity float64, now time.Time) float64 {
	ownTokens := float64(e.KVTokens())
	usedTokens, gaugeTokens := ownTokens+float64(e.ReportedByOthers.KVTokens), e.unlessOld(e.gaugeHeld, now)*capacity
	mayBeIdle := e.FetchablePrompts() == 0
	if !mayBeIdle && !math.IsNaN(gaugeTokens) {
		chargedSinceScrape := ownTokens - e.sampledTokens
		usedTokens = max(usedTokens, gaugeTokens+chargedSinceScrape)
	}
	return usedTokens
}
