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
