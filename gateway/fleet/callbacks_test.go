package fleet

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// mixed has a prefill and a decode engine of two connectors each.
func mixed(t *testing.T) *Fleet {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"lw": {Connector: mooncake.AscendLayerwise}, "sgl": {Connector: mooncake.SGLang},
		"pull": {Connector: mooncake.NIXLPull}, "ascend": {}}
	cfg.Bind.Listen = "127.0.0.1:1"
	cfg.Engines.Prefill = []config.Engine{{URL: "http://127.0.0.1:1", Profile: "lw"}, {URL: "http://127.0.0.1:2", Profile: "sgl"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "lw"}, {URL: "http://127.0.0.1:4", Profile: "sgl"}}
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	return f
}

func (f *Fleet) up(key, model string) {
	f.OnStatus(key, engine.Status{Up: true, Models: []engine.Model{{ID: model}}})
}

func TestADecodeEngineMayNameItsOwnHostsOnly(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"lw": {Connector: mooncake.AscendLayerwise, KVHosts: []string{"10.0.1.9"}}, "ascend": {}}
	cfg.Bind.Listen = "10.0.0.2:1"
	cfg.Engines.Decode = []config.Engine{{URL: "http://10.0.1.1:3", Profile: "lw"}, {URL: "http://10.0.1.2:3"}}
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	known := f.Now().HostsOf("decode 10.0.1.1:3")
	require.True(t, known("10.0.1.1") && known("10.0.1.9"))
	require.False(t, known("10.0.1.2") || f.Now().HostsOf("decode x")("x"))
	require.False(t, f.KnownHost("10.0.1.1"), "no hand-off may point there")
	for address, calls := range map[string]bool{"10.0.1.1": true, "::ffff:10.0.1.9": true, "10.0.1.2": false, "10.0.1.3": false} {
		require.Equal(t, calls, f.Now().CallsBack(netip.MustParseAddr(address)), address)
	}
	require.NoError(t, f.Remove(roster.Decode, "10.0.1.1:3"))
	require.False(t, f.Now().CallsBack(netip.MustParseAddr("10.0.1.1")))
}
