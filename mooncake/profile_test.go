package mooncake

import (
	"math"
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
		NIXLPush: 30 * time.Second, AscendLayerwise: 0, SGLang: 0,
	} {
		p := Profile{Connector: connector}.WithDefaults()
		require.NoError(t, p.Validate(), connector)
		require.Equal(t, hold, p.KVHoldTimeout, connector)
		require.Equal(t, connector, p.Name)
		require.Equal(t, p, p.WithDefaults(), "%s: defaults are filled in once", connector)
		require.Equal(t, hold == 0, p.Early(), "%s: what keeps nothing is bound before its prefill", connector)
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
		{"an unknown connector", func(p *Profile) { p.Connector = "lmcache" }, `connector is "lmcache"; use one of: ascend-mooncake-v1, nixl-pull, nixl-push, vllm-mooncake, opaque, ascend-layerwise, sglang`},
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

func TestWhichConnectorsBindWhen(t *testing.T) {
	for _, tc := range []struct {
		connector string
		early     bool
	}{
		{AscendMooncakeV1, false}, {NIXLPull, false}, {NIXLPush, false}, {VLLMMooncake, false}, {Opaque, false},
		{AscendLayerwise, true}, {SGLang, true}, {None, true},
	} {
		t.Run(tc.connector, func(t *testing.T) {
			p := Profile{Connector: tc.connector}.WithDefaults()
			require.NoError(t, p.Validate())
			require.Equal(t, tc.early, p.Early())
			budget, err := p.HoldBudget()
			require.NoError(t, err)
			require.Equal(t, !p.HasHandoff(), budget == math.MaxInt64, "a hand-off is held for a time")
		})
	}
}

func TestKeysThatAConnectorCannotHeedAreRefused(t *testing.T) {
	for _, tc := range []struct {
		key    string
		change func(*Profile)
		both   bool
	}{
		{"kv_hold_timeout", func(p *Profile) { p.KVHoldTimeout = time.Minute }, true},
		{"hold_margin", func(p *Profile) { p.HoldMargin = time.Second }, true},
		{"reject_releases", func(p *Profile) { p.RejectReleases = new(false) }, true},
		{"probe_min_tokens", func(p *Profile) { p.ProbeMinTokens = MinTokensOne }, true},
		{"probe_ignore_eos", func(p *Profile) { p.ProbeIgnoreEOS = true }, true},
		{"allow_local_prefill", func(p *Profile) { p.AllowLocalPrefill = true }, false},
		{"pass_through", func(p *Profile) { p.PassThrough = true }, false},
		{"chat_resume", func(p *Profile) { p.ChatResume = ChatResumeVLLM }, false},
	} {
		t.Run(tc.key, func(t *testing.T) {
			for _, connector := range []string{SGLang, None, AscendLayerwise} {
				p := Profile{Name: "mine", Connector: connector}
				tc.change(&p)
				err := p.WithDefaults().Validate()
				if connector != AscendLayerwise || tc.both {
					require.ErrorContains(t, err, `profile "mine": `+tc.key)
				} else {
					require.NoError(t, err)
				}
			}
		})
	}
}

func TestOnlyRequestsToSGLangNameRanks(t *testing.T) {
	for _, connector := range Connectors() {
		err := Profile{Name: "mine", Connector: connector, NameRanks: new(false)}.WithDefaults().Validate()
		if connector == SGLang {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, `profile "mine": name_ranks has no meaning with connector `+connector)
		}
	}
}

func TestOnlyEnginesThatArePulledFromKeepAnswers(t *testing.T) {
	for _, connector := range Connectors() {
		p := Profile{Name: "mine", Connector: connector}.WithDefaults()
		require.NoError(t, p.Validate())
		require.Zero(t, p.Keeps())
		for _, how := range []string{HandBackCounted} {
			p.HandBack = how
			if connector != NIXLPull {
				require.ErrorContains(t, p.Validate(), `profile "mine": hand_back is `+how+`, and engines with connector `+connector)
				continue
			}
			require.NoError(t, p.Validate())
			require.Equal(t, 480*time.Second, p.Keeps(), "vLLM's default")
		}
		if connector != NIXLPull {
			continue
		}
		p.DecoderTTL = -time.Second
		require.ErrorContains(t, p.Validate(), "decoder_kv_blocks_ttl is -1s")
		p.HandBack = "kept"
		require.ErrorContains(t, p.Validate(), `hand_back is "kept"`)
	}
}

func TestOnlyEnginesOfAscendGiveBack(t *testing.T) {
	for _, connector := range Connectors() {
		p := Profile{Name: "mine", Connector: connector, GivesBack: new(false)}.WithDefaults()
		require.False(t, p.MayGiveBack())
		if p.Ascend() {
			require.NoError(t, p.Validate())
			p.GivesBack = nil
			require.True(t, p.MayGiveBack())
			continue
		}
		require.ErrorContains(t, p.Validate(), `profile "mine": gives_back has no meaning with connector `+connector)
	}
}

func TestACanaryForARankOfSGLang(t *testing.T) {
	p := profileOf(SGLang)
	require.JSONEq(t, `{"model":"m","prompt":"a","max_tokens":2,"ignore_eos":true,"temperature":0,"stream":false,"bootstrap_host":"2.2.2.2","bootstrap_port":8998,"bootstrap_room":3,"routed_dp_rank":3}`, string(p.Canary()("m", 3)))
	require.NotContains(t, string(p.Canary()("m", -1)), "dp_rank")
	p.NameRanks = new(false)
	require.NotContains(t, string(p.Canary()("m", 3)), "dp_rank")
	require.Contains(t, string(p.Canary()("m", 3)), `"bootstrap_room":3`)
	require.Nil(t, profileOf(NIXLPull).Canary())
}
