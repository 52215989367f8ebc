package live

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/detect"
)

func TestRoundsInWords(t *testing.T) {
	for _, tt := range []struct {
		name   string
		held   int
		status board.RoundStatus
		want   string
	}{
		{"nothing was told yet", 0, board.RoundStatus{}, "No step is known yet."},
		{"nothing was computed", 0, board.RoundStatus{Steps: 9}, "No step had a prefill since the start."},
		{"nothing is held", 0, board.RoundStatus{Steps: 100, PrefillSteps: 31, EmptyShare: 0.26},
			"Since the start 31 % of steps had a prefill, and 26 % of ranks were empty in them."},
		{"one is held", 1, board.RoundStatus{Steps: 100, PrefillSteps: 31, EmptyShare: 0.26, HeldS: 0.72},
			"Since the start 31 % of steps had a prefill, and 26 % of ranks were empty in them. 1 request is held for a round now, for 720 ms at " +
				"most."},
		{"several are", 3, board.RoundStatus{HeldS: 4}, "No step is known yet. 3 requests are held for a round now, for 4.0 s at most."},
	} {
		require.Equal(t, tt.want, roundsOf(&detect.Group{Held: tt.held, Rounds: &tt.status}).Says, tt.name)
	}
	require.Nil(t, roundsOf(&detect.Group{}), "ranks that only decode get no prompts")
}
