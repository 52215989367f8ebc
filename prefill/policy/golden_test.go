package policy

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// at is a candidate with an account, to which a prompt is then fitted.
func at(id string, prompt, matched float64, change func(e *Engine)) Engine {
	e := Engine{ID: id, BlockTokens: 16, Ring: Vnodes(id)}
	e.TPMs, e.T0Ms = 0.0938, 150.72
	if change != nil {
		change(&e)
	}
	e.SetPrompt(prompt, matched)
	return e
}

func queued(tokens, bs float64) func(*Engine) {
	return func(e *Engine) { e.QueuedNewTokens, e.BS = tokens, bs }
}

// choose parses, prepares and chooses, and returns the id and all scores.
func choose(t testing.TB, spec, requestID string, candidates ...Engine) (string, []float64) {
	t.Helper()
	p, err := (*Library)(nil).Parse(spec)
	require.NoError(t, err)
	for i := range candidates {
		candidates[i].Order = i
	}
	Aggregate(candidates)
	choice := p.Choose(&Query{ID: requestID, Cursor: -1}, candidates)
	return candidates[choice.Index].ID, p.scores
}

// The golden examples, each with its numbers worked out by hand.
func TestGoldenExamples(t *testing.T) {
	attention := func(tokens, attention, beta2 float64) func(*Engine) {
		return func(e *Engine) { e.QueuedNewTokens, e.QueuedAttention, e.Beta2 = tokens, attention, beta2 }
	}
	remote := func(rtt, tokens float64) func(*Engine) {
		return func(e *Engine) { e.RTTMs, e.QueuedNewTokens = rtt, tokens }
	}
	waits := func(waiting, running, bs float64) func(*Engine) {
		return func(e *Engine) { e.Waiting, e.Running, e.BS = waiting, running, bs }
	}
	active := func(active, kv float64) func(*Engine) {
		return func(e *Engine) { e.ActiveTokens, e.KVTokens = active, kv }
	}
	work := func(active, kv float64) func(*Engine) {
		return func(e *Engine) { e.ActiveWork, e.KVWork = active, kv }
	}
	blocks := func(tokens, blocks float64) func(*Engine) {
		return func(e *Engine) { e.QueuedNewTokens, e.ActiveBlocks = tokens, blocks }
	}
	backlog := func(elapsed float64) func(*Engine) {
		return func(e *Engine) {
			w := Latency{T0Ms: 150.72, TPMs: 0.0938}.Ms(6000, 0)
			e.QueuedNewTokens, e.BS, e.BacklogMs = 6000, 1, Backlog(w, w, elapsed)
		}
	}
	for _, tt := range []struct {
		name, policy string
		candidates   []Engine
		scores       []float64
		want         string
	}{
		{"G1 the product weighs hits against the batch", "lmetric", []Engine{
			at("a", 4000, 0, queued(0, 4)), at("b", 4000, 3200, queued(1000, 6)), at("c", 4000, 3968, queued(9000, 6)),
		}, []float64{20000, 12600, 63224}, "b"},
		{"G2 the batch after routing counts, so that idle ones differ by their hits", "lmetric", []Engine{
			at("a", 4096, 0, nil), at("b", 4096, 2048, nil),
		}, []float64{4096, 2048}, "b"},
		{"G3 a whole hit still computes a block", "lmetric", []Engine{
			at("a", 4096, 4096, queued(0, 9)), at("b", 4096, 0, nil),
		}, []float64{160, 4096}, "a"},
		{"G4 of equal products the smaller prefill", "lmetric", []Engine{
			at("a", 1000, 0, queued(0, 1)), at("b", 1000, 0, queued(1000, 0)),
		}, []float64{2000, 2000}, "a"},
		{"G7 held tokens weigh 0.3", "least-tokens", []Engine{
			at("a", 100, 0, active(3000, 3000)), at("b", 100, 0, active(0, 10_000)),
		}, []float64{3900, 3000}, "b"},
		{"G8 the weights of vllm-ascend's proxy", "least-tokens:work=vllm-ascend", []Engine{
			at("a", 100, 0, work(154.5745, 154.5745)), at("b", 100, 0, work(0, 2*465.0745)),
		}, []float64{200.94685, 279.0447}, "a"},
		{"G9 a waiting request weighs four running ones", "vllm-queue", []Engine{
			at("a", 100, 0, waits(0, 9, 9)), at("b", 100, 0, waits(2, 1, 3)), at("c", 100, 0, waits(3, 0, 3)),
		}, []float64{9, 9, 12}, "b"},
		{"G10 hits at lambda 0.7", "bailian", []Engine{
			at("a", 4000, 3200, queued(0, 8)), at("b", 4000, 0, queued(0, 2)),
		}, []float64{0.44, 0.775}, "a"},
		{"G10 load at lambda 0.2", "bailian:lambda=0.2", []Engine{
			at("a", 4000, 3200, queued(0, 8)), at("b", 4000, 0, queued(0, 2)),
		}, []float64{0.84, 0.40}, "b"},
		{"G11 hits while batches differ by 8", "aibrix-filter", []Engine{
			at("a", 1600, 1440, queued(0, 12)), at("b", 1600, 160, queued(0, 4)),
		}, []float64{-0.9, -0.1}, "a"},
		{"G11 the batch when they differ by more", "aibrix-filter:range=8", []Engine{
			at("a", 1600, 1440, queued(0, 13)), at("b", 1600, 160, queued(0, 4)),
		}, []float64{13, 4}, "b"},
		{"G12 blocks and new tokens at w 1", "dynamo-sum", []Engine{
			at("a", 1600, 0, blocks(0, 400)), at("b", 1600, 0, blocks(3200, 150)),
		}, []float64{500, 450}, "b"},
		{"G12 and at w 2", "dynamo-sum:w=2", []Engine{
			at("a", 1600, 0, blocks(0, 400)), at("b", 1600, 0, blocks(3200, 150)),
		}, []float64{600, 750}, "a"},
		{"G13 a queue is worse than a miss", "ttft-sim", []Engine{
			at("a", 4000, 0, nil), at("b", 4000, 3840, queued(5000, 0)),
		}, []float64{525.92, 634.728}, "a"},
		{"G14 without attention", "ttft-sim", []Engine{
			at("a", 32000, 0, nil), at("b", 32000, 24000, attention(26000, 0, 0)),
		}, []float64{3152.32, 3339.92}, "a"},
		{"G14 with attention", "ttft-sim", []Engine{
			at("a", 32000, 0, attention(0, 0, 2e-5)), at("b", 32000, 24000, attention(26000, 0, 2e-5)),
		}, []float64{13392.32, 7819.92}, "b"},
		{"G15 the queue counts once", "gorgo", []Engine{
			at("a", 4000, 0, remote(3, 6500)), at("b", 4000, 3584, remote(183, 4200)), at("c", 4000, 0, remote(281, 0)),
		}, []float64{987.90, 615.9808, 656.20}, "b"},
		{"G15 the queue counts twice", "gorgo:qs=2", []Engine{
			at("a", 4000, 0, remote(3, 6500)), at("b", 4000, 3584, remote(183, 4200)), at("c", 4000, 0, remote(281, 0)),
		}, []float64{1597.60, 1009.9408, 656.20}, "c"},
		{"G29 the running prefill is nearly over", "finish", []Engine{
			at("a", 4000, 0, nil), at("b", 4000, 3840, backlog(600)),
		}, []float64{525.92, 344.108}, "b"},
		{"G29 the running prefill has just begun", "finish", []Engine{
			at("a", 4000, 0, nil), at("b", 4000, 3840, backlog(100)),
		}, []float64{525.92, 779.248}, "a"},
		{"G29 lmetric does not see it run", "lmetric", []Engine{
			at("a", 4000, 0, nil), at("b", 4000, 3840, backlog(600)),
		}, []float64{4000, 12320}, "a"},
		{"G29 nor does ttft-sim", "ttft-sim", []Engine{
			at("a", 4000, 0, nil), at("b", 4000, 3840, backlog(600)),
		}, []float64{525.92, 728.528}, "a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, scores := choose(t, tt.policy, "req-1", tt.candidates...)
			require.InDeltaSlice(t, tt.scores, scores, 1e-6)
			require.Equal(t, tt.want, got)
		})
	}
}

