package board

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestTheBudgetReachesThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []int32
		p := &fake{Spec: "p"}
		admit := fakes.LeastKV(false)
		p.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			seen = append(seen, s.Budget)
			time.Sleep(3 * time.Millisecond)
			return admit(s, dst)
		}
		cfg := testConfig(p)
		cfg.Policy = "p"
		h := newHand(t, cfg)
		h.fleet(ranks(1, 9, 0))
		for range 3 {
			h.put(pool.Entry{}).slotNow(t)
		}
		require.Equal(t, []int32{4000, 3000, 2250}, seen)
		require.NoError(t, h.setPolicy("p"))
		h.put(pool.Entry{}).slotNow(t)
		require.EqualValues(t, 4000, seen[3], "another policy starts anew")
	})
}
