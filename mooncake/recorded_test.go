package mooncake

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/real/recording"
)

// TestRecordedProbesAreRead gives what real prefill engines answered to ReadProbe, and finds each
// hand-off byte for byte in the decode request that was recorded with it.
func TestRecordedProbesAreRead(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	decodes := map[string]string{}
	for _, r := range all {
		decodes[r.Name] = r.Ask.Body
	}
	p := Profile{Connector: NIXLPull}.WithDefaults()
	local := func(host string) bool { return host == "127.0.0.1" }
	read, handed := 0, 0
	for _, r := range all {
		if !strings.Contains(r.Ask.Body, `"do_remote_decode":true`) || r.Status != 200 {
			continue
		}
		read++
		t.Run(r.Name, func(t *testing.T) {
			var want struct {
				KV     json.RawMessage `json:"kv_transfer_params"`
				Prompt []int           `json:"prompt_token_ids"`
				Usage  struct {
					Prompt  int `json:"prompt_tokens"`
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				} `json:"usage"`
				Choices []struct {
					Finish string `json:"finish_reason"`
					Prompt []int  `json:"prompt_token_ids"`
				} `json:"choices"`
			}
			require.NoError(t, json.Unmarshal(r.Body(), &want))
			a, err := p.ReadProbe(r.Body(), nil, local)
			require.NoError(t, err)
			require.Equal(t, string(want.KV), string(a.KV))
			require.Equal(t, []int{want.Usage.Prompt, want.Usage.Details.Cached}, []int{a.PromptTokens, a.CachedTokens})
			require.Equal(t, want.Choices[0].Finish, a.FinishReason)
			require.NotEmpty(t, a.EngineID)
			require.False(t, a.ReusesRequestID, "the hand-off names its request")
			if strings.Contains(r.Ask.Body, "return_token_ids") {
				var ids []int
				require.NoError(t, json.Unmarshal(a.PromptTokenIDs, &ids))
				require.Equal(t, append(want.Prompt, want.Choices[0].Prompt...), ids)
				require.Len(t, ids, a.PromptTokens)
			}
			if body, ok := decodes[strings.Replace(r.Name, "prefill-", "decode-", 1)]; ok && r.Name != "prefill-lost" {
				handed++
				require.Contains(t, body, `"kv_transfer_params":`+string(a.KV), "what the decode engine was sent")
			}
			_, err = p.ReadProbe(r.Body(), nil, func(string) bool { return false })
			require.ErrorIs(t, err, ErrUnknownHost)
			for _, cut := range []int{1, len(r.Body()) / 3, len(r.Body()) - 1} {
				_, err := p.ReadProbe(r.Body()[:cut], nil, local)
				require.ErrorIs(t, err, ErrBadHandoff, "cut at %d bytes", cut)
			}
		})
	}
	require.Greater(t, read, 10)
	require.Greater(t, handed, 8)
}

// TestRecordedAnswersWithoutAHandoff are 200s of engines that were not asked to keep anything.
func TestRecordedAnswersWithoutAHandoff(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	p := Profile{Connector: NIXLPull}.WithDefaults()
	for _, r := range all {
		if r.Engine != "plain" || r.Status != 200 || r.Streams() || !strings.Contains(r.Ask.Path, "completions") {
			continue
		}
		a, err := p.ReadProbe(r.Body(), nil, func(string) bool { return true })
		require.ErrorIs(t, err, ErrNoHandoff, r.Name)
		require.NotZero(t, a.PromptTokens, r.Name)
	}
}
