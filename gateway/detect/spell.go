package detect

import (
	"cmp"
	"time"
)

// spell measures for how long a condition has been wrong. It filters flicker: the spell counts once the condition has been wrong for least,
// and ends once the condition has been well for least.
type spell struct {
	least time.Duration // 0: spellLasts
	state spellState
	since time.Time // when the condition became wrong; zero in spellWell
	away  time.Time // in spellBegun and spellEnding: when the condition became well; zero: it is wrong now
}

type spellState int

const (
	spellWell    spellState = iota
	spellBegun              // the condition has been wrong for less than least
	spellLasting            // the condition has been wrong for longer, so it is reported
	spellEnding             // the spell was lasting, and the condition has been well for less than least
)

const (
	spellLasts = 20 * time.Second
	// spellGap is how long the condition must be well to end a spell that is not yet reported. It is less than the 5 s of a bin, so that
	// one look at which the condition is well does not end the spell, but a second one does.
	spellGap = 4 * time.Second
)

// observe records whether the condition is wrong now (amiss). It returns for how long it has been wrong; 0: it is well, or has not been
// wrong for long enough.
func (s *spell) observe(amiss bool, now time.Time) time.Duration {
	least := cmp.Or(s.least, spellLasts)
	wellFor := time.Duration(0) // 0 also at the first look that finds the condition well
	if amiss {
		s.away = time.Time{}
	} else if s.away.IsZero() {
		s.away = now
	} else {
		wellFor = now.Sub(s.away)
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
	case s.state == spellBegun && wellFor >= spellGap, s.state == spellEnding && wellFor >= least:
		*s = spell{least: s.least}
	}
	return s.lasts(now)
}

// lasts is how long the condition has been wrong; 0: the spell is not in spellLasting.
func (s *spell) lasts(now time.Time) time.Duration {
	if s.state != spellLasting {
		return 0
	}
	return now.Sub(s.since)
}
