package live

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway"
	"evenkeel/gateway/incident"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/timeline"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// Whatever ranks come and go, every line has a value for every sample that is
// kept: what the rank held then, or -1.
func TestHistoryKeepsTheLastSamples(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h, said := history{}, []map[int32]int64{}
		for range rapid.IntRange(0, 2*samples).Draw(t, "samples") {
			seen, s := map[int32]int64{}, gateway.Sample{}
			if len(said) > 0 {
				for id, v := range said[len(said)-1] {
					seen[id] = v
				}
			}
			for range rapid.IntRange(0, 2).Draw(t, "changes") {
				id := rapid.Int32Range(0, 3).Draw(t, "rank")
				if _, ok := seen[id]; ok && rapid.Bool().Draw(t, "goes") {
					delete(seen, id)
				} else {
					seen[id] = rapid.Int64Range(0, 9).Draw(t, "tokens")
				}
			}
			for id, v := range seen {
				s.Ranks = append(s.Ranks, board.Load{Worker: id, KVTokens: v})
			}
			said = append(said, seen)
			h.add(&s, noon.Add(time.Duration(len(said))*time.Second))
		}
		said = said[max(0, len(said)-samples):]
		got := h.copy()
		require.Len(t, got.AtMs, len(said))
		ever := map[int32]bool{}
		for _, seen := range said {
			for id := range seen {
				ever[id] = true
			}
		}
		require.Len(t, got.Ranks, len(ever))
		for _, line := range got.Ranks {
			want := make([]int64, 0, len(said))
			for _, seen := range said {
				v, ok := seen[line.ID]
				if !ok {
					v = -1
				}
				want = append(want, v)
			}
			require.Equal(t, want, line.KVTokens, "rank %d", line.ID)
		}
	})
}

func TestRatesAreOfTheLastTenSeconds(t *testing.T) {
	var h history
	var idle Traffic
	h.rate(&idle)
	require.Zero(t, idle)
	for i := range 30 {
		s := gateway.Sample{Recent: journal.Recent{Ended: 1000, Failed: 2}}
		if i >= 15 {
			s.Ended, s.Failed = 1000+uint64(i-14)*20, 2+uint64(i-14)
		}
		s.OutputTokens = int64(i) * 500
		h.add(&s, noon.Add(time.Duration(i)*time.Second))
	}
	var got Traffic
	h.rate(&got)
	require.Equal(t, Traffic{RequestsPerS: 20, FailuresPerS: 1, TokensPerS: 500}, got)
}

// A failure that is over is not told for as long as the rate knows of it: what clients see now counts.
func TestAFailureIsOverOnceEnoughRequestsWentWell(t *testing.T) {
	for _, tt := range []struct {
		name          string
		ended, failed []uint64 // of each second
		want          bool
	}{
		{"nothing failed", []uint64{10, 10}, []uint64{0, 0}, false},
		{"all fail", []uint64{40, 40, 40}, []uint64{40, 40, 40}, false},
		{"all failed, and a few went well since", []uint64{40, 40, 2, 1, 1}, []uint64{40, 40, 0, 0, 0}, false},
		{"all failed, and five went well since", []uint64{40, 40, 2, 1, 2}, []uint64{40, 40, 0, 0, 0}, true},
		{"all failed, and many went well in the second since", []uint64{400, 400, 400}, []uint64{400, 400, 0}, false},
		{"all failed, and many went well in the two seconds since", []uint64{400, 400, 400, 400}, []uint64{400, 400, 0, 0}, false},
		{"one in ten failed, and that few may go well by chance", []uint64{40, 40, 40, 0, 0}, []uint64{4, 4, 0, 0, 0}, false},
		{"one in ten failed, and fifty went well since", []uint64{40, 40, 40, 5, 5}, []uint64{4, 4, 0, 0, 0}, true},
		{"they fail again", []uint64{40, 40, 40, 40}, []uint64{40, 0, 0, 1}, false},
		{"nothing ended since", []uint64{40, 0, 0}, []uint64{40, 0, 0}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var h history
			var s gateway.Sample
			h.add(&s, noon)
			for i := range tt.ended {
				s.Ended, s.Failed = s.Ended+tt.ended[i], s.Failed+tt.failed[i]
				h.add(&s, noon.Add(time.Duration(i+1)*time.Second))
			}
			var got Traffic
			h.rate(&got)
			require.Equal(t, tt.want, got.Recovered)
			d := NewFake(1).Document(t.Context())
			d.Traffic = got
			for _, f := range findingsOf(&d, timeline.Ended{All: 120, Failed: 9}) {
				require.False(t, tt.want && f.Kind == incident.RequestsFail, f.What)
			}
		})
	}
}

// A number that was never known has no line.
func TestHistoryNamesItsNumbers(t *testing.T) {
	var h history
	require.Empty(t, h.copy().Lines)
	for i := range 3 {
		s := gateway.Sample{Loads: board.Loads{Pool: 4, OutputTokens: int64(70 * i)}, Recent: journal.Recent{Ended: uint64(2 * i)}}
		if i == 1 {
			s.TTFT = journal.Latency{P50: 5 * time.Millisecond, P99: 9 * time.Millisecond, Samples: 1}
		}
		h.add(&s, noon.Add(time.Duration(i)*time.Second))
	}
	require.Equal(t, []NumbersLine{
		{"pool_entries", []int64{4, 4, 4}}, {"requests_per_ks", []int64{0, 2000, 2000}}, {"tokens_per_s", []int64{0, 70, 70}},
		{"ttft_p50_us", []int64{-1, 5000, -1}}, {"ttft_p99_us", []int64{-1, 9000, -1}},
	}, h.copy().Lines)
}
