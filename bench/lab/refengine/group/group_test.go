package group

import (
	"cmp"
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/dispatcher/step"
)

// clocked runs a group in a bubble, where time stands still until everyone waits.
func clocked(t *testing.T, cfg Config, f func(g *Group)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.C0 = cmp.Or(cfg.C0, 10*time.Millisecond)
		cfg.C1 = cmp.Or(cfg.C1, time.Microsecond)
		cfg.Ranks, cfg.Slots, cfg.Blocks, cfg.TokensPerChunk = cmp.Or(cfg.Ranks, 1), cmp.Or(cfg.Slots, 32), cmp.Or(cfg.Blocks, 4096), 1
		cfg.PrefillBase, cfg.PrefillPer = cmp.Or(cfg.PrefillBase, 9*time.Millisecond), cmp.Or(cfg.PrefillPer, 9*time.Microsecond)
		var c struct{ overAdmitted, preemptions, localPrefills, tokens atomic.Int64 }
		g := New(cfg, Counts{
			OverAdmitted: &c.overAdmitted, Preemptions: &c.preemptions, LocalPrefills: &c.localPrefills, Tokens: &c.tokens,
		}, steplog.New(1000, "", nil),
			make([]*cache.Cache, cfg.Ranks))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); g.Run(ctx) }()
		f(g)
		cancel()
		<-done
	})
}

func (g *Group) put(rank, prompt, want int) *Job {
	j := NewJob(rank, make([]int32, prompt), "", false, want)
	g.Submit(j)
	synctest.Wait()
	return j
}

