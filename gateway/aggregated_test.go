package gateway_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
)

func together(more func(*config.Config)) options {
	return options{
		mixed: []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		dirty: true,
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			if more != nil {
				more(cfg)
			}
		},
	}
}

func TestRanksThatPrefillAndDecodeServeAlone(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	for _, more := range []string{`"stream":true,`, ""} {
		_, route := c.say(talk(more, reftext.MakePrompt(1, 300)))
		require.Equal(t, "aggregated", route)
	}
	c.settledRequests(2)
	r := c.records()[1]
	require.Equal(t, "aggregated", r.Route)
	require.Positive(t, r.PromptTokens)
	require.NotEmpty(t, r.Rank)
}
