package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// The garbage that a heap may hold before it is collected: a quarter of what is in use, and this at least.
const garbageRoom = 16 << 20

// boundGarbage has the collector come after so much garbage, where Go's own rule lets the heap
// double. Answers that flow allocate nothing: by that rule the garbage of the burst that opened
// them would stay as long as they do. The heap of a proxy with few streams is
// collected more rarely than by that rule, which makes a request cheaper. An
// operator who sets GOGC has that.
func boundGarbage() {
	if os.Getenv("GOGC") == "" {
		(&collector{percent: 100}).follow()
	}
}

type collector struct {
	percent int // of the heap in use, as Go has it
}

// follow calls adjust after every collection, the next one first.
func (c *collector) follow() {
	runtime.AddCleanup(&struct{ _ *collector }{}, func(c *collector) {
		c.adjust()
		c.follow()
	}, c)
}

func (c *collector) adjust() {
	parts := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/globals:bytes"}, {Name: "/gc/scan/stack:bytes"}}
	metrics.Read(parts)
	live, roots := parts[0].Value.Uint64(), parts[1].Value.Uint64()+parts[2].Value.Uint64()
	if percent := garbagePercent(live, roots); percent != c.percent {
		c.percent = percent
		debug.SetGCPercent(percent)
	}
}

// garbagePercent is the room for garbage beside so many bytes in use, as Go wants it: of these and of
// the roots together. Its steps leave alone what has hardly changed: to set it stops all
// goroutines for an instant.
func garbagePercent(live, roots uint64) int {
	const step = 5
	percent := 100 * max(garbageRoom, live/4) / max(live+roots, garbageRoom/4)
	return int((percent + step/2) / step * step)
}
