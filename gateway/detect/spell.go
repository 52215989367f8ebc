package detect

import (
	"cmp"
	"time"
)

// spell measures for how long something has been wrong. It is reported once it has lasted for a while, and is over
// once it was away for as long.
type spell struct {
	least time.Duration // how long it must last until it is reported; 0: spellLasts
	state spellState
	since time.Time // since when it is wrong; zero in spellWell
	away  time.Time // in spellBegun and spellEnding: since when it is not wrong
}

type spellState int

const (
	spellWell    spellState = iota
	spellBegun              // it has been wrong for less than its least time
	spellLasting            // it has been wrong for longer
	spellEnding             // it was lasting, and has been well for less than its least time
)

const (
	spellLasts = 20 * time.Second
	// spellGap ends a spell that is away for so long before it is reported. It is less than a bin, so that one look in
	// between does not count.
	spellGap = 4 * time.Second
)

// observe takes in whether it is wrong now (amiss), and returns for how long it has been wrong; 0: it is not, or not for long
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

// lasts is for how long it has been wrong, if it is lasting now; else 0.
func (s *spell) lasts(now time.Time) time.Duration {
	if s.state != spellLasting {
		return 0
	}
	return now.Sub(s.since)
}
