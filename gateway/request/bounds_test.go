package request

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// The docs have a limit under the name of the key that is in force.
func TestALimitIsTheKeyThatTheDocsName(t *testing.T) {
	const odd = 12345 * time.Millisecond
	for l, row := range map[lifecycle.Timeout]struct {
		key string // or the limit itself, where no key has it
		set func(*config.Config, *mooncake.Profile)
	}{
		lifecycle.ByProbe:      {"limits.probe_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Limits.ProbeTimeout = odd }},
		lifecycle.ByWhole:      {"limits.probe_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Limits.ProbeTimeout = odd }},
		lifecycle.ByFirstEvent: {"first_event_timeout", func(_ *config.Config, p *mooncake.Profile) { p.FirstEventTimeout = odd }},
		lifecycle.ByCallback:   {"bind.callback_timeout", func(c *config.Config, _ *mooncake.Profile) { c.Bind.CallbackTimeout = odd }},
		lifecycle.ByGrace:      {"5 s", nil},
		lifecycle.ByConfirm:    {"100 ms", nil},
	} {
		cfg, p, want := config.Default(), mooncake.Profile{}, odd
		if row.set != nil {
			row.set(cfg, &p)
		} else {
			var err error
			want, err = time.ParseDuration(strings.ReplaceAll(row.key, " ", ""))
			require.NoError(t, err)
		}
		require.Contains(t, l.String(), row.key)
		require.Equal(t, want, timeoutOf(l, fleet.NewSettings(cfg), &p), row.key)
	}
}

// Each event of /generate has all of the answer so far, so that a stream has the square of its
// tokens. As long as each event has what its tokens may take, the engine has not sent too much.
func TestAStreamOfGenerateMayBeLong(t *testing.T) {
	const tokens = 1000
	const one = `[-0.1,12345,null],`
	for likeliest, perToken := range map[int]string{0: one, 5: strings.Repeat(one, 6)} {
		srv := newServer(t)
		j := &job{srv: srv.Server, req: &openai.Request{Endpoint: mooncake.Generate, Limit: tokens, TopLogprobs: likeliest}}
		u, reader, now := &upstreamCall{job: j, maxTokens: j.maxAnswerTokens(0)}, sse.NewReader(), time.Now()
		reader.Reset(u.streamLimits(time.Hour))
		for n := range tokens {
			event := fmt.Sprintf(`data: {"text":"%s","output_ids":[%s1],"meta_info":{"output_token_logprobs":[%snull],"completion_tokens":%d}}`,
				strings.Repeat(" word", n+1), strings.Repeat("12345,", n), strings.Repeat(perToken, n+1), n+1)
			reader.Feed([]byte(event+sse.BlankLine), now)
			e, ok := reader.Next()
			require.True(t, ok, "event %d, %v", n, reader.Err())
			require.Equal(t, sse.KindData, e.Kind)
		}
	}
}
