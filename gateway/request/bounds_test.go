package request

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
)

// The docs have a limit under the name of the key that is in force.
func TestALimitIsTheKeyThatTheDocsName(t *testing.T) {
	const odd = 12345 * time.Millisecond
	for l, row := range map[lifecycle.Limit]struct {
		key string // or the limit itself, where no key has it
		set func(*config.Config, *mooncake.Profile)
	}{
		lifecycle.ByProbe:      {"limits.probe_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Limits.ProbeTimeout = odd }},
		lifecycle.ByWhole:      {"limits.probe_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Limits.ProbeTimeout = odd }},
		lifecycle.ByFirstEvent: {"first_event_timeout", func(_ *config.Config, p *mooncake.Profile) { p.FirstEventTimeout = odd }},
		lifecycle.ByHold:       {"first_event_timeout", func(_ *config.Config, p *mooncake.Profile) { p.FirstEventTimeout = odd }},
		lifecycle.ByCallback:   {"bind.callback_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Bind.CallbackTimeout = odd }},
		lifecycle.ByGrace:      {"5 s", nil},
		lifecycle.ByConfirm:    {"100 ms", nil},
		lifecycle.ByAbort:      {"200 ms", nil},
	} {
		cfg, p, want := config.Default(), mooncake.Profile{}, odd
		if row.set != nil {
			row.set(cfg, &p)
		} else {
			var err error
			want, err = time.ParseDuration(strings.ReplaceAll(row.key, " ", ""))
			require.NoError(t, err)
		}
		require.Contains(t, l.String(), row.key)
		require.Equal(t, want, waitAtMost(l, fleet.NewSettings(cfg), &p), row.key)
	}
}
