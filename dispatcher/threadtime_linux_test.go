package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// In a bubble, a policy that sleeps uses none of its thread's time, and one that computes none of
// the bubble's.
func TestAPolicyIsReplacedForWhatItComputes(t *testing.T) {
	for name, c := range map[string]struct {
		decide func()
		reason string
	}{
		"its thread is not scheduled": {func() { time.Sleep(900 * time.Millisecond) }, ""},
		"it waits for something":      {func() { time.Sleep(2 * time.Second) }, board.FallbackBlocked},
		"it computes for too long": {func() {
			for began := threadTime(); threadTime()-began < 30*time.Millisecond; { //nolint:revive // it computes
			}
		}, board.FallbackSlow},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				admit := fakes.LeastKV(false)
				cfg := testConfig(&fake{Spec: "p", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
					c.decide()
					return admit(s, dst)
				}})
				cfg.Policy, cfg.TickLimit = "p", 20*time.Millisecond
				h := newHand(t, cfg)
				h.fleet(ranks(1, 100, 0))
				h.put(pool.Entry{}).slotNow(t)
				for _, reason := range []string{board.FallbackSlow, board.FallbackBlocked} {
					want := 0.0
					if reason == c.reason {
						want = 1
					}
					require.Equal(t, want, testutil.ToFloat64(h.metrics.fallbacks.WithLabelValues(reason)), reason)
				}
			})
		})
	}
}
