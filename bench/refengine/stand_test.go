package refengine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A decode engine whose core stands still renews no hold. If that lasts longer than the hold,
// the prefill engine gives the blocks away, and a wrong answer looks like any other answer.
func TestACoreThatStandsStillForLongerThanTheHoldDecodesGarbage(t *testing.T) {
	const hold = 200 * time.Millisecond
	for name, stand := range map[string]time.Duration{"not at all": 0, "longer": 4 * hold} {
		t.Run("pulled, "+name, func(t *testing.T) {
			p := pairOf(t, Config{Connector: NIXLPull, KVHoldTimeout: hold})
			kv := probe(t, p.c, p.p, "a b c")
			require.NoError(t, p.d.SetFaults(Rule{Fault: Standstill, DelayMS: int(stand.Milliseconds())}))
			d := p.post(p.d, "one", "a b c", decodeMore(kv, `"stream":true,"max_tokens":8,`))
			require.Equal(t, stand == 0, p.right("a b c", p.stream(d)))
			require.Equal(t, stand > 0, p.p.Stats().ExpiredPulls == 1)
		})
		t.Run("written, "+name, func(t *testing.T) {
			p := pairOf(t, Config{Connector: NIXLPush, KVHoldTimeout: hold})
			d := p.post(p.d, "one", "a b c", p.decodeBy(p.coordinates(), "one"))
			eventually(t, "it has blocks", func() bool { return p.d.Stats().KVUsed > 0 })
			require.NoError(t, p.d.SetFaults(Rule{Fault: Standstill, DelayMS: int(stand.Milliseconds())}))
			require.Equal(t, 200, (<-p.post(p.p, "one", "a b c", probeMore).got).status)
			require.Equal(t, stand == 0, p.right("a b c", p.stream(d)))
			require.Equal(t, stand > 0, p.p.Stats().ExpiredPulls == 1)
		})
	}
}

// The API server goes on and answers for health and metrics; only the tokens do not come.
func TestAnEngineWhoseCoreStandsStillAnswersItsHealthCheck(t *testing.T) {
	e := start(t, Config{Role: Both})
	c := client(t)
	require.NoError(t, e.SetFaults(Rule{Fault: Standstill, DelayMS: 3_600_000}))
	require.Equal(t, 200, do(c, "GET", e.URLs()[0]+"/health", "").status)
	require.Equal(t, 200, do(c, "GET", e.URLs()[0]+"/metrics", "").status)
	done := make(chan reply, 1)
	go func() {
		done <- do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b c", `"max_tokens":2,`))
	}()
	select {
	case r := <-done:
		t.Fatalf("it answered %d %s", r.status, r.body)
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, e.SetFaults())
	require.Equal(t, 200, (<-done).status)
}
