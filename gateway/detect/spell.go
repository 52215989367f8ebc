package detect

import (
	"cmp"
	"time"
)

// spell is for how long something has been amiss. It is told of after it lasted for a while, and over after it was away for as long.
type spell struct {
	least time.Duration // it lasts, to be told of; 0: spellLasts
	state spellState
	since time.Time // amiss; zero where it is well
	away  time.Time // spellEnding: since when it is not amiss
}

type spellState int

const (
	spellWell    spellState = iota
	spellBegun              // amiss for less than its least time
	spellLasting            // amiss for longer
	spellEnding             // it was lasting, and is not amiss for less than its least time
)

const (
	spellLasts = 20 * time.Second
	spellGap   = 4 * time.Second // that it may be away before it is told of: less than a bin, so that one look in between does not count
)

// look takes in how it is now, and says for how long it has been amiss; 0: it is not, or not for long enough.
func (s *spell) look(amiss bool, now time.Time) time.Duration {
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

// lasts says for how long it has been amiss, if it is so now and was told of.
func (s *spell) lasts(now time.Time) time.Duration {
	if s.state != spellLasting {
		return 0
	}
	return now.Sub(s.since)
}
