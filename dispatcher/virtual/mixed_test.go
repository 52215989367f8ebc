package virtual

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/step"
)

// bench is a group of ranks, and when its requests got their tokens.
type bench struct {
	Mixed
	now    float64
	firsts map[int32]float64
	ends   map[int32]float64
	tokens map[int32]int
}

func mixed(ranks int, change func(g *Mixed)) *bench {
	b := &bench{firsts: map[int32]float64{}, ends: map[int32]float64{}, tokens: map[int32]int{}}
	b.Mixed = Mixed{Law: step.Law{Model: step.Model{C0Ms: 10, OwnPromptMs: 0.1}}, Budget: 100, Slots: 4, Ranks: make([]MixedRank, ranks),
		Ends: Never}
	b.Cached = func(int, *MixedRequest) int32 { return 0 }
	b.Token = func(_ int, w *MixedRequest) {
		if b.tokens[w.Job]++; w.Gen == 1 {
			b.firsts[w.Job] = b.now
		}
	}
	b.Finished = func(_ int, w *MixedRequest) { b.ends[w.Job] = b.now }
	if change != nil {
		change(&b.Mixed)
	}
	return b
}

// steps runs so many, and says how long each took.
func (b *bench) steps(n int) (lengths []float64) {
	for range n {
		b.Begin(b.now)
		if b.Ends == Never {
			return lengths
		}
		lengths = append(lengths, b.Ends-b.now)
		b.now = b.Ends
		b.Finish()
	}
	return lengths
}

func equal(t *testing.T, want, got []float64) {
	t.Helper()
	require.InDeltaSlice(t, want, got, 1e-9)
}

func TestALawOfSteps(t *testing.T) {
	b := mixed(2, func(g *Mixed) {
		g.Law.Model = step.Model{C0Ms: 10, RequestMs: 1, C1Ms: 0.01, OwnPromptMs: 0.1, SharedPromptMs: 0.2, PrefillMs: 5}
	})
	b.Add(0, MixedRequest{Job: 1, Prompt: 50, Left: 3})
	b.Add(1, MixedRequest{Job: 2, Prompt: 30, Left: 2})
	equal(t, []float64{
		10 + 0.1*50 + 0.2*80/2 + 5, // both compute
		10 + 1 + 0.01*51,           // the first one reads more
		10 + 1 + 0.01*52,
	}, b.steps(9))
}

func TestAPromptIsComputedInChunksBesideDecodes(t *testing.T) {
	b := mixed(1, nil)
	b.Add(0, MixedRequest{Job: 1, Prompt: 10, Left: 9})
	equal(t, []float64{11}, b.steps(1))
	b.Add(0, MixedRequest{Job: 2, Prompt: 250, Left: 1})
	equal(t, []float64{10 + 9.9, 10 + 9.9, 10 + 5.2, 10}, b.steps(4)) // 99 beside the decode, 99, and the last 52
	require.InDelta(t, 11+19.9+19.9+15.2, b.firsts[2], 1e-9)
	require.Equal(t, 5, b.tokens[1], "decodes are not delayed inside a rank")
}

func TestPromptsWaitForTheInterval(t *testing.T) {
	b := mixed(1, func(g *Mixed) { g.Interval = 3 })
	b.Add(0, MixedRequest{Job: 1, Prompt: 10, Left: 20})
	b.steps(2) // the second one is number 1
	b.Add(0, MixedRequest{Job: 2, Prompt: 10, Left: 1})
	equal(t, []float64{10, 11}, b.steps(2))
	for job := range int32(5) { // more than slots: the step after computes on
		b.Add(0, MixedRequest{Job: 10 + job, Prompt: 60, Left: 1})
	}
	equal(t, []float64{10, 10, 19.9, 19.9, 19.9, 10.3, 10, 10}, b.steps(8)) // the last three tokens come in time again
}

