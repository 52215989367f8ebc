package request

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

// What a decode engine computes of prompts whose KV was handed over is counted, and neither what it
// pulls nor what it is to compute itself is.
func TestPullsThatFellShortAreCounted(t *testing.T) {
	t.Parallel()
	var scraped atomic.Int64
	b := start(t, alone(setup{gauged: true, decode: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096},
		Hooks: refengine.Hooks{OnRequest: func(path string, _ http.Header) {
			if path == "/metrics" {
				scraped.Add(1)
			}
		}}}}}))
	short := func() float64 { return b.metric(t, "evenkeel_engine_short_pulled_tokens_total", "decode d0") }
	ask := func(as string) {
		t.Helper()
		require.Equal(t, "right", b.judge(as+strings.Repeat("a prompt of many words goes here ", 100), ""))
	}
	scrapes := func() {
		t.Helper()
		before := scraped.Load()
		b.eventually("some scrapes, of which any may be the one that counts wrongly", func() bool { return scraped.Load() > before+6 })
	}
	scrapes()
	for range 6 { // from the second one on the decode rank has it, and may compute the rest
		ask("handed over ")
	}
	require.Equal(t, "right", b.judge("short", ""))
	require.NotZero(t, b.locals())
	scrapes()
	require.Zero(t, short())
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.LostKV, Leg: refengine.LegDecode}))
	ask("lost on the way ")
	b.eventually("it is counted", func() bool { return short() > 100 })
	b.settle()
}
