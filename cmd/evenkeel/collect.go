package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// garbageRoom is the least amount of garbage, in bytes, that the heap may have before it is collected. A larger heap may have a quarter
// of the memory in use.
const garbageRoom = 16 << 20

// boundGarbage makes the collector run earlier on a large heap than Go's own rule, which lets the heap double. A running stream allocates
// nothing, so under Go's rule the garbage of a burst of new streams would stay as long as they run. A small heap is collected more
// rarely than under Go's rule, which makes requests cheaper. If the operator has set GOGC, boundGarbage changes nothing.
func boundGarbage() {
	if os.Getenv("GOGC") == "" {
		(&collector{percent: 100}).follow()
	}
}

type collector struct {
	percent int // the current GC percent, as debug.SetGCPercent defines it
}

// follow calls adjust after each collection from now on. For this it makes an object that is garbage at once: the next collection runs
// the object's cleanup.
func (c *collector) follow() {
	runtime.AddCleanup(&struct{ _ *collector }{}, func(c *collector) {
		c.adjust()
		c.follow()
	}, c)
}

// adjust sets the GC percent for the next collection.
func (c *collector) adjust() {
	parts := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/globals:bytes"}, {Name: "/gc/scan/stack:bytes"}}
	metrics.Read(parts)
	live, roots := parts[0].Value.Uint64(), parts[1].Value.Uint64()+parts[2].Value.Uint64()
	if percent := garbagePercent(live, roots); percent != c.percent {
		c.percent = percent
		debug.SetGCPercent(percent)
	}
}

// garbagePercent returns the room for garbage as a percentage of the live heap and the roots together, which is Go's definition. live
// and roots are in bytes. The result is rounded to steps of 5, so that it rarely changes: setting it stops all
// goroutines for an instant.
func garbagePercent(live, roots uint64) int {
	const step = 5
	percent := 100 * max(garbageRoom, live/4) / max(live+roots, garbageRoom/4) // 400 at most, for a heap that is almost empty
	return int((percent + step/2) / step * step)
}
