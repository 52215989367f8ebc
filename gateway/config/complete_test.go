package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

func TestComplete(t *testing.T) {
	c, err := Parse("f.yaml", []byte(`
profiles: {n: {connector: nixl-pull, max_num_seqs: 9}}
engines:
  prefill: [{url: "http://p0:1", profile: n}]
  decode: [{url: "http://d0:1", profile: n, group: west, slots: 4}]
  aggregated: [{url: "http://a0:1", group: east, slots: 4, token_budget: 8192, prefill_schedule_interval: 2}]
`))
	require.NoError(t, err)
	before := *c
	for _, tc := range []struct {
		name, role string
		in, want   Engine
		refused    string
	}{
		{"a prefill engine takes the first one's profile", "prefill", Engine{URL: "http://p1:1"}, Engine{URL: "http://p1:1", Profile: "n"}, ""},
		{"a decode engine joins the first one's group", "decode", Engine{URL: "http://d1:1"}, Engine{URL: "http://d1:1", Profile: "n", Group: "west", Barrier: "dp", Slots: 4, Cost: 1}, ""},
		{"what is given stays", "decode", Engine{URL: "http://d1:1", Profile: "ascend", Group: "east", Barrier: "none", Slots: 2, Cost: 3},
			Engine{URL: "http://d1:1", Profile: "ascend", Group: "east", Barrier: "none", Slots: 2, Cost: 3}, ""},
		{"a group that steers a terminal", "decode", Engine{URL: "http://d1:1", Group: "a\x1b[2J"}, Engine{}, `"a\x1b[2J" is no name of a group`},
		{"a group keeps its barrier", "decode", Engine{URL: "http://d1:1", Group: "west", Barrier: "none"}, Engine{}, "group \"west\" has barrier dp, this engine none"},
		{"an aggregated engine joins the first one's group", "aggregated", Engine{URL: "http://a1:1"}, Engine{URL: "http://a1:1", Profile: "aggregated", Group: "east", Barrier: "dp", Slots: 4, Cost: 1, Budget: 8192, Interval: 2}, ""},
		{"a profile that hands nothing over is one of aggregated engines", "decode", Engine{URL: "http://d1:1", Profile: "aggregated"}, Engine{}, "list it under engines.aggregated"},
		{"an engine needs a URL", "prefill", Engine{URL: "p1"}, Engine{}, "p1: url: \"p1\" is not an engine's URL"},
		{"a profile must exist", "prefill", Engine{URL: "http://p1:1", Profile: "x"}, Engine{}, "http://p1:1: profile: no profile is named \"x\""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := c.Complete(tc.role, tc.in)
			if tc.refused != "" {
				require.ErrorContains(t, err, tc.refused)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
		})
	}
	require.Equal(t, before.Engines, c.Engines, "the config itself stays as it was")

	bare := Default()
	require.NoError(t, bare.Validate())
	got, err := bare.Complete("decode", Engine{URL: "http://d:1"})
	require.NoError(t, err)
	require.Equal(t, Engine{URL: "http://d:1", Profile: "ascend", Group: "main", Barrier: "dp", Cost: 1}, got)
	bare.Profiles[DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, MaxNumSeqs: 64, MaxBatchedTokens: 2048}.WithDefaults()
	got, err = bare.CompleteFound("aggregated", Engine{URL: "http://a:1"})
	require.NoError(t, err)
	require.Equal(t, Engine{URL: "http://a:1", Profile: "aggregated", Group: "main", Barrier: "dp", Cost: 1, Slots: 64, Budget: 2048}, got)
}

