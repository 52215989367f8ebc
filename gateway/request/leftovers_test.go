package request

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Requests that are cut at the end of a shutdown leave hand-offs while it waits
// for those that are being discarded.
func TestNothingBeginsOnceTheRestIsAwaited(t *testing.T) {
	var d leftovers
	release := make(chan struct{})
	require.NoError(t, d.run(1, func() { <-release }))
	require.ErrorIs(t, d.run(1, func() { t.Error("one too many") }), errCrowded)
	require.NoError(t, d.run(2, func() { <-release }))

	over := d.close()
	var late sync.WaitGroup
	for range 8 {
		late.Go(func() {
			if d.run(100, func() { t.Error("it began") }) == nil {
				t.Error("it may begin")
			}
		})
	}
	late.Wait()
	select {
	case <-over:
		t.Error("two still run")
	default:
	}
	close(release)
	<-over
	require.Zero(t, d.open)
	<-d.close() // again
}
