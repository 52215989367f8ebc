package fit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestACallbackTakesItsUsualTime(t *testing.T) {
	l := New(Config{}).CallbackLatencyOf("p")
	require.Zero(t, l.Mean())
	l.Add(10 * time.Millisecond)
	require.Equal(t, 10*time.Millisecond, l.Mean())
	for range 200 {
		l.Add(30 * time.Millisecond)
	}
	require.InEpsilon(t, 30*time.Millisecond, l.Mean(), 0.01)
}
