package board

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhoWaitedInTheEngineDoesNotMakeTheWayLonger(t *testing.T) {
	var l lag
	for n := range uint32(1000) {
		waited := n % 7
		l.ended(100+n, 100+n+2+waited, 100+n+2+waited+9)
	}
	require.Equal(t, 1, l.slots(16), "1 of 11 steps")
	for n := range uint32(3 * lagWindow) {
		l.ended(5000+n, 5000+n+6, 5000+n+15)
	}
	require.Equal(t, 5, l.slots(16), "the way has become longer: 5 of 15")
	l.ended(0, 5, 9)        // no step was told when it was bound
	l.ended(1<<32-4, 2, 11) // numbers begin anew, and so many steps are as many
	require.Equal(t, 5, l.slots(16))
	require.Zero(t, (&lag{}).slots(16))
}

// The first request of a window may have waited in the engine's queue: the window before it still counts.
func TestTheLagOfOneRequestDoesNotCount(t *testing.T) {
	var l lag
	for range lagWindow {
		l.ended(100, 103, 112) // 2 steps without a token, then 10
	}
	require.Equal(t, 3, l.slots(16))
	l.ended(100, 141, 150) // 40 steps without a token
	require.Equal(t, 3, l.slots(16))
}

func TestAQuarterOfTheSlotsIsAheadAtMost(t *testing.T) {
	var l lead
	require.Zero(t, l.slots(16))
	for n := range uint32(1000) {
		l.ended(100+n, 100+n+3, 100+n+20)
	}
	require.Equal(t, 2, l.slots(16), "2 of 20 steps are before the first token")
	require.Equal(t, 4, (&lead{seen: 1000, steps: 18, stay: 18}).slots(16), "a quarter of them at most")
	l.ended(0, 5, 9) // no step was told when it was bound
	require.Equal(t, 2, l.slots(16))
}
