package ledger

import (
	"math"
	"time"
)

// Sample is what one scrape says about a candidate.
type Sample struct {
	KVUsage          float64       // 0..1, NaN: not reported
	Running, Waiting float64       // requests, NaN: not reported
	CapacityTokens   int64         // KV tokens the candidate can hold, 0: not reported
	BlockTokens      int           // of a KV block, 0: not reported
	RTT              time.Duration // to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are what scrapes said of a candidate, and what came of it since.
type Gauges struct {
	Foreign float64       // requests there that are not ours
	Misses  int           // failed scrapes in a row
	Missed  uint64        // failed scrapes, ever
	Block   int           // tokens of a KV block, 0: not told
	RTT     time.Duration // 0: not measured
	Sampled time.Time     // when the last good scrape was sent

	usage         float64 // of the KV cache, NaN: none
	sampledTokens float64 // of ours that it counts
	scraped       int64   // capacity in KV tokens
	foreignQueue  float64 // of Foreign, those that certainly wait
	waits         float64 // at the last scrape, ours too
	engineWaits   float64 // requests the engine holds back and runs, ours that
	engineRuns    float64 // came and went since the scrape included
	sends         int     // of ours, ever
	answers       int
	startTime     float64
	asked         time.Time     // when the scrape under way was sent; zero: none is
	took          time.Duration // by the last scrape, failed or not
	tookGood      time.Duration // by the last good one
	idle          idle
}

// idle is where an account stood when a scrape found nobody waiting.
type idle struct {
	ran            float64
	sends, answers int
}

// Stale says that so many scrapes in a row failed that the gauges are no longer
// believed. The engine may be too busy to tell them, so it stays in service by our
// own accounts, but engines that tell their gauges are preferred.
func (a *Account) Stale() bool { return a.ledger.cfg.Misses > 0 && a.Misses >= a.ledger.cfg.Misses }

// Current says whether the last sample still speaks of others' requests: for
// three intervals, each as long as a scrape really takes.
func (a *Account) Current(now time.Time) bool {
	each := max(a.ledger.cfg.Interval, a.took)
	if !a.asked.IsZero() {
		each = max(each, now.Sub(a.asked))
	}
	return now.Sub(a.Sampled) <= 3*each
}

// Own is the share of the KV cache that dispatchers' accounts say is taken; 0 while
// the capacity is unknown, so that then only the scraped share closes the gate.
func (a *Account) Own() float64 {
	if capacity := a.Capacity(); capacity > 0 {
		return float64(a.KVTokens()+a.Shared.KVTokens) / float64(capacity)
	}
	return 0
}

// tellsUntil is when the engine's own KV usage is too old to count; zero: never. By then
// as many scrapes as make the gauges stale would have been answered, if each had taken
// as long as the last good one. A scrape that is still under way changes nothing, because
// it may wait for its whole timeout.
func (a *Account) tellsUntil() time.Time {
	cfg := &a.ledger.cfg
	if cfg.Misses == 0 || a.Sampled.IsZero() {
		return time.Time{}
	}
	return a.Sampled.Add(time.Duration(cfg.Misses+1) * max(cfg.Interval, a.tookGood))
}

// Told is the engine's own KV usage, NaN where it does not tell it any more.
func (a *Account) Told(now time.Time) float64 {
	until := a.tellsUntil()
	if a.Stale() || !until.IsZero() && !now.Before(until) {
		return math.NaN()
	}
	return a.usage
}

// Usage is the larger of what we know and what the engine says, its gauge being
// frozen while we have nothing there.
func (a *Account) Usage() float64 {
	usage := a.Own()
	if a.Live() > 0 && a.usage > usage { // never true of NaN
		usage = a.usage
	}
	return usage
}

// Queue is how many requests the engine holds back and runs, ours that came and went
// since the scrape included.
func (a *Account) Queue() (waiting, running float64) { return a.engineWaits, a.engineRuns }

// Strangers is how many requests wait at the engine that are not ours, and how many
// wait at all; false: no current sample says.
func (a *Account) Strangers(now time.Time) (foreign, all float64, ok bool) {
	return a.foreignQueue, a.waits, a.Current(now)
}

// SinceIdle is how many requests ran when a scrape found nobody waiting, and how many
// probes more than were sent have been answered since.
func (a *Account) SinceIdle() (ran float64, answered int) {
	return a.idle.ran, (a.answers - a.idle.answers) - (a.sends - a.idle.sends)
}

// Mark is where an account stood when a scrape was sent.
type Mark struct {
	sent           time.Time
	unanswered     int
	sends, answers int
	tokens         float64 // of ours
	probing        float64 // of those, of probes that were not answered
}

// Ask says that a scrape is sent.
func (a *Account) Ask(now time.Time) Mark {
	a.asked = now
	return Mark{now, len(a.unanswered), a.sends, a.answers, float64(a.KVTokens()), float64(a.Tokens[Probing])}
}

// Unasked says that nobody waits for the scrape any more.
func (a *Account) Unasked() { a.asked = time.Time{} }

// Miss books a scrape that failed.
func (a *Account) Miss(at Mark, now time.Time) {
	a.asked, a.took = time.Time{}, now.Sub(at.sent)
	a.Misses++
	a.Missed++
	a.UpdateGate(now)
}

// Sample books what a scrape said. What the engine counts beyond our own unanswered
// probes came from others. It reports whether the engine has started anew since the
// last one.
func (a *Account) Sample(s Sample, at Mark, now time.Time) (restarted bool) {
	a.asked, a.took = time.Time{}, now.Sub(at.sent)
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
	if at.unanswered > 0 && s.Waiting > 0 { // it has not begun with these
		a.sampledTokens -= at.probing * min(1, s.Waiting/float64(at.unanswered))
	}
	a.Foreign, a.foreignQueue, a.waits = 0, 0, 0
	if there := s.Running + s.Waiting; !math.IsNaN(there) {
		a.Foreign = max(0, there-float64(at.unanswered))
		a.foreignQueue, a.waits = max(0, s.Waiting-float64(at.unanswered)), s.Waiting
		if s.Waiting == 0 {
			a.idle = idle{s.Running, at.sends, at.answers}
		}
		a.engineWaits, a.engineRuns = s.Waiting+float64(a.sends-at.sends), s.Running
		for range a.answers - at.answers {
			a.settleOne()
		}
	}
	a.Sampled, a.tookGood, a.Misses = at.sent, a.took, 0
	a.UpdateGate(now)
	return restarted
}

// settleOne takes a finished request off the running ones, or off the waiting
// ones where the scrape had not seen it run.
func (a *Account) settleOne() {
	if a.engineRuns >= 1 {
		a.engineRuns--
	} else {
		a.engineWaits = max(0, a.engineWaits-1)
	}
}
