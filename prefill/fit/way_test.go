package fit

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestATransferIsALineOfItsPrompt(t *testing.T) {
	w, rng := New(Config{}).Way("p"), rand.New(rand.NewPCG(1, 1))
	require.Zero(t, w.Transfer(1000), "nothing is known")
	for range 300 {
		tokens := 500 + rng.IntN(8000)
		w.Moved(tokens, 3*time.Millisecond+time.Duration(tokens)*time.Microsecond)
	}
	require.InEpsilon(t, 7*time.Millisecond, w.Transfer(4000), 0.01)
	require.InEpsilon(t, 23*time.Millisecond, w.Transfer(20_000), 0.01)
}

func TestATransferThatDoesNotGrowIsTheMean(t *testing.T) {
	times := New(Config{})
	w, rng := times.Way("p"), rand.New(rand.NewPCG(1, 1))
	w.Moved(100, 4*time.Millisecond)
	require.Equal(t, 4*time.Millisecond, w.Transfer(9000))
	for range 500 {
		w.Moved(500+rng.IntN(8000), time.Duration(2+rng.IntN(5))*time.Millisecond)
	}
	require.InEpsilon(t, 4*time.Millisecond, w.Transfer(9000), 0.1)
	w.Moved(100, -time.Second) // the first event came before the answer
	require.Positive(t, w.Transfer(9000))
	require.Zero(t, times.Way("another").Transfer(9000))
	require.Same(t, w, times.Way("p"))
}

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
