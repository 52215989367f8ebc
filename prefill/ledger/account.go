package ledger

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Sums are what an account is charged with. All numbers are integers, so that exactly what was added can be
// subtracted again.
type Sums struct {
	Leases [Phases]int
	Tokens [Phases]int64
	Work   [Phases]int64

	NewTokens, PredictedUs, Attention int64
}

// book adds the weight of a prompt if times is 1, and takes it away if times is -1.
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

// Held counts the prompts whose KV the engine holds for us.
func (s *Sums) Held() int { return s.Live() + s.Leases[Orphaned] }

// KVTokens is all that the prefiller's KV cache holds for us. A prompt's tokens are given back at the first decode
// event, and not when the probe is answered.
func (s *Sums) KVTokens() int64 { return sum(s.Tokens) }

// KVWork is KVTokens in vllm-ascend's weight.
func (s *Sums) KVWork() int64 { return sum(s.Work) }

func sum(v [Phases]int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// Share is what one dispatcher has on a candidate that several dispatchers use.
type Share struct {
	Unanswered int   `json:"n"`             // probes that the engine has not answered
	NewTokens  int64 `json:"new,omitempty"` // of their prompts, tokens that are predicted not to be cached
	KVTokens   int64 `json:"kv,omitempty"`  // of their prompts, and of prefilled prompts that were not fetched yet
}

// Plus adds the shares that two dispatchers have of one candidate's load.
func (s Share) Plus(o Share) Share {
	return Share{s.Unanswered + o.Unanswered, s.NewTokens + o.NewTokens, s.KVTokens + o.KVTokens}
}

// Account is what one candidate is charged with, and what its engine's gauges say beside it.
type Account struct {
	Sums
	Gauges
	gate
	Owner      string
	Waiting    Sums      // prompts that wait for the candidate, while one round of decisions runs
	Shared     Share     // what other dispatchers have there; SetShared changes it
	AnsweredAt time.Time // when the engine answered one of our probes last
	Unfetched  int       // prompts that were left to the engine's own timeout, since the start

	ledger     *Ledger
	freed      freed
	capacity   int64     // KV tokens that it is configured to have; 0: the scrape says
	unanswered []*Charge // probes, in the order in which they were sent
}

// Account returns the account of a new candidate, with nothing charged.
func (l *Ledger) Account(owner string) Account {
	return Account{ledger: l, Owner: owner, Gauges: Gauges{usage: math.NaN()}}
}

// SetCapacity says how many KV tokens the candidate is configured to have; 0: the capacity that the scrape says
// counts.
func (a *Account) SetCapacity(tokens int64, now time.Time) {
	a.capacity = tokens
	a.UpdateGate(now)
}

// Capacity is how many KV tokens the candidate has; 0: not known.
func (a *Account) Capacity() int64 {
	return cmp.Or(a.capacity, a.scraped)
}

// Wait adds a prompt that waits for the candidate in this round.
func (a *Account) Wait(w Weight) {
	a.Waiting.Leases[Probing]++
	a.Waiting.NewTokens += w.NewTokens
	a.Waiting.PredictedUs += w.PredictedUs
	a.Waiting.Attention += w.Attention
}

// Share is what this dispatcher has on the candidate.
func (a *Account) Share() Share { return Share{a.Leases[Probing], a.NewTokens, a.KVTokens()} }

// SetShared takes what other dispatchers say that they have on the candidate.
func (a *Account) SetShared(s Share, now time.Time) {
	if a.Shared != s {
		a.Shared = s
		a.UpdateGate(now)
	}
}

// answer takes a probe off the unanswered ones, and off the counts of the last scrape.
func (a *Account) answer(c *Charge, now time.Time) {
	if c.sent.IsZero() {
		return
	}
	i := slices.Index(a.unanswered, c)
	a.unanswered = slices.Delete(a.unanswered, i, i+1)
	a.AnsweredAt = now
	a.answers++
	a.settleOne()
}

// OldestSent is when the oldest unanswered probe was sent; zero: all probes are answered.
func (a *Account) OldestSent() time.Time {
	if len(a.unanswered) == 0 {
		return time.Time{}
	}
	return a.unanswered[0].sent
}

// NextSent is when the oldest unanswered probe other than the charge's was sent; zero: there is none.
func (a *Account) NextSent(c *Charge) time.Time {
	for _, probe := range a.unanswered[:min(2, len(a.unanswered))] {
		if probe != c {
			return probe.sent
		}
	}
	return time.Time{}
}

// running is the oldest unanswered probe, and the latest time at which the engine can have begun with it: it was sent
// then, or the answer before came then. nil: all probes are answered.
func (a *Account) running() (oldest *Charge, since time.Time) {
	if len(a.unanswered) == 0 {
		return nil, since
	}
	oldest = a.unanswered[0]
	if a.AnsweredAt.After(oldest.sent) {
		return oldest, a.AnsweredAt
	}
	return oldest, oldest.sent
}

// A probe is taken for stuck once it has taken stallFactor times its prediction and stallSlack more: either the
// engine hangs, or the prediction is worth nothing.
const (
	stallFactor = 4
	stallSlack  = time.Second
)

// StallsAt is the time from which the candidate counts as stalled if it answers nothing until then; false: it has no
// unanswered probe.
func (a *Account) StallsAt() (time.Time, bool) {
	oldest, since := a.running()
	if oldest == nil {
		return since, false
	}
	return since.Add(stallFactor*oldest.Predicted() + stallSlack), true
}

// Stalled reports whether that moment has come.
func (a *Account) Stalled(now time.Time) bool {
	at, ok := a.StallsAt()
	return ok && !now.Before(at)
}

// Unsent is how many prompts are charged whose probe was not sent yet.
func (a *Account) Unsent() int { return a.Leases[Probing] - len(a.unanswered) }

// Backlog is our own part of the indicator backlog_ms. Prompts that wait for the candidate count like those that it
// runs.
func (a *Account) Backlog(now time.Time) float64 {
	waiting := float64(a.Waiting.PredictedUs) / 1000
	oldest, since := a.running()
	if oldest == nil {
		return waiting
	}
	return waiting + policy.Backlog(float64(a.PredictedUs)/1000, float64(oldest.Weight.PredictedUs)/1000,
		float64(now.Sub(since))/float64(time.Millisecond))
}

// Ends is when all probes that were sent are predicted to be answered; false: this is not known. It is not known
// either while a charged prompt was not sent yet.
func (a *Account) Ends() (at time.Time, known bool) {
	oldest, since := a.running()
	if oldest == nil || a.PredictedUs == 0 || len(a.unanswered) < a.Leases[Probing] {
		return at, false
	}
	return since.Add(time.Duration(a.PredictedUs) * time.Microsecond), true
}

// Foresee splits the time until the end of a charged prompt's prefill: current is when the prompt that the engine
// computes now ends, and rest is how long the prompts after it, up to the charged one, take. duration corrects a
// predicted prefill time: the caller knows by how much the engine's predictions were off lately. A prompt that was not
// sent yet comes last.
func (a *Account) Foresee(c *Charge, duration func(predicted time.Duration) time.Duration) (current time.Time, rest time.Duration) {
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

// OthersBacklog is the part of backlog_ms, in ms, that other dispatchers and strangers sent. usualTokens is how many new
// tokens a prompt usually has; decodes says that the engine also decodes. The other dispatchers report how
// much they have there. Requests that a current sample shows beyond that count as long as one of our prompts usually
// takes. A running prompt counts half, because on average half of it is done. On an engine that also decodes, running
// requests do not count, because they may be decodes.
func (a *Account) OthersBacklog(line policy.Line, usualTokens float64, decodes bool, now time.Time) float64 {
	reported := float64(a.Shared.Unanswered)
	ms := reported*line.T0Ms + line.TPMs*float64(a.Shared.NewTokens)
	if a.Foreign == 0 || !a.Current(now) {
		return ms
	}
	waiting, running := a.foreignQueue, a.Foreign-a.foreignQueue
	if decodes {
		running = 0
	}
	waiting, reported = max(0, waiting-reported), max(0, reported-waiting)
	return ms + (waiting+max(0, running-reported)/2)*line.Ms(usualTokens, 0)
}

// Batch is the indicator bs: our unanswered probes, and what others sent: as other dispatchers report it, or as a
// current sample shows it if that is more.
func (a *Account) Batch(now time.Time) float64 {
	others := float64(a.Shared.Unanswered)
	if a.Foreign > 0 && a.Current(now) {
		others = max(others, a.Foreign)
	}
	return float64(a.Leases[Probing]+a.Waiting.Leases[Probing]) + others
}

// Beside is how many requests run there that are not our probes, as a current sample
// shows.
func (a *Account) Beside(now time.Time) float64 {
	if !a.Current(now) {
		return 0
	}
	return a.Foreign - a.foreignQueue
}

// Crowded says whether prompts of others are on the engine, as other dispatchers report or a current sample shows. On
// an engine that also decodes, running requests are taken for decodes.
func (a *Account) Crowded(decodes bool, now time.Time) bool {
	prompts := a.Foreign
	if decodes {
		prompts = a.foreignQueue
	}
	return a.Shared.Unanswered > 0 || prompts > 0 && a.Current(now)
}

// Ahead is how many requests would come before one more probe: our unanswered ones, and what others have there, as
// they report it or as it waits there by a current sample.
func (a *Account) Ahead(now time.Time) float64 {
	others := float64(a.Shared.Unanswered)
	if a.foreignQueue > 0 && a.Current(now) {
		others = max(others, a.foreignQueue)
	}
	return float64(a.Leases[Probing]) + others
}

// Charge books a prompt whose probe is sent now. c must not move.
func (a *Account) Charge(c *Charge, w Weight, h *Holder, now time.Time) {
	a.Reserve(c, w, h, now)
	c.Send(now)
}

// Reserve books a prompt whose probe is sent later. c must not move.
func (a *Account) Reserve(c *Charge, w Weight, h *Holder, now time.Time) {
	if h != nil {
		h.charges++
		if h.ended {
			a.ledger.unheld++
		}
	}
	*c = Charge{Weight: w, account: a, phase: Probing, holder: h, since: now}
	a.book(Probing, w, 1)
	a.freed.fadeTo(now) // the pace is measured from the first charge on
	a.ledger.charged++
	a.UpdateGate(now)
}

// UpdateGate must be called after every change of something that the gate depends on.
func (a *Account) UpdateGate(now time.Time) {
	a.update(kvState{own: a.Own(), scraped: a.GaugeUsage(now), live: a.Live() + a.Shared.Unanswered, until: a.gaugeCountsUntil()},
		a.ledger.cfg.KVThreshold, now)
}

// Stale says that so many scrapes in a row failed that the gauges are no longer relied on. The engine may be too busy
// to answer scrapes, so it stays in service by our own accounts, but engines whose gauges can be read are preferred.
func (a *Account) Stale() bool { return a.Misses >= staleAfter }

// Current says whether the last sample still holds for others' requests: for three intervals, each as long as a
// scrape really takes.
func (a *Account) Current(now time.Time) bool {
	interval := max(a.ledger.cfg.Interval, a.scrapeTook)
	if !a.asked.IsZero() {
		interval = max(interval, now.Sub(a.asked))
	}
	return now.Sub(a.Sampled) <= 3*interval
}

// Own is the share of the KV cache that is taken by the accounts of this and other dispatchers; 0 while the capacity
// is unknown, so that then only the scraped share closes the gate.
func (a *Account) Own() float64 {
	if capacity := a.Capacity(); capacity > 0 {
		return float64(a.KVTokens()+a.Shared.KVTokens) / float64(capacity)
	}
	return 0
}

// gaugeCountsUntil is when the engine's own KV usage becomes too old to count; zero: never. By then staleAfter scrapes
// would have been answered, if each had taken as long as the last good one. A scrape that is still under way changes
// nothing, because it may wait for its whole timeout.
func (a *Account) gaugeCountsUntil() time.Time {
	if a.Sampled.IsZero() {
		return time.Time{}
	}
	return a.Sampled.Add((staleAfter + 1) * max(a.ledger.cfg.Interval, a.goodScrapeTook))
}

// GaugeUsage is the share of the KV cache in use by the engine's gauge; NaN if the gauge is unknown, too old or stale.
func (a *Account) GaugeUsage(now time.Time) float64 {
	until := a.gaugeCountsUntil()
	if a.Stale() || !until.IsZero() && !now.Before(until) {
		return math.NaN()
	}
	return a.usage
}

// Usage is the larger of our own account and the engine's gauge. While we have nothing there the gauge does not
// count, because it is frozen.
func (a *Account) Usage() float64 {
	usage := a.Own()
	if a.Live() > 0 && a.usage > usage { // never true of NaN
		usage = a.usage
	}
	return usage
}

// Queue is how many requests the engine holds back and how many it runs. Ours that came and went since the scrape are
// included.
func (a *Account) Queue() (waiting, running float64) { return a.engineWaits, a.engineRuns }

// Strangers is how many requests that are not ours wait at the engine, and how many wait in all; false: no current
// sample says.
func (a *Account) Strangers(now time.Time) (foreign, all float64, ok bool) {
	return a.foreignQueue, a.waitingAtScrape, a.Current(now)
}

// SinceIdle is how many requests ran when a scrape last found none waiting, and how many more of our probes were
// answered than sent since then.
func (a *Account) SinceIdle() (ran float64, answered int) {
	return a.idle.ran, (a.answers - a.idle.answers) - (a.sends - a.idle.sends)
}

// Ask says that a scrape is sent.
func (a *Account) Ask(now time.Time) Mark {
	a.asked = now
	return Mark{
		sent: now, unanswered: len(a.unanswered), sends: a.sends, answers: a.answers, tokens: float64(a.KVTokens()),
		probing: float64(a.Tokens[Probing]),
	}
}

// Unasked says that the scrape under way was given up.
func (a *Account) Unasked() { a.asked = time.Time{} }

// Miss books a scrape that failed.
func (a *Account) Miss(at Mark, now time.Time) {
	a.asked, a.scrapeTook = time.Time{}, now.Sub(at.sent)
	a.Misses++
	a.Missed++
	a.UpdateGate(now)
}

// Sample books what a scrape said. What the engine counts beyond our own unanswered probes came from others. It
// reports whether the engine has started anew since the last scrape.
func (a *Account) Sample(s Sample, at Mark, now time.Time) (restarted bool) {
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
	if at.unanswered > 0 && s.Waiting > 0 { // the engine has not begun with these prompts, so its gauge does not have their KV
		a.sampledTokens -= at.probing * min(1, s.Waiting/float64(at.unanswered))
	}
	a.Foreign, a.foreignQueue, a.waitingAtScrape = 0, 0, 0
	if requests := s.Running + s.Waiting; !math.IsNaN(requests) {
		a.Foreign = max(0, requests-float64(at.unanswered))
		a.foreignQueue, a.waitingAtScrape = max(0, s.Waiting-float64(at.unanswered)), s.Waiting
		if s.Waiting == 0 {
			a.idle = idle{s.Running, at.sends, at.answers}
		}
		a.engineWaits, a.engineRuns = s.Waiting+float64(a.sends-at.sends), s.Running
		for range a.answers - at.answers {
			a.settleOne()
		}
	}
	a.Sampled, a.goodScrapeTook, a.Misses = at.sent, a.scrapeTook, 0
	a.UpdateGate(now)
	return restarted
}

// settleOne takes an answered request off the running ones of the last scrape, or off the waiting ones if the scrape
// counted none as running.
func (a *Account) settleOne() {
	if a.engineRuns >= 1 {
		a.engineRuns--
	} else {
		a.engineWaits = max(0, a.engineWaits-1)
	}
}

// Room predicts when the KV cache has room for more prompts, from the pace at which it was freed lately. known is false
// if the capacity or the pace is not known. The pace counts only the KV of our own prompts, because the room that other
// dispatchers' prompts leave is taken by their next prompts.
func (a *Account) Room(now time.Time) (r Room, known bool) {
	capacity, pace := float64(a.Capacity()), a.freed.perMs(now)
	if capacity == 0 || pace == 0 {
		return r, false
	}
	ownTokens := float64(a.KVTokens())
	usedTokens, gaugeTokens := ownTokens+float64(a.Shared.KVTokens), a.GaugeUsage(now)*capacity
	if a.Live() > 0 && !math.IsNaN(gaugeTokens) { // else the gauge is frozen, or there is none
		chargedSinceScrape := ownTokens - a.sampledTokens
		usedTokens = max(usedTokens, gaugeTokens+chargedSinceScrape)
	}
	limit := capacity
	if a.Closed(now) { // the gate keeps new probes back until the usage is below this limit
		limit *= a.ledger.cfg.KVThreshold - Hysteresis
	}
	r = Room{InMs: (usedTokens - limit) / pace, TokenMs: 1 / pace}
	if a.Closed(now) { // the engine's gauge must also say that there is room, so at least until the next scrape
		r.InMs = max(r.InMs, float64(a.ledger.cfg.Interval-now.Sub(a.Sampled))/float64(time.Millisecond), 0)
	}
	return r, true
}
