package prefill

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/prefill/policy"
)

// line is one whose times can be had in the head: 100 ms and 1 ms a token.
var latency = policy.Latency{T0Ms: 100, TPMs: 1}

// simple is engines without surprises.
func simple(ranks int) *Plan {
	return &Plan{Load: 0.7, Seeds: 1, Policies: []string{"finish"}, TellLine: true,
		Engines: Engines{Ranks: ranks, Capacity: 1 << 20, Line: latency, Hold: 50 * time.Millisecond}}
}

// ask is a request at a time, with its blocks and tokens behind them.
func ask(ms int, own int, blocks ...int32) *job {
	r := &request{prompt: blockTokens*len(blocks) + own, output: 3, blocks: blocks}
	for _, b := range blocks {
		r.keys = append(r.keys, keyOf(b))
	}
	j := &job{request: r, arrived: time.Duration(ms) * time.Millisecond}
	j.nameless = (own + blockTokens - 1) / blockTokens
	return j
}

// play runs jobs in the given order of arrival.
func play(t require.TestingT, p *Plan, jobs ...*job) *run {
	for i, j := range jobs {
		j.number = i
	}
	r, err := newRun(p, p.Policies[0], &prompts{names: 100}, jobs, 0)
	require.NoError(t, err)
	require.NoError(t, r.all(noContext))
	return r
}

func TestATimeLineByHand(t *testing.T) {
	a, b, c := ask(0, 100, 1, 2), ask(200, 200, 1, 2), ask(300, 50)
	play(t, simple(1), a, b, c)
	require.Equal(t, 100*time.Millisecond+1124*time.Millisecond, a.first, "nothing cached: 100 + 1124 ms")
	require.Equal(t, 1024, b.cached, "what a left")
	require.Equal(t, a.first+300*time.Millisecond, b.first, "behind a, 100 + 200 ms")
	require.Equal(t, b.first+150*time.Millisecond, c.first, "behind b, though its own prompt is short")
	require.Equal(t, a.first+50*time.Millisecond, a.finished, "its KV was fetched")
}

func TestAPromptThatIsCachedWholeIsComputedFromItsLastBlock(t *testing.T) {
	a, b := ask(0, 0, 1, 2), ask(5000, 0, 1, 2)
	play(t, simple(1), a, b)
	require.Equal(t, blockTokens, b.cached)
	require.Equal(t, 612*time.Millisecond, b.first-b.arrived)
	require.Equal(t, blockTokens, b.expected, "as the tier thought")
}

func TestAPrefillWaitsForKVThatIsNotFetched(t *testing.T) {
	p := simple(1)
	p.Engines.Capacity = 4 * blockTokens
	p.Engines.Hold = 10 * time.Second
	a, b := ask(0, 0, 1, 2, 3), ask(1, 0, 4, 5)
	play(t, p, a, b)
	require.Equal(t, a.first+10*time.Second, b.began)
}

func TestFinishWaitsForACacheWhereTheProductDoesNot(t *testing.T) {
	// One engine holds the prefix of 8 blocks and is busy for 2,600 ms, the other is
	// idle. Waiting ends after 2,600 + 200 ms, the prefill anew after 4,296 ms; by the
	// product it is (2,500 + 100) * 2 against 4,196 * 1.
	for _, tt := range []struct {
		policy string
		hit    int
	}{{"finish", 4096}, {"lmetric", 0}} {
		t.Run(tt.policy, func(t *testing.T) {
			p := simple(2)
			p.Policies[0] = tt.policy
			first, busy, asks := ask(0, 1, 1, 2, 3, 4, 5, 6, 7, 8), ask(10_000, 2500, 1, 2, 3, 4, 5, 6, 7, 8),
				ask(10_001, 100, 1, 2, 3, 4, 5, 6, 7, 8)
			play(t, p, first, busy, asks)
			require.Equal(t, tt.hit, asks.cached)
		})
	}
}

func TestEnginesThatDecodeByHand(t *testing.T) {
	p := simple(1)
	p.Engines.Decode = &Decode{C0: 10 * time.Millisecond, C1: time.Millisecond / 100, Chunk: 300}
	a := ask(0, 400) // 3 tokens: one of the prefill, two of steps
	play(t, p, a)
	ms := func(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }
	require.Equal(t, ms(100+300+10+100+10), a.first, "two chunks, a step's fixed time each")
	require.Equal(t, a.first+ms(10+4.01+10+4.02), a.finished, "two steps over 401 and 402 tokens")
}

func TestEveryRequestIsAnsweredOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := simple(rapid.IntRange(1, 4).Draw(t, "engines"))
		p.Engines.Capacity = rapid.Int64Range(8, 64).Draw(t, "blocks") * blockTokens
		p.Policies[0] = rapid.SampledFrom(Policies()).Draw(t, "policy")
		p.Push = rapid.IntRange(0, 3).Draw(t, "push")
		if rapid.Bool().Draw(t, "decode") {
			p.Engines.Decode = &Decode{C0: time.Millisecond, C1: time.Microsecond, Chunk: 700}
		}
		var jobs []*job
		at := 0
		for range rapid.IntRange(8, 40).Draw(t, "requests") {
			at += rapid.IntRange(0, 2000).Draw(t, "gap")
			var blocks []int32
			for b := range rapid.IntRange(0, 6).Draw(t, "depth") {
				blocks = append(blocks, int32(b)+10*rapid.Int32Range(0, 2).Draw(t, "text"))
			}
			jobs = append(jobs, ask(at, rapid.IntRange(1, 700).Draw(t, "own"), blocks...))
		}
		r := play(t, p, jobs...)
		last := make([]time.Duration, p.Engines.Ranks)
		for _, j := range byBegin(jobs) {
			require.Equal(t, j.prompt, j.cached+j.fresh)
			require.GreaterOrEqual(t, j.began, j.arrived)
			require.GreaterOrEqual(t, j.first-j.began, time.Duration(1e6*latency.Ms(float64(j.fresh), 0)))
			require.GreaterOrEqual(t, j.finished, j.first)
			require.GreaterOrEqual(t, j.began, last[j.engine], "one prompt at a time")
			last[j.engine] = j.first
		}
		require.Equal(t, len(jobs), r.released)
		for _, e := range r.engines {
			require.Zero(t, e.cache.pinned())
			require.Zero(t, e.load())
		}
		for _, c := range r.scheduler.Status() {
			require.Zero(t, c.KVTokens)
			require.Zero(t, c.QueuedNewTokens)
			require.Zero(t, c.BacklogMs)
		}
	})
}

// poisson is requests of one length at random times, sharing nothing.
func poisson(n, prompt int) *trace.Trace {
	rng := rand.New(rand.NewPCG(1, 2))
	tr := &trace.Trace{}
	at := 0.0
	for range n {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(at * 1e9), Prompt: prompt, Output: 1})
		at += rng.ExpFloat64()
	}
	return tr
}

// With prompts of one length an engine is an M/D/1 queue: the mean wait is
// rho / (2 (1 - rho)) services (Pollaczek and Khinchine).
func TestWaitsAreThoseOfQueueingTheory(t *testing.T) {
	p := simple(1)
	p.Trace, p.Load, p.Seeds = poisson(30_000, 900), 0.6, 2
	got, err := p.Run(t.Context())
	require.NoError(t, err)
	m := got.Runs[0].Metrics
	rho := m[report.Utilisation].Mean
	require.InDelta(t, 0.6, rho, 0.01)
	require.InEpsilon(t, 1000*(1+rho/2/(1-rho)), m[report.TTFTMean].Mean, 0.05)
	require.Zero(t, m[report.HitRatio].Mean)
}

func TestTheSameSeedGivesTheSameRun(t *testing.T) {
	p := simple(4)
	p.Trace, p.Requests, p.Seeds, p.Policies, p.Burst = trace.Mooncake(), 1500, 2, []string{"finish", "random", "bailian"}, 0.6
	p.Engines.Line = policy.Latency{T0Ms: 150, TPMs: 0.1}
	one, err := p.Run(t.Context())
	require.NoError(t, err)
	two, err := p.Run(t.Context())
	require.NoError(t, err)
	require.Equal(t, one, two)
	p.Pace = one.Pace
	two, err = p.Run(t.Context())
	require.NoError(t, err)
	require.Equal(t, one, two, "at a pace that is known")
	require.Positive(t, one.Runs[0].Metrics[report.TTFTMean].SD, "another seed is another run")
}

func TestASeedIsABlockThatNoOtherMeasures(t *testing.T) {
	pr := newPrompts(poisson(1000, 900).Requests)
	var measured []request
	for seed := 1; seed <= 7; seed++ {
		block := pr.block(seed, 7)
		require.GreaterOrEqual(t, len(block), pr.warmUp()+125)
		measured = append(measured, block[pr.warmUp():]...)
	}
	require.Equal(t, pr.requests[pr.warmUp():], measured)
	jobs := pr.draw(pr.block(7, 7), 7, 2, 0)
	require.Less(t, jobs[0].arrived, 2*pr.quantum, "a block begins at once")
}
