package detect

import (
	"cmp"
	"time"
)

// spell measures how long a condition has been bad. It reports a condition that has been bad for the least time, until it has been well for
// as long.
type spell struct {
	least time.Duration // least time; 0: spellLasts
	state spellState
	since time.Time // when it became bad; zero in spellWell
	away  time.Time // in spellBegun and spellEnding: when it became well
}

type spellState int

const (
	spellWell    spellState = iota
	spellBegun              // bad for less than the least time
	spellLasting            // bad for longer, and reported
	spellEnding             // was lasting, and is well for less than the least time
)

const (
	spellLasts = 20 * time.Second
	// A spell that is not reported yet ends when it is well for this long. It is shorter than a bin, so that a single bad look between two
	// good ones does not count.
	spellGap = 4 * time.Second
)

// observe records whether the condition is bad now (amiss), and returns for how long it has been; 0: it is well, or not bad for long
// enough.
func (s *spell) observe(amiss bool, now time.Time) time.Duration {
	least := cmp.Or(s.least, spellLasts)
	if amiss {
		s.away = time.Time{}
	} else if s.away.IsZero() {
		s.away = now
	}
	switch {
	case amiss && s.state == spellWell:
		*s = spell{least: s.least, state: spellBegun, since: now}
	case amiss && s.state == spellEnding:
		s.state = spellLasting
	case amiss && s.state == spellBegun && now.Sub(s.since) >= least:
		s.state = spellLasting
	case !amiss && s.state == spellLasting:
		s.state = spellEnding
	case s.state == spellBegun && !amiss && now.Sub(s.away) >= spellGap, s.state == spellEnding && !amiss && now.Sub(s.away) >= least:
		*s = spell{least: s.least}
	}
	return s.lasts(now)
}

// lasts returns for how long the condition has been bad, if it is reported; else 0.
func (s *spell) lasts(now time.Time) time.Duration {
	if s.state != spellLasting {
		return 0
	}
	return now.Sub(s.since)
}
