package fit

import "time"

// sameStep is the largest time between two answers that count as computed in the same step of the engine.
const sameStep = 5 * time.Millisecond

// ComputeTimer measures how long an engine computed each prompt, without the time that the prompt waited for other prompts. An
// engine computes prompts in the order in which they arrive: it computes a prompt from its arrival, or from the previous
// answer, until its own answer. Prompts that are answered together were computed together, and count as one prefill. If
// an engine answers in another order, the times cannot be separated, and no sample results.
type ComputeTimer struct {
	lastAnswer  time.Time
	spoiltUntil time.Time // probes that were sent before this time yield no sample: how long the engine computed them is not known

	collecting bool      // a prefill is open: answers within sameStep of the last answer join it
	unusable   bool      // the open prefill yields no sample; the next prefill begins without this mark
	began      time.Time // when the engine began to compute the open prefill, as far as answers show
	latestSent time.Time // when the latest probe of the open prefill was sent
	sample     Sample    // sum of the open prefill's answers, without the duration
	done       [2]Sample // scratch for the result of Answered
}

// Answer is the answer to one probe.
type Answer struct {
	Sent     time.Time
	RTT      time.Duration // round trip to the engine, which is not part of the prefill
	Unusable bool          // the token counts or the engine's other work are not known: the answer yields no sample
	Sample
}

// Answered adds an answer and returns the samples that are complete now; the slice is valid until the next call. Answers that come within
// sameStep of one another were computed together, and form one prefill. It stays open until an answer comes later than that, or no probe is
// unanswered. Then complete ends it. An engine computes prompts in their order, so complete must know whether an older probe was overtaken:
// it gets the time at which the oldest probe outside the prefill was sent. oldestUnanswered is when the oldest unanswered probe was sent;
// zero: all probes are answered.
func (t *ComputeTimer) Answered(a Answer, oldestUnanswered, now time.Time) []Sample {
	done := t.done[:0]
	if t.collecting && now.Sub(t.lastAnswer) > sameStep { // this answer belongs to another step than the open prefill
		oldestOutside := a.Sent // of the probes outside the open prefill: this one, and those that are still unanswered
		if !oldestUnanswered.IsZero() && oldestUnanswered.Before(oldestOutside) {
			oldestOutside = oldestUnanswered
		}
		done = t.complete(done, oldestOutside)
	}
	if !t.collecting {
		t.open(a)
	}
	t.join(a, now)
	if oldestUnanswered.IsZero() { // no other answer can join this one
		noneOvertaken := now // no probe is outside the prefill; now is not before any of its own probes
		done = t.complete(done, noneOvertaken)
	}
	return done
}

// open begins a prefill with its first answer, which join then adds. The engine began to compute it when its probe arrived, or after the
// last answer if it still computed another prompt then.
func (t *ComputeTimer) open(a Answer) {
	t.collecting, t.unusable, t.sample, t.latestSent = true, false, Sample{}, a.Sent
	t.began = a.Sent.Add(a.RTT) // adds the whole round trip, so that the measured duration contains none of it
	if t.lastAnswer.After(t.began) {
		t.began = t.lastAnswer
	}
}

// join adds an answer to the open prefill, whose sample is the sum of its answers. One unusable answer makes the sample unusable.
func (t *ComputeTimer) join(a Answer, now time.Time) {
	t.lastAnswer = now
	// A probe that was sent too early may have waited for one that was overtaken or not answered, for an unknown time.
	sentTooEarly := a.Sent.Before(t.spoiltUntil)
	t.unusable = t.unusable || a.Unusable || sentTooEarly
	if a.Sent.After(t.latestSent) {
		t.latestSent = a.Sent
	}
	t.sample.merge(a.Sample)
}

// complete ends the open prefill, and appends its sample to done unless it is unusable. oldestOutside is when the oldest probe outside the
// prefill was sent. If this was before the latest of the prefill's own probes, that older probe was overtaken: the engine may have computed
// a part of it in this prefill's time. Then neither this prefill can be measured, nor any later one of a probe that was sent before
// latestSent. For example, the probes A, B and C are sent in this order, and answered in the order B, A, C. B has overtaken A, so the times
// of both are not used. C was sent after B, so its time is used.
func (t *ComputeTimer) complete(done []Sample, oldestOutside time.Time) []Sample {
	t.collecting = false
	if wasOvertaken := oldestOutside.Before(t.latestSent); wasOvertaken {
		t.unusable = true            // this prefill yields no sample
		t.spoiltUntil = t.latestSent // join marks the prefills of older probes
	}
	if t.unusable {
		return done
	}
	t.sample.Ms = float64(t.lastAnswer.Sub(t.began)) / float64(time.Millisecond)
	return append(done, t.sample)
}

// ProbeDropped notes that a probe ended without an answer. How long the engine computed it is not known, so that the probes that
// waited meanwhile yield no sample.
func (t *ComputeTimer) ProbeDropped(now time.Time) { t.spoiltUntil = now }

// merge adds a prefill that was computed together with this one. The hit of the sum is chosen so that its attention, the
// number of token pairs, equals the attention of both prefills. A prefill of N new tokens after H cached ones has N*(H + N/2) pairs.
func (s *Sample) merge(other Sample) {
	if newTokens := s.New + other.New; newTokens > 0 { // otherwise there is no attention
		pairs := s.New*(s.Hit+s.New/2) + other.New*(other.Hit+other.New/2)
		s.New, s.Hit = newTokens, max(0, pairs/newTokens-newTokens/2)
	}
	s.Concurrent = max(s.Concurrent, other.Concurrent)
	s.Predicted += other.Predicted
}
