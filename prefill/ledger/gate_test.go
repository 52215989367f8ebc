package ledger

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Golden examples, and the ways between them.
func TestGate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before bool // closed
		state  kvState
		closed bool
	}{
		{"G16: a full gauge of an engine that holds nothing of ours is frozen", false, kvState{scraped: .97, own: .10}, false},
		{"G16: a full gauge counts while something of ours is there", false, kvState{scraped: .97, promptsOnEngine: 3, own: .40}, true},
		{"G16: our own accounts close it whatever the gauge says", false, kvState{scraped: .30, promptsOnEngine: 9, own: .93}, true},
		{"G16: an engine that does not tell its gauge is gated by our accounts", false,
			kvState{scraped: math.NaN(), promptsOnEngine: 3, own: .10}, false},
		{"the threshold itself closes", false, kvState{scraped: math.NaN(), promptsOnEngine: 1, own: .90}, true},
		{"just below the threshold stays open", false, kvState{scraped: .89, promptsOnEngine: 1, own: .89}, false},
		{"just below the threshold stays closed", true, kvState{scraped: .89, promptsOnEngine: 1, own: .10}, true},
		{"0.02 below the threshold opens", true, kvState{scraped: .8799, promptsOnEngine: 1, own: .8799}, false},
		{"a gauge that reports nothing says nothing", true, kvState{scraped: math.NaN(), promptsOnEngine: 1, own: .10}, false},
		{"a frozen gauge does not keep it closed", true, kvState{scraped: .97, own: .10}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := gate{closed: tt.before}
			g.updateState(tt.state, 0.90, time.Unix(0, 0))
			require.Equal(t, tt.closed, g.Closed(time.Unix(0, 0)), "gate.update(%+v) from closed=%v", tt.state, tt.before)
		})
	}
}

// What a gauge alone closed opens at the time at which the gauge is too old; what our
// accounts keep closed does not.
func TestAGateOpensWhenItsGaugeIsTooOld(t *testing.T) {
	start := time.Unix(0, 0)
	until := start.Add(2 * time.Second)
	for _, tt := range []struct {
		name  string
		own   float64
		opens bool
	}{
		{"the gauge alone", .10, true},
		{"the gauge alone, up to where the gate opens", .8799, true},
		{"our accounts too, as long as they are above where it opens", .89, false},
		{"our accounts too", .95, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var g gate
			g.updateState(kvState{scraped: .97, promptsOnEngine: 3, own: tt.own, gaugeCountsUntil: until}, 0.90, start)
			require.True(t, g.Closed(until.Add(-1)))
			require.Equal(t, tt.opens, !g.Closed(until))
			at, ok := g.MayPassAt()
			require.Equal(t, tt.opens, ok)
			if tt.opens {
				require.Equal(t, until, at)
			}
			g.updateState(kvState{scraped: math.NaN(), promptsOnEngine: 3, own: tt.own}, 0.90, until)
			require.Equal(t, tt.opens, !g.Closed(until), "as the next change of the accounts finds it")
		})
	}
}
