package fit

import "time"

// together is how near answers follow each other that an engine gave in one step.
const together = 5 * time.Millisecond

// Stretch tells how long an engine took for each of its prompts, although others waited
// there with it. An engine goes through prompts in the order in which they come: it was at
// one from its arrival, or from the answer before, until its own answer. Prompts that are
// answered together were computed together and count as one prefill. Where an engine
// answers in another order, nobody knows what it did when, and nothing is learned.
type Stretch struct {
	ended  time.Time // the last answer
	spoilt time.Time // probes sent before that tell nothing

	open     bool // answers that others may still join
	void     bool
	began    time.Time // with their prefill
	youngest time.Time // when the last of them was sent
	sample   Sample    // of all of them, without the time
	done     [2]Sample
}

// Answer is one of a probe.
type Answer struct {
	Sent time.Time
	RTT  time.Duration // to the engine
	Void bool          // nobody knows what the engine did for it, or beside it
	Sample
}

// Answered takes an answer, and returns the samples that are complete with it, until the
// next call. oldest is when the oldest probe that is still unanswered was sent; zero: there
// is none.
func (s *Stretch) Answered(a Answer, oldest, now time.Time) []Sample {
	done := s.done[:0]
	if s.open && now.Sub(s.ended) > together {
		first := a.Sent
		if !oldest.IsZero() && oldest.Before(first) {
			first = oldest
		}
		done = s.end(done, first)
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
		done = s.end(done, now)
	}
	return done
}

// end completes the prefill of the answers so far. An older probe that is still
// unanswered was overtaken: some of it may be computed already.
func (s *Stretch) end(done []Sample, oldest time.Time) []Sample {
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

// Dropped says that a probe ended without an answer: nobody knows what the engine did for
// it while others waited.
func (s *Stretch) Dropped(now time.Time) { s.spoilt = now }

// join adds a prefill that was computed together with others. Attention is that of all: what
// each found counts by how much of the new tokens are its own.
func (s *Sample) join(o Sample) {
	if all := s.New + o.New; all > 0 {
		pairs := s.New*(s.Hit+s.New/2) + o.New*(o.Hit+o.New/2)
		s.New, s.Hit = all, max(0, pairs/all-all/2)
	}
	s.Beside = max(s.Beside, o.Beside)
	s.Predicted += o.Predicted
}
