package gateway_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/draft"
	"evenkeel/mooncake"
)

// Decode engines of vllm-ascend give chats back for want of KV memory. With the profile that init writes for them every chat goes
// on to its last token.
func TestNoChatBreaksOnAscend(t *testing.T) {
	t.Parallel()
	drafted := func(t *testing.T, connector string) mooncake.Profile {
		cfg := config.Default()
		cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: connector}}
		text, err := draft.File(cfg, []draft.Entry{
			{Engine: config.Engine{URL: "http://127.0.0.1:8100"}, Role: "prefill"}, {Engine: config.Engine{URL: "http://127.0.0.1:8200"}, Role: "decode"},
		})
		require.NoError(t, err)
		written, err := config.Parse("new", text)
		require.NoError(t, err)
		require.Equal(t, written.Profiles[config.DefaultProfile], mooncake.Profile{Name: config.DefaultProfile, Connector: connector}.WithDefaults(), "who writes no file has the same")
		return written.Profiles[config.DefaultProfile]
	}
	for _, row := range []struct{ version, connector string }{
		{"0.26.0", mooncake.AscendMooncakeV1}, {"0.27.1", mooncake.AscendMooncakeV1}, {"0.27.1", mooncake.AscendLayerwise},
	} {
		t.Run(row.connector+" "+row.version, func(t *testing.T) {
			t.Parallel()
			e := refengine.Config{Version: row.version, Connector: refengine.Connector(row.connector), PromptTokensDetails: true}
			c := start(t, options{prefill: []refengine.Config{e}, decode: []refengine.Config{e}, profile: drafted(t, row.connector), configure: func(cfg *config.Config) {
				if row.connector == mooncake.AscendLayerwise {
					cfg.Bind.Listen = "127.0.0.1:0"
				}
			}})
			c.allUp()
			const chats, atOnce = 150, mostGivenBack
			for i := 0; i < chats; i += atOnce {
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, Leg: refengine.LegDecode, AfterTokens: 7, Count: mostGivenBack}))
				var wg sync.WaitGroup
				for k := range atOnce {
					wg.Go(func() {
						prompt := reftext.MakePrompt(uint64(i+k), 100)
						r := c.post(chatPath, chat(prompt, `"stream":true,`))
						key := reftext.OfUser(prompt).Answer
						got := read(t, r.body)
						if n, err := reftext.Check(key, 0, got.text[0]); r.status != 200 || got.fail != "" || err != nil || n != reftext.NaturalLength(key) {
							t.Errorf("%d %s: %d tokens of %d, %v", r.status, got.fail, n, reftext.NaturalLength(key), err)
						}
					})
				}
				wg.Wait()
			}
			require.Positive(t, c.metric(`evenkeel_recomputes_total{tier="2"}`), "chats were given back in their middle")
			require.Zero(t, c.metric(`evenkeel_recomputes_total{tier="4"}`))
		})
	}
}

// mostGivenBack is how often an answer goes on (recompute_max).
const mostGivenBack = 3
