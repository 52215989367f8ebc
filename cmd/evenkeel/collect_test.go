package main

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestGarbageIsBounded(t *testing.T) {
	before := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(before) })
	percent := func() uint64 {
		s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	t.Setenv("GOGC", "")
	startGCTuning()
	after := func(what string, ok func() bool) {
		require.Eventually(t, func() bool { runtime.GC(); return ok() }, time.Minute, time.Millisecond, what)
	}
	after("a small heap is collected more rarely than by Go's rule", func() bool { return percent() > 100 })
	inUse := make([]byte, 64<<20)
	after("a large one more often", func() bool { return percent() < 50 })
	runtime.KeepAlive(inUse)
	for _, row := range []struct {
		live, roots uint64
		room        int // MiB
	}{{0, 0, 16}, {4 << 20, 0, 16}, {4 << 20, 4 << 20, 16}, {20 << 20, 1 << 20, 16}, {64 << 20, 0, 16}, {128 << 20, 1 << 20, 32},
		{4 << 30, 0, 1024}} {
		percent := garbagePercent(row.live, row.roots)
		require.Positive(t, percent)
		require.InDelta(t, row.room, float64(max(row.live+row.roots, 4<<20))*float64(percent)/100/(1<<20), float64(row.room)/8, "%d bytes in use",
			row.live)
	}
}
