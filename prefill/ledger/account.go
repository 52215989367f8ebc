package ledger

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Sums are the totals of all charges on an account. They are integers, because adding and subtracting the same float
// leaves a rounding error.
type Sums struct {
	Leases [Phases]int
	Tokens [Phases]int64
	Work   [Phases]int64

	NewTokens, PredictedUs, Attention int64
}

// book adds the weight of a prompt if times is 1, and subtracts the weight if times is -1.
func (s *Sums) book(phase Phase, weight Weight, times int64) {
	s.Leases[phase] += int(times)
	s.Tokens[phase] += times * weight.Tokens
	s.Work[phase] += times * weight.Work
	if phase == Probing {
		s.NewTokens += times * weight.NewTokens
		s.PredictedUs += times * weight.PredictedUs
		s.Attention += times * weight.Attention
	}
}

// Live counts the prompts whose KV a decode engine may still fetch.
func (s *Sums) Live() int { return s.Leases[Probing] + s.Leases[Pooled] + s.Leases[Dispatched] }

// Held counts the prompts of this proxy whose KV the engine holds, those that no decode engine will fetch included.
func (s *Sums) Held() int { return s.Live() + s.Leases[Orphaned] }

// KVTokens is the number of tokens that the prefill engine's KV cache holds for this proxy. A prompt counts until
// the engine frees its KV: at the first decode event, or at the engine's own timeout.
func (s *Sums) KVTokens() int64 { return sum(s.Tokens) }

// KVWork is the same load as KVTokens, in the weight that vllm-ascend's proxy gives to prompts.
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
	Owner      string
	Waiting    Sums      // prompts that wait for the candidate, while one round of decisions runs
	Shared     Share     // the load of other dispatchers on the candidate; SetShared changes it
	AnsweredAt time.Time // when the engine last answered a probe of this proxy
	Unfetched  int       // prompts that were left to the engine's own timeout, since the start

	ledger     *Ledger
	freed      freed
	capacity   int64       // KV tokens from the configuration; 0: the scraped capacity is used
	unanswered []*InFlight // probes, in the order in which they were sent
	turned     time.Time   // when the engine last turned to another prompt, as far as the ends of probes show; zero: never
}

// Load returns the account of a new candidate, with nothing charged.
func (l *Ledger) Load(owner string) EngineLoad {
	return EngineLoad{ledger: l, Owner: owner, Gauges: Gauges{usage: math.NaN()}}
}

// SetCapacity sets the candidate's capacity from the configuration, in KV tokens; 0: the scraped capacity is used.
func (a *EngineLoad) SetCapacity(tokens int64, now time.Time) {
	a.capacity = tokens
	a.UpdateGate(now)
}

// Capacity is how many KV tokens fit on the candidate; 0: not known.
func (a *EngineLoad) Capacity() int64 {
	return cmp.Or(a.capacity, a.scraped)
}

// Wait adds a prompt that waits for the candidate in this round.
func (a *EngineLoad) Wait(w Weight) {
	a.Waiting.Leases[Probing]++
	a.Waiting.NewTokens += w.NewTokens
	a.Waiting.PredictedUs += w.PredictedUs
	a.Waiting.Attention += w.Attention
}

// Share is the load that this dispatcher has put on the candidate.
func (a *EngineLoad) Share() Share { return Share{a.Leases[Probing], a.NewTokens, a.KVTokens()} }

// SetShared replaces the load that other dispatchers report for the candidate.
func (a *EngineLoad) SetShared(s Share, now time.Time) {
	if a.Shared != s {
		a.Shared = s
		a.UpdateGate(now)
	}
}

// end removes a probe that has ended from the unanswered probes, and from the request counts of the last scrape. answered says that
// the engine has answered it with a hand-off. Otherwise its client has left, for example, and the end says nothing about the engine: a
// probe that waited leaves the prompt that the engine computes as it is, and an engine that stands still does not turn to another prompt.
func (a *EngineLoad) end(c *InFlight, answered bool, now time.Time) {
	if c.sent.IsZero() {
		return
	}
	i := slices.Index(a.unanswered, c)
	if answered {
		a.AnsweredAt = now
	}
	if answered || i == 0 && !a.Stalled(now) {
		a.turned = now
	}
	a.unanswered = slices.Delete(a.unanswered, i, i+1)
	a.answers++
	a.removeAnswered()
}