func TestPromptsWaitAfterAStepWithPrompts(t *testing.T) {
	b := mixed(2, func(g *Mixed) { g.Interval, g.AfterPrompts = 3, true })
	b.Add(0, MixedRequest{Job: 1, Prompt: 10, Left: 30})
	equal(t, []float64{11, 10, 10, 10, 10}, b.steps(5))
	b.Add(1, MixedRequest{Job: 2, Prompt: 10, Left: 1})
	equal(t, []float64{11}, b.steps(1)) // nothing was computed for so long that it begins at once
	b.Add(1, MixedRequest{Job: 3, Prompt: 10, Left: 1})
	equal(t, []float64{10, 10, 11, 10, 10}, b.steps(5)) // it waits for the other rank, although its own decodes nothing
	b.Drop(0, 1)
	b.Add(0, MixedRequest{Job: 4, Prompt: 10, Left: 1})
	b.Add(0, MixedRequest{Job: 5, Prompt: 10, Left: 1})
	equal(t, []float64{12}, b.steps(1))
	b.Add(0, MixedRequest{Job: 6, Prompt: 10, Left: 1})
	equal(t, []float64{11}, b.steps(1)) // no rank decodes, so none rests
}

func TestTheDelayerHoldsPromptsUntilEachRankHasOne(t *testing.T) {
	b := mixed(2, func(g *Mixed) { g.Delay = 3 })
	b.Add(0, MixedRequest{Job: 1, Prompt: 10, Left: 30})
	equal(t, []float64{11}, b.steps(1)) // nothing runs, so nothing is held
	b.Add(0, MixedRequest{Job: 2, Prompt: 10, Left: 30})
	equal(t, []float64{10, 10, 11}, b.steps(3)) // held for two passes
	b.Add(0, MixedRequest{Job: 3, Prompt: 10, Left: 30})
	equal(t, []float64{10}, b.steps(1))
	b.Add(1, MixedRequest{Job: 4, Prompt: 10, Left: 30})
	equal(t, []float64{11}, b.steps(1))
	b.Add(0, MixedRequest{Job: 5, Prompt: 200, Left: 30})
	b.Add(1, MixedRequest{Job: 6, Prompt: 10, Left: 30})
	equal(t, []float64{10 + 9.7}, b.steps(1)) // 97 beside three decodes; the prompt of 10 takes less
	b.Add(1, MixedRequest{Job: 7, Prompt: 20, Left: 30})
	equal(t, []float64{10 + 9.7}, b.steps(1)) // one rank goes on with its prompt, so that both have one
	require.Len(t, b.Ranks[1].Waiting, 0)
	equal(t, []float64{10 + 0.6}, b.steps(1))
	b.Add(1, MixedRequest{Job: 8, Prompt: 10, Left: 30})
	equal(t, []float64{10, 11}, b.steps(2)) // the pass in which one rank went on counts
}

func TestTheLastAdmittedIsPreemptedAndComputedAgain(t *testing.T) {
	b := mixed(1, func(g *Mixed) { g.KVCapacity = 42 })
	b.Add(0, MixedRequest{Job: 1, Prompt: 20, Left: 6})
	b.Add(0, MixedRequest{Job: 2, Prompt: 20, Left: 6})
	// 21 of the second one are computed again when the first has left
	equal(t, []float64{14, 10, 10, 10, 10, 10, 12.1, 10, 10, 10, 10}, b.steps(20))
	require.Equal(t, map[int32]int{1: 6, 2: 6}, b.tokens)
	require.Zero(t, b.Ranks[0].KV)
}

// A request holds whole blocks: the second prompt fits only if the room is counted in tokens.
func TestBlocksAreHeldWhole(t *testing.T) {
	for block, waiting := range map[int64]int{1: 0, 10: 1} {
		b := mixed(1, func(g *Mixed) { g.KVCapacity, g.Block = 40, block })
		b.Add(0, MixedRequest{Job: 1, Prompt: 19, Left: 9})
		b.steps(2)
		b.Add(0, MixedRequest{Job: 2, Prompt: 12, Left: 1})
		b.steps(1)
		require.Len(t, b.Ranks[0].Waiting, waiting, "blocks of %d", block)
		b.steps(9)
		require.Equal(t, map[int32]int{1: 9, 2: 1}, b.tokens)
	}
}

