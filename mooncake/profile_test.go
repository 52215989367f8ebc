package mooncake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHoldBudget(t *testing.T) {
	for _, tc := range []struct {
		name            string
		timeout, margin time.Duration
		want            time.Duration
		err             string
	}{
		{"the default margin of a long hold is 120 s", 480 * time.Second, 0, 360 * time.Second, ""},
		{"the default margin of a short hold is half", 30 * time.Second, 0, 15 * time.Second, ""},
		{"where both rules meet", 240 * time.Second, 0, 120 * time.Second, ""},
		{"the operator's margin", 30 * time.Second, 5 * time.Second, 25 * time.Second, ""},
		{"a margin as long as the hold leaves nothing", 30 * time.Second, 30 * time.Second, 0, "leaves nothing of kv_hold_timeout 30s"},
		{"a longer margin leaves less than nothing", 30 * time.Second, time.Minute, 0, "leaves nothing of kv_hold_timeout 30s"},
		{"no hold at all", 0, 0, 0, "kv_hold_timeout is 0s"},
		{"a hold below zero", -time.Second, 0, 0, "kv_hold_timeout is -1s"},
		{"a margin below zero would dispatch late", 30 * time.Second, -1, 0, "hold_margin is -1ns"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Profile{KVHoldTimeout: tc.timeout, HoldMargin: tc.margin}.HoldBudget()
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
			} else {
				require.NoError(t, err)
			}
			if got != tc.want {
				t.Errorf("HoldBudget(%v, %v) = %v; want %v", tc.timeout, tc.margin, got, tc.want)
			}
		})
	}
}

func TestDefaultsOfProfiles(t *testing.T) {
	for connector, hold := range map[string]time.Duration{
		AscendMooncakeV1: 480 * time.Second, NIXLPull: 30 * time.Second, VLLMMooncake: 480 * time.Second, Opaque: 480 * time.Second,
	} {
		p := Profile{Connector: connector}.WithDefaults()
		require.NoError(t, p.Validate(), connector)
		require.Equal(t, hold, p.KVHoldTimeout, connector)
		require.Equal(t, connector, p.Name)
		require.Equal(t, p, p.WithDefaults(), "%s: defaults are filled in once", connector)
	}
	p := Profile{}.WithDefaults()
	require.Equal(t, AscendMooncakeV1, p.Connector)
	require.True(t, *p.ContinuousUsage)
	require.True(t, *p.ReturnTokenIDs)
	require.Equal(t, 3, *p.RecomputeMax)
	require.Nil(t, p.RejectReleases, "decided by the engine's version")
	require.Equal(t, 60*time.Second, p.FirstEventTimeout)

	own := Profile{Name: "a2", ContinuousUsage: new(false), KVHoldTimeout: time.Minute, RecomputeMax: new(0)}.WithDefaults()
	require.Equal(t, "a2", own.Name)
	require.False(t, *own.ContinuousUsage)
	require.Equal(t, time.Minute, own.KVHoldTimeout)
	require.Zero(t, *own.RecomputeMax, "never recompute is a choice")
}

func TestValidateSaysWhatToChange(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Profile)
		err    string
	}{
		{"layerwise cannot wait", func(p *Profile) { p.Connector = "ascend-layerwise" }, "start the engines with MooncakeConnectorV1"},
		{"push cannot wait", func(p *Profile) { p.Connector = "nixl-push" }, "start the engines with NixlConnector (pull)"},
		{"SGLang cannot wait", func(p *Profile) { p.Connector = "sglang" }, "it has no handoff to keep"},
		{"an unknown connector", func(p *Profile) { p.Connector = "lmcache" }, `connector is "lmcache"; use one of: ascend-mooncake-v1, nixl-pull`},
		{"an unknown way to keep EOS away", func(p *Profile) { p.ProbeMinTokens = "2" }, `probe_min_tokens is "2"; use one of: 1, omit, ignore_eos`},
		{"an unknown way to resume", func(p *Profile) { p.ChatResume = "retry" }, `chat_resume is "retry"`},
		{"an unknown way to address ranks", func(p *Profile) { p.DPMode = "auto" }, `dp_mode is "auto"`},
		{"an unknown non-stream mode", func(p *Profile) { p.NonStream = "stream" }, `nonstream is "stream"`},
		{"a margin that leaves nothing", func(p *Profile) { p.HoldMargin = time.Hour }, "leaves nothing"},
		{"a first event that is never waited for", func(p *Profile) { p.FirstEventTimeout = -1 }, "first_event_timeout is -1ns"},
		{"a vocabulary below zero", func(p *Profile) { p.VocabSize = -1 }, "vocab_size is -1"},
		{"recomputes below zero", func(p *Profile) { p.RecomputeMax = new(-1) }, "recompute_max is -1"},
		{"a port beyond ports", func(p *Profile) { p.BootstrapPort = 70000 }, "bootstrap_port is 70000"},
		{"a host without a name", func(p *Profile) { p.KVHosts = []string{" "} }, "kv_hosts has an empty entry"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := Profile{Name: "mine"}.WithDefaults()
			tc.change(&p)
			require.ErrorContains(t, p.Validate(), tc.err)
			require.ErrorContains(t, p.Validate(), `profile "mine"`)
		})
	}
}