func TestWhichProfilesEnginesMayHave(t *testing.T) {
	for _, tc := range []struct{ text, role, want string }{
		{"engines: {decode: [{url: \"http://d:1\"}]}", "decode", "ascend"},
		{"engines: {aggregated: [{url: \"http://a:1\"}]}", "", "aggregated"},
		{"engines: {aggregated: [{url: \"http://a:1\"}]}", "prefill", ""},
		{"discovery: {files: [f]}", "prefill", "ascend"},
		{"discovery: {files: [f]}", "", "ascend"},
		{"discovery: {files: [f]}", "aggregated", "aggregated ascend"},
		{"discovery: {kubernetes: [{selector: a, port: 1}]}", "decode", "ascend"},
		{"profiles: {n: {connector: nixl-pull}}\ndiscovery: {files: [f]}", "decode", "n"},
		{"profiles: {n: {connector: none}}\ndiscovery: {files: [f]}", "decode", "ascend"},
		{"profiles: {n: {connector: none}}\ndiscovery: {files: [f]}", "", "ascend n"},
	} {
		c, err := Parse("f.yaml", []byte(tc.text))
		require.NoError(t, err, tc.text)
		require.Equal(t, tc.want, strings.Join(c.ProfilesInUse(tc.role), " "), "%s: %s", tc.text, tc.role)
	}
}

func TestInstanceID(t *testing.T) {
	for url, want := range map[string]string{
		"http://p0:8100": "p0:8100", "http://p0": "p0:80", "https://p0/": "p0:443", "http://[fd00::1]:8100": "[fd00::1]:8100", "http://my_engine-0.svc:1": "my_engine-0.svc:1",
	} {
		id, err := InstanceID(url)
		require.NoError(t, err)
		require.Equal(t, want, id)
	}
	for _, url := range []string{"", "p0:8100", "tcp://p0:8100", "http://", "http://p0:8100/v1", "http://p0:8100?a=b", "http://p0:8100#f",
		"http://u@p0:8100", "http://p0:70000", "http://p0:x", "http://$(reboot):80", "http://a;b:80", "http://a&b:80", "http://a'b:80",
		"http://a\u202eb:80"} {
		_, err := InstanceID(url)
		require.Error(t, err, url)
	}
}

func TestTarget(t *testing.T) {
	plain, err := Target(Engine{URL: "http://p0:8100/"}, &mooncake.Profile{})
	require.NoError(t, err)
	require.Equal(t, "p0:8100", plain.ID)
	require.Equal(t, "http://p0:8100", plain.URL.String())
	require.Equal(t, -1, plain.Rank)
	require.Nil(t, plain.TLS)

	t.Setenv("EK_TEST_KEY", "secret")
	tls, err := Target(Engine{URL: "https://p0"}, &mooncake.Profile{APIKeyEnv: "EK_TEST_KEY"})
	require.NoError(t, err)
	require.Equal(t, "p0", tls.TLS.ServerName)
	require.Equal(t, "secret", tls.APIKey)

	_, err = Target(Engine{URL: "http://p0:1"}, &mooncake.Profile{APIKeyEnv: "EK_TEST_NO_KEY"})
	require.ErrorContains(t, err, "EK_TEST_NO_KEY, which is empty; export it")
	_, err = Target(Engine{URL: "p0"}, &mooncake.Profile{})
	require.Error(t, err)
}

func TestTheDefaultPrefillPolicyDependsOnWhoDecodes(t *testing.T) {
	for _, tt := range []struct{ name, yaml, want string }{
		{"prefill engines that only prefill", "engines: {prefill: [{url: http://p0:1}], decode: [{url: http://d0:1}]}", "finish"},
		{"an engine in both lists", "engines: {prefill: [{url: http://p0:1}, {url: http://b0:1}], decode: [{url: http://b0:1}]}", "finish"},
		{"an engine in both lists, and other regions", "engines: {prefill: [{url: http://b0:1}], decode: [{url: http://b0:1}]}\ngeo: {mode: distributed, hmac: {keys_file: keys}, self: {id: e1, region: east}, peers: [{id: w1, region: west, url: http://w:1}]}", "lmetric"},
		{"but what is written counts", "engines: {prefill: [{url: http://b0:1}], decode: [{url: http://b0:1}]}\nprefill: {policy: finish}", "finish"},
	} {
		c, err := Parse("x.yaml", []byte(tt.yaml))
		require.NoError(t, err, tt.name)
		require.NoError(t, c.Validate())
		require.Equal(t, tt.want, c.Prefill.Policy, tt.name)
	}
}