func TestARankThatComputesFirstDoesNotDecodeMeanwhile(t *testing.T) {
	b := mixed(2, func(g *Mixed) { g.PrefillFirst = true })
	b.Add(0, MixedRequest{Job: 1, Prompt: 10, Left: 9})
	b.Add(1, MixedRequest{Job: 2, Prompt: 10, Left: 9})
	b.steps(1)
	b.Add(0, MixedRequest{Job: 3, Prompt: 150, Left: 1})
	equal(t, []float64{10 + 10, 10 + 5, 10}, b.steps(3)) // the whole budget, as no decode takes of it
	require.Equal(t, map[int32]int{1: 2, 2: 4, 3: 1}, b.tokens, "the other rank goes on")
}

func TestADroppedRequestLeavesItsSlotAndRoom(t *testing.T) {
	b := mixed(1, func(g *Mixed) { g.Slots, g.Budget = 2, 20 })
	for job := range int32(3) {
		b.Add(0, MixedRequest{Job: job, Prompt: 30, Left: 5})
	}
	b.steps(2)
	require.Len(t, b.Ranks[0].Running, 2)
	b.Drop(0, 2) // waits
	b.Drop(0, 1) // is computed
	b.Drop(0, 7) // is not there
	require.Empty(t, b.Ranks[0].Waiting)
	b.Begin(b.now)
	b.Drop(0, 0) // decodes
	require.Zero(t, b.Ranks[0].KV)
	require.Empty(t, b.Ranks[0].Running)
	b.Finish()
	require.Empty(t, b.steps(1))
	require.Equal(t, map[int32]int{0: 1}, b.tokens)
}

func TestEachChunkIsTold(t *testing.T) {
	var done []int
	b := mixed(1, func(g *Mixed) {
		g.Cached = func(int, *MixedRequest) int32 { return 30 }
		g.Computed = func(_ int, w *MixedRequest) { done = append(done, w.Done()) }
	})
	b.Add(0, MixedRequest{Job: 1, Prompt: 250, Left: 3})
	b.steps(9)
	require.Equal(t, []int{130, 230, 250}, done)
}

func TestWhatIsCachedIsNotComputed(t *testing.T) {
	b := mixed(1, nil)
	b.Cached = func(int, *MixedRequest) int32 { return 1000 }
	b.Add(0, MixedRequest{Job: 1, Prompt: 90, Left: 1})
	equal(t, []float64{10.1}, b.steps(1)) // but its last token is
}

// Each request gets its tokens, and every rank keeps to slots, budget and room.
func TestMixedRanksServeAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := mixed(rapid.IntRange(1, 4).Draw(t, "ranks"), func(g *Mixed) {
			g.Budget = rapid.Int32Range(5, 50).Draw(t, "budget") // above the slots, as engines want it
			g.Slots = rapid.IntRange(1, 4).Draw(t, "slots")
			g.KVCapacity = rapid.SampledFrom([]int64{0, 130, 300}).Draw(t, "room") // any request fits alone
			g.Interval = rapid.Int64Range(0, 3).Draw(t, "interval")
			g.Delay = rapid.IntRange(0, 4).Draw(t, "delay")
			g.PrefillFirst = rapid.Bool().Draw(t, "first")
			g.Block = rapid.Int64Range(0, 9).Draw(t, "block")
		})
		want := map[int32]int{}
		for job := range rapid.Int32Range(1, 20).Draw(t, "requests") {
			w := MixedRequest{Job: job, Prompt: rapid.Int32Range(1, 100).Draw(t, "prompt"), Left: rapid.Int32Range(1, 20).Draw(t, "answer")}
			want[job] = int(w.Left)
			b.Add(rapid.IntRange(0, len(b.Ranks)-1).Draw(t, "rank"), w)
			b.steps(rapid.IntRange(0, 4).Draw(t, "steps"))
			for i := range b.Ranks {
				r := &b.Ranks[i]
				require.LessOrEqual(t, len(r.Running), b.Slots)
				sum := int64(0)
				for _, w := range r.Running {
					sum += b.wholeBlocks(w.kvTokens())
				}
				require.Equal(t, sum, r.KV)
				require.True(t, b.KVCapacity == 0 || len(r.Running) < 2 || r.KV <= b.KVCapacity, "%d of %d", r.KV, b.KVCapacity)
			}
		}
		b.steps(100_000)
		require.Equal(t, Never, b.Ends, "it rests")
		require.Equal(t, want, b.tokens)
		require.Len(t, b.ends, len(want))
	})
}