func TestG5TiesGoWhereTheRequestHashes(t *testing.T) {
	require.Equal(t, uint64(0x11ae1013c620e0a3), HRW("req-1", "p1/1"))
	require.Equal(t, uint64(0x26b793cc4dca95b3), HRW("req-2", "p1/1"))
	require.Equal(t, uint64(0x1cbc0c0a4179235f), HRW("req-3", "p0/1"))
	for _, policy := range []string{"finish", "lmetric", "gorgo", "bailian", "aibrix-filter", "dynamo-sum", "ttft-sim", "vllm-queue",
		"least-tokens", "random"} {
		for id, want := range map[string]string{"req-1": "p1/1", "req-2": "p1/1", "req-3": "p0/1"} {
			got, _ := choose(t, policy, id, at("p0/0", 10, 0, nil), at("p0/1", 10, 0, nil), at("p1/0", 10, 0, nil), at("p1/1", 10, 0, nil))
			require.Equal(t, want, got, "%s, request %s", policy, id)
		}
	}
}

// Candidate b is closed for requests 1 to 4.
func TestG6RoundRobinGoesOnBehindTheLastChosen(t *testing.T) {
	p, err := (*Library)(nil).Parse("round-robin")
	require.NoError(t, err)
	require.True(t, p.TakesTurns())
	all := []Engine{{ID: "a"}, {ID: "b", Order: 1}, {ID: "c", Order: 2}}
	var chosen string
	q := Query{ID: "r", Cursor: -1}
	for n := 1; n <= 7; n++ {
		eligible := all
		if n < 5 {
			eligible = []Engine{all[0], all[2]}
		}
		e := eligible[p.Choose(&q, eligible).Index]
		q.Cursor = e.Order
		chosen += e.ID
	}
	require.Equal(t, "acacabc", chosen)
}

