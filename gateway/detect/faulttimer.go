package detect

import (
	"cmp"
	"time"
)

// faultTimer measures for how long a condition has been wrong. It filters flicker: the fault counts once the condition has been wrong for
// minDuration, and ends once the condition has been well for minDuration.
type faultTimer struct {
	minDuration time.Duration // time that a condition must be wrong, or well, to begin or end the fault; 0: defaultMinDuration
	state       faultState
	since       time.Time // when the condition became wrong; zero in noFault
	wellSince   time.Time // in faultBegun and faultEnding: when the condition became well; zero: it is wrong now
}

type faultState int

const (
	noFault      faultState = iota
	faultBegun              // the condition has been wrong for less than minDuration
	faultLasting            // the condition has been wrong for at least minDuration, so it is reported
	faultEnding             // the fault was lasting, and the condition has been well for less than minDuration
)

const (
	defaultMinDuration = 20 * time.Second
	// endsUnreportedAfter is how long the condition must be well again to end a fault that is not yet reported. With one Update per
	// bin of 5 s, the first one at which the condition is well does not end the fault, and the second one does.
	endsUnreportedAfter = 4 * time.Second
)

// observe records whether the condition is wrong now. It returns for how long the condition has been wrong; 0: the condition is well, or
// has not been wrong for long enough.
func (s *faultTimer) observe(isWrong bool, now time.Time) time.Duration {
	minDuration := cmp.Or(s.minDuration, defaultMinDuration)
	wellFor := s.noteWell(isWrong, now)
	switch s.state {
	case noFault:
		if isWrong {
			*s = faultTimer{minDuration: s.minDuration, state: faultBegun, since: now}
		}
	case faultBegun: // not reported yet
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
		if isWrong { // wrong again before the fault ended, so it goes on, and has lasted since it began
			s.state = faultLasting
		} else if wellFor >= minDuration {
			*s = faultTimer{minDuration: s.minDuration}
		}
	}
	return s.duration(now)
}

// noteWell notes since when the condition has been well, and returns for how long. It returns 0 if the condition is wrong now, or is found
// well for the first time.
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

// duration is how long the condition has been wrong; 0: the fault is not in faultLasting.
func (s *faultTimer) duration(now time.Time) time.Duration {
	if s.state != faultLasting {
		return 0
	}
	return now.Sub(s.since)
}
