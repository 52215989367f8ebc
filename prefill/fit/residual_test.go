package fit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAnEngineIsCorrectedByWhatItMispredicted(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, tt := range []struct {
		name      string
		took      float64
		low, high float64 // after 200 probes that were predicted to take 1,000 ms
	}{
		{"slower", 1400, 350, 400},
		{"faster", 700, -300, -250},
		{"as predicted", 1000, 0, 0},
		{"never by more than the prediction", 60_000, 850, 1000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, at := Residual{}, now
			require.Zero(t, r.Ms(at))
			for range 200 {
				at = at.Add(time.Second)
				r.Add(tt.took, 1000, at)
			}
			require.GreaterOrEqual(t, r.Ms(at), tt.low)
			require.LessOrEqual(t, r.Ms(at), tt.high)
			require.InDelta(t, 0, r.Ms(at.Add(10*time.Minute)), 1, "it fades")
		})
	}
	r := Residual{}
	r.Add(2000, 1000, now)
	require.Less(t, r.Ms(now), 200.0, "one probe is not the rule")
	for i := range 200 {
		r.Add(1000+float64(i%2*800-400), 1000, now.Add(time.Duration(i)*time.Second))
	}
	require.Zero(t, r.Ms(now.Add(200*time.Second)), "what may be chance does not count")
}
