package refengine

import (
	"cmp"
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/refengine/cache"
	"evenkeel/bench/refengine/steplog"
)

// clocked runs a group in a bubble, where time stands still until everyone waits.
func clocked(t *testing.T, cfg Config, f func(g *group)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.C0 = cmp.Or(cfg.C0, 10*time.Millisecond)
		cfg.C1 = cmp.Or(cfg.C1, time.Microsecond)
		cfg = cfg.WithDefaults()
		require.NoError(t, cfg.Validate())
		g := newGroup(cfg, &counters{}, steplog.New(1000, "", nil))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); g.run(ctx) }()
		f(g)
		cancel()
		<-done
	})
}

func (g *group) put(rank, prompt, want int) *job {
	j := newJob(rank, make([]int32, prompt), "", false, want)
	g.inbox.post(message{kind: submit, job: j})
	synctest.Wait()
	return j
}

func TestTheSlowestRankSetsTheStep(t *testing.T) {
	clocked(t, Config{DPSize: 2, PrefillBase: 1, PrefillPerToken: 1}, func(g *group) {
		long, short := g.put(0, 1000, 3), g.put(1, 10, 3)
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, finished, long.end.Load())
		require.Equal(t, finished, short.end.Load())
		steps := g.log.All()
		require.Len(t, steps, 4, "the second came when the first's step had begun")
		require.Equal(t, []steplog.RankLoad{{Running: 1, KVTokens: 1000}, {}}, steps[0].Ranks)
		require.Equal(t, []steplog.RankLoad{{Running: 1, KVTokens: 1001}, {Running: 1, KVTokens: 10}}, steps[1].Ranks)
		require.Equal(t, 10*time.Millisecond+1002*time.Microsecond, steps[2].Length)
		require.Equal(t, []steplog.RankLoad{{}, {Running: 1, KVTokens: 12}}, steps[3].Ranks)
		for i, s := range steps {
			require.Zero(t, s.Late)
			if i > 0 {
				require.Equal(t, steps[i-1].Start.Add(steps[i-1].Length), s.Start, "no gap between steps")
			}
		}
	})
}

func TestALocalPrefillHoldsUpTheWholeGroup(t *testing.T) {
	clocked(t, Config{DPSize: 2, PrefillBase: time.Second, PrefillPerToken: time.Millisecond}, func(g *group) {
		g.put(0, 500, 2)
		time.Sleep(10 * time.Second)
		steps := g.log.All()
		require.Equal(t, 1510*time.Millisecond+500*time.Microsecond, steps[0].Length)
		require.Less(t, steps[1].Length, 12*time.Millisecond)
		require.EqualValues(t, 1, g.count.LocalPrefills.Load())
	})
}

func TestALocalPrefillComputesWhatTheCacheDoesNotHave(t *testing.T) {
	clocked(t, Config{DPSize: 2, PrefillBase: time.Second, PrefillPerToken: time.Millisecond}, func(g *group) {
		g.caches[0] = cache.New(100, nil)
		for i, want := range []time.Duration{1510*time.Millisecond + 500*time.Microsecond, (1510-384)*time.Millisecond + 500*time.Microsecond} { // three blocks
			j := g.put(0, 500, 1)
			time.Sleep(10 * time.Second)
			require.Equal(t, want, g.log.All()[i].Length)
			require.EqualValues(t, 384*i, j.cached.Load())
		}
	})
}

func TestSlotsAreGivenInOrderOfArrival(t *testing.T) {
	clocked(t, Config{Slots: 2}, func(g *group) {
		a, b, c, d := g.put(0, 10, 5), g.put(0, 10, 3), g.put(0, 10, 1), g.put(0, 10, 1)
		require.EqualValues(t, 2, g.count.OverAdmitted.Load(), "two more than slots")
		require.EqualValues(t, 4, g.ranks[0].gauges.most.Load())
		ended := func() (n int) {
			for _, j := range []*job{b, c, a, d} {
				if j.end.Load() != finished {
					break
				}
				n++
			}
			return n
		}
		last := 0
		for range 200 {
			time.Sleep(time.Millisecond)
			synctest.Wait()
			require.GreaterOrEqual(t, ended(), last)
			last = ended()
		}
		require.Equal(t, 4, last)
	})
}

// Whoever sends a request beyond the slots on purpose says so. That is no mistake.
func TestRequestsSentBeyondTheSlotsAreNotOverAdmitted(t *testing.T) {
	clocked(t, Config{Slots: 1}, func(g *group) {
		g.put(0, 10, 5)
		on := newJob(0, make([]int32, 10), "", false, 1)
		on.beyond = true
		g.inbox.post(message{kind: submit, job: on})
		synctest.Wait()
		require.Zero(t, g.count.OverAdmitted.Load())
		g.put(0, 10, 1)
		require.EqualValues(t, 1, g.count.OverAdmitted.Load())
	})
}

