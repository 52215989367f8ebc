package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// tells is a plain engine to which tokens 7, 8 and 9 are so much likelier than others after a
// prompt of so many tokens.
func tells(t *testing.T, lead map[int]float64) *site {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var b struct {
			Prompt  []int
			Allowed []int `json:"allowed_token_ids"`
		}
		_ = json.NewDecoder(r.Body).Decode(&b)
		p := -0.5
		if token := b.Allowed[0]; token < 7 {
			p -= lead[len(b.Prompt)]
		}
		fmt.Fprintf(w, `{"choices":[{"logprobs":{"token_logprobs":[%v]}}]}`, p)
	}))
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	require.NoError(t, err)
	at, err := strconv.Atoi(port)
	require.NoError(t, err)
	return &site{options: options{connector: mooncake.None}, engines: map[string]*engine{"plain": {port: at}}}
}

func TestAnswersMayPartWhereThePlainEngineIsUndecided(t *testing.T) {
	answer := func(tokens, text string, logprob float64) map[string]any {
		return object(t, fmt.Sprintf(`{"choices":[{"index":0,"prompt_token_ids":[1,2,3],"token_ids":[%s],"text":%q,"logprobs":{"token_logprobs":[%v]}}]}`, tokens, text, logprob))
	}
	w := tells(t, map[int]float64{5: 2e-4, 4: 0.3})
	for _, c := range []struct {
		name    string
		got     map[string]any
		verdict verdict
		seen    string
	}{
		{"the same", answer("7,8,9", "abc", -0.5), pass, "fields"},
		{"a log probability that is rounded elsewhere", answer("7,8,9", "abc", -0.5002), pass, "1 log probabilities are within 0.001"},
		{"a log probability that is another", answer("7,8,9", "abc", -0.7), fail, "the tokens are the same"},
		{"another token where two are alike", answer("7,8,4", "abx", -0.5), pass, "the two tokens there were 0.0002 apart"},
		{"another token where one leads", answer("7,5,9", "axc", -0.5), fail, "parts after 1 tokens, where the plain engine's token leads by 0.3"},
		{"an end that comes too soon", answer("7,8", "ab", -0.5), fail, "ends after 2 tokens"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := answer("7,8,9", "abc", -0.5)
			o := w.judge(t.Context(), question{path: completions, want: want}, want, c.got)
			require.Equal(t, c.verdict, o.verdict, o.seen)
			require.Contains(t, o.seen, c.seen)
			if c.verdict == pass && c.name != "the same" {
				w := &site{options: options{connector: mooncake.NIXLPull}}
				require.Equal(t, fail, w.judge(t.Context(), question{want: want}, want, c.got).verdict,
					"before a connector nothing is rounded elsewhere")
			}
		})
	}
}

func TestTokenIDsOfAChatAreFound(t *testing.T) {
	doc := said(t, "text/event-stream", `data: {"prompt_token_ids":[4,5],"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[7]}]}

data: {"choices":[{"index":0,"delta":{"content":"b"},"token_ids":[8]}]}

data: [DONE]

`)
	prompt, tokens := choice(doc, 0)
	require.Equal(t, []json.Number{"4", "5"}, prompt)
	require.Equal(t, []json.Number{"7", "8"}, tokens)
	prompt, tokens = choice(doc, 1)
	require.Nil(t, prompt)
	require.Nil(t, tokens)
}

func TestWhatBreaks(t *testing.T) {
	body, last := exchanged([]byte(`{"kv_transfer_params":{"a":1},"prompt":"x"}`), nil)
	require.JSONEq(t, `{"kv_transfer_params":{"a":1},"prompt":"x"}`, string(body))
	body, last = exchanged([]byte(`{"kv_transfer_params":{"b":2},"prompt":"y"}`), last)
	require.JSONEq(t, `{"kv_transfer_params":{"a":1},"prompt":"y"}`, string(body))
	require.JSONEq(t, `{"b":2}`, string(last))
	body, _ = exchanged([]byte(`{"prompt":"y"}`), last)
	require.JSONEq(t, `{"prompt":"y"}`, string(body))
	text, err := io.ReadAll(lossy(io.NopCloser(strings.NewReader("data: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\ndata: [DONE]\n\n"))))
	require.NoError(t, err)
	require.Equal(t, "data: 1\n\ndata: 2\n\ndata: 4\n\ndata: [DONE]\n\n", string(text))
}
