package stand

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAGateHoldsUntilItsTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		require.False(t, g.Wait(t.Context()), "the zero Gate is open")
		g.Close(time.Minute)
		began := time.Now()
		require.True(t, g.Wait(t.Context()))
		require.Equal(t, time.Minute, time.Since(began))
		require.False(t, g.Wait(t.Context()), "its time is over")
	})
}

func TestAGateThatIsOpenedEarlyLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		g.Close(time.Hour)
		time.AfterFunc(time.Second, func() { g.Close(0) })
		began := time.Now()
		require.True(t, g.Wait(t.Context()))
		require.Equal(t, time.Second, time.Since(began))
	})
}

func TestAGateLetsGoWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		g.Close(time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		require.True(t, g.Wait(ctx))
		require.Equal(t, time.Second, time.Since(began))
	})
}
