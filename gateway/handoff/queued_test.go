package handoff

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// A hand-off is kept as long as the prefill engine's profile says, and an answer in one piece is
// doubted after a silence that a request sent at the deadline could not outlast.
func TestTheWaitForAFirstEventHasTheTimesOfItsHandOff(t *testing.T) {
	now, traffic := time.Now(), &engine.Traffic{}
	h := &Handoff{Handoff: mooncake.NewHandoff(nil, now.Add(60*time.Second), now.Add(120*time.Second))}
	for _, row := range []struct {
		name     string
		h        *Handoff
		endpoint mooncake.Endpoint
		rank     int
		piece    bool
		want     engine.Wait
	}{
		{"a stream", h, mooncake.Chat, 1, false, engine.Wait{KeptUntil: now.Add(105 * time.Second), MaxSilence: 45 * time.Second}},
		{"an answer in one piece", h, mooncake.Chat, 1, true,
			engine.Wait{KeptUntil: now.Add(105 * time.Second), MaxSilence: 45 * time.Second, OnePiece: true}},
		{"a response, which may be on another rank", h, mooncake.Responses, 1, false,
			engine.Wait{KeptUntil: now.Add(105 * time.Second), MaxSilence: 45 * time.Second, AnyRank: true}},
		{"a response of an engine of one rank", nil, mooncake.Responses, -1, false, engine.Wait{}},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := &roster.Rank{Signs: traffic.Liveness(row.rank), Target: &engine.Target{Rank: row.rank}}
			p := row.h.AwaitFirstEvent(r, row.endpoint, now, row.piece)
			defer p.End(now, true)
			require.Equal(t, row.want, p.Wait)
		})
	}
}