// OldestSent is when the oldest unanswered probe was sent; zero: all probes are answered.
func (a *EngineLoad) OldestSent() time.Time {
	if len(a.unanswered) == 0 {
		return time.Time{}
	}
	return a.unanswered[0].sent
}

// NextSent is when the oldest unanswered probe other than the charge's was sent; zero: there is none.
func (a *EngineLoad) NextSent(c *InFlight) time.Time {
	for _, probe := range a.unanswered[:min(2, len(a.unanswered))] {
		if probe != c {
			return probe.sent
		}
	}
	return time.Time{}
}

// running is the oldest unanswered probe, and the latest time at which the engine can have begun to compute it: when the
// probe was sent, or when the engine turned to it after another probe, whichever is later. nil: all probes are answered.
func (a *EngineLoad) running() (oldest *InFlight, since time.Time) {
	if len(a.unanswered) == 0 {
		return nil, since
	}
	oldest = a.unanswered[0]
	if a.turned.After(oldest.sent) {
		return oldest, a.turned
	}
	return oldest, oldest.sent
}

// A probe counts as stuck after stallFactor times its predicted duration plus stallSlack: either the engine hangs, or
// the prediction is useless.
const (
	stallFactor = 4
	stallSlack  = time.Second
)

// StallsAt is the time from which the candidate counts as stalled, unless it answers a probe before; false: it has no
// unanswered probe.
func (a *EngineLoad) StallsAt() (time.Time, bool) {
	oldest, since := a.running()
	if oldest == nil {
		return since, false
	}
	return since.Add(stallFactor*oldest.Predicted() + stallSlack), true
}

// Stalled reports whether the oldest unanswered probe counts as stuck now.
func (a *EngineLoad) Stalled(now time.Time) bool {
	at, ok := a.StallsAt()
	return ok && !now.Before(at)
}

// Unsent is the number of charged prompts whose probe was not sent yet.
func (a *EngineLoad) Unsent() int { return a.Leases[Probing] - len(a.unanswered) }

// Backlog is the part of the indicator backlog_ms that this proxy's own prompts cause, in ms. Prompts that wait for the
// candidate in this round count like the prompts that it computes.
func (a *EngineLoad) Backlog(now time.Time) float64 {
	waiting := float64(a.Waiting.PredictedUs) / 1000
	oldest, since := a.running()
	if oldest == nil {
		return waiting
	}
	return waiting + policy.Backlog(float64(a.PredictedUs)/1000, float64(oldest.Weight.PredictedUs)/1000,
		float64(now.Sub(since))/float64(time.Millisecond))
}

// Ends is the time by which all charged prompts are predicted to be prefilled; false: not known, as while the probe of
// a charged prompt was not sent yet.
func (a *EngineLoad) Ends() (at time.Time, known bool) {
	oldest, since := a.running()
	if oldest == nil || a.PredictedUs == 0 || len(a.unanswered) < a.Leases[Probing] {
		return at, false
	}
	return since.Add(time.Duration(a.PredictedUs) * time.Microsecond), true
}

// Foresee predicts the end of a charged prompt's prefill in two parts: current is when the engine ends the prompt that it
// computes now, and rest is how long it then takes for the prompts up to and including the charged one. duration corrects
// a predicted prefill time by the recent error of the engine's predictions, which the caller knows. A prompt that was not
// sent yet comes last.
func (a *EngineLoad) Foresee(c *InFlight, duration func(predicted time.Duration) time.Duration) (current time.Time, rest time.Duration) {
	oldest, since := a.running()
	if oldest != nil {
		current = since.Add(duration(oldest.Predicted()))
	}
	if c == oldest {
		return current, 0
	}
	for _, probe := range a.unanswered {
		if probe == c {
			break
		}
		if probe != oldest {
			rest += duration(probe.Predicted())
		}
	}
	return current, rest + duration(c.Predicted())
}

