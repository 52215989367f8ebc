package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// Through the whole proxy, with vLLM's hand-offs, and on ranks that do both.
func TestTokenIDsGoThroughTheProxy(t *testing.T) {
	t.Parallel()
	body := func(more string) string {
		return fmt.Sprintf(`{"model":%q,"token_ids":[11,12,13,14],"sampling_params":{"max_tokens":20}%s}`, model, more)
	}
	key := reftext.OfIDs([]int32{11, 12, 13, 14}, nil).Answer
	for _, mixed := range []bool{false, true} {
		t.Run(fmt.Sprintf("ranks that do both: %t", mixed), func(t *testing.T) {
			t.Parallel()
			o := options{profile: mooncake.Profile{Connector: mooncake.NIXLPull}}
			if mixed {
				o = options{mixed: []refengine.Config{{DPSize: 2}}}
			}
			if !mixed {
				o.prefill = []refengine.Config{{Version: "0.32.0", Connector: refengine.NIXLPull}}
				o.decode = []refengine.Config{{Version: "0.32.0", Connector: refengine.NIXLPull, DPSize: 2}}
			}
			c := start(t, o)
			r := c.Post(mooncake.Tokens.Path(), body(""), "X-Request-Id", "mine")
			require.Equal(t, http.StatusOK, r.Status, r.Body)
			var got struct {
				ID      string `json:"request_id"`
				Choices []struct {
					IDs []int32 `json:"token_ids"`
				}
			}
			require.NoError(t, json.Unmarshal([]byte(r.Body), &got))
			require.Equal(t, "generate-tokens-mine", got.ID)
			for i, id := range got.Choices[0].IDs {
				require.Equal(t, reftext.TokenID(key, i), id)
			}
			require.Len(t, got.Choices[0].IDs, min(20, reftext.NaturalLength(key)))
			require.Contains(t, c.Post(mooncake.Tokens.Path(), body(`,"stream":true`)).Body, "data: [DONE]")
			require.Equal(t, http.StatusNotFound, c.Post(mooncake.Generate.Path(), fmt.Sprintf(`{"model":%q,"input_ids":[1]}`, model)).Status)
			require.Equal(t, http.StatusOK, c.Post("/inference/v1/abort_requests", `{"request_ids":["generate-tokens-mine"]}`).Status)
			require.Equal(t, http.StatusBadRequest, c.Post("/inference/v1/abort_requests", `{}`).Status)
		})
	}
}

// An engine that was started without --enable-scale-out says so.
func TestAnEngineWithoutTokenIDsSaysSo(t *testing.T) {
	t.Parallel()
	c := start(t, options{profile: mooncake.Profile{Connector: mooncake.NIXLPull},
		prefill: []refengine.Config{{Version: "0.32.0", Connector: refengine.NIXLPull, Answers: refengine.Answers{NoScaleOut: true}}},
		decode:  []refengine.Config{{Version: "0.32.0", Connector: refengine.NIXLPull, Answers: refengine.Answers{NoScaleOut: true}}}})
	r := c.Post(mooncake.Tokens.Path(), fmt.Sprintf(`{"model":%q,"token_ids":[1],"sampling_params":{}}`, model))
	require.Equal(t, http.StatusNotFound, r.Status, r.Body)
	require.Contains(t, r.Body, "--enable-scale-out", "its own words")
}
