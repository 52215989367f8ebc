package gateway_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// A request that comes to an engine as it falls asleep has an answer's head and no event. It goes
// to an engine that is awake, and nobody is blamed. The pause is never over.
func TestARequestLeavesAnEngineThatFallsAsleep(t *testing.T) {
	t.Parallel()
	configure := func(cfg *config.Config) {
		quickHealth(cfg)
		cfg.Health.Interval, cfg.Limits.ProbeTimeout, cfg.Pool.TTL = 300*time.Millisecond, time.Hour, time.Minute
	}
	two := func(version string) []refengine.Config {
		return []refengine.Config{{Version: version}, {Version: version}}
	}
	early := mooncake.Profile{FirstEventTimeout: 6 * time.Second}
	for _, row := range []struct {
		name  string
		more  string // what the request has
		setup options
	}{
		{"aggregated, a stream", `"stream":true,`, options{mixed: two("0.33.0")}},
		{"aggregated, in one piece", "", options{mixed: two("0.33.0")}},
		{"aggregated, an older version", `"stream":true,`, options{mixed: two("0.32.0")}},
		{"a pair", `"stream":true,`, options{prefill: two("0.33.0"), decode: two("0.33.0"), profile: early}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := row.setup
			o.dirty, o.configure = true, configure
			c := start(t, o)
			for i := range 4 {
				require.Equal(t, "right", c.Judge(fmt.Sprint("warm up ", i), row.more))
			}
			require.Equal(t, 200, c.Ask("POST", c.Decode[0].URLs()[0]+"/pause?mode=keep", "").Status)
			var all []<-chan string
			for i := range 6 { // before a check sees it
				all = append(all, c.Judging(fmt.Sprint("request ", i), row.more))
			}
			for i, verdict := range all {
				c.Eventually(fmt.Sprint("answer ", i, " comes"), func() bool { return len(verdict) == 1 })
				require.Equal(t, "right", <-verdict)
			}
			require.Equal(t, "halted", c.state(c.Decode[0]))
			require.Zero(t, c.Sum("evenkeel_engine_outages_total"))
		})
	}
}
