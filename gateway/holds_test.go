package gateway_test

import (
	"cmp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// What an answer under way holds on the heap between two events, by the package that asked for it:
// the log of this test is the one place that says what a stream costs. Raise the limit only for
// what is worth it.
func TestWhatAStreamHolds(t *testing.T) {
	profileAll(t)
	const streams = 100
	c := start(t, options{
		// Between two steps, all streams wait for an event for long enough to be measured. They begin at
		// once.
		decode:    []refengine.Config{{Slots: streams + 1, Steps: refengine.Steps{C0: 500 * time.Millisecond, FirstAtOnce: true}}},
		configure: func(cfg *config.Config) { cfg.EventLoops = 2 },
	})
	c.Endless()() // what is kept for the next request is there
	before := held()
	for range streams {
		c.Endless()
	}
	var all int
	var packages map[string]int
	c.Eventually("all streams are with a loop, and hold little", func() bool {
		all, packages = 0, held()
		// What the page keeps grows with the minutes.
		for _, name := range []string{"evenkeel/gateway/detect", "evenkeel/gateway/live"} {
			delete(packages, name)
		}
		for name := range packages {
			packages[name] = (packages[name] - before[name]) / streams
			all += packages[name]
		}
		return all < 9<<10+512
	})
	order := make([]string, 0, len(packages))
	for name, bytes := range packages {
		if bytes >= 16 {
			order = append(order, name)
		}
	}
	slices.SortFunc(order, func(a, b string) int { return cmp.Compare(packages[b], packages[a]) })
	for _, name := range order {
		t.Logf("%6d bytes a stream: %s", packages[name], name)
	}
	t.Logf("%6d bytes in all", all)
	require.Positive(t, packages["evenkeel/gateway/request"])
}

// held is how many bytes are in use that evenkeel's packages asked for, each with what it called of
// others. Engines and clients of the test are not among them.
func held() map[string]int {
	for range 3 { // pools are empty after two, and the profile is that of the last collection but one
		runtime.GC()
	}
	list := make([]runtime.MemProfileRecord, 100_000)
	found, _ := runtime.MemProfile(list, false)
	bytes := map[string]int{}
	for _, r := range list[:found] {
		by := ""
		frames := runtime.CallersFrames(r.Stack())
		for more := true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			name, ours := strings.CutPrefix(f.Function, "evenkeel/")
			switch {
			case !ours:
			case strings.HasPrefix(name, "bench/"), strings.HasPrefix(name, "gateway_test."):
				by, more = "", false
			case by == "":
				end := strings.LastIndexByte(name, '/') + 1
				dot := strings.IndexByte(name[end:], '.')
				by = "evenkeel/" + name[:end+dot]
			}
		}
		if by != "" {
			bytes[by] += int(r.InUseBytes())
		}
	}
	return bytes
}
