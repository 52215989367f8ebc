package refengine

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// asked sends a completion, and gives its answer when it comes.
func asked(c *http.Client, e *Engine, body string) <-chan reply {
	got := make(chan reply, 1)
	go func() { got <- do(c, "POST", e.URLs()[0]+"/v1/completions", body) }()
	return got
}

func TestVLLMIsPaused(t *testing.T) {
	long := completionBody("a b c", `"max_tokens":4000,"ignore_eos":true,"stream":true,`)
	for _, row := range []struct {
		name, version, mode string
		status              int    // of what comes meanwhile; 0: it waits
		ends                string // what runs; empty: it runs on after the pause
	}{
		{"0.33 aborts what runs, and refuses what comes", "0.33.0", "", 503, `"finish_reason":"abort"`},
		{"0.32 aborts what runs, and lets wait what comes", "0.32.0", "?mode=abort", 0, `"finish_reason":"abort"`},
		{"0.33 keeps what runs, and lets wait what comes", "0.33.0", "?mode=keep", 0, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			e, c := start(t, Config{Role: Aggregated, Version: row.version, KV: KV{PrefixCache: 64}, Steps: Steps{C0: time.Millisecond}}), client(t)
			at := e.URLs()[0]
			require.Contains(t, do(c, "GET", at+"/is_paused", "").body, "false")
			require.Equal(t, 422, do(c, "POST", at+"/pause?mode=now", "").status)
			runs := asked(c, e, long)
			require.Eventually(t, func() bool { return e.Stats().Running > 0 }, time.Minute, time.Millisecond)
			require.Contains(t, do(c, "POST", at+"/reset_prefix_cache", "").body, `"success":false`)
			require.Contains(t, do(c, "POST", at+"/pause"+row.mode, "").body, "paused")
			require.Contains(t, do(c, "GET", at+"/is_paused", "").body, "true")
			require.Equal(t, 200, do(c, "GET", at+"/health", "").status)
			require.Equal(t, 200, do(c, "POST", at+"/update_weights", "{}").status)
			comes := asked(c, e, completionBody("d", `"max_tokens":1,`))
			if row.status != 0 {
				r := <-comes
				require.Equal(t, row.status, r.status)
				require.Contains(t, r.body, "Generation is paused. Please retry after it resumes.")
				require.Contains(t, do(c, "POST", at+"/v1/completions", completionBody("d", `"stream":true,`)).body, "Generation is paused.", "a stream has begun by then")
			}
			if row.ends != "" {
				require.Contains(t, (<-runs).body, row.ends)
			}
			require.Contains(t, do(c, "POST", at+"/reset_prefix_cache", "").body, map[bool]string{true: `true`, false: `false`}[row.ends != ""])
			require.Empty(t, runs)
			require.Empty(t, comes)
			require.Contains(t, do(c, "POST", at+"/resume", "").body, "resumed")
			if row.status == 0 {
				require.Equal(t, 200, (<-comes).status)
			}
			if row.ends == "" {
				require.Contains(t, (<-runs).body, `"finish_reason":"length"`)
			}

			do(c, "POST", at+"/pause?mode=keep", "")
			e.Kill()
			require.NoError(t, e.Revive())
			require.Equal(t, 200, do(c, "POST", at+"/v1/completions", completionBody("d", `"max_tokens":1,`)).status, "another process is not paused")
		})
	}
}

// The last token comes with the end that its core says: a front end that aborts the request before
// has neither.
func TestAnAnswerThatIsAbortedHasNotItsLastToken(t *testing.T) {
	e, c := start(t, Config{Role: Aggregated, Steps: Steps{C0: 20 * time.Millisecond}}), client(t)
	require.NoError(t, e.SetFaults(Rule{Fault: Slow, DelayMS: 500})) // its core is done while the front end writes
	ends := asked(c, e, completionBody("a b c", `"max_tokens":4,"ignore_eos":true,"stream":true,`))
	for _, n := range []int64{1, 0} {
		require.Eventually(t, func() bool { return e.Stats().Running == n }, time.Minute, time.Millisecond)
	}
	do(c, "POST", e.URLs()[0]+"/pause", "")
	do(c, "POST", e.URLs()[0]+"/resume", "")
	got := (<-ends).body
	require.Contains(t, got, `"finish_reason":"abort"`)
	require.NotContains(t, got, string(reftext.AppendTokenJSON(nil, reftext.TokenID(reftext.Of("a b c").Answer, 3))))
}

func TestSGLangIsPaused(t *testing.T) {
	e, c := start(t, Config{Role: Prefill, Connector: SGLang, KV: KV{PrefixCache: 64}}), client(t)
	at := e.URLs()[0]
	require.Equal(t, 422, do(c, "POST", at+"/pause_generation", "").status, "it wants a body")
	require.Equal(t, 404, do(c, "POST", at+"/pause", "").status)
	require.Equal(t, 404, do(c, "POST", at+"/reset_prefix_cache", "").status)
	require.Equal(t, 200, do(c, "GET", at+"/ready", "").status)
	waits := asked(c, e, `{"model":"ref","prompt":"a b","max_tokens":1,"bootstrap_host":"127.0.0.1","bootstrap_port":1,"bootstrap_room":7}`)
	require.Eventually(t, func() bool { return e.Stats().Requests > 0 }, time.Minute, time.Millisecond)
	require.Eventually(t, func() bool {
		if do(c, "POST", at+"/pause_generation", `{"mode":"abort"}`).status != 200 {
			return false
		}
		select {
		case r := <-waits:
			return strings.Contains(r.body, "abort")
		case <-time.After(50 * time.Millisecond): // it was counted, but did not run yet: the pause holds it
			do(c, "POST", at+"/continue_generation", "{}")
			return false
		}
	}, time.Minute, time.Millisecond, "a request that runs is aborted")
	require.Equal(t, 503, do(c, "GET", at+"/ready", "").status)
	r := do(c, "POST", at+"/flush_cache", "")
	require.True(t, r.status == 200 && strings.HasPrefix(r.body, "Cache flushed."), r.body)
	require.Equal(t, 200, do(c, "POST", at+"/continue_generation", "{}").status)
	require.Equal(t, 200, do(c, "GET", at+"/ready", "").status)

	e.life.prefills[0].Used.Add(1) // a request holds KV
	defer e.life.prefills[0].Used.Add(-1)
	require.Equal(t, 400, do(c, "POST", at+"/flush_cache?timeout=0.01", "").status)
	require.Equal(t, 200, do(c, "POST", at+"/pause_generation", `{"mode":"retract"}`).status)
	require.Equal(t, 200, do(c, "POST", at+"/flush_cache", "").status, "what it has retracted holds none")
	require.Equal(t, 200, do(c, "POST", at+"/continue_generation", "{}").status)
}
