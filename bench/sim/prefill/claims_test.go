//go:build !race

// Figures of whole traces, each run in one goroutine: the race detector finds
// nothing in them and takes ten times as long.

package prefill

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/prefill/policy"
)

// mooncake is what evenkeel simulate --tier prefill runs without flags.
func mooncake(load float64, policies ...string) *Plan {
	return &Plan{
		Trace: trace.Mooncake(), Load: load, Seeds: 1, Policies: policies,
		Engines: Engines{Ranks: 8, Capacity: 1_000_000, Line: policy.Latency{T0Ms: 150.72, TPMs: 0.0938}, Hold: 500 * time.Millisecond},
	}
}

func of(t *testing.T, p *Plan, m report.Metric) []float64 {
	t.Helper()
	got, err := p.Run(t.Context())
	require.NoError(t, err)
	values := make([]float64, len(got.Runs))
	for i, r := range got.Runs {
		values[i] = r.Metrics[m].Mean
	}
	return values
}

// What the tables of docs/results/prefill-policies.md show, in a run of each.
func TestFinishBeatsTheProductOnPurePrefillers(t *testing.T) {
	for _, tt := range []struct{ load, most float64 }{{0.7, 0.97}, {0.85, 0.95}} {
		p := mooncake(tt.load, "lmetric", "finish")
		got, err := p.Run(t.Context())
		require.NoError(t, err)
		product, finish := got.Runs[0].Metrics, got.Runs[1].Metrics
		require.InEpsilon(t, tt.load, product[report.Utilisation].Mean, 2*paceSlack)
		require.LessOrEqual(t, finish[report.TTFTMean].Mean, tt.most*product[report.TTFTMean].Mean)
		require.LessOrEqual(t, finish[report.TTFTP99].Mean, product[report.TTFTP99].Mean)
	}
}

// An engine that also decodes is never alone with a probe.
func TestFinishLearnsBesideDecodes(t *testing.T) {
	p := mooncake(0.7, "lmetric", "finish")
	p.Requests = 4000
	p.Engines.Decode = &Decode{C0: 55 * time.Millisecond, C1: 200 * time.Nanosecond, Chunk: 2048}
	means := of(t, p, report.TTFTMean)
	require.LessOrEqual(t, means[1], 0.95*means[0])
}

// All engines share a law. What one of them takes beyond it is what finish mispredicted there.
func TestFinishKeepsOffAnEngineThatIsSlowerThanItsKind(t *testing.T) {
	p := mooncake(0.7, "ttft-sim", "finish")
	p.Engines.Slow = 3
	means := of(t, p, report.TTFTMean)
	require.LessOrEqual(t, means[1], 0.9*means[0])
}

func TestTheDetectorHelpsWhoFollowsHits(t *testing.T) {
	on := mooncake(0.75, "bailian", "lmetric", "finish")
	on.Requests = 6000
	on.Burst = 0.6
	off := *on
	off.NoHotspots = true
	with, without := of(t, on, report.TTFTMean), of(t, &off, report.TTFTMean)
	require.LessOrEqual(t, with[0], 0.7*without[0], "bailian")
	require.InEpsilon(t, without[1], with[1], 0.05, "lmetric replicates a hot prefix by itself")
	require.InEpsilon(t, without[2], with[2], 0.05, "finish does")
}

func TestAWrongCapacityShowsInThePredictions(t *testing.T) {
	for factor, most := range map[float64]float64{1: 0.01, 0.25: 1, 4: 1} {
		p := mooncake(0.7, "finish")
		p.Requests, p.CapacityFactor = 4000, factor
		missed := of(t, p, report.HitError)[0]
		require.LessOrEqual(t, missed, most)
		if factor != 1 {
			require.Greater(t, missed, 0.1, "told %v times the capacity", factor)
		}
	}
}

func TestWhatCannotBeSimulatedIsSaid(t *testing.T) {
	for _, tt := range []struct {
		name string
		with func(*Plan)
		says string
	}{
		{"a cache smaller than a prompt", func(p *Plan) { p.Engines.Capacity = 100_000 }, "give at least"},
		{"no engine", func(p *Plan) { p.Engines.Ranks = 0 }, "0 prefill engines"},
		{"no such policy", func(p *Plan) { p.Policies = []string{"finis"} }, `unknown policy "finis"`},
		{"a policy with a slip", func(p *Plan) { p.Definitions = map[string]policy.Definition{"mine": {Score: "p_token"}} }, "p_token"},
		{"no load", func(p *Plan) { p.Load = 0 }, "a load of 0"},
		{"a burst of more than all", func(p *Plan) { p.Burst = 1.5 }, "a burst of 1.5"},
		{"all at once", func(p *Plan) { p.Trace = &trace.Trace{Requests: make([]trace.Request, 20)} }, "arrive at once"},
		{"prefills of endless tokens", func(p *Plan) { p.Engines.Line.TPMs = math.Inf(1) }, "a day at most"},
		{"prefills of a huge number", func(p *Plan) { p.Engines.Line.T0Ms = 1e300 }, "a day at most"},
		{"prefills of no number", func(p *Plan) { p.Engines.Line.Beta2 = math.NaN() }, "a day at most"},
		{"a hold that never ends", func(p *Plan) { p.Engines.Hold = 2_000_000 * time.Hour }, "from 0 to a day"},
		{"steps that never end", func(p *Plan) { p.Engines.Decode = &Decode{C0: 2_000_000 * time.Hour, Chunk: 1} }, "at most 16m40s"},
		{"tokens that take an hour", func(p *Plan) { p.Engines.Decode = &Decode{C0: 1, C1: time.Hour, Chunk: 1} }, "at most 16m40s + 1s"},
		{"steps of no length", func(p *Plan) { p.Engines.Decode = &Decode{} }, "c0 and chunk"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mooncake(0.7, "finish")
			tt.with(p)
			require.ErrorContains(t, p.Validate(), tt.says)
		})
	}
}

func TestATalkIsKnownByItsPrefix(t *testing.T) {
	s := newSessions()
	first := s.of([]int32{0, 1, 2})
	other := s.of([]int32{0, 9})
	require.NotEqual(t, first, other, "a system prompt is no talk")
	require.Equal(t, first, s.of([]int32{0, 1, 2, 3, 4}), "goes on where the first ended")
	require.Equal(t, first, s.of([]int32{0, 1, 2, 3, 4, 5}))
	require.NotEqual(t, first, s.of([]int32{0, 1, 2, 8}), "a second one from there is another")
	require.NotEqual(t, s.of(nil), s.of(nil))
}
