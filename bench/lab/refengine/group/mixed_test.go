package group

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine/cache"
)

// aggregated are two ranks whose steps take 10 ms, and 0.1 ms for each token of a prompt.
func aggregated(how Mixed) Config {
	if how.Budget == 0 {
		how.Budget = 100
	}
	return Config{Ranks: 2, Slots: 4, C1: 1, PrefillBase: 1, PrefillPer: 100 * time.Microsecond, Mixed: &how}
}

// scheduled writes each step: of each rank how many requests decode and how many tokens of prompts
// it computes.
func (g *Group) scheduled() string {
	var steps []string
	for _, s := range g.log.All() {
		var ranks []string
		for _, r := range s.Ranks {
			ranks = append(ranks, fmt.Sprintf("%d+%d", r.Running, r.Prefill))
		}
		steps = append(steps, strings.Join(ranks, "|"))
	}
	return strings.Join(steps, " ")
}

type ask struct{ after, rank, prompt, want int } // after: steps that have begun

// Each step is "decodes+prompt tokens" of rank 0, and of rank 1.
func TestAggregatedRanksScheduleAsVLLM(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    Config
		asks   []ask
		want   string
		evicts int
	}{
		"a prompt is computed in chunks, and its last one makes the first token": {
			aggregated(Mixed{}), []ask{{0, 0, 250, 3}}, "0+100|0+0 0+100|0+0 0+50|0+0 1+0|0+0 1+0|0+0", 0,
		},
		"decodes come first and take of the budget, the rest of it is for prompts in the order in which they came": {
			aggregated(Mixed{}), []ask{{0, 0, 10, 6}, {1, 0, 150, 2}, {1, 0, 60, 1}, {1, 0, 60, 1}},
			"0+10|0+0 1+99|0+0 1+99|0+0 2+72|0+0 1+0|0+0 1+0|0+0", 0,
		},
		"several prompts share a step, and each rank has a budget of its own": {
			aggregated(Mixed{}), []ask{{0, 0, 40, 1}, {1, 0, 40, 1}, {1, 0, 70, 1}, {1, 1, 90, 1}}, "0+40|0+0 0+100|0+90 0+10|0+0", 0,
		},
		"a slot is free only when a request has ended": {
			aggregated(Mixed{}), []ask{{0, 0, 10, 2}, {0, 0, 10, 9}, {0, 0, 10, 9}, {0, 0, 10, 9}, {0, 0, 10, 1}},
			"0+10|0+0 1+30|0+0 3+10|0+0 3+0|0+0 3+0|0+0 3+0|0+0 3+0|0+0 3+0|0+0 3+0|0+0 3+0|0+0", 0,
		},
		"a prompt waits until all of it fits, and who came later waits behind it": {
			func() Config { c := aggregated(Mixed{Budget: 400}); c.Blocks = 4; return c }(),
			[]ask{{0, 0, 200, 4}, {1, 0, 300, 1}, {1, 0, 10, 1}}, "0+200|0+0 1+0|0+0 1+0|0+0 1+0|0+0 0+310|0+0", 0,
		},
		"the last admitted is preempted, and computed again with what it has said": {
			func() Config { c := aggregated(Mixed{Budget: 400}); c.Blocks = 3; return c }(),
			[]ask{{0, 0, 126, 5}, {0, 0, 125, 6}},
			"0+126|0+0 1+125|0+0 2+0|0+0 2+0|0+0 1+0|0+0 0+128|0+0 1+0|0+0 1+0|0+0", 1,
		},
		"prompts come in every second step, but at once where nothing decodes": {
			aggregated(Mixed{Interval: 2}), []ask{{0, 0, 10, 7}, {2, 0, 50, 1}, {2, 1, 50, 1}, {4, 0, 20, 1}},
			"0+10|0+0 1+0|0+0 1+50|0+50 1+0|0+0 1+20|0+0 1+0|0+0 1+0|0+0", 0,
		},
		"SGLang's rank does not decode while it can compute, and the other one does": {
			aggregated(Mixed{First: true}), []ask{{0, 0, 10, 3}, {0, 1, 10, 5}, {2, 0, 150, 1}},
			"0+10|0+0 1+0|0+10 0+100|1+0 0+50|1+0 1+0|1+0 0+0|1+0", 0,
		},
		"the delayer holds a prompt until the other rank has one, too": {
			aggregated(Mixed{Delay: 5}), []ask{{0, 0, 10, 8}, {1, 0, 10, 1}, {3, 1, 10, 1}},
			"0+10|0+0 1+0|0+0 1+0|0+0 1+10|0+10 1+0|0+0 1+0|0+0 1+0|0+0 1+0|0+0", 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			clocked(t, tt.cfg, func(g *Group) {
				var jobs []*Job
				for _, a := range tt.asks {
					for begun := 0; begun < a.after; begun = len(g.log.All()) + 1 {
						time.Sleep(time.Millisecond)
						synctest.Wait()
					}
					jobs = append(jobs, g.put(a.rank, a.prompt, a.want))
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Equal(t, tt.want, g.scheduled())
				require.EqualValues(t, tt.evicts, g.count.Preemptions.Load())
				for i, j := range jobs {
					require.Equal(t, Finished, j.End.Load(), "request %d", i)
					require.EqualValues(t, tt.asks[i].want, j.Made.Load(), "request %d", i)
				}
				requireEmpty(t, g)
			})
		})
	}
}

