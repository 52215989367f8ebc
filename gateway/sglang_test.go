package gateway_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

// What engines of SGLang count of their barrier stands in the status and on the live page. One
// request leaves a rank that waits for the other.
func TestTheStatusTellsHowLongRanksWaitByTheirOwnCount(t *testing.T) {
	t.Parallel()
	var health atomic.Int64
	c := early(t, refengine.SGLang, options{
		decode: []refengine.Config{{DPSize: 2, DPMode: "internal", Steps: refengine.Steps{C1: 20 * time.Microsecond},
			SGLang: refengine.SGLangOptions{BarrierMetrics: true},
			Hooks: refengine.Hooks{OnRequest: func(path string, _ http.Header) {
				if path == "/health" {
					health.Add(1)
				}
			}}}},
		configure: func(cfg *config.Config) { cfg.Health.Interval = 50 * time.Millisecond }, // metrics are read every ten of them
	})
	c.Eventually("a wait is told", func() bool {
		require.Equal(t, "right", c.Judge("one two three", `"stream":true,`))
		const told = `"sync_wait_ms":`
		return strings.Contains(c.get("/status").Body, told) && strings.Contains(c.get("/live?once").Body, told)
	})
	require.Zero(t, health.Load(), "GET /health of SGLang generates a token and takes a second at least")
}

// After the end, the dispatcher has one status for everybody who asks. Waits are told in a copy of
// it.
func TestWaitsAreNotWrittenIntoTheStatusOfOthers(t *testing.T) {
	t.Parallel()
	shared := board.Status{Models: []board.ModelStatus{{
		Groups:  []board.GroupStatus{{GroupLoads: board.GroupLoads{Name: "g", Barrier: true}, Step: &board.StepStatus{MeanMs: 20}}},
		Workers: []board.WorkerStatus{{ID: 1, Group: "g", Barrier: true}},
	}}}
	mine := shared
	gateway.FillInSyncWaits(&mine, func(int32) (gateway.Gauges, bool) { return gateway.Gauges{WaitMs: 3}, true })
	require.Equal(t, board.StepStatus{MeanMs: 20, SyncWaitMs: 3}, *mine.Models[0].Groups[0].Step)
	require.Equal(t, board.StepStatus{MeanMs: 20}, *shared.Models[0].Groups[0].Step)
}