func TestPulledKVIsChargedBeforeItHasASlot(t *testing.T) {
	clocked(t, Config{Slots: 1, KVTokens: 4 * blockSize}, func(g *group) {
		g.put(0, 100, 1000)
		second, third := newJob(0, make([]int32, 100), "", true, 1), newJob(0, make([]int32, 300), "", true, 1)
		g.inbox.post(message{kind: submit, job: second})
		g.inbox.post(message{kind: submit, job: third})
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		select {
		case <-second.granted:
		default:
			require.Fail(t, "there was room for the second")
		}
		select {
		case <-third.granted:
			require.Fail(t, "the third has no blocks")
		default:
		}
		g.inbox.post(message{kind: landed, job: second, want: 1})
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, goingOn, second.end.Load(), "no slot")
		last := g.log.All()
		require.Equal(t, 1, last[len(last)-1].Ranks[0].Running, "capacity, not load")
		g.inbox.post(message{kind: cancel, job: second})
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		_, open := <-third.granted
		require.False(t, open)
	})
}

func TestOverflowTakesTheLatestAdmitted(t *testing.T) {
	for _, enabled := range []bool{true, false} {
		clocked(t, Config{KVTokens: 3 * blockSize, RecomputeEnable: enabled}, func(g *group) {
			first, second := g.put(0, 100, 200), g.put(0, 120, 30)
			time.Sleep(20 * time.Second)
			synctest.Wait()
			require.Equal(t, finished, first.end.Load())
			if enabled {
				require.Equal(t, recomputed, second.end.Load())
				require.EqualValues(t, 1, g.count.Preemptions.Load())
			} else {
				require.Equal(t, finished, second.end.Load(), "recomputed in place, invisible")
				require.EqualValues(t, 30, second.made.Load())
			}
		})
	}
}

func TestARankNeverHoldsMoreThanItsKVExceptByOneRequest(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		capacity := rapid.IntRange(2, 8).Draw(rt, "blocks")
		type ask struct{ prompt, want, gap int }
		asks := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) ask {
			return ask{rapid.IntRange(1, capacity*blockSize-1).Draw(t, "prompt"), rapid.IntRange(1, 150).Draw(t, "want"), rapid.IntRange(0, 40).Draw(t, "gap")}
		}), 1, 12).Draw(rt, "requests")
		enabled := rapid.Bool().Draw(rt, "recompute")
		clocked(t, Config{Slots: 3, KVTokens: capacity * blockSize, RecomputeEnable: enabled, StepLog: 100_000}, func(g *group) {
			var jobs []*job
			for _, a := range asks {
				jobs = append(jobs, g.put(0, a.prompt, a.want))
				time.Sleep(time.Duration(a.gap) * time.Millisecond)
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			for _, j := range jobs {
				require.NotEqual(t, goingOn, j.end.Load(), "everyone ends")
			}
			for _, s := range g.log.All() {
				r := s.Ranks[0]
				require.LessOrEqual(t, r.Running, 3)
				if r.Running > 1 {
					require.LessOrEqual(t, r.KVTokens, capacity*blockSize)
				}
			}
			require.Zero(t, g.ranks[0].gauges.kvBlocks.Load())
		})
	})
}

func TestPrefillIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{PrefillBase: 10 * time.Millisecond, PrefillPerToken: time.Millisecond, KVTokens: 2 * blockSize}.WithDefaults()
		r := newPrefillRank(cfg, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.run(ctx) }()
		began := time.Now()
		at := make([]time.Duration, 4)
		var frees []func()
		contexts := make([]context.CancelFunc, 4)
		for i := range at {
			var jctx context.Context
			jctx, contexts[i] = context.WithCancel(ctx)
			r.add(&prefillJob{ctx: jctx, ids: make([]int32, 100), done: func(_ int, free func()) {
				at[i] = time.Since(began)
				frees = append(frees, free)
			}})
		}
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []time.Duration{110 * time.Millisecond, 220 * time.Millisecond, 0, 0}, at, "the KV cache holds two prompts")
		contexts[2]() // its client leaves
		frees[0]()
		time.Sleep(time.Second)
		synctest.Wait()
		require.Zero(t, at[2])
		require.Equal(t, 1110*time.Millisecond, at[3])
		for _, stop := range contexts {
			stop()
		}
		cancel()
		<-done
	})
}