func requireEmpty(t *testing.T, g *Group) {
	t.Helper()
	require.Empty(t, g.mixed.jobs)
	for i := range g.ranks {
		require.Zero(t, g.Gauges(i).Running.Load()+g.Gauges(i).Waiting.Load()+g.Gauges(i).KVBlocks.Load(), "rank %d", i)
	}
}

func TestTheLawOfAnAggregatedStep(t *testing.T) {
	cfg := aggregated(Mixed{Budget: 1000, Shared: 20 * time.Microsecond})
	cfg.CR, cfg.C1, cfg.PrefillBase = time.Millisecond, time.Microsecond, 5*time.Millisecond
	clocked(t, cfg, func(g *Group) {
		g.put(0, 100, 4)
		g.put(1, 200, 2)
		time.Sleep(time.Minute)
		ms := func(x float64) time.Duration { return time.Duration(x * 1e6) }
		for i, want := range []time.Duration{
			ms(10 + 0.1*100 + 0.02*100/2 + 5),
			ms(10 + 0.1*200 + 0.02*200/2 + 5), // rank 0 decodes meanwhile, which takes less
			ms(10 + 1 + 0.201),
			ms(10 + 1 + 0.103),
		} {
			require.Equal(t, want, g.log.All()[i].Length, "step %d", i)
		}
	})
}

// A decode group has the cost per request, too.
func TestARequestCostsTimeBesideItsKV(t *testing.T) {
	clocked(t, Config{Ranks: 2, CR: time.Millisecond, C1: 1, PrefillBase: 1, PrefillPer: 1}, func(g *Group) {
		g.put(0, 1000, 1)
		g.put(1, 10, 9)
		g.put(1, 10, 9)
		time.Sleep(time.Minute)
		steps := g.log.All()
		require.Equal(t, 12*time.Millisecond+22, steps[2].Length, "two requests take longer than the KV of one")
	})
}

// A prompt on rank 0 holds up the tokens of rank 1 for as long as each of its chunks takes.
func TestAPromptHoldsUpTheOtherRank(t *testing.T) {
	clocked(t, aggregated(Mixed{}), func(g *Group) {
		j := g.put(1, 10, 9)
		var gaps []time.Duration
		last := time.Now()
		for made := int64(0); j.End.Load() == GoingOn; {
			<-j.Wake
			if now := j.Made.Load(); now > made {
				gaps = append(gaps, time.Since(last).Round(100*time.Microsecond))
				made, last = now, time.Now()
			}
			if made == 3 && len(gaps) == 3 {
				g.Submit(NewJob(0, make([]int32, 250), "", false, 2))
			}
		}
		ms := func(n ...time.Duration) (all []time.Duration) {
			for _, x := range n {
				all = append(all, x*time.Millisecond)
			}
			return all
		}
		require.Equal(t, ms(11, 10, 10, 10, 20, 20, 15, 10, 10), gaps, "the prompt came when its step had begun")
	})
}

func TestALeavingClientFreesSlotAndBlocks(t *testing.T) {
	cfg := aggregated(Mixed{})
	cfg.Slots, cfg.Blocks = 2, 8
	clocked(t, cfg, func(g *Group) {
		decodes, computes, waits := g.put(0, 10, 1000), g.put(0, 700, 9), g.put(0, 10, 1)
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 2, g.Gauges(0).Running.Load())
		require.EqualValues(t, 1, g.Gauges(0).Waiting.Load())
		require.EqualValues(t, 1+6, g.Gauges(0).KVBlocks.Load(), "all of a prompt is held when its first chunk is computed")
		require.Positive(t, decodes.Made.Load())
		for _, left := range []struct {
			job                      *Job
			running, waiting, blocks int64
		}{{waits, 2, 0, 7}, {computes, 1, 0, 1}, {decodes, 0, 0, 0}} {
			g.Cancel(left.job)
			synctest.Wait()
			require.Equal(t, left.running, g.Gauges(0).Running.Load())
			require.Equal(t, left.waiting, g.Gauges(0).Waiting.Load())
			require.Equal(t, left.blocks, g.Gauges(0).KVBlocks.Load())
			require.Equal(t, GoingOn, left.job.End.Load())
		}
		time.Sleep(time.Minute)
		requireEmpty(t, g)
		next := g.put(0, 1000, 1)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, Finished, next.End.Load(), "the rank goes on")
	})
}

func TestChunksAreInThePrefixCacheAsTheyAreComputed(t *testing.T) {
	clocked(t, aggregated(Mixed{Budget: cache.BlockSize}), func(g *Group) {
		g.caches[0] = cache.New(100, nil)
		first := NewJob(0, make([]int32, 5*cache.BlockSize), "", false, 1)
		g.Submit(first)
		time.Sleep(70 * time.Millisecond) // three chunks
		synctest.Wait()
		g.Cancel(first)
		second, other := g.put(0, 5*cache.BlockSize, 1), g.put(1, 5*cache.BlockSize, 1)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 3*cache.BlockSize, second.Cached.Load())
		require.Zero(t, other.Cached.Load(), "each rank has a cache of its own")
		require.EqualValues(t, 10*cache.BlockSize, g.Gauges(0).Queries.Load())
		require.EqualValues(t, 3*cache.BlockSize, g.Gauges(0).Hits.Load())
		require.Zero(t, g.Gauges(1).Queries.Load(), "a rank without a cache is asked nothing")
	})
}
