package fit

import "time"

// together is how close answers follow each other that an engine computed in one step.
const together = 5 * time.Millisecond

// Stretch finds out how long an engine took for each prompt, although others waited there as well. An engine computes
// prompts in the order in which they come: it worked at a prompt from its arrival, or from the answer before, until
// its own answer. Prompts that are answered together were computed together, and count as one prefill. If an engine
// answers in another order, it is not known what it did when, and nothing is learned.
type Stretch struct {
	ended  time.Time // the last answer
	spoilt time.Time // probes that were sent before this time teach nothing

	open     bool // the last answers are not complete: others may still join them
	void     bool
	began    time.Time // when the prefill of the open answers began
	youngest time.Time // when the latest of these probes was sent
	sample   Sample    // sum of them, without the time
	done     [2]Sample
}

// Answer is the answer to one probe.
type Answer struct {
	Sent time.Time
	RTT  time.Duration // to the engine
	Void bool          // it is not known what the engine did for it, or beside it
	Sample
}

// Answered takes an answer and returns the samples that it completes; the slice is valid until the next call. oldest
// is when the oldest probe that is still unanswered was sent; zero: there is none.
func (s *Stretch) Answered(a Answer, oldest, now time.Time) []Sample {
	done := s.done[:0]
	if s.open && now.Sub(s.ended) > together {
		oldestUnanswered := a.Sent
		if !oldest.IsZero() && oldest.Before(oldestUnanswered) {
			oldestUnanswered = oldest
		}
		done = s.complete(done, oldestUnanswered)
	}
	if !s.open {
		s.open, s.void, s.sample, s.youngest = true, false, Sample{}, a.Sent
		if s.began = a.Sent.Add(a.RTT); s.ended.After(s.began) {
			s.began = s.ended
		}
	}
	s.ended = now
	s.void = s.void || a.Void || a.Sent.Before(s.spoilt)
	if a.Sent.After(s.youngest) {
		s.youngest = a.Sent
	}
	s.sample.join(a.Sample)
	if oldest.IsZero() {
		done = s.complete(done, now)
	}
	return done
}

// complete ends the prefill of the open answers, and appends its sample to done unless it is void. oldest is when the
// oldest probe was sent that these answers do not answer. If that was before one of theirs, they have overtaken it, and
// some of it may be computed already: nothing is learned.
func (s *Stretch) complete(done []Sample, oldest time.Time) []Sample {
	s.open = false
	if oldest.Before(s.youngest) {
		s.void, s.spoilt = true, s.youngest
	}
	if s.void {
		return done
	}
	s.sample.Ms = float64(s.ended.Sub(s.began)) / float64(time.Millisecond)
	return append(done, s.sample)
}

// Dropped says that a probe ended without an answer: it is not known what the engine did for it while others waited.
func (s *Stretch) Dropped(now time.Time) { s.spoilt = now }

// join adds a prefill that was computed together with this one. The attention of the sum is that of both: the hit of
// each counts by its share of the new tokens.
func (s *Sample) join(other Sample) {
	if newTokens := s.New + other.New; newTokens > 0 {
		pairs := s.New*(s.Hit+s.New/2) + other.New*(other.Hit+other.New/2)
		s.New, s.Hit = newTokens, max(0, pairs/newTokens-newTokens/2)
	}
	s.Beside = max(s.Beside, other.Beside)
	s.Predicted += other.Predicted
}
