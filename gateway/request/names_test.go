package request

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// noModel is how vLLM says that it does not have a model.
const noModel = "{\"error\":{\"message\":\"The model `ref` does not exist.\",\"type\":\"NotFoundError\",\"param\":\"model\",\"code\":404}}"

// Engines whose lists have changed since they were read answer 404, and no list is read again here.
// Another engine is asked, no engine is blamed, and the client gets the 404 once no engine is left,
// or too many have said so.
func TestEnginesThatDoNotHaveTheModel(t *testing.T) {
	t.Parallel()
	late, early := mooncake.Profile{}, mooncake.Profile{Connector: mooncake.AscendLayerwise}
	for _, row := range []struct {
		name    string
		profile mooncake.Profile
		lacks   func(probe bool, n int32) bool // of the legs of that kind, the n-th gets a 404
		outcome string
		legs    [2]int32 // probes, decodes; those of hand-offs that are discarded are not in it
	}{
		{"a prefill engine", late, func(probe bool, n int32) bool { return probe && n == 1 }, "right", [2]int32{2, 1}},
		{"a decode engine", late, func(probe bool, n int32) bool { return !probe && n == 1 }, "right", [2]int32{2, 2}},
		{"both, one after the other", late, func(_ bool, n int32) bool { return n == 1 }, "right", [2]int32{3, 2}},
		{"three prefill engines", late, func(probe bool, n int32) bool { return probe && n <= 3 }, "right", [2]int32{4, 1}},
		{"every prefill engine", late, func(probe bool, _ int32) bool { return probe }, "404", [2]int32{4, 0}},
		{"every decode engine", late, func(probe bool, _ int32) bool { return !probe }, "404", [2]int32{4, 4}},
		{"a prefill engine, beside the decode leg", early, func(probe bool, n int32) bool { return probe && n == 1 }, "right", [2]int32{2, 1}},
		{"a decode engine, beside the prefill", early, func(probe bool, n int32) bool { return !probe && n == 1 }, "right", [2]int32{0, 2}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var on atomic.Bool
			var legs [2]atomic.Int32
			b := start(t, setup{
				prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{KV: refengine.KV{RejectReleases: true}},
					{KV: refengine.KV{RejectReleases: true}}}, profile: row.profile,
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					body, _ := io.ReadAll(r.Body)
					r.Body = io.NopCloser(strings.NewReader(string(body)))
					probe, side := strings.Contains(string(body), `"do_remote_decode":true`), 1
					if probe {
						side = 0
					}
					discards := !probe && strings.Contains(string(body), `"cache_salt"`) && strings.Contains(string(body), `"max_tokens":1,`)
					if on.Load() && !discards && row.lacks(probe, legs[side].Add(1)) {
						w.Header().Set("Content-Type", "application/json")
						w.WriteHeader(http.StatusNotFound)
						_, _ = io.WriteString(w, noModel)
						return
					}
					engine.ServeHTTP(w, r)
				},
			})
			on.Store(true)
			before := b.metric(t, "evenkeel_prefill_attempts_total", "failed")
			require.Equal(t, row.outcome, b.judge(short, `"stream":true,`))
			b.over()
			if row.legs[0] > 0 {
				require.Equal(t, row.legs, [2]int32{legs[0].Load(), legs[1].Load()})
			}
			if !row.profile.Early() { // else what stands before the engine answers 502 to a probe that is ended beside its decode call
				require.Equal(t, before, b.metric(t, "evenkeel_prefill_attempts_total", "failed"), "no prefill engine is blamed")
			}
			if in := b.asked[len(b.asked)-1]; row.outcome == "404" {
				require.Equal(t, "model_not_found", in.Record.LogEntry.Outcome, "in the engine's own words")
			}
		})
	}
}
