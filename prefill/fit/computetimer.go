package fit

import "time"

// sameStep is the largest time between two answers that count as computed in one step of the
// engine.
const sameStep = 5 * time.Millisecond

// ComputeTimer measures how long an engine computed each prompt, without its wait for other
// prompts. An engine computes prompts in the order in which they arrive: each from its arrival, or
// from the previous answer, until its own answer. Prompts that are answered together were computed
// together, and count as one prefill. If an engine answers in another order, the times cannot be
// separated, and no sample results.
type ComputeTimer struct {
	lastAnswer  time.Time
	spoiltUntil time.Time // probes that were sent before yield no sample

	collecting bool      // a prefill is open: answers within sameStep of the last answer join it
	unusable   bool      // the open prefill yields no sample
	began      time.Time // when the engine began the open prefill, as far as answers show
	latestSent time.Time // the latest probe of the open prefill
	sample     Sample    // sum of the open prefill's answers, without the duration
	done       [2]Sample // scratch for the result of Answered
}

type Answer struct {
	Sent     time.Time
	RTT      time.Duration // to the engine; not part of the prefill
	Unusable bool          // the token counts or the engine's other work are not known
	Sample
}

// Answered adds an answer and returns the samples that are complete now; the slice is valid until
// the next call. A prefill stays open until an answer comes later than sameStep, or no probe is
// unanswered. oldestUnanswered is when the oldest unanswered probe was sent; zero: none.
func (t *ComputeTimer) Answered(a Answer, oldestUnanswered, now time.Time) []Sample {
	done := t.done[:0]
	if t.collecting && now.Sub(t.lastAnswer) > sameStep {
		oldestOutside := a.Sent // of the probes outside the open prefill
		if !oldestUnanswered.IsZero() && oldestUnanswered.Before(oldestOutside) {
			oldestOutside = oldestUnanswered
		}
		done = t.complete(done, oldestOutside)
	}
	if !t.collecting {
		t.open(a)
	}
	t.join(a, now)
	if oldestUnanswered.IsZero() { // no other answer can join
		noneOvertaken := now // not before any of the prefill's own probes
		done = t.complete(done, noneOvertaken)
	}
	return done
}

// open begins a prefill with its first answer, which join then adds.
func (t *ComputeTimer) open(a Answer) {
	t.collecting, t.unusable, t.sample, t.latestSent = true, false, Sample{}, a.Sent
	t.began = a.Sent.Add(a.RTT) // the whole round trip, so that the measured duration contains none of it
	if t.lastAnswer.After(t.began) {
		t.began = t.lastAnswer
	}
}

func (t *ComputeTimer) join(a Answer, now time.Time) {
	t.lastAnswer = now
	// Such a probe may have waited for one that was overtaken or not answered, for an unknown time.
	sentTooEarly := a.Sent.Before(t.spoiltUntil)
	t.unusable = t.unusable || a.Unusable || sentTooEarly
	if a.Sent.After(t.latestSent) {
		t.latestSent = a.Sent
	}
	t.sample.merge(a.Sample)
}

// complete ends the open prefill, and appends its sample to done unless it is unusable. If the
// oldest probe outside of it was sent before the latest of its own, that probe was overtaken, and
// the engine may have computed a part of it in this prefill's time. Then no probe sent before
// latestSent can be measured. For example, A, B and C are sent in this order and answered in the
// order B, A, C: only the time of C is used.
func (t *ComputeTimer) complete(done []Sample, oldestOutside time.Time) []Sample {
	t.collecting = false
	if wasOvertaken := oldestOutside.Before(t.latestSent); wasOvertaken {
		t.unusable = true
		t.spoiltUntil = t.latestSent // join marks the prefills of older probes
	}
	if t.unusable {
		return done
	}
	t.sample.Ms = float64(t.lastAnswer.Sub(t.began)) / float64(time.Millisecond)
	return append(done, t.sample)
}

// ProbeDropped notes that a probe ended without an answer. The probes that waited meanwhile yield
// no sample.
func (t *ComputeTimer) ProbeDropped(now time.Time) { t.spoiltUntil = now }

// merge adds a prefill that was computed together with this one. The hit of the sum is chosen so
// that the number of token pairs stays: N new tokens after H cached ones have N*(H + N/2).
func (s *Sample) merge(other Sample) {
	if newTokens := s.New + other.New; newTokens > 0 {
		pairs := s.New*(s.Hit+s.New/2) + other.New*(other.Hit+other.New/2)
		s.New, s.Hit = newTokens, max(0, pairs/newTokens-newTokens/2)
	}
	s.Concurrent = max(s.Concurrent, other.Concurrent)
	s.Predicted += other.Predicted
}
