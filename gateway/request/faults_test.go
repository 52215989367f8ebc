package request

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

// Whatever an engine does wrong, on either side: the client gets the right text whole, or is told
// that it did not. However wrong or late its gauges and pages are, which a monitor reads, no client
// notices anything.
func TestEveryFault(t *testing.T) {
	t.Parallel()
	silence := 500 * time.Millisecond // of an engine that hangs; a right answer needs its time, too
	if race.Enabled {
		silence = 2 * time.Second
	}
	for _, name := range refengine.FaultNames() {
		fault := refengine.Fault(name)
		if fault == refengine.WrongKey {
			continue // KV of another prompt only the engine could tell
		}
		for i, rule := range fault.Forms() {
			for _, side := range []string{"prefill", "decode"} {
				t.Run(fmt.Sprintf("%s %d on %s", name, i, side), func(t *testing.T) {
					t.Parallel()
					o := setup{profile: mooncake.Profile{FirstEventTimeout: patience, RejectReleases: new(true)}}
					if fault == refengine.Hang {
						o.profile.FirstEventTimeout = silence
						o.configure = func(c *config.Config, _ *Deps) { c.Limits.ProbeTimeout, c.Limits.EventTimeout = silence, silence }
					}
					pages := slices.Contains([]refengine.Fault{refengine.FrozenGauges, refengine.SlowPages}, fault)
					o.gauged = pages && side == "decode" // no gauge of a prefill engine is read here
					b := start(t, o)
					e := map[string]*refengine.Engine{"prefill": b.p[0], "decode": b.d[0]}[side]
					for j, more := range []string{`"stream":true,`, ``, `"stream":true,"n":2,"seed":5,`, `"n":2,"seed":5,`} {
						rule := rule
						rule.Count = 1 + j%2 // once, and on the retry as well
						require.NoError(t, e.SetFaults(rule))
						got := b.judge(fmt.Sprintf("p%d words to prefill", j), more)
						if fault.Harmless() || pages {
							require.Equal(t, "right", got)
						}
						if status, err := strconv.Atoi(got); err == nil {
							require.Contains(t, []int{400, 422, 429, 500, 501, 502, 503, 504}, status)
						}
					}
					require.NoError(t, e.SetFaults())
					b.eventually("all is well again", func() bool { return b.judge("and now", `"stream":true,`) == "right" })
					b.settle()
				})
			}
		}
	}
}
