package fit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestACallbackTakesItsUsualTime(t *testing.T) {
	w := New(Config{}).Way("p")
	require.Zero(t, w.Callback())
	w.CalledBack(10 * time.Millisecond)
	require.Equal(t, 10*time.Millisecond, w.Callback())
	for range 200 {
		w.CalledBack(30 * time.Millisecond)
	}
	require.InEpsilon(t, 30*time.Millisecond, w.Callback(), 0.01)
}