// OthersBacklog is the part of backlog_ms, in ms, that other dispatchers and strangers (clients that bypass all
// dispatchers) sent. usualTokens is how many new tokens a prompt usually has; decodes says that the engine also decodes.
// Other dispatchers report their load. A current sample may show more requests than were reported; each of these counts
// as long as a usual prompt of this proxy takes. A running prompt counts half, because on average half of it is done. On
// an engine that also decodes, running requests do not count, because they may be decodes.
func (a *EngineLoad) OthersBacklog(line policy.Latency, usualTokens float64, decodes bool, now time.Time) float64 {
	reported := float64(a.Shared.Unanswered)
	ms := reported*line.T0Ms + line.TPMs*float64(a.Shared.NewTokens)
	if a.Foreign == 0 || !a.Current(now) {
		return ms
	}
	waiting, running := a.foreignQueue, a.Foreign-a.foreignQueue
	if decodes {
		running = 0
	}
	unreportedWaiting := max(0, waiting-reported)
	unreportedRunning := max(0, running-max(0, reported-waiting))
	return ms + (unreportedWaiting+unreportedRunning/2)*line.Ms(usualTokens, 0)
}

// Batch is the indicator bs: the unanswered probes of this proxy plus the requests of others. The requests of others are
// the number that other dispatchers report, or the number that a current sample shows, whichever is larger.
func (a *EngineLoad) Batch(now time.Time) float64 {
	others := float64(a.Shared.Unanswered)
	if a.Foreign > 0 && a.Current(now) {
		others = max(others, a.Foreign)
	}
	return float64(a.Leases[Probing]+a.Waiting.Leases[Probing]) + others
}

// Beside is how many requests run on the engine that are not probes of this proxy; 0 without a current sample.
func (a *EngineLoad) Beside(now time.Time) float64 {
	if !a.Current(now) {
		return 0
	}
	return a.Foreign - a.foreignQueue
}

// Crowded reports whether the engine has prompts of others, by the reports of other dispatchers or by a current sample.
// On an engine that also decodes, running requests count as decodes.
func (a *EngineLoad) Crowded(decodes bool, now time.Time) bool {
	prompts := a.Foreign
	if decodes {
		prompts = a.foreignQueue
	}
	return a.Shared.Unanswered > 0 || prompts > 0 && a.Current(now)
}

// Ahead is how many requests the engine would serve before one more probe: the unanswered probes of this proxy plus the
// requests of others. The latter are the number that other dispatchers report, or the number that waits by a current
// sample, whichever is larger.
func (a *EngineLoad) Ahead(now time.Time) float64 {
	others := float64(a.Shared.Unanswered)
	if a.foreignQueue > 0 && a.Current(now) {
		others = max(others, a.foreignQueue)
	}
	return float64(a.Leases[Probing]) + others
}

// Charge books a prompt whose probe is sent now. The caller must not copy c afterwards, because the account points to it.
func (a *EngineLoad) Charge(c *InFlight, w Weight, h *LeaseOwner, now time.Time) {
	a.Reserve(c, w, h, now)
	c.Send(now)
}

// Reserve books a prompt whose probe is sent later. The caller must not copy c afterwards, because the account points to it.
func (a *EngineLoad) Reserve(c *InFlight, w Weight, h *LeaseOwner, now time.Time) {
	if h != nil {
		h.charges++
		if h.ended {
			a.ledger.unheld++
		}
	}
	*c = InFlight{Weight: w, account: a, phase: Probing, holder: h, since: now}
	a.book(Probing, w, 1)
	a.freed.fadeTo(now) // starts the measurement at the first charge; later calls only bring it up to date
	a.ledger.charged++
	a.UpdateGate(now)
}

// UpdateGate opens or closes the gate by the present state. It must be called after every change of this state.
func (a *EngineLoad) UpdateGate(now time.Time) {
	a.update(kvState{own: a.Own(), scraped: a.GaugeUsage(now), live: a.Live() + a.Shared.Unanswered, until: a.gaugeCountsUntil()},
		a.ledger.cfg.KVThreshold, now)
}

