package prefill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// A prompt that is bound before its prefill is given to an engine a little before that can begin
// it; what is charged and not sent yet holds the next one back.
func TestAnEarlyPromptIsGivenAheadOfItsPrefill(t *testing.T) {
	for _, row := range []struct {
		connector string
		want      int
	}{{mooncake.SGLang, 2}, {mooncake.AscendMooncakeV1, 1}} {
		clock := time.Unix(1_000_000, 0)
		c := Default()
		c.Clock = func() time.Time { return clock }
		c.Scrape.Interval = 0
		c.Push.MaxUnanswered, c.Push.Lead = 1, 20*time.Millisecond
		c.Calibration.T0Ms, c.Calibration.TPMs, c.Calibration.Known = 100, 0.001, true
		scheduler, err := New(c)
		require.NoError(t, err)
		profile := mooncake.Profile{Connector: row.connector}.WithDefaults()
		scheduler.SetCandidates([]Candidate{{ID: "p/0", Instance: "p", Models: []string{"m"}, Live: true, Profile: &profile}})
		var leases []*Lease
		offer := func() {
			scheduler.Offer(Request{Model: "m", PromptTokens: 10}, func(l *Lease, err error) {
				if err == nil {
					leases = append(leases, l)
				}
			})
		}
		for range 3 {
			offer()
		}
		require.Len(t, leases, 1)
		if row.connector == mooncake.SGLang {
			scheduler.Wake()
			require.Len(t, leases, 1, "its probe is not sent yet")
			leases[0].MarkSent()
		}
		clock = clock.Add(50 * time.Millisecond)
		scheduler.Wake()
		require.Len(t, leases, 1)
		if at, ok := scheduler.NextWake(); row.want == 2 {
			require.True(t, ok)
			require.WithinDuration(t, clock.Add(30*time.Millisecond), at, 2*time.Millisecond)
		}
		clock = clock.Add(40 * time.Millisecond)
		scheduler.Wake()
		require.Len(t, leases, row.want, row.connector)
	}
}
