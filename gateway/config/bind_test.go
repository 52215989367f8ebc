package config

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The arrival queue of engines that prefill and decode has its bound, whatever pairs there are
// beside them.
func TestAQueueIsBoundedWhereAggregatedEnginesStandBesideEarlyPairs(t *testing.T) {
	const pairs = "profiles: {s: {connector: sglang}}\nprefill: {queue: {max: 5}}\nengines:\n" +
		"  prefill: [{url: \"http://p:1\", profile: s}]\n  decode: [{url: \"http://d:1\", profile: s}]\n"
	_, err := Parse("e.yaml", []byte(pairs))
	require.ErrorContains(t, err, "pool.size is their limit")
	cfg, err := Parse("e.yaml", []byte(pairs+"  aggregated: [{url: \"http://a:1\"}]\n"))
	require.NoError(t, err)
	require.False(t, cfg.OnlyEarlyBinding())
}
