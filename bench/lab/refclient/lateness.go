package refclient

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Lateness measures by how much later than it asked for this process has been woken since then, in
// sum. What the wait for others may take in real time grows by as much.
func Lateness(t *testing.T) (sum func() time.Duration) {
	const nap = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	var late atomic.Int64
	var napper sync.WaitGroup
	napper.Go(func() {
		for ctx.Err() == nil {
			begin := time.Now()
			time.Sleep(nap) // how much longer it takes is what is measured
			late.Add(int64(time.Since(begin) - nap))
		}
	})
	t.Cleanup(func() {
		cancel()
		napper.Wait()
	})
	return func() time.Duration { return time.Duration(late.Load()) }
}