// What ranks do in their steps teaches the law that made these long, also where some have several
// prompts and others none.
func TestTheStepsOfMixedRanksTeachTheirLaw(t *testing.T) {
	for _, c := range []struct {
		name string
		law  step.Model
		rate float64 // requests per second
	}{
		{"requests cost nothing", step.Model{C0Ms: 20, C1Ms: 2e-4, OwnPromptMs: 0.07, SharedPromptMs: 0.05, PrefillMs: 12}, 5},
		{"requests cost something", step.Model{C0Ms: 15, C1Ms: 1e-4, RequestMs: 0.3, OwnPromptMs: 0.08, SharedPromptMs: 0.03, PrefillMs: 3}, 5},
		{"a prefill takes no more than its tokens", step.Model{C0Ms: 40, C1Ms: 2e-4, OwnPromptMs: 0.05, SharedPromptMs: 0.05}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			b := mixed(4, func(g *Mixed) { g.Law.Model, g.Budget, g.Slots = c.law, 4096, 48 })
			// which share of a prompt is the rank's own is told
			s := step.Times{Configured: step.Model{OwnPromptMs: c.law.OwnPromptMs, SharedPromptMs: c.law.SharedPromptMs}}
			coming, job := 0., int32(0)
			for s.Samples() < 9000 {
				for ; coming <= b.now; coming += 1000 / c.rate * rng.ExpFloat64() {
					job++
					least := 0 // the rank that holds least, as a router would have it
					for i := range b.Ranks {
						if held(&b.Ranks[i]) < held(&b.Ranks[least]) {
							least = i
						}
					}
					b.Add(least, MixedRequest{Job: job, Prompt: 1 + int32(min(30_000, 1500*math.Exp(rng.NormFloat64()))),
						Left: 1 + int32(300*rng.ExpFloat64())})
				}
				if b.Begin(b.now); b.Ends == Never {
					b.now = coming
					continue
				}
				lasts := (b.Ends - b.now) * (1 + 0.01*rng.NormFloat64())
				if rng.IntN(100) == 0 {
					lasts *= 8 // an engine stood still
				}
				length := time.Duration(lasts * float64(time.Millisecond))
				s.Add(length)
				s.Learn(step.Sample{Ranks: b.RankWork, Tokens: 1, Length: length})
				b.now = b.Ends
				b.Finish()
			}
			m, source, r2 := s.Model()
			t.Logf("%+v, R2 %.2f", m, r2)
			require.Equal(t, step.Learned, source)
			require.InEpsilon(t, c.law.C0Ms, m.C0Ms, 0.05)
			require.InEpsilon(t, c.law.C1Ms, m.C1Ms, 0.1)
			require.InDelta(t, c.law.RequestMs, m.RequestMs, 0.1*c.law.RequestMs)
			require.InEpsilon(t, c.law.OwnPromptMs+c.law.SharedPromptMs, m.OwnPromptMs+m.SharedPromptMs, 0.03)
			require.InEpsilon(t, c.law.OwnPromptMs, m.OwnPromptMs, 0.05)
			require.InDelta(t, c.law.PrefillMs, m.PrefillMs, 1.5)
		})
	}
}

// held are the tokens of what runs on a rank and waits there.
func held(r *MixedRank) int64 {
	sum := r.KV
	for _, w := range r.Waiting {
		sum += int64(w.Prompt)
	}
	return sum
}