func TestTheSlowestRankSetsTheStep(t *testing.T) {
	clocked(t, Config{Ranks: 2, PrefillBase: 1, PrefillPer: 1}, func(g *Group) {
		long, short := g.put(0, 1000, 3), g.put(1, 10, 3)
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, Finished, long.End.Load())
		require.Equal(t, Finished, short.End.Load())
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

// The third step has a rank with one long prompt, and another one with three short ones. Who pays
// for what in it depends on how the engine pads: there are graphs for 1, 2 and 4 requests.
func TestStepsOfEachForm(t *testing.T) {
	for form, want := range map[step.Form]time.Duration{
		step.Eager:      10*time.Millisecond + (33+3*1000)*time.Microsecond + 3*2*time.Millisecond + 2*3*time.Millisecond,
		step.Unmasked:   10*time.Millisecond + (1002+4*1000)*time.Microsecond + 4*2*time.Millisecond + 4*3*time.Millisecond,
		step.Masked:     10*time.Millisecond + (1002+4*1000)*time.Microsecond + 4*2*time.Millisecond + 2*3*time.Millisecond,
		step.OwnBuckets: 10*time.Millisecond + (33+4*1000)*time.Microsecond + 4*2*time.Millisecond + 2*3*time.Millisecond,
	} {
		t.Run(form.String(), func(t *testing.T) {
			cfg := Config{Ranks: 2, PrefillBase: 1, PrefillPer: 1, CR: time.Millisecond, CM: 2 * time.Millisecond, CS: 3 * time.Millisecond,
				Form: form, Captured: 4}
			clocked(t, cfg, func(g *Group) {
				g.put(0, 1000, 4)
				for range 3 {
					g.put(1, 10, 4)
				}
				time.Sleep(time.Second)
				full := g.log.All()[2]
				require.Equal(t, []steplog.RankLoad{{Running: 1, KVTokens: 1002}, {Running: 3, KVTokens: 33}}, full.Ranks)
				require.Equal(t, want, full.Length)
			})
		})
	}
}

// In each step, every rank but the slowest waits for it.
func TestRanksCountHowLongTheyWait(t *testing.T) {
	clocked(t, Config{Ranks: 3, CR: time.Millisecond, PrefillBase: 1, PrefillPer: 1}, func(g *Group) {
		g.put(0, 1000, 4)
		g.put(1, 300, 3) // which begin in the second step
		g.put(1, 300, 3)
		time.Sleep(time.Second)
		synctest.Wait()
		for i, want := range []struct {
			waited       time.Duration
			pairs, fewer int64
		}{ // steps: 1000|0|0, 1001|600|0, 1002|602|0, 1003|604|0, by KV; a request is worth 1000 of them
			{(600 - 1) + (602 - 2) + (604 - 3), 1000 + 1001 + 1002 + 1003, 0},
			{2000, 600 + 602 + 604, 1000 + 401 + 400 + 399},
			{2000 + 2600 + 2602 + 2604, 0, 1000 + 1001 + 1002 + 1003},
		} {
			on := g.Gauges(i)
			require.EqualValues(t, 4, on.Steps.Load(), "rank %d", i)
			require.InDelta(t, want.waited*time.Microsecond, on.WaitNanos.Load(), 3000, "rank %d", i) // with local prefills of about 1000 ns
			require.Equal(t, []int64{want.pairs, want.fewer}, []int64{on.Pairs.Load(), on.FewerPairs.Load()}, "rank %d", i)
		}
	})
	clocked(t, Config{}, func(g *Group) {
		g.put(0, 10, 3)
		time.Sleep(time.Second)
		require.Zero(t, g.Gauges(0).Steps.Load(), "one rank waits for no other")
	})
}

func TestALocalPrefillHoldsUpTheWholeGroup(t *testing.T) {
	clocked(t, Config{Ranks: 2, PrefillBase: time.Second, PrefillPer: time.Millisecond}, func(g *Group) {
		g.put(0, 500, 2)
		time.Sleep(10 * time.Second)
		steps := g.log.All()
		require.Equal(t, 1510*time.Millisecond+500*time.Microsecond, steps[0].Length)
		require.EqualValues(t, 1500*time.Millisecond+1001*time.Microsecond, g.Gauges(1).WaitNanos.Load(),
			"for the prefill, too, and in the second step for the KV")
		require.Zero(t, g.Gauges(0).WaitNanos.Load())
		require.Less(t, steps[1].Length, 12*time.Millisecond)
		require.EqualValues(t, 1, g.count.LocalPrefills.Load())
	})
}

func TestALocalPrefillComputesWhatTheCacheDoesNotHave(t *testing.T) {
	clocked(t, Config{Ranks: 2, PrefillBase: time.Second, PrefillPer: time.Millisecond}, func(g *Group) {
		g.caches[0] = cache.New(100, nil)
		// three blocks
		for i, want := range []time.Duration{1510*time.Millisecond + 500*time.Microsecond, (1510-384)*time.Millisecond + 500*time.Microsecond} {
			j := g.put(0, 500, 1)
			time.Sleep(10 * time.Second)
			require.Equal(t, want, g.log.All()[i].Length)
			require.EqualValues(t, 384*i, j.Cached.Load())
		}
	})
}

func TestSlotsAreGivenInOrderOfArrival(t *testing.T) {
	clocked(t, Config{Slots: 2}, func(g *Group) {
		a, b, c, d := g.put(0, 10, 5), g.put(0, 10, 3), g.put(0, 10, 1), g.put(0, 10, 1)
		require.EqualValues(t, 2, g.count.OverAdmitted.Load(), "two more than slots")
		require.EqualValues(t, 4, g.ranks[0].gauges.Most.Load())
		ended := func() (n int) {
			for _, j := range []*Job{b, c, a, d} {
				if j.End.Load() != Finished {
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
	clocked(t, Config{Slots: 1}, func(g *Group) {
		g.put(0, 10, 5)
		on := NewJob(0, make([]int32, 10), "", false, 1)
		on.Beyond = true
		g.Submit(on)
		synctest.Wait()
		require.Zero(t, g.count.OverAdmitted.Load())
		g.put(0, 10, 1)
		require.EqualValues(t, 1, g.count.OverAdmitted.Load())
	})
}

func TestPulledKVIsChargedBeforeItHasASlot(t *testing.T) {
	clocked(t, Config{Slots: 1, Blocks: 4}, func(g *Group) {
		g.put(0, 100, 1000)
		second, third := NewJob(0, make([]int32, 100), "", true, 1), NewJob(0, make([]int32, 300), "", true, 1)
		g.Submit(second)
		g.Submit(third)
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		select {
		case <-second.Granted:
		default:
			require.Fail(t, "there was room for the second")
		}
		select {
		case <-third.Granted:
			require.Fail(t, "the third has no blocks")
		default:
		}
		g.Landed(second, 1, false)
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, GoingOn, second.End.Load(), "no slot")
		last := g.log.All()
		require.Equal(t, 1, last[len(last)-1].Ranks[0].Running, "capacity, not load")
		g.Cancel(second)
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		_, open := <-third.Granted
		require.False(t, open)
	})
}

func TestOverflowTakesTheLatestAdmitted(t *testing.T) {
	for _, enabled := range []bool{true, false} {
		clocked(t, Config{Blocks: 3, Recompute: enabled}, func(g *Group) {
			first, second := g.put(0, 100, 200), g.put(0, 120, 30)
			time.Sleep(20 * time.Second)
			synctest.Wait()
			require.Equal(t, Finished, first.End.Load())
			if enabled {
				require.Equal(t, Recomputed, second.End.Load())
				require.EqualValues(t, 1, g.count.Preemptions.Load())
			} else {
				require.Equal(t, Finished, second.End.Load(), "recomputed in place, invisible")
				require.EqualValues(t, 30, second.Made.Load())
			}
		})
	}
}

func TestARankNeverHoldsMoreThanItsKVExceptByOneRequest(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		capacity := rapid.IntRange(2, 8).Draw(rt, "blocks")
		type ask struct{ prompt, want, gap int }
		asks := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) ask {
			return ask{rapid.IntRange(1, capacity*cache.BlockSize-1).Draw(t, "prompt"), rapid.IntRange(1, 150).Draw(t, "want"),
				rapid.IntRange(0, 40).Draw(t, "gap")}
		}), 1, 12).Draw(rt, "requests")
		enabled := rapid.Bool().Draw(rt, "recompute")
		clocked(t, Config{Slots: 3, Blocks: capacity, Recompute: enabled}, func(g *Group) {
			var jobs []*Job
			for _, a := range asks {
				jobs = append(jobs, g.put(0, a.prompt, a.want))
				time.Sleep(time.Duration(a.gap) * time.Millisecond)
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			for _, j := range jobs {
				require.NotEqual(t, GoingOn, j.End.Load(), "everyone ends")
			}
			for _, s := range g.log.All() {
				r := s.Ranks[0]
				require.LessOrEqual(t, r.Running, 3)
				if r.Running > 1 {
					require.LessOrEqual(t, r.KVTokens, capacity*cache.BlockSize)
				}
			}
			require.Zero(t, g.ranks[0].gauges.KVBlocks.Load())
		})
	})
}

func TestAFirstTokenMayComeAtOnce(t *testing.T) {
	clocked(t, Config{FirstAtOnce: true, PrefillBase: 1, PrefillPer: 1}, func(g *Group) {
		first := g.put(0, 10, 3)
		require.EqualValues(t, 1, first.Made.Load(), "the group was idle")
		time.Sleep(4 * time.Millisecond)
		second, single := g.put(0, 10, 3), g.put(0, 10, 1)
		require.EqualValues(t, 1, second.Made.Load(), "in the middle of a step")
		require.Equal(t, Finished, single.End.Load())
		time.Sleep(7 * time.Millisecond) // the step has ended
		synctest.Wait()
		require.EqualValues(t, 2, first.Made.Load())
		require.EqualValues(t, 2, second.Made.Load())
	})
}

func TestAPhaseSaysWhenStepsEnd(t *testing.T) {
	clocked(t, Config{FirstAtOnce: true, PrefillBase: 1, PrefillPer: 1, C1: 1, Phase: 3 * time.Millisecond}, func(g *Group) {
		time.Sleep(5 * time.Millisecond) // the bubble's clock began at a whole second
		j := g.put(0, 10, 3)
		require.EqualValues(t, 1, j.Made.Load())
		time.Sleep(9 * time.Millisecond) // 4 ms after the end of the step that was under way
		synctest.Wait()
		require.EqualValues(t, 2, j.Made.Load())
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 3, j.Made.Load())
	})
}

func TestTokensOfAStepMayComeOneAfterTheOther(t *testing.T) {
	const requests = 20
	step := 20 * time.Millisecond
	clocked(t, Config{FirstAtOnce: true, Spread: true, C0: step, C1: 1, PrefillBase: 1, PrefillPer: 1}, func(g *Group) {
		var jobs []*Job
		for range requests {
			jobs = append(jobs, g.put(0, 10, 4))
		}
		var came [requests]time.Duration // when each had its second token
		began := time.Now()
		for tick := range 80 { // four steps
			time.Sleep(time.Millisecond)
			synctest.Wait()
			together := 0
			for i, j := range jobs {
				if made := j.Made.Load(); made == 2 && came[i] == 0 {
					came[i] = time.Since(began)
					together++
				} else if made == 3 {
					require.GreaterOrEqual(t, time.Since(began)-came[i], step-time.Millisecond, "a step lies between two tokens of request %d", i)
				}
			}
			require.LessOrEqual(t, together, 3, "second tokens in millisecond %d", tick)
		}
		for i, j := range jobs {
			require.Equal(t, Finished, j.End.Load(), "request %d", i)
		}
	})
}