func TestRandomLooksAtNothingButTheHash(t *testing.T) {
	got, _ := choose(t, "random", "req-1", at("p0/0", 10, 0, nil), at("p1/1", 10, 0, queued(1e6, 50)))
	require.Equal(t, "p1/1", got)
}

// The ring has 100 points.
func TestStickyRingTakesTheFirstPointClockwise(t *testing.T) {
	ring := map[string][]uint64{"A": {10, 40}, "B": {25, 80}, "C": {60}}
	for _, tt := range []struct {
		name string
		key  uint64
		down string
		want string
	}{
		{"the next point", 27, "", "A"},
		{"a candidate that is down is passed over", 27, "A", "C"},
		{"and two", 27, "AC", "B"},
		{"past the last point the ring begins again", 85, "", "A"},
		{"a point owns its own place", 25, "", "B"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var up []Engine
			for _, id := range []string{"A", "B", "C"} {
				if !strings.Contains(tt.down, id) {
					points := []uint64{}
					for _, v := range ring[id] {
						points = append(points, v*(math.MaxUint64/100))
					}
					up = append(up, Engine{ID: id, Ring: points})
				}
			}
			p, err := (*Library)(nil).Parse("sticky-ring")
			require.NoError(t, err)
			q := Query{ID: "r", Key: tt.key * (math.MaxUint64 / 100), Cursor: -1}
			require.Equal(t, tt.want, up[p.Choose(&q, up).Index].ID)
		})
	}
}

func TestStickyRingMovesOnlyWhoLosesItsCandidate(t *testing.T) {
	p, err := (*Library)(nil).Parse("sticky-ring")
	require.NoError(t, err)
	var all []Engine
	for n := range 8 {
		id := fmt.Sprintf("p%d/0", n)
		all = append(all, Engine{ID: id, Ring: Vnodes(id)})
	}
	for n := range uint64(200) {
		q := Query{ID: "r", Key: HRW("session", fmt.Sprint(n)), Cursor: -1}
		before := all[p.Choose(&q, all).Index].ID
		after := all[p.Choose(&q, all[:7]).Index].ID
		if before != "p7/0" {
			require.Equal(t, before, all[p.Choose(&q, all[:7]).Index].ID)
		}
		require.NotEqual(t, "p7/0", after)
	}
}
