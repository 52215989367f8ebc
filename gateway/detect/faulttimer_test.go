package detect

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAFaultIsToldAfterAWhileAndEndsAfterAWhile(t *testing.T) {
	for _, tt := range []struct {
		name   string
		amiss  string // a letter for each five seconds: x where it is amiss
		states []faultState
		lasts  time.Duration
	}{
		{"it is well", "...", []faultState{noFault, noFault, noFault}, 0},
		{"for a moment", "x..", []faultState{faultBegun, faultBegun, noFault}, 0},
		{"one look in between does not count", "x.xxx", []faultState{faultBegun, faultBegun, faultBegun, faultBegun, faultLasting}, 20 * time.Second},
		{"for a while", "xxxxx", []faultState{faultBegun, faultBegun, faultBegun, faultBegun, faultLasting}, 20 * time.Second},
		{"it is away for a moment", "xxxxx.x", []faultState{faultBegun, faultBegun, faultBegun, faultBegun, faultLasting, faultEnding, faultLasting}, 30 * time.Second},
		{"it is over", "xxxxx.....", []faultState{
			faultBegun, faultBegun, faultBegun, faultBegun, faultLasting, faultEnding, faultEnding, faultEnding, faultEnding, noFault,
		}, 0},
	} {
		var s faultTimer
		var states []faultState
		var lasts time.Duration
		for i, c := range tt.amiss {
			lasts = s.observe(c == 'x', noon.Add(time.Duration(i)*5*time.Second))
			states = append(states, s.state)
		}
		require.Equal(t, tt.states, states, tt.name)
		require.Equal(t, tt.lasts, lasts, tt.name)
	}
}
