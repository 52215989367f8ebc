package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// minGarbage is how much garbage, in bytes, the heap may always have before it is collected. A
// large heap may have more: a quarter of its live data.
const minGarbage = 16 << 20

// startGCTuning makes the garbage collector run earlier on a large heap than Go's own rule, which
// lets the heap double. A running stream allocates nothing, so under Go's rule the garbage of a
// burst of new streams would stay until these streams end. A small heap is collected more rarely
// than under Go's rule, which makes requests cheaper. If the operator has set GOGC, startGCTuning
// changes nothing.
func startGCTuning() {
	if os.Getenv("GOGC") == "" {
		(&gcTuner{percent: 100}).adjustAfterEachGC()
	}
}

// gcTuner sets Go's GC percent anew after each collection.
type gcTuner struct {
	percent int // the current GC percent, as debug.SetGCPercent defines it
}

// adjustAfterEachGC calls setGCPercent after each collection from now on. To notice collections, it
// makes an object that is garbage at once. The next collection runs the object's cleanup, which
// makes another such object.
func (c *gcTuner) adjustAfterEachGC() {
	runtime.AddCleanup(&struct{ _ *gcTuner }{}, func(c *gcTuner) {
		c.setGCPercent()
		c.adjustAfterEachGC()
	}, c)
}

// setGCPercent sets the GC percent for the next collection by the live heap that the last one left.
func (c *gcTuner) setGCPercent() {
	parts := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/globals:bytes"}, {Name: "/gc/scan/stack:bytes"}}
	metrics.Read(parts)
	live, roots := parts[0].Value.Uint64(), parts[1].Value.Uint64()+parts[2].Value.Uint64()
	if percent := garbagePercent(live, roots); percent != c.percent {
		c.percent = percent
		debug.SetGCPercent(percent)
	}
}

// garbagePercent returns how much garbage the heap may have, as a percentage of the live heap and
// the roots together, which is Go's definition of the GC percent. live and roots are in bytes. The
// result is rounded to steps of 5, so that it rarely changes, because setting it stops all
// goroutines for an instant.
func garbagePercent(live, roots uint64) int {
	const step = 5
	percent := 100 * max(minGarbage, live/4) / max(live+roots, minGarbage/4) // at most 400, for a heap that is almost empty
	return int((percent + step/2) / step * step)
}
