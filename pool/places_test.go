package pool

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPlaces(t *testing.T) {
	p, freed := NewPlaces(2), 0
	p.OnFree(func() { freed++ })
	require.True(t, p.TryReserve())
	require.True(t, p.TryReserve())
	require.False(t, p.TryReserve(), "a third of two")
	p.Release()
	require.Equal(t, 1, freed)
	require.True(t, p.TryReserve(), "what was released is free again")
	p.Release()
	p.Release()
	p.Release() // once too often
	require.Equal(t, 0, p.Used())
	require.Equal(t, 3, freed, "a release of nothing frees nothing")
	require.Equal(t, 2, p.Size())

	require.True(t, p.TryReserve())
	p.Reserve()
	p.Reserve() // beyond the size
	p.Release()
	require.False(t, p.TryReserve(), "two are held, which is all there are")
	p.Release()
	require.True(t, p.TryReserve())
}

func TestPlacesNeverExceedTheirSize(t *testing.T) {
	const size = 7
	p := NewPlaces(size)
	var held, most atomic.Int64
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 2000 {
				if !p.TryReserve() {
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
	p := NewPlaces(2)
	woken := 0
	p.OnFree(func() { woken++ })
	require.True(t, p.TryReserve())
	require.True(t, p.TryReserve())
	p.Resize(1)
	require.Equal(t, []int{1, 2}, []int{p.Size(), p.Used()})
	p.Release()
	require.False(t, p.TryReserve(), "still full")
	woken = 0
	p.Resize(2)
	require.Equal(t, 1, woken, "somebody may wait for the room")
	require.True(t, p.TryReserve())
}
