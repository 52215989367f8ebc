package fleet

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// mixed has a prefill and a decode engine of two connectors each.
func mixed(t *testing.T) *Fleet {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"lw": {Connector: mooncake.AscendLayerwise}, "sgl": {Connector: mooncake.SGLang}, "pull": {Connector: mooncake.NIXLPull}, "ascend": {}}
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

func (f *Fleet) states() map[string]string {
	all := map[string]string{}
	for _, s := range f.Statuses() {
		all[s.Role+" "+s.ID] = s.State
	}
	return all
}

func TestAnEngineWithAnotherConnectorThanItsModelIsRefused(t *testing.T) {
	f := mixed(t)
	const lwP, sglP, lwD, sglD = "prefill 127.0.0.1:1", "prefill 127.0.0.1:2", "decode 127.0.0.1:3", "decode 127.0.0.1:4"
	f.up(lwP, "one")
	f.up(lwD, "one")
	f.up(sglP, "two")
	f.up(sglD, "two")
	require.Equal(t, map[string]string{lwP: "up", lwD: "up", sglP: "up", sglD: "up"}, f.states(), "each model has its own connector")

	f = mixed(t)
	f.up(sglD, "one")
	f.up(lwD, "one")
	f.up(lwP, "one")
	f.up(sglP, "one")
	require.Equal(t, map[string]string{lwP: "odd", lwD: "odd", sglP: "up", sglD: "up"}, f.states(), "what served first")
	p, d := f.Up()
	require.Equal(t, []int{1, 1}, []int{p, d})
	for _, s := range f.Statuses() {
		if s.State == "odd" {
			require.Contains(t, s.Error, "its connector is ascend-layerwise (profile lw), and decode engine 127.0.0.1:4, which has model one too, has sglang (profile sgl)")
			require.False(t, s.Draining)
		}
	}
	require.Len(t, f.Missing(), 2)

	f.OnStatus(sglD, engine.Status{})
	require.Equal(t, "odd", f.states()[lwD], "another of that connector serves")
	f.OnStatus(sglP, engine.Status{})
	require.Equal(t, map[string]string{lwP: "up", lwD: "up", sglP: "down", sglD: "down"}, f.states())
	f.up(sglP, "one")
	require.Equal(t, "odd", f.states()[sglP], "it comes back to a model that others serve")
}

func TestConnectorsThatBindLateMayDiffer(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"ascend": {}, "opaque": {Connector: mooncake.Opaque}}
	cfg.Engines.Prefill = []config.Engine{{URL: "http://127.0.0.1:1", Profile: "opaque"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3"}}
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	f.up("prefill 127.0.0.1:1", "m")
	f.up("decode 127.0.0.1:3", "m")
	require.Equal(t, map[string]string{"prefill 127.0.0.1:1": "up", "decode 127.0.0.1:3": "up"}, f.states())
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
	known := f.HostsOf("decode 10.0.1.1:3")
	require.True(t, known("10.0.1.1") && known("10.0.1.9"))
	require.False(t, known("10.0.1.2") || f.HostsOf("decode x")("x"))
	require.False(t, f.KnownHost("10.0.1.1"), "no hand-off may point there")
	for address, calls := range map[string]bool{"10.0.1.1": true, "::ffff:10.0.1.9": true, "10.0.1.2": false, "10.0.1.3": false} {
		require.Equal(t, calls, f.CallsBack(netip.MustParseAddr(address)), address)
	}
	require.NoError(t, f.Remove(Decode, "10.0.1.1:3"))
	require.False(t, f.CallsBack(netip.MustParseAddr("10.0.1.1")))
}

// SGLang reads the rooms of responses and messages for sure from 0.5.23 on.
func TestWhichVersionsOfSGLangTakeHandOffsEverywhere(t *testing.T) {
	for version, want := range map[string]bool{
		"0.5.23": true, "v0.5.23": true, "0.5.23.post1": true, "0.5.24.dev3+g1": true, "0.6.0": true, "0.6": true, "1.0.0": true,
		"0.5.22": false, "0.5.9": false, "0.4.9.post6": false, "0.5": false, "main": false, "": false,
	} {
		i := &instance{profile: &mooncake.Profile{Connector: mooncake.SGLang}}
		i.status.Version = version
		for _, ep := range []mooncake.Endpoint{mooncake.Responses, mooncake.Messages} {
			require.Equal(t, want, i.takesHandOff(ep), version)
		}
		require.True(t, i.takesHandOff(mooncake.Chat), version)
	}
}
