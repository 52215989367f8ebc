package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

func TestHowLongThePoolKeepsARequest(t *testing.T) {
	for _, tc := range []struct {
		name       string
		connectors []string
		ttl, want  time.Duration
	}{
		{"what pulls gives a hold budget", []string{mooncake.AscendMooncakeV1}, 0, 6 * time.Minute},
		{"the shortest of several counts", []string{mooncake.AscendMooncakeV1, mooncake.NIXLPush}, 0, 15 * time.Second},
		{"what is bound before its prefill waits as for a prefill engine", []string{mooncake.SGLang}, 0, 40 * time.Second},
		{"both at once", []string{mooncake.SGLang, mooncake.AscendMooncakeV1}, 0, 40 * time.Second},
		{"the configured time", []string{mooncake.AscendLayerwise}, time.Hour, time.Hour},
		{"no engines", nil, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Pool.TTL, cfg.Prefill.Queue.Timeout = tc.ttl, 40*time.Second
			cfg.Profiles = map[string]mooncake.Profile{}
			for i, connector := range tc.connectors {
				cfg.Profiles[connector] = mooncake.Profile{Connector: connector}.WithDefaults()
				cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: "http://p" + string(rune('0'+i)), Profile: connector})
			}
			require.Equal(t, tc.want, NewSettings(cfg).PoolTTL())
		})
	}
}

// For as long as this, a proxy that takes engines over leaves room for what the owner before may
// have left on them.
func TestHowLongBlocksAreHeldForAHandOff(t *testing.T) {
	for _, tc := range []struct {
		connectors []string
		want       time.Duration
	}{
		{[]string{mooncake.NIXLPull}, 30 * time.Second},
		{[]string{mooncake.NIXLPull, mooncake.AscendMooncakeV1}, 8 * time.Minute},
		{[]string{mooncake.SGLang}, 9 * time.Minute}, // the prefill engine keeps nothing, but a prefill may write for as long
		{[]string{mooncake.SGLang, mooncake.NIXLPull}, 30 * time.Second},
		{nil, 0},
	} {
		cfg := config.Default()
		cfg.Limits.ProbeTimeout = 9 * time.Minute
		cfg.Profiles = map[string]mooncake.Profile{}
		for _, connector := range tc.connectors {
			cfg.Profiles[connector] = mooncake.Profile{Connector: connector}.WithDefaults()
		}
		require.Equal(t, tc.want, NewSettings(cfg).HoldTimeout(), "%v", tc.connectors)
	}
}
