package gateway_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

// vLLM leaves the prompt out of an answer that also has token ids, so an echo
// must not be mixed with ids that only the proxy wants.
func TestEcho(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	prompt := reftext.MakePrompt(3, 100)
	alone, err := refengine.Start(refengine.Config{}.Quick())
	require.NoError(t, err)
	defer alone.Close()
	for _, more := range []string{`"echo":true,`, `"echo":true,"stream":true,`, `"echo":true,"return_token_ids":true,`, `"echo":true,"stream":true,"return_token_ids":true,`} {
		body := completion(prompt, `"max_tokens":6,`+more)
		want := c.ask(http.MethodPost, alone.URLs()[0]+completionPath, body)
		got := c.post(completionPath, body)
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, readSeamless(t, want.body).text, readSeamless(t, got.body).text, more)
		if !strings.Contains(more, "ids") {
			require.Equal(t, prompt+reftext.Text(reftext.Of(prompt).Answer, 6), readSeamless(t, got.body).text, more)
		}
	}
}

// A leg that is refused ends its request at once: the client does not wait for the
// first event of the others, which may take a minute, and they are not decoded.
func TestAFanOutIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	for _, stream := range []string{"", `"stream":true,`} {
		t.Run(stream, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{dirty: true, decode: []refengine.Config{{}}})
			require.NoError(t, c.decode[0].SetFaults(
				refengine.Rule{Fault: refengine.Reject, Leg: refengine.LegDecode, Count: 1, DelayMS: 1},
				refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders, Leg: refengine.LegDecode}))
			got := make(chan reply, 1)
			go func() {
				got <- c.post(completionPath, strings.Replace(completion("x", stream+`"max_tokens":5,`), `"x"`, `["one","two","three"]`, 1))
			}()
			select {
			case r := <-got:
				require.Equal(t, http.StatusBadRequest, r.status, r.body)
				require.Contains(t, r.body, "rejected on demand")
			case <-time.After(patience / 2):
				t.Fatal("the answer waits for legs that hang")
			}
			require.NoError(t, c.decode[0].SetFaults())
			c.decode[0].Kill() // ends what hangs there
			c.settledRequests(1)
			require.Equal(t, []string{"engine_refused"}, c.outcomes())
		})
	}
}
