package prompts

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPrefillIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(Config{Blocks: 2, Concurrency: 1, Base: 10 * time.Millisecond, PerToken: time.Millisecond}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		began := time.Now()
		at := make([]time.Duration, 4)
		var frees []func()
		contexts := make([]context.CancelFunc, 4)
		for i := range at {
			var jctx context.Context
			jctx, contexts[i] = context.WithCancel(ctx)
			r.Add(&Job{Ctx: jctx, IDs: make([]int32, 100), Done: func(_ int, free func()) {
				at[i] = time.Since(began)
				frees = append(frees, free)
			}})
		}
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []time.Duration{110 * time.Millisecond, 220 * time.Millisecond, 0, 0}, at, "the KV cache holds two prompts")
		contexts[2]() // its client leaves
		frees[0]()
		time.Sleep(time.Second)
		synctest.Wait()
		require.Zero(t, at[2])
		require.Equal(t, 1110*time.Millisecond, at[3])
		for _, stop := range contexts {
			stop()
		}
		cancel()
		<-done
	})
}
