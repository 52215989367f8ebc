package service

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Requests that are cut at the end of a shutdown leave hand-offs while it waits
// for those that are being discarded.
func TestNothingBeginsOnceTheRestIsAwaited(t *testing.T) {
	var g Background
	release := make(chan struct{})
	require.NoError(t, g.Run(1, func() { <-release }))
	require.ErrorIs(t, g.Run(1, func() { t.Error("one too many") }), ErrCrowded)
	require.NoError(t, g.Run(2, func() { <-release }))

	over := g.Close()
	var late sync.WaitGroup
	for range 8 {
		late.Go(func() {
			if g.Run(100, func() { t.Error("it began") }) == nil {
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
	require.Zero(t, g.running)
	<-g.Close() // again
}
