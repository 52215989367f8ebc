package detect

import (
	"cmp"
	"time"
)

// faultTimer measures for how long a condition has been wrong. It filters flicker: a fault counts
// after minDuration, and ends once the condition has been well for as long.
type faultTimer struct {
	minDuration time.Duration // 0: defaultMinDuration
	state       faultState
	since       time.Time // zero in noFault
	wellSince   time.Time // in faultBegun and faultEnding; zero: the condition is wrong now
}

type faultState int

const (
	noFault      faultState = iota
	faultBegun              // wrong for less than minDuration
	faultLasting            // wrong for at least minDuration, so it is reported
	faultEnding             // well for less than minDuration
)

const (
	defaultMinDuration = 20 * time.Second
	// endsUnreportedAfter: with one Update per bin of 5 s, the second one at which the condition is
	// well ends an unreported fault.
	endsUnreportedAfter = 4 * time.Second
)

// observe records whether the condition is wrong now, and returns duration.
func (s *faultTimer) observe(isWrong bool, now time.Time) time.Duration {
	minDuration := cmp.Or(s.minDuration, defaultMinDuration)
	wellFor := s.noteWell(isWrong, now)
	switch s.state {
	case noFault:
		if isWrong {
			*s = faultTimer{minDuration: s.minDuration, state: faultBegun, since: now}
		}
	case faultBegun:
		if isWrong && now.Sub(s.since) >= minDuration {
			s.state = faultLasting
		} else if wellFor >= endsUnreportedAfter {
			*s = faultTimer{minDuration: s.minDuration}
		}
	case faultLasting:
		if !isWrong {
			s.state = faultEnding
		}
	case faultEnding:
		if isWrong { // it goes on, and has lasted since it began
			s.state = faultLasting
		} else if wellFor >= minDuration {
			*s = faultTimer{minDuration: s.minDuration}
		}
	}
	return s.duration(now)
}

// noteWell returns for how long the condition has been well.
func (s *faultTimer) noteWell(isWrong bool, now time.Time) time.Duration {
	if isWrong {
		s.wellSince = time.Time{}
		return 0
	}
	if s.wellSince.IsZero() {
		s.wellSince = now
	}
	return now.Sub(s.wellSince)
}

// duration is 0 unless the fault is reported.
func (s *faultTimer) duration(now time.Time) time.Duration {
	if s.state != faultLasting {
		return 0
	}
	return now.Sub(s.since)
}
