package ledger

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Sums are what an account is charged with. Every number is an integer, so that
// what was added can be taken away without a rest.
type Sums struct {
	Leases [Phases]int
	Tokens [Phases]int64
	Work   [Phases]int64

	NewTokens, PredictedUs, Attention int64
}

// book adds what a prompt weighs, once, or takes it away, -1 times.
func (s *Sums) book(p Phase, w Weight, times int64) {
	s.Leases[p] += int(times)
	s.Tokens[p] += times * w.Tokens
	s.Work[p] += times * w.Work
	if p == Probing {
		s.NewTokens += times * w.NewTokens
		s.PredictedUs += times * w.PredictedUs
		s.Attention += times * w.Attention
	}
}

// Live counts the prompts whose KV somebody will still fetch.
func (s *Sums) Live() int { return s.Leases[Probing] + s.Leases[Pooled] + s.Leases[Dispatched] }

// Held counts those whose KV the engine holds for us.
func (s *Sums) Held() int { return s.Live() + s.Leases[Orphaned] }

// KVTokens is all that the prefiller's KV cache holds for us: it is given back at
// the first decode event, never at the probe's answer.
func (s *Sums) KVTokens() int64 { return sum(s.Tokens) }

// KVWork is the same in vllm-ascend's weight.
func (s *Sums) KVWork() int64 { return sum(s.Work) }

func sum(v [Phases]int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// Share is what one dispatcher has on a candidate that several dispatchers use.
type Share struct {
	Unanswered int   `json:"n"`             // probes
	NewTokens  int64 `json:"new,omitempty"` // of their prompts, that are not cached
	KVTokens   int64 `json:"kv,omitempty"`  // that the engine holds for them and for all that was prefilled and not fetched
}

// Plus is what two dispatchers have there together.
func (s Share) Plus(o Share) Share {
	return Share{s.Unanswered + o.Unanswered, s.NewTokens + o.NewTokens, s.KVTokens + o.KVTokens}
}

// Account is what one candidate is charged with, and what its engine says beside it.
type Account struct {
	Sums
	Gauges
	gate
	Owner      string
	Waiting    Sums      // what waits for the candidate while one round of decisions runs
	Shared     Share     // of other dispatchers; SetShared changes it
	AnsweredAt time.Time // the last of our probes
	Unfetched  int       // prompts that were left to the engine's own timeout, since the start

	ledger     *Ledger
	freed      freed
	capacity   int64     // KV tokens it is configured to have, 0: the scrape says
	unanswered []*Charge // probes, in the order in which they were sent
}

// Account returns that of a candidate, with nothing charged.
func (l *Ledger) Account(owner string) Account {
	return Account{ledger: l, Owner: owner, Gauges: Gauges{usage: math.NaN()}}
}

// SetCapacity says how many KV tokens the candidate is configured to have; 0: what
// the scrape says.
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

// Share is what we have there.
func (a *Account) Share() Share { return Share{a.Leases[Probing], a.NewTokens, a.KVTokens()} }

// SetShared takes what other dispatchers say that they have there.
func (a *Account) SetShared(s Share, now time.Time) {
	if a.Shared != s {
		a.Shared = s
		a.UpdateGate(now)
	}
}

// answer takes a probe off the unanswered ones, and off the scraped queue.
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

// OldestSent is when the oldest unanswered probe was sent; zero: all are answered.
func (a *Account) OldestSent() time.Time {
	if len(a.unanswered) == 0 {
		return time.Time{}
	}
	return a.unanswered[0].sent
}

// NextSent is when the oldest unanswered probe beside a charge was sent; zero: there is
// none.
func (a *Account) NextSent(c *Charge) time.Time {
	for _, o := range a.unanswered[:min(2, len(a.unanswered))] {
		if o != c {
			return o.sent
		}
	}
	return time.Time{}
}

// running is the oldest unanswered probe, and when the engine can have begun with
// it at the latest; nil: all are answered.
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

// A probe that takes so many times its prediction and then some is stuck, or
// the prediction is worth nothing.
const (
	stallFactor = 4
	stallSlack  = time.Second
)

// StallsAt is when a candidate that does not answer is no longer waited for;
// false while it has nothing to answer.
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

// Backlog is our own part of the indicator backlog_ms. What waits for the candidate
// counts like what it runs.
func (a *Account) Backlog(now time.Time) float64 {
	waiting := float64(a.Waiting.PredictedUs) / 1000
	oldest, since := a.running()
	if oldest == nil {
		return waiting
	}
	return waiting + policy.Backlog(float64(a.PredictedUs)/1000, float64(oldest.Weight.PredictedUs)/1000, float64(now.Sub(since))/float64(time.Millisecond))
}

// Ends is when all that was sent is predicted to be answered; false: nobody knows. What is charged and not sent yet
// has no end.
func (a *Account) Ends() (at time.Time, known bool) {
	oldest, since := a.running()
	if oldest == nil || a.PredictedUs == 0 || len(a.unanswered) < a.Leases[Probing] {
		return at, false
	}
	return since.Add(time.Duration(a.PredictedUs) * time.Microsecond), true
}

// Foresee is how the end of a charged prompt's prefill comes about: at a time what the engine is at ends, unless
// that is late, and what follows up to that end takes so much more. took is what becomes of the prediction for a
// prompt. What is not sent yet comes last.
func (a *Account) Foresee(c *Charge, took func(predicted time.Duration) time.Duration) (current time.Time, rest time.Duration) {
	oldest, since := a.running()
	if oldest != nil {
		current = since.Add(took(oldest.Predicted()))
	}
	if c == oldest {
		return current, 0
	}
	for _, o := range a.unanswered {
		if o == c {
			break
		}
		if o != oldest {
			rest += took(o.Predicted())
		}
	}
	return current, rest + took(c.Predicted())
}

// OthersBacklog is the part of backlog_ms that other dispatchers and strangers
// sent. The other dispatchers say how much they have there; requests that a current
// sample shows beyond that count as long as a prompt of ours usually takes. A
// running prompt counts half, because on average half of it is done. On an engine
// that also decodes, running requests do not count, because they may be decodes.
func (a *Account) OthersBacklog(line policy.Line, usualTokens float64, decodes bool, now time.Time) float64 {
	told := float64(a.Shared.Unanswered)
	ms := told*line.T0Ms + line.TPMs*float64(a.Shared.NewTokens)
	if a.Foreign == 0 || !a.Current(now) {
		return ms
	}
	waits, runs := a.foreignQueue, a.Foreign-a.foreignQueue
	if decodes {
		runs = 0
	}
	waits, told = max(0, waits-told), max(0, told-waits)
	return ms + (waits+max(0, runs-told)/2)*line.Ms(usualTokens, 0)
}

// Batch is the indicator bs: our unanswered probes and what others sent, as they
// say or a sample shows, while it is current.
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

// Crowded says whether prompts of others are there, as they say or a current sample
// shows. On an engine that also decodes, running requests are taken for decodes.
func (a *Account) Crowded(decodes bool, now time.Time) bool {
	prompts := a.Foreign
	if decodes {
		prompts = a.foreignQueue
	}
	return a.Shared.Unanswered > 0 || prompts > 0 && a.Current(now)
}

// Ahead is how many requests would be before one more probe: our unanswered ones,
// and what others have there or have waiting there.
func (a *Account) Ahead(now time.Time) float64 {
	others := float64(a.Shared.Unanswered)
	if a.foreignQueue > 0 && a.Current(now) {
		others = max(others, a.foreignQueue)
	}
	return float64(a.Leases[Probing]) + others
}
