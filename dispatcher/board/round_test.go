package board

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
)

// The board uses its snapshot again in the next tick, while the decision log still looks at the
// copy.
func TestACopyOfARoundStaysAsItWas(t *testing.T) {
	s := policy.Snapshot{
		Workers: []policy.Worker{{ID: 1, Running: []policy.Request{{ID: 2}}}}, Pool: []policy.Entry{{ID: 3}},
		Waits: []policy.EntryDetails{{HeldMs: 4}},
	}
	from := Round{Snapshot: s, Assign: []policy.Assignment{{Entry: 3, Worker: 1}}}
	var to Round
	for range 2 { // the second time on the room of the first
		to.Copy(&from)
		s.Workers[0].ID, s.Workers[0].Running[0].ID, s.Pool[0].ID, s.Waits[0].HeldMs, from.Assign[0].Worker = 9, 9, 9, 9, 9
		require.Equal(t, policy.Snapshot{
			Workers: []policy.Worker{{ID: 1, Running: []policy.Request{{ID: 2}}}}, Pool: []policy.Entry{{ID: 3}},
			Waits: []policy.EntryDetails{{HeldMs: 4}},
		}, to.Snapshot)
		require.Equal(t, []policy.Assignment{{Entry: 3, Worker: 1}}, to.Assign)
		s.Workers[0].ID, s.Workers[0].Running[0].ID, s.Pool[0].ID, s.Waits[0].HeldMs, from.Assign[0].Worker = 1, 2, 3, 4, 1
	}
}