// Stale reports whether too many scrapes in a row failed to rely on the gauges. The engine may only be too busy to
// answer scrapes. It therefore stays in service by this proxy's own accounts, but engines with readable gauges are
// preferred.
func (a *EngineLoad) Stale() bool { return a.Misses >= staleAfter }

// Current reports whether the last sample is recent enough to count the requests of others. A sample is current for
// three scrape intervals, or for three times the duration of a scrape if scrapes take longer than the interval.
func (a *EngineLoad) Current(now time.Time) bool {
	interval := max(a.ledger.cfg.Interval, a.scrapeTook)
	if !a.asked.IsZero() {
		interval = max(interval, now.Sub(a.asked))
	}
	return now.Sub(a.Sampled) <= 3*interval
}

// Own is the share of the KV cache, 0 to 1, that this and other dispatchers use by their accounts. While the capacity
// is unknown it is 0, and only the engine's gauge can close the gate.
func (a *EngineLoad) Own() float64 {
	if capacity := a.Capacity(); capacity > 0 {
		return float64(a.KVTokens()+a.Shared.KVTokens) / float64(capacity)
	}
	return 0
}

// gaugeCountsUntil is when the engine's KV gauge becomes too old to count; zero: never. It leaves time for staleAfter
// further scrapes, each as long as the last good one. A scrape that is still under way does not extend the time, because
// it may wait for its whole timeout.
func (a *EngineLoad) gaugeCountsUntil() time.Time {
	if a.Sampled.IsZero() {
		return time.Time{}
	}
	return a.Sampled.Add((staleAfter + 1) * max(a.ledger.cfg.Interval, a.goodScrapeTook))
}

// GaugeUsage is the share of the KV cache that is in use by the engine's gauge, 0 to 1; NaN if the gauge is unknown, too
// old or stale.
func (a *EngineLoad) GaugeUsage(now time.Time) float64 {
	until := a.gaugeCountsUntil()
	if a.Stale() || !until.IsZero() && !now.Before(until) {
		return math.NaN()
	}
	return a.usage
}

// Usage is the share of the KV cache in use, 0 to 1: the larger of the accounts and the engine's gauge. The gauge does
// not count while no prompt of this proxy is on the engine, because an idle engine does not update it.
func (a *EngineLoad) Usage() float64 {
	usage := a.Own()
	if a.Live() > 0 && a.usage > usage { // never true of NaN
		usage = a.usage
	}
	return usage
}

// Queue is how many requests wait in the engine and how many run. Probes that this proxy sent or got answered since the
// last scrape are included.
func (a *EngineLoad) Queue() (waiting, running float64) { return a.engineWaits, a.engineRuns }

// Strangers is how many requests from elsewhere than this proxy wait in the engine, and how many wait in all; false: no
// sample is current.
func (a *EngineLoad) Strangers(now time.Time) (foreign, all float64, ok bool) {
	return a.foreignQueue, a.waitingAtScrape, a.Current(now)
}

// SinceIdle looks back to the last scrape that found no request waiting. ran is how many requests ran then; answered is
// the number of answers to this proxy's probes since then, less the number of probes sent since then.
func (a *EngineLoad) SinceIdle() (ran float64, answered int) {
	return a.idle.ran, (a.answers - a.idle.answers) - (a.sends - a.idle.sends)
}

// Ask notes that a scrape is sent now, and returns the state of the account for Sample or Miss.
func (a *EngineLoad) Ask(now time.Time) Mark {
	a.asked = now
	return Mark{
		sent: now, unanswered: len(a.unanswered), sends: a.sends, answers: a.answers, tokens: float64(a.KVTokens()),
		probing: float64(a.Tokens[Probing]),
	}
}

// Unasked notes that the scrape under way was abandoned.
func (a *EngineLoad) Unasked() { a.asked = time.Time{} }

// Miss notes that a scrape failed.
func (a *EngineLoad) Miss(at Mark, now time.Time) {
	a.asked, a.scrapeTook = time.Time{}, now.Sub(at.sent)
	a.Misses++
	a.Missed++
	a.UpdateGate(now)
}

