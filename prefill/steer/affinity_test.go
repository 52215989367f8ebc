package steer

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestASessionStaysWhileItsCandidateHasNoMoreThanItsShare(t *testing.T) {
	for _, tt := range []struct {
		name string
		bs   []float64
		kept bool
	}{
		{"far above", []float64{5, 1, 1, 1}, false},
		{"one above", []float64{2, 1, 1, 1}, false},
		{"within", []float64{3, 2, 2, 2}, true},
		{"alone", []float64{9}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sum := 0.0
			for _, bs := range tt.bs {
				sum += bs
			}
			require.Equal(t, tt.kept, withinLoad(tt.bs[0], sum, len(tt.bs), 1.25))
		})
	}
}

func TestASessionIsForgottenWhenItIsNotUsed(t *testing.T) {
	a, now := NewAffinity(AffinityConfig{TTL: time.Minute, MaxKeys: 10}), time.Unix(0, 0)
	a.Record(1, "p0/0", now)
	a.Record(2, "p1/0", now.Add(30*time.Second))
	require.Equal(t, "p0/0", a.lastCandidate(1, now.Add(time.Minute-1)))
	require.Empty(t, a.lastCandidate(1, now.Add(time.Minute)))
	require.Equal(t, "p1/0", a.lastCandidate(2, now.Add(time.Minute)))
	a.Record(2, "p2/0", now.Add(time.Minute))
	require.Equal(t, "p2/0", a.lastCandidate(2, now.Add(2*time.Minute-1)), "a use counts from itself")
}

// Against a plain model: a map with the time of each use.
func TestASessionThatEndsIsForgotten(t *testing.T) {
	a, now := NewAffinity(AffinityConfig{TTL: time.Minute, MaxKeys: 10}), time.Unix(0, 0)
	a.Record(1, "p", now)
	a.Record(2, "p", now)
	a.EndSession(1)
	a.EndSession(3)
	require.Empty(t, a.lastCandidate(1, now))
	require.Equal(t, "p", a.lastCandidate(2, now))
}

func TestSessionsAreBoundedAndTheOldestGoesFirst(t *testing.T) {
	type use struct {
		candidate string
		at        time.Time
	}
	rapid.Check(t, func(t *rapid.T) {
		const most, ttl = 5, 20
		a, model, now := NewAffinity(AffinityConfig{TTL: ttl, MaxKeys: most}), map[uint64]use{}, time.Unix(0, 0)
		for n := range rapid.IntRange(1, 200).Draw(t, "requests") {
			now = now.Add(time.Duration(rapid.IntRange(1, 4).Draw(t, "later")))
			for k, u := range model {
				if now.Sub(u.at) >= ttl {
					delete(model, k)
				}
			}
			key := rapid.Uint64Range(1, 9).Draw(t, "key")
			require.Equal(t, model[key].candidate, a.lastCandidate(key, now))
			if _, known := model[key]; !known && len(model) == most {
				oldest := uint64(0)
				for k, u := range model {
					if oldest == 0 || u.at.Before(model[oldest].at) {
						oldest = k
					}
				}
				delete(model, oldest)
			}
			model[key] = use{fmt.Sprint(n), now}
			a.Record(key, model[key].candidate, now)
			require.Equal(t, len(model), len(a.byKey))
			require.LessOrEqual(t, a.byUse.Len(), most)
		}
	})
}
