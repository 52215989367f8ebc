package ledger

import (
	"math"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Sums are the totals of all charges on an engine. They are integers, because adding and subtracting the same float
// leaves a rounding error.
type Sums struct {
	Leases [Phases]int
	Tokens [Phases]int64
	Work   [Phases]int64

	NewTokens, PredictedUs, Attention int64
}

// book adds a prompt and its weight if sign is 1, and subtracts them if sign is -1. The load of the prefill itself counts only until the
// probe is answered.
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

// HeldPrompts counts the prompts of this proxy whose KV the engine holds, those that no decode engine will fetch included.
func (s *Sums) HeldPrompts() int { return s.FetchablePrompts() + s.Leases[Orphaned] }

// KVTokens is the number of tokens that the prefill engine's KV cache holds for this proxy. A prompt counts until
// the engine frees its KV: at the first decode event, or at the engine's own timeout.
func (s *Sums) KVTokens() int64 { return sum(s.Tokens) }

// KVWork is the same load as KVTokens, measured by the weight that vllm-ascend's proxy gives to prompts, in millionths.
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

// Plus adds the shares that two dispatchers have of one candidate's load.
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
	ReportedByOthers Share     // the load of other dispatchers on the candidate; SetReportedByOthers changes it
	AnsweredAt       time.Time // when the engine last answered a probe of this proxy

	ledger     *Ledger
	freedPace  freedPace
	capacity   int64       // KV tokens that fit; 0: not known
	unanswered []*InFlight // unanswered probes, the oldest first
	// previousEndedAt is when the engine last ended a prompt, and so began another one, as far as the ends of probes show; zero: never.
	previousEndedAt time.Time
}

// NewLoad returns the load of a new candidate, with nothing charged.
func (l *Ledger) NewLoad(owner string) EngineLoad {
	return EngineLoad{ledger: l, Owner: owner, Gauges: Gauges{gaugeUsage: math.NaN(), gaugeHeld: math.NaN()}}
}

// SetCapacity sets how many KV tokens fit on the candidate; 0: not known.
func (e *EngineLoad) SetCapacity(tokens int64, now time.Time) {
	e.capacity = tokens
	e.UpdateGate(now)
}

// Capacity is how many KV tokens fit on the candidate; 0: not known.
func (e *EngineLoad) Capacity() int64 { return e.capacity }

// AddWaiting adds a prompt that waits for the candidate in this round. It counts like a prompt whose probe is not answered (Probing).
func (e *EngineLoad) AddWaiting(w Weight) {
	e.Waiting.Leases[Probing]++
	e.Waiting.NewTokens += w.NewTokens
	e.Waiting.PredictedUs += w.PredictedUs
	e.Waiting.Attention += w.Attention
}

// Share is the load that this dispatcher has put on the candidate, for its report to other dispatchers.
func (e *EngineLoad) Share() Share { return Share{e.Leases[Probing], e.NewTokens, e.KVTokens()} }

// SetReportedByOthers replaces the load that other dispatchers report for the candidate. The new load can close or open the KV
// gate.
func (e *EngineLoad) SetReportedByOthers(s Share, now time.Time) {
	if e.ReportedByOthers != s {
		e.ReportedByOthers = s
		e.UpdateGate(now)
	}
}

