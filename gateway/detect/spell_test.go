package detect

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestASpellIsToldAfterAWhileAndEndsAfterAWhile(t *testing.T) {
	for _, tt := range []struct {
		name   string
		amiss  string // a letter for each five seconds: x where it is amiss
		states []spellState
		lasts  time.Duration
	}{
		{"it is well", "...", []spellState{spellWell, spellWell, spellWell}, 0},
		{"for a moment", "x..", []spellState{spellBegun, spellBegun, spellWell}, 0},
		{"one look in between does not count", "x.xxx", []spellState{spellBegun, spellBegun, spellBegun, spellBegun, spellLasting}, 20 * time.Second},
		{"for a while", "xxxxx", []spellState{spellBegun, spellBegun, spellBegun, spellBegun, spellLasting}, 20 * time.Second},
		{"it is away for a moment", "xxxxx.x", []spellState{spellBegun, spellBegun, spellBegun, spellBegun, spellLasting, spellEnding, spellLasting}, 30 * time.Second},
		{"it is over", "xxxxx.....", []spellState{
			spellBegun, spellBegun, spellBegun, spellBegun, spellLasting, spellEnding, spellEnding, spellEnding, spellEnding, spellWell,
		}, 0},
	} {
		var s spell
		var states []spellState
		var lasts time.Duration
		for i, c := range tt.amiss {
			lasts = s.observe(c == 'x', noon.Add(time.Duration(i)*5*time.Second))
			states = append(states, s.state)
		}
		require.Equal(t, tt.states, states, tt.name)
		require.Equal(t, tt.lasts, lasts, tt.name)
	}
}