// Sample takes over the result of a scrape; at is the state of the account when the scrape was sent. Requests that the
// engine counts beyond the unanswered probes of this proxy came from others. Sample reports whether the engine restarted
// since the last scrape.
func (a *EngineLoad) Sample(s Sample, at Mark, now time.Time) (restarted bool) {
	a.asked, a.scrapeTook = time.Time{}, now.Sub(at.sent)
	if restarted = a.startTime > 0 && s.StartTime > 0 && s.StartTime != a.startTime; restarted {
		a.ledger.freeOrphans(a, a.Sampled, now)
	}
	if s.StartTime > 0 {
		a.startTime = s.StartTime
	}
	if s.CapacityTokens > 0 {
		a.scraped = s.CapacityTokens
	}
	if s.BlockTokens > 0 {
		a.Block = s.BlockTokens
	}
	if s.RTT > 0 {
		a.RTT = s.RTT
	}
	a.usage = s.KVUsage
	a.sampledTokens = at.tokens
	if at.unanswered > 0 && s.Waiting > 0 { // the engine's gauge does not count the KV of prompts that still wait
		a.sampledTokens -= at.probing * min(1, s.Waiting/float64(at.unanswered))
	}
	a.countRequests(s, at)
	a.Sampled, a.goodScrapeTook, a.Misses = at.sent, a.scrapeTook, 0
	a.UpdateGate(now)
	return restarted
}

// countRequests takes over the engine's counts of requests, and corrects them by the probes that were sent or answered
// after the scrape was sent.
func (a *EngineLoad) countRequests(s Sample, at Mark) {
	a.Foreign, a.foreignQueue, a.waitingAtScrape = 0, 0, 0
	requests := s.Running + s.Waiting
	if math.IsNaN(requests) {
		return
	}
	a.Foreign = max(0, requests-float64(at.unanswered))
	a.foreignQueue, a.waitingAtScrape = max(0, s.Waiting-float64(at.unanswered)), s.Waiting
	if s.Waiting == 0 {
		a.idle = idle{ran: s.Running, sends: at.sends, answers: at.answers}
	}
	a.engineWaits, a.engineRuns = s.Waiting+float64(a.sends-at.sends), s.Running
	for range a.answers - at.answers {
		a.removeAnswered()
	}
}

// removeAnswered subtracts an answered request from the running requests, or from the waiting ones if no request runs.
func (a *EngineLoad) removeAnswered() {
	if a.engineRuns >= 1 {
		a.engineRuns--
	} else {
		a.engineWaits = max(0, a.engineWaits-1)
	}
}

// Room predicts when the KV cache has room for more prompts, from the recent pace at which its tokens were freed. known
// is false if the capacity or the pace is not known. The pace counts only the KV of this proxy's prompts, because other
// dispatchers fill the room that their own prompts leave.
func (a *EngineLoad) Room(now time.Time) (r Room, known bool) {
	capacity, pace := float64(a.Capacity()), a.freed.perMs(now)
	if capacity == 0 || pace == 0 {
		return r, false
	}
	ownTokens := float64(a.KVTokens())
	usedTokens, gaugeTokens := ownTokens+float64(a.Shared.KVTokens), a.GaugeUsage(now)*capacity
	if a.Live() > 0 && !math.IsNaN(gaugeTokens) { // an idle engine does not update its gauge
		chargedSinceScrape := ownTokens - a.sampledTokens
		usedTokens = max(usedTokens, gaugeTokens+chargedSinceScrape)
	}
	limit := capacity
	if a.Closed(now) { // the gate opens only when usage is this far below the threshold
		limit *= a.ledger.cfg.KVThreshold - Hysteresis
	}
	r = Room{InMs: (usedTokens - limit) / pace, TokenMs: 1 / pace}
	if a.Closed(now) { // the gate can open only at the next scrape, when the engine's gauge shows the room
		r.InMs = max(r.InMs, float64(a.ledger.cfg.Interval-now.Sub(a.Sampled))/float64(time.Millisecond), 0)
	}
	return r, true
}
