package detect

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var (
	full   = Outcome{"queue_full", 429}
	broken = Outcome{"upstream_broken", 502}
)

func TestFailuresStay(t *testing.T) {
	var r Ring
	require.Empty(t, r.failures())
	add := func(at time.Duration, f map[Outcome]uint64) []Failed {
		r.Add(Sample{At: noon.Add(at), Failures: f})
		return r.failures()
	}
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, SinceStart: 3}}, add(0, map[Outcome]uint64{broken: 3}),
		"when they failed is not known")
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, Last10S: 2, LastMinute: 2, Last5Min: 2, LastHour: 2, SinceStart: 5}},
		add(6*time.Second, map[Outcome]uint64{broken: 5}))
	for s := range 360 {
		add(time.Duration(7+s)*time.Second, map[Outcome]uint64{broken: 5})
	}
	require.Equal(t, []Failed{
		{Outcome: "queue_full", Status: 429, Last10S: 1, LastMinute: 1, Last5Min: 1, LastHour: 1, SinceStart: 1},
		{Outcome: "upstream_broken", Status: 502, LastHour: 2, SinceStart: 5},
	}, add(367*time.Second, map[Outcome]uint64{broken: 5, full: 1}), "the last ones first")
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, SinceStart: 5}, {Outcome: "queue_full", Status: 429, SinceStart: 1}},
		add(2*time.Hour, map[Outcome]uint64{broken: 5, full: 1}))
}

func TestRatesAreOfTheLastTenSeconds(t *testing.T) {
	var r Ring
	require.Zero(t, r.rates())
	for i := range 30 {
		s := Sample{At: noon.Add(time.Duration(i) * time.Second), Ended: 1000, Failed: 2, Tokens: int64(i) * 500}
		if i >= 15 {
			s.Ended, s.Failed = 1000+uint64(i-14)*20, 2+uint64(i-14)
		}
		r.Add(s)
	}
	require.Equal(t, Rates{RequestsPerS: 20, FailuresPerS: 1, TokensPerS: 500}, r.Last().Rates)
}

// A failure that is over is not told for as long as the rate knows of it: what clients see now
// counts.
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
			var w Watch
			s := Sample{At: noon}
			w.Add(s)
			for i := range tt.ended {
				s.Ended, s.Failed, s.At = s.Ended+tt.ended[i], s.Failed+tt.failed[i], noon.Add(time.Duration(i+1)*time.Second)
				w.Add(s)
			}
			require.Equal(t, tt.want, w.Last().Recovered)
			f := Facts{Proxy: Proxy{Ready: true}}
			w.FillInFound(&f)
			for _, x := range Find(&f, w.lastMinute()) {
				require.False(t, tt.want && x.Kind == RequestsFail, x.What)
			}
		})
	}
}

// Whatever comes, and however the clock jumps: samples are in order, there are few of them, and
// none is older than it may be.
func TestTheRingIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r Ring
		at := noon
		for range rapid.IntRange(1, 400).Draw(t, "samples") {
			at = at.Add(time.Duration(rapid.SampledFrom([]int{1, 1, 1, 1, 5, 70, 0, -1, -4000}).Draw(t, "seconds")) * time.Second)
			s := Sample{At: at, Examined: rapid.Bool().Draw(t, "looked"), Ranks: make([]RankAt, 700)}
			r.Add(s)
			for _, tier := range []*tier{&r.fine, &r.bins, &r.minutes} {
				ranks := 0
				for i := range tier.list {
					s := &tier.list[i]
					ranks += len(s.Ranks)
					require.LessOrEqual(t, r.Last().At.Sub(s.At), tier.keptFor+tier.interval)
					require.True(t, i == 0 || tier.list[i-1].At.Truncate(tier.interval).Before(s.At.Truncate(tier.interval)))
				}
				require.LessOrEqual(t, ranks, maxRankRecords)
				require.LessOrEqual(t, len(tier.list), int(tier.keptFor/tier.interval)+1)
			}
		}
	})
}

func TestThePastIsKeptForAWhile(t *testing.T) {
	var r Ring
	_, ok := r.PageAt(noon)
	require.False(t, ok)
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	for i := range 2000 {
		r.Add(Sample{At: at(i)})
		if i%5 == 0 {
			r.KeepPage([]byte{byte(i / 5)}, at(i))
		}
	}
	for when, want := range map[int]int{1999: 1995, 1500: 1500, 1503: 1500, 9999: 1995} {
		page, ok := r.PageAt(at(when))
		require.True(t, ok)
		require.Equal(t, []byte{byte(want / 5)}, page, when)
	}
	_, ok = r.PageAt(at(1000))
	require.False(t, ok, "it is more than 15 minutes ago")
}

func TestThePastIsBoundedInBytes(t *testing.T) {
	var r Ring
	for i := range 100 {
		r.Add(Sample{At: noon.Add(time.Duration(i) * BinLength)})
		r.KeepPage(make([]byte, maxPageBytes/10), noon.Add(time.Duration(i)*BinLength))
		sum := 0
		for k := range r.bins.list {
			sum += len(r.bins.list[k].Page)
		}
		require.LessOrEqual(t, sum, maxPageBytes)
	}
}
