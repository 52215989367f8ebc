package gateway_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// What ends an answer of token ids that runs at an engine, with the health checks and the loops of
// a whole proxy.
func TestWhoEndsAnAnswerOfTokens(t *testing.T) {
	for _, row := range []struct {
		name   string
		end    func(c *cluster)
		goesOn bool
	}{
		{name: "a trainer pauses the engine", end: func(c *cluster) {
			require.Equal(c, 200, c.Ask("POST", c.Decode[0].URLs()[0]+"/pause", "").Status)
			require.Equal(c, 200, c.Ask("POST", c.Decode[0].URLs()[0]+"/resume", "").Status)
		}},
		{name: "evenkeel pauses it for an operator", goesOn: true, end: func(c *cluster) {
			c.does("/pause")
			c.does("/resume")
		}},
		{name: "the engine has met a fault", goesOn: true, end: func(c *cluster) {
			require.NoError(c, c.Decode[0].SetFaults(refengine.Rule{Fault: refengine.CoreFault}))
			time.AfterFunc(3*time.Second, func() { _ = c.Decode[0].SetFaults() })
		}},
	} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, streamed %t", row.name, stream), func(t *testing.T) {
				t.Parallel()
				prefill := refengine.Config{Version: "0.33.0"}
				slowly := refengine.Config{Version: "0.33.0", Steps: refengine.Steps{C0: 20 * time.Millisecond}}
				c := start(t, options{dirty: true, prefill: []refengine.Config{prefill}, decode: []refengine.Config{slowly}, configure: retrying,
					profile: mooncake.Profile{Connector: mooncake.NIXLPull}})
				said := make(chan reply, 1)
				go func() {
					said <- c.Post("/inference/v1/generate", fmt.Sprintf(
						`{"model":"ref","stream":%t,"token_ids":[1,2,3,4,5,6,7,8,9],"sampling_params":{"max_tokens":100,"ignore_eos":true}}`, stream))
				}()
				c.Eventually("it runs", func() bool { return len(said) > 0 || c.Decode[0].Stats().Tokens > 10 })
				if len(said) > 0 {
					require.Fail(t, "it has ended", (<-said).Body)
				}
				row.end(c)
				r := <-said
				require.Equal(t, http.StatusOK, r.Status, r.Body)
				end := `"finish_reason":"abort"`
				if row.goesOn {
					end = `"finish_reason":"length"`
				}
				require.Equal(t, 1, strings.Count(r.Body, end), r.Body)
				require.Contains(t, r.Body, `"weight_versions":[{"version":"default","start":0,`)
			})
		}
	}
}
