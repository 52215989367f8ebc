package refengine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A decode engine whose core stands still renews no hold. If that lasts longer than the hold,
// the prefill engine gives the blocks away, and a wrong answer looks like any other answer.
func TestACoreThatStandsStillForLongerThanTheHoldDecodesGarbage(t *testing.T) {
	for name, row := range map[string]struct {
		hold   time.Duration
		stands bool
	}{"not at all": {time.Minute, false}, "longer": {200 * time.Millisecond, true}} {
		stand := func(t *testing.T, p pair) {
			if row.stands {
				require.NoError(t, p.d.SetFaults(Rule{Fault: Standstill, DelayMS: int(time.Hour.Milliseconds())}))
			}
		}
		goOn := func(t *testing.T, p pair, leases int64) {
			if row.stands {
				eventually(t, "the leases end", func() bool { return p.p.Stats().Leaks == leases })
				require.NoError(t, p.d.SetFaults())
			}
		}
		t.Run("pulled, "+name, func(t *testing.T) {
			p := pairOf(t, Config{Connector: NIXLPull, KV: KV{HoldTimeout: row.hold}})
			kv := probe(t, p.c, p.p, "a b c")
			stand(t, p)
			d := p.post(p.d, "one", "a b c", decodeMore(kv, `"stream":true,"max_tokens":8,`))
			goOn(t, p, 1)
			require.Equal(t, !row.stands, p.right("a b c", p.stream(d)))
			require.Equal(t, row.stands, p.p.Stats().ExpiredPulls == 1)
		})
		t.Run("written, "+name, func(t *testing.T) {
			p := pairOf(t, Config{Connector: NIXLPush, KV: KV{HoldTimeout: row.hold}})
			d := p.post(p.d, "one", "a b c", p.decodeBy(p.coordinates(), "one"))
			eventually(t, "it has blocks", func() bool { return p.d.Stats().KVUsed > 0 })
			stand(t, p)
			require.Equal(t, 200, (<-p.post(p.p, "one", "a b c", probeMore).got).status)
			goOn(t, p, 2) // that of the probe for the coordinates, too
			require.Equal(t, !row.stands, p.right("a b c", p.stream(d)))
			require.Equal(t, row.stands, p.p.Stats().OutlivedWrites == 1)
			require.Zero(t, p.p.Stats().ExpiredPulls, "the write began in time")
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
