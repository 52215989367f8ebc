package pool

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPlaces(t *testing.T) {
	p, freed := NewSemaphore(2), 0
	p.OnFree(func() { freed++ })
	require.True(t, p.TryAcquire())
	require.True(t, p.TryAcquire())
	require.False(t, p.TryAcquire(), "a third of two")
	p.Release()
	require.Equal(t, 1, freed)
	require.True(t, p.TryAcquire(), "what was released is free again")
	p.Release()
	p.Release()
	p.Release() // once too often
	require.Equal(t, 0, p.Used())
	require.Equal(t, 3, freed, "a release of nothing frees nothing")
	require.Equal(t, 2, p.Size())

	require.True(t, p.TryAcquire())
	p.Reserve()
	p.Reserve() // beyond the size
	p.Release()
	require.False(t, p.TryAcquire(), "two are held, which is all there are")
	p.Release()
	require.True(t, p.TryAcquire())
}

func TestPlacesNeverExceedTheirSize(t *testing.T) {
	const size = 7
	p := NewSemaphore(size)
	var held, most atomic.Int64
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 2000 {
				if !p.TryAcquire() {
					continue
				}
				n := held.Add(1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				held.Add(-1)
				p.Release()
			}
		})
	}
	all.Wait()
	require.LessOrEqual(t, most.Load(), int64(size))
	require.Zero(t, p.Used())
}

func TestResizeKeepsWhatIsReserved(t *testing.T) {
	p := NewSemaphore(2)
	woken := 0
	p.OnFree(func() { woken++ })
	require.True(t, p.TryAcquire())
	require.True(t, p.TryAcquire())
	p.Resize(1)
	require.Equal(t, []int{1, 2}, []int{p.Size(), p.Used()})
	p.Release()
	require.False(t, p.TryAcquire(), "still full")
	woken = 0
	p.Resize(2)
	require.Equal(t, 1, woken, "somebody may wait for the room")
	require.True(t, p.TryAcquire())
}
