package selftest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

func TestAServerOfSGLangWithElasticEP(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.SGLang, DPSize: 2, DPMode: "internal"})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.SGLang, DPSize: 2, DPMode: "internal",
		SGLang: refengine.SGLangOptions{ElasticEP: new("mooncake")}})
	c := meeting(t, refengine.SGLang, p, d)
	c.Engines.Prefill[0].Ranks, c.Engines.Decode[0].Ranks = 2, 2
	found := pick(Run(t.Context(), c, Options{}), Warn)
	require.Len(t, found, 1, "the decode engine, once")
	require.True(t, strings.HasPrefix(found[0], "decode: runs with elastic EP"), found[0])
	require.Contains(t, found[0], "set name_ranks: false in its profile")

	profile := c.Profiles[config.DefaultProfile]
	profile.NameRanks = new(false)
	c.Profiles[config.DefaultProfile] = profile
	require.NoError(t, c.Validate())
	found = pick(Run(t.Context(), c, Options{}), Warn)
	require.Empty(t, found)
}

func TestAServerOfSGLangWithElasticEPThatFollowsTheRoom(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.SGLang, DPSize: 2, DPMode: "internal",
		SGLang: refengine.SGLangOptions{ElasticEP: new("mooncake")}})
	d := start(t, refengine.Config{Role: refengine.Decode, Connector: refengine.SGLang, DPSize: 2, DPMode: "internal",
		SGLang: refengine.SGLangOptions{ElasticEP: new("mooncake")}})
	c := meeting(t, refengine.SGLang, p, d)
	c.Engines.Prefill[0].Ranks, c.Engines.Decode[0].Ranks = 2, 2
	profile := c.Profiles[config.DefaultProfile]
	profile.NameRanks = new(false)
	c.Profiles[config.DefaultProfile] = profile
	found := pick(Run(t.Context(), c, Options{}), Warn)
	require.Len(t, found, 1, "the prefill engine, once")
	require.True(t, strings.HasPrefix(found[0], "prefill: runs with elastic EP"), found[0])
	require.Contains(t, found[0], "--load-balance-method round_robin")
}