// probeEnded removes an ended probe, the call that makes the engine compute a prompt, from the unanswered probes. It also subtracts it from
// the engine's present number of requests. answered says that the engine has answered the probe with a hand-off, and so begins another
// prompt now (previousEndedAt). After any other end, for example because the client left, the engine begins another prompt only if it
// computed this one and does not hang.
func (e *EngineLoad) probeEnded(f *InFlight, answered bool, now time.Time) {
	if f.sent.IsZero() { // the probe was never sent to the engine, and so is not in unanswered
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
	e.probesEnded++ // with or without an answer, the engine has one request less
	e.discountEndedProbe()
}

// OldestSent is when the oldest unanswered probe was sent; zero: all probes are answered.
func (e *EngineLoad) OldestSent() time.Time {
	if len(e.unanswered) == 0 {
		return time.Time{}
	}
	return e.unanswered[0].sent
}

// NextSent is when the oldest unanswered probe other than f was sent; zero: there is none.
func (e *EngineLoad) NextSent(f *InFlight) time.Time {
	for _, probe := range e.unanswered[:min(2, len(e.unanswered))] { // only one of the two oldest probes can be f
		if probe != f {
			return probe.sent
		}
	}
	return time.Time{}
}

// oldestUnanswered is the oldest unanswered probe; nil: all probes are answered. since is the latest time at which the engine can
// have begun to compute this probe: when the probe was sent, or when the engine ended the previous prompt, whichever is later.
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

// A probe counts as stuck after stallFactor times its predicted duration plus stallSlack: either the engine hangs, or
// the prediction is useless.
const (
	stallFactor = 4
	stallSlack  = time.Second
)

// StallsAt is the time from which the candidate counts as stalled, unless it answers a probe before. known is false if it has no
// unanswered probe.
func (e *EngineLoad) StallsAt() (at time.Time, known bool) {
	oldest, since := e.oldestUnanswered()
	if oldest == nil {
		return at, false
	}
	return since.Add(stallFactor*oldest.Predicted() + stallSlack), true
}

// Stalled reports whether the oldest unanswered probe counts as stuck now.
func (e *EngineLoad) Stalled(now time.Time) bool {
	at, known := e.StallsAt()
	return known && !now.Before(at)
}

// Unsent is the number of charged prompts whose probe was not sent yet.
func (e *EngineLoad) Unsent() int { return e.Leases[Probing] - len(e.unanswered) }

// Backlog is the part of the indicator backlog_ms that this proxy's own prompts cause, in ms. Prompts that wait for the
// candidate in this round count like the prompts that it computes. The oldest unanswered probe counts only with the time that it still
// needs.
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

// PrefillsDoneAt is the time by which the engine is predicted to have computed all charged prompts. It computes them one after the other,
// from when it began the oldest one (since), in the sum of their predicted durations (PredictedUs). A probe is the call that sends a prompt
// to the engine. known is false if no probe is unanswered, if nothing is predicted, or if the probe of a charged prompt was not sent yet.
func (e *EngineLoad) PrefillsDoneAt() (at time.Time, known bool) {
	oldest, since := e.oldestUnanswered()
	if oldest == nil || e.PredictedUs == 0 {
		return at, false
	}
	if e.Unsent() > 0 { // it is not known when the engine can begin with this prompt
		return at, false
	}
	predicted := time.Duration(e.PredictedUs) * time.Microsecond // of all prompts without an answer
	return since.Add(predicted), true
}

// PredictEnd predicts the end of a charged prompt's prefill in two parts. currentEnds is when the engine ends the prompt that it
// computes now, which is the oldest unanswered probe; zero: it computes none. rest is how long the engine then takes for the prompts up to
// and including the charged one. corrected adds the recent error of the engine's predictions to a predicted prefill time. A prompt that was
// not sent yet comes last.
func (e *EngineLoad) PredictEnd(f *InFlight, corrected func(predicted time.Duration) time.Duration) (
	currentEnds time.Time, rest time.Duration,
) {
	oldest, since := e.oldestUnanswered()
	if oldest != nil {
		currentEnds = since.Add(corrected(oldest.Predicted()))
	}
	if f == oldest { // the engine computes this prompt now
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

// OthersBacklog is the part of the indicator backlog_ms, in ms, that comes from the prompts of other dispatchers and of strangers (clients
// that bypass all dispatchers). latency predicts the time of a prefill: T0Ms per prompt, and TPMs per new token. Other dispatchers report
// their prompts. A current sample may show more requests than were reported; each of these counts as long as a usual prompt of this proxy
// takes, which has usualTokens new tokens. A running prompt counts half, because on average half of it is done. decodes says that the
// engine also decodes: its running requests may then be decodes, so that only waiting ones count as prompts.
func (e *EngineLoad) OthersBacklog(latency policy.Latency, usualTokens float64, decodes bool, now time.Time) float64 {
	reportedMs := float64(e.ReportedByOthers.Unanswered)*latency.T0Ms + latency.TPMs*float64(e.ReportedByOthers.NewTokens)
	if e.ObservedOthers == 0 || !e.Current(now) { // no current sample shows requests of others
		return reportedMs
	}
	waiting, running := e.unreportedRequests(decodes)
	const cachedTokens = 0 // not known for a prompt that no dispatcher reports
	return reportedMs + (waiting+running/2)*latency.Ms(usualTokens, cachedTokens)
}

// unreportedRequests counts the requests of others in the last sample that no dispatcher has reported. The reported ones are subtracted
// from the waiting requests first, and the rest of them from the running requests. On an engine that also decodes, running is 0, because
// the running requests may be decodes.
func (e *EngineLoad) unreportedRequests(decodes bool) (waiting, running float64) {
	reported := float64(e.ReportedByOthers.Unanswered)
	waiting, running = e.observedOthersWaiting, e.ObservedOthers-e.observedOthersWaiting
	if decodes {
		running = 0
	}
	return max(0, waiting-reported), max(0, running-max(0, reported-waiting))
}

// BatchSize is the indicator bs: the unanswered probes of this proxy plus the requests of others. Prompts that wait for the candidate in
// this round (Waiting) count like unanswered probes. The requests of others are the number that other dispatchers report, or the number
// that a current sample shows, whichever is larger.
func (e *EngineLoad) BatchSize(now time.Time) float64 {
	others := float64(e.ReportedByOthers.Unanswered)
	if e.ObservedOthers > 0 && e.Current(now) {
		others = max(others, e.ObservedOthers)
	}
	return float64(e.Leases[Probing]+e.Waiting.Leases[Probing]) + others
}

// ConcurrentRequests is how many requests run on the engine that are not probes of this proxy; 0 without a current sample.
func (e *EngineLoad) ConcurrentRequests(now time.Time) float64 {
	if !e.Current(now) {
		return 0
	}
	return e.ObservedOthers - e.observedOthersWaiting
}

// HasOthersPrompts reports whether the engine has prompts of other proxies or clients: other dispatchers report some, or a current
// sample shows some. On an engine that also decodes, running requests count as decodes.
func (e *EngineLoad) HasOthersPrompts(decodes bool, now time.Time) bool {
	prompts := e.ObservedOthers
	if decodes { // the running requests may all be decodes
		prompts = e.observedOthersWaiting
	}
	sampled := prompts > 0 && e.Current(now)
	return e.ReportedByOthers.Unanswered > 0 || sampled
}

// RequestsAhead is how many requests the engine would serve before one more probe: the unanswered probes of this proxy plus the
// requests of others. The latter are the number that other dispatchers report, or the number that a current sample shows as
// waiting, whichever is larger.
func (e *EngineLoad) RequestsAhead(now time.Time) float64 {
	others := float64(e.ReportedByOthers.Unanswered)
	if e.observedOthersWaiting > 0 && e.Current(now) {
		others = max(others, e.observedOthersWaiting)
	}
	return float64(e.Leases[Probing]) + others
}

// Charge books a prompt whose probe is sent now. The caller must not copy f afterwards, because the EngineLoad points to it.
func (e *EngineLoad) Charge(f *InFlight, w Weight, o *LeaseOwner, now time.Time) {
	e.Reserve(f, w, o, now)
	f.MarkSent(now)
}

// Reserve books a prompt whose probe is sent later: the prompt counts in the engine's load, and may close its KV gate. o stands for the
// request, which must end this charge, and by which the audit (Audit) finds charges that were never ended; nil: the audit does not check
// this charge. The caller must not copy f afterwards, because the EngineLoad points to it.
func (e *EngineLoad) Reserve(f *InFlight, w Weight, o *LeaseOwner, now time.Time) {
	if o != nil {
		o.openCharges++
		if o.ended { // the request is over already, so that no code will end this charge: it counts as lost at once
			e.ledger.lostCharges++
		}
	}
	*f = InFlight{Weight: w, load: e, phase: Probing, owner: o, since: now}
	e.book(Probing, w, 1)
	e.freedPace.fadeTo(now) // the measured time over which KV is freed begins with the first charge; after that, this changes no result
	e.ledger.charged++
	e.UpdateGate(now)
}

// UpdateGate opens or closes the KV gate, as the present charges, reports and gauges demand. The engine's gauge counts only while the
// engine has prompts of this proxy or of other dispatchers, because an idle engine does not update it. UpdateGate must be called after
// every change of charges, reports and gauges.
func (e *EngineLoad) UpdateGate(now time.Time) {
	e.updateState(kvState{
		own: e.CountedUsage(), scraped: e.GaugeUsage(now), promptsOnEngine: e.FetchablePrompts() + e.ReportedByOthers.Unanswered,
		gaugeCountsUntil: e.gaugeCountsUntil(),
	}, e.ledger.cfg.KVThreshold, now)
}

// Stale reports whether staleAfter scrapes in a row have failed, so that the gauges no longer count. The engine may only be too
// busy to answer scrapes. It therefore stays in service and its load is known from this proxy's own counts, but engines with
// readable gauges are preferred.
func (e *EngineLoad) Stale() bool { return e.FailedInRow >= staleAfter }

// Current reports whether the last sample is recent enough to count the requests of others. A sample is current for
// three scrape intervals, or for three times the duration of a scrape if scrapes take longer than the interval.
func (e *EngineLoad) Current(now time.Time) bool {
	interval := max(e.ledger.cfg.Interval, e.scrapeTook)
	if !e.scrapeSentAt.IsZero() { // a scrape under way has taken this long already
		interval = max(interval, now.Sub(e.scrapeSentAt))
	}
	return now.Sub(e.SampledAt) <= 3*interval
}

// CountedUsage is the share of the KV cache, 0 to 1, that this and other dispatchers use by their counts. While the capacity
// is unknown it is 0, and only the engine's gauge can close the gate.
func (e *EngineLoad) CountedUsage() float64 {
	if capacity := e.Capacity(); capacity > 0 {
		return float64(e.KVTokens()+e.ReportedByOthers.KVTokens) / float64(capacity)
	}
	return 0
}

// gaugeCountsUntil is when the engine's KV gauge becomes too old to count; zero: never, because there was no scrape. This is staleAfter + 1
// scrape intervals after the last good scrape was sent: one for that scrape, and one for each of the scrapes that may fail after it. If the
// last good scrape took longer than an interval, its duration counts instead. A scrape that is still under way does not extend the time,
// because it may wait for its whole timeout.
func (e *EngineLoad) gaugeCountsUntil() time.Time {
	if e.SampledAt.IsZero() {
		return time.Time{}
	}
	return e.SampledAt.Add((staleAfter + 1) * max(e.ledger.cfg.Interval, e.goodScrapeTook))
}

// GaugeUsage is the share of the KV cache, 0 to 1, that the engine's gauge shows as in use. It is NaN if the engine
// reported none, if the last reading is too old (gaugeCountsUntil), or if too many scrapes in a row failed (Stale).
func (e *EngineLoad) GaugeUsage(now time.Time) float64 { return e.unlessOld(e.gaugeUsage, now) }

// unlessOld returns the value of a gauge, as GaugeUsage does.
func (e *EngineLoad) unlessOld(gauge float64, now time.Time) float64 {
	until := e.gaugeCountsUntil() // zero: there was no good scrape yet, so nothing is too old
	tooOld := !until.IsZero() && !now.Before(until)
	if e.Stale() || tooOld {
		return math.NaN()
	}
	return gauge // NaN if the last good scrape reported none, or if there was none
}

// Usage is the share of the KV cache in use, 0 to 1: the larger of the charges' share and the engine's gauge. The gauge does not count
// while the engine has no prompt of this proxy whose KV may still be fetched, because an idle engine does not update it.
func (e *EngineLoad) Usage() float64 {
	usage := e.CountedUsage()
	hasOwnPrompts := e.FetchablePrompts() > 0
	if hasOwnPrompts && e.gaugeUsage > usage { // the comparison is false if gaugeUsage is NaN
		usage = e.gaugeUsage
	}
	return usage
}

// RequestCounts is how many requests wait in the engine and how many run. These are the counts of the last scrape, corrected by
// the probes of this proxy that were sent, or have ended, since then.
func (e *EngineLoad) RequestCounts() (waiting, running float64) { return e.waitingNow, e.runningNow }

// WaitingCounts is how many requests waited in the engine at the last scrape: those of other proxies and clients, and all. recent is
// false if the scrape is too old to count.
func (e *EngineLoad) WaitingCounts(now time.Time) (ofOthers, all float64, recent bool) {
	return e.observedOthersWaiting, e.waitingAtScrape, e.Current(now)
}

// SinceIdle looks back to the last scrape that found no request waiting. ran is how many requests ran then; ended is the number of this
// proxy's probes that have ended since then, less the number of probes sent since then.
func (e *EngineLoad) SinceIdle() (ran float64, ended int) {
	return e.idle.ran, (e.probesEnded - e.idle.probesEnded) - (e.probesSent - e.idle.probesSent)
}

// StartScrape notes that a scrape is sent now, and returns the state of the EngineLoad for StoreSample or RecordFailedScrape.
func (e *EngineLoad) StartScrape(now time.Time) ScrapeStart {
	e.scrapeSentAt = now
	return ScrapeStart{
		sent: now, unansweredProbes: len(e.unanswered), probesSent: e.probesSent, probesEnded: e.probesEnded, kvTokens: float64(e.KVTokens()),
		unansweredTokens: float64(e.Tokens[Probing]),
	}
}

// AbandonScrape notes that the scrape under way was cancelled. It counts neither as good nor as failed.
func (e *EngineLoad) AbandonScrape() { e.scrapeSentAt = time.Time{} }

// RecordFailedScrape counts a failed scrape. After staleAfter failures in a row the gauges no longer count. start is the result of
// StartScrape.
func (e *EngineLoad) RecordFailedScrape(start ScrapeStart, now time.Time) {
	e.scrapeSentAt, e.scrapeTook = time.Time{}, now.Sub(start.sent)
	e.FailedInRow++
	e.FailedScrapes++
	e.UpdateGate(now)
}

// StoreSample stores the result of a scrape; start is the state of the EngineLoad when the scrape was sent (StartScrape). What the scrape
// did not report keeps its last value, except KVUsage and the request counts. With the new values, the KV gate, which keeps new probes from
// an engine whose KV cache is full, may open or close. StoreSample reports whether the engine restarted since the last scrape. An orphaned
// charge is one whose KV no decode engine will fetch, so that the engine holds it until its own timeout. If the engine restarted,
// StoreSample ends those from before the last good scrape, because the old process still ran then, and their KV is gone with it.
func (e *EngineLoad) StoreSample(s Sample, start ScrapeStart, now time.Time) (restarted bool) {
	e.scrapeSentAt, e.scrapeTook = time.Time{}, now.Sub(start.sent)
	restarted = e.startTime > 0 && s.StartTime > 0 && s.StartTime != e.startTime
	if restarted {
		lastGoodScrape := e.SampledAt // not yet the scrape whose result is s
		e.ledger.freeOrphans(e, lastGoodScrape, now)
	}
	if s.StartTime > 0 {
		e.startTime = s.StartTime
	}
	if s.RTT > 0 {
		e.RTT = s.RTT
	}
	e.gaugeUsage, e.gaugeHeld = s.KVUsage, s.KVHeld
	e.sampledTokens = start.tokensInGauge(s.Waiting) // this proxy's part of the gauge, which lacks the prompts that wait in the engine
	e.countRequests(s, start)
	e.SampledAt, e.goodScrapeTook, e.FailedInRow = start.sent, e.scrapeTook, 0 // a good scrape ends the row of failed ones
	e.UpdateGate(now)
	return restarted
}

// tokensInGauge estimates how many KV tokens of this proxy's prompts a scraped gauge includes. The engine's gauge does not count the KV of
// prompts that still wait. Of this proxy's unanswered prompts, as many are taken to wait as the scrape shows waiting requests.
func (s ScrapeStart) tokensInGauge(waitingRequests float64) float64 {
	tokens := s.kvTokens
	if s.unansweredProbes > 0 && waitingRequests > 0 { // false if waitingRequests is NaN, which means that it was not reported
		waitingShare := min(1, waitingRequests/float64(s.unansweredProbes))
		tokens -= s.unansweredTokens * waitingShare
	}
	return tokens
}

// countRequests takes over the engine's counts of requests; start is the state when the scrape was sent. Requests that exceed this proxy's
// unanswered probes came from elsewhere. All probes may be among the waiting requests, so only waiting requests in excess of the probes
// certainly came from elsewhere.
func (e *EngineLoad) countRequests(s Sample, start ScrapeStart) {
	e.ObservedOthers, e.observedOthersWaiting, e.waitingAtScrape = 0, 0, 0
	requests, ownProbes := s.Running+s.Waiting, float64(start.unansweredProbes)
	if math.IsNaN(requests) { // the engine did not report both counts
		return
	}
	e.ObservedOthers = max(0, requests-ownProbes)
	e.observedOthersWaiting, e.waitingAtScrape = max(0, s.Waiting-ownProbes), s.Waiting
	if s.Waiting == 0 { // SinceIdle reports the requests that run now, and counts probes from this scrape on
		e.idle = idle{ran: s.Running, probesSent: start.probesSent, probesEnded: start.probesEnded}
	}
	e.correctCounts(s, start)
}

// correctCounts computes how many requests wait and run in the engine now: as in the sample, with the probes of this proxy that were sent
// after the scrape was sent (start), and without those that have ended after that.
func (e *EngineLoad) correctCounts(s Sample, start ScrapeStart) {
	sentSince, endedSince := e.probesSent-start.probesSent, e.probesEnded-start.probesEnded
	e.waitingNow, e.runningNow = s.Waiting+float64(sentSince), s.Running
	for range endedSince {
		e.discountEndedProbe()
	}
}

// discountEndedProbe subtracts an ended probe from the running requests, or from the waiting ones if no request runs.
func (e *EngineLoad) discountEndedProbe() {
	if e.runningNow >= 1 {
		e.runningNow--
	} else {
		e.waitingNow = max(0, e.waitingNow-1)
	}
}

// RoomForecast predicts when the KV cache has room for more prompts, from the recent pace at which its tokens were freed: after InMs, and
// TokenMs later for each token of the prompt. known is false if the capacity or the pace is not known. The pace counts only the KV of this
// proxy's prompts, because other dispatchers fill the room that their own prompts leave. The KV gate keeps new prompts away when usage
// reaches a threshold (KVThreshold).
func (e *EngineLoad) RoomForecast(now time.Time) (r Room, known bool) {
	capacity, tokensPerMs := float64(e.Capacity()), e.freedPace.perMs(now)
	if capacity == 0 || tokensPerMs == 0 {
		return r, false
	}
	usedTokens := e.usedTokens(capacity, now)
	r.TokenMs = 1 / tokensPerMs
	if !e.Closed(now) { // the gate is open: prompts have room up to the capacity, and InMs is negative if some of it is free now
		r.InMs = (usedTokens - capacity) / tokensPerMs
		return r, true
	}
	// A closed gate opens when usage is below the threshold by Hysteresis, and not before the next scrape shows this.
	opensAtTokens := capacity * (e.ledger.cfg.KVThreshold - Hysteresis)
	nextScrapeMs := float64(e.ledger.cfg.Interval-now.Sub(e.SampledAt)) / float64(time.Millisecond)
	r.InMs = max((usedTokens-opensAtTokens)/tokensPerMs, nextScrapeMs, 0)
	return r, true
}

// usedTokens estimates how many tokens the KV cache holds now: those that this and other dispatchers count or, if they are more, those that
// the engine's gauge showed and those that this proxy has charged since. The gauge does not count while the engine has no prompt of this
// proxy whose KV may still be fetched, because an idle engine does not update it. capacity is the size of the cache in tokens.
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
