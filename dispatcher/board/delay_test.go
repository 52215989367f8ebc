package board

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhoWaitedInTheEngineDoesNotMakeTheWayLonger(t *testing.T) {
	var l handoffDelay
	for n := range uint32(1000) {
		waited := n % 7
		l.learn(100+n, 100+n+2+waited, 100+n+2+waited+9)
	}
	require.Equal(t, 1, l.extraSlots(16), "1 of 11 steps")
	for n := range uint32(3 * delayWindow) {
		l.learn(5000+n, 5000+n+6, 5000+n+15)
	}
	require.Equal(t, 5, l.extraSlots(16), "the way has become longer: 5 of 15")
	l.learn(0, 5, 9)        // no step was told when it was bound
	l.learn(1<<32-4, 2, 11) // numbers begin anew, and so many steps are as many
	require.Equal(t, 5, l.extraSlots(16))
	require.Zero(t, (&handoffDelay{}).extraSlots(16))
}

// The first request of a window may have waited in the engine's queue: the window before it still
// counts.
func TestTheLagOfOneRequestDoesNotCount(t *testing.T) {
	var l handoffDelay
	for range delayWindow {
		l.learn(100, 103, 112) // 2 steps without a token, then 10
	}
	require.Equal(t, 3, l.extraSlots(16))
	l.learn(100, 141, 150) // 40 steps without a token
	require.Equal(t, 3, l.extraSlots(16))
}

func TestAQuarterOfTheSlotsIsAheadAtMost(t *testing.T) {
	var l prefillDelay
	require.Zero(t, l.extraSlots(16))
	for n := range uint32(1000) {
		l.learn(100+n, 100+n+3, 100+n+20)
	}
	require.Equal(t, 2, l.extraSlots(16), "2 of 20 steps are before the first token")
	require.Equal(t, 4, (&prefillDelay{requests: 1000, meanDelaySteps: 18, meanDecodeSteps: 18}).extraSlots(16), "a quarter of them at most")
	l.learn(0, 5, 9) // no step was told when it was bound
	require.Equal(t, 2, l.extraSlots(16))
}
