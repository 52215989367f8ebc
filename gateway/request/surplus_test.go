package request

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/engine"
	"evenkeel/mooncake"
)

// endSurplus ends at an engine all that runs there, as RL trainers do once they have enough
// samples.
func endSurplus(t *testing.T, e *refengine.Engine, sglang bool) {
	t.Helper()
	paths := []string{"/pause?mode=abort", "/resume"}
	if sglang {
		paths = []string{"/abort_request"}
	}
	for _, path := range paths {
		resp, err := http.Post(e.URLs()[0]+path, "application/json", strings.NewReader(`{"abort_all":true}`))
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	}
}

// An answer that its engine ends because it was told to, by somebody else than evenkeel, is an
// answer.
func TestTheSurplusOfARolloutIsEndedAtItsEngines(t *testing.T) {
	t.Parallel()
	slowly := []refengine.Config{{Steps: refengine.Steps{C0: 50 * time.Millisecond}}} // per token, of 12 to 40
	ill, draining := errors.New("its process is gone"), "drains"
	for _, row := range []struct {
		name      string
		connector string
		params    string
		mixed     bool
		ill       error  // what the health check says after the abort
		withheld  string // why evenkeel keeps requests from the engine
		goesOn    bool
	}{
		{name: "vLLM"},
		{name: "vLLM, several answers", params: `"n":2`},
		{name: "vLLM, a rank that does both", mixed: true},
		{name: "vLLM that pushes", connector: mooncake.NIXLPush},
		{name: "SGLang", connector: mooncake.SGLang},
		{name: "SGLang, several answers", connector: mooncake.SGLang, params: `"n":2`},
		{name: "an engine that does not answer its health check", ill: ill, goesOn: true},
		{name: "SGLang that does not answer its health check", connector: mooncake.SGLang, ill: ill, goesOn: true},
		{name: "an engine that drains", withheld: draining, goesOn: true},
		{name: "SGLang that drains", connector: mooncake.SGLang, withheld: draining, goesOn: true},
	} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, streamed %t", row.name, stream), func(t *testing.T) {
				t.Parallel()
				sglang := row.connector == mooncake.SGLang
				o := setup{decode: slowly, profile: mooncake.Profile{Connector: row.connector}}
				if row.mixed {
					o = setup{mixed: slowly}
				}
				b := start(t, o)
				b.monitor.ill, b.engines.withheld = row.ill, row.withheld != ""
				body, rendered := tokensOf(t, row.params, "")
				path, n := mooncake.Tokens.Path(), 1+strings.Count(row.params, `"n"`)
				if sglang {
					path, body = mooncake.Generate.Path(), strings.Replace(body, "token_ids", "input_ids", 1)
				}
				if stream {
					body = withUsage(body)
				}
				said, before := make(chan reply, 1), b.d[0].Stats().Tokens
				go func() { said <- b.post(path, body) }()
				b.eventually("tokens come", func() bool { return b.d[0].Stats().Tokens > before+int64(6*n) })
				endSurplus(t, b.d[0], sglang)
				r := <-said
				require.Equal(t, http.StatusOK, r.status, r.body)
				made, finishes := map[int][]int32{}, []string{}
				if sglang {
					all, fail := readGenerated(t, r, n > 1)
					require.Empty(t, fail, r.body)
					for i, g := range all {
						made[i], finishes = g.IDs, append(finishes, g.Meta.Finish.Type)
					}
				} else {
					got := readTokens(t, r)
					require.Empty(t, got.fail, r.body)
					require.Len(t, got.usage, 1, r.body)
					spans := fmt.Sprintf(`[{"version":"default","start":0,"end":%d}]`, len(got.ids[0]))
					if n == 1 {
						require.Equal(t, spans, got.spans, "the weights that made all tokens, also those from before an abort")
					}
					made, finishes = got.ids, got.finishes
				}
				require.Len(t, made, n, r.body)
				for i := range n {
					key := rendered.Answer
					whole := reftext.NaturalLength(key)
					expect(t, key, made[i])
					if row.goesOn {
						require.Len(t, made[i], whole, r.body)
						require.NotContains(t, finishes, "abort")
						continue
					}
					require.NotEmpty(t, made[i])
					require.Less(t, len(made[i]), whole, r.body)
					require.Equal(t, "abort", finishes[i])
				}
				b.over()
				if last := b.asked[len(b.asked)-1].Record; !row.goesOn {
					require.Equal(t, "ok", last.Outcome)
					for id, verdicts := range b.monitor.judged {
						require.NotContains(t, verdicts, engine.Faulted, id)
					}
				}
				b.settle()
			})
		}
	}
}

// What is prefilled when a trainer ends the surplus has no tokens yet, and ends so.
func TestTheSurplusIsEndedBeforeItsFirstToken(t *testing.T) {
	t.Parallel()
	for _, sglang := range []bool{false, true} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("SGLang %t, streamed %t", sglang, stream), func(t *testing.T) {
				t.Parallel()
				o := setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: 5 * time.Second}}}}
				if sglang {
					o.profile.Connector = mooncake.SGLang
				}
				b := start(t, o)
				path, key := mooncake.Tokens.Path(), "token_ids"
				if sglang {
					path, key = mooncake.Generate.Path(), "input_ids"
				}
				said := make(chan reply, 1)
				go func() {
					said <- b.post(path, fmt.Sprintf(`{"model":%q,"stream":%t,%q:[1,2,3,4,5,6,7,8,9],"sampling_params":{}}`, refModel, stream, key))
				}()
				b.eventually("it is prefilled", func() bool { return b.p[0].Stats().Running > 0 })
				for _, e := range append(b.p, b.d...) {
					endSurplus(t, e, sglang)
				}
				r := <-said
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.Contains(t, r.body, "abort")
				require.Zero(t, b.d[0].Stats().Tokens, r.body)
				b.settle()
			})
		}
	}
}
