package selftest

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// A hold that is too short for the longest prompt is seen before a client sends one.
func TestThePullOfTheLongestPromptIsForeseen(t *testing.T) {
	for _, row := range []struct {
		name  string
		per   time.Duration // for a token
		hold  time.Duration
		level Level
		says  string
	}{
		{"links are fast enough", time.Nanosecond, time.Minute, OK,
			"pulls a prompt of max_model_len (40000 tokens) in about "},
		{"a prompt of 40,000 tokens takes 40 s, and 22.5 s are left", time.Millisecond, time.Minute, Warn,
			"one of max_model_len (40000 tokens) takes about "},
		{"a longer hold leaves more", time.Millisecond, 4 * time.Minute, OK, "and kv_hold_timeout leaves it 1m30s"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := refengine.Config{Connector: refengine.NIXLPull, Role: refengine.Prefill}
			c.Model.MaxLen = 40_000
			p := start(t, c)
			c.Role, c.KV.TransferPer = refengine.Decode, row.per
			d := start(t, c)
			profile := mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: row.hold}
			found := Run(t.Context(), cluster(t, profile, p.URLs(), d.URLs()), Options{Resumes: true})
			require.Empty(t, pick(found, Bad))
			require.Contains(t, strings.Join(pick(found, row.level), "\n"), row.says)
		})
	}
}
