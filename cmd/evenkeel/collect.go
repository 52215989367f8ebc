package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// minGarbage is the least amount of garbage, in bytes, that the heap may have before it is collected. A larger heap may have a quarter
// of the memory in use.
const minGarbage = 16 << 20

// startGCTuning makes the garbage collector run earlier on a large heap than Go's own rule, which lets the heap double. A running stream
// allocates nothing, so under Go's rule the garbage of a burst of new streams would stay as long as they run. A small heap is collected
// more rarely than under Go's rule, which makes requests cheaper. If the operator has set GOGC, startGCTuning changes nothing.
func startGCTuning() {
	if os.Getenv("GOGC") == "" {
		(&gcTuner{percent: 100}).adjustAfterEachGC()
	}
}

// gcTuner sets Go's GC percent after each collection.
type gcTuner struct {
	percent int // the current GC percent, as debug.SetGCPercent defines it
}

// adjustAfterEachGC calls setGCPercent after each collection from now on. For this it makes an object that is garbage at once: the next
// collection runs the object's cleanup, which makes another one.
func (c *gcTuner) adjustAfterEachGC() {
	runtime.AddCleanup(&struct{ _ *gcTuner }{}, func(c *gcTuner) {
		c.setGCPercent()
		c.adjustAfterEachGC()
	}, c)
}

// setGCPercent sets the GC percent for the next collection, by what the last one left.
func (c *gcTuner) setGCPercent() {
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
	percent := 100 * max(minGarbage, live/4) / max(live+roots, minGarbage/4) // 400 at most, for a heap that is almost empty
	return int((percent + step/2) / step * step)
}
