package fit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestACallbackTakesItsUsualTime(t *testing.T) {
	l := New(Config{}).Way("p")
	require.Zero(t, l.Callback())
	l.CalledBack(10 * time.Millisecond)
	require.Equal(t, 10*time.Millisecond, l.Callback())
	for range 200 {
		l.CalledBack(30 * time.Millisecond)
	}
	require.InEpsilon(t, 30*time.Millisecond, l.Callback(), 0.01)
}
