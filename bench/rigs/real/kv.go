package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/rigs/testbed"
)

var caches = []row{
	usually("KV events against cached_tokens", eventsAgainstCached),
	usually("KV tokens of each rank against vLLM's gauges", kvAgainstGauges),
}

// handoffs are rows about hand-offs that a decode engine pulls.
var handoffs = []row{
	scene("what the drain of a consumed hand-off leaves in a prefix cache", everyone, drainLeavesNothing),
	scene("a request that comes ahead of its slot", everyone, aheadOfItsSlot),
}

var dataParallel = []row{
	scene("--data-parallel-size 2 on one address", []string{"plain", "p0", "dp"}, twoRanks),
}

// cached is what the answer says of the prefix cache, and what evenkeel had
// predicted from the KV events.
func cached(a answer) (counted, predicted int, err error) {
	var doc struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(a.Body, &doc); err != nil || a.Status != 200 {
		return 0, 0, fmt.Errorf("%v %w", a, err)
	}
	predicted, err = strconv.Atoi(a.Head.Get("X-Evenkeel-Hit-Tokens"))
	return doc.Usage.Details.Cached, predicted, err
}

// eventsAgainstCached asks for prompts whose beginnings the prefill engine has
// cached, and for some that it has dropped since.
func eventsAgainstCached(ctx context.Context, w *site) (outcome, error) {
	const seed, tokens = 9000, 1 // of prompts that no row before had on these engines
	first, other := ids(1000, seed), ids(900, seed+1)
	type step struct {
		name   string
		prompt []int
		want   int // -1: evicted some time ago, or not
	}
	steps := []step{
		{"new", first, 0},
		{"the same again", first, 992},
		{"longer by 300", append(append([]int{}, first...), ids(300, seed+2)...), 992},
		{"600 in common", append(append([]int{}, first[:600]...), other[:300]...), 576},
		{"one block", first[:33], 32},
	}
	for i := range blocks*blockSize/1900 + 2 { // as much as the cache holds
		steps = append(steps, step{"filler", ids(1900, seed+10+uint64(i)), 0})
	}
	steps = append(steps, step{"after the cache was filled with others", first, -1})
	var seen []string
	for _, s := range steps {
		if err := testbed.Pause(ctx, 150*time.Millisecond); err != nil { // events of the prompt before are on their way
			return outcome{}, err
		}
		counted, predicted,
			err := cached(ask(ctx, "POST", w.proxy.URL()+completions, greedy.With(body{"prompt": s.prompt, "max_tokens": tokens})))
		switch {
		case err != nil:
			return outcome{}, err
		case counted != predicted, s.want >= 0 && counted != s.want:
			return failed("%s: the engine found %d tokens, evenkeel predicted %d; it should be %d", s.name, counted, predicted, s.want), nil
		case s.want < 0 && counted == 992:
			return failed("nothing was evicted, so evictions were not tried"), nil
		case s.name != "filler":
			seen = append(seen, fmt.Sprintf("%s: %d", s.name, counted))
		}
	}
	return passed("found and predicted are equal for %d prompts; %s", len(steps), strings.Join(seen, ", ")), nil
}

// kvAgainstGauges compares evenkeel's KV tokens of a rank with the blocks that
// its engine says are in use, while answers grow.
func kvAgainstGauges(ctx context.Context, w *site) (outcome, error) {
	list := prompts(14, 1500, 100)
	var looks, compared int
	var worst string
	most := 0.0
	t, err := w.under(ctx, list, func() error {
		for range 120 {
			looks++
			for _, name := range []string{"d0", "d1"} {
				before, err := w.engines[name].series(ctx)
				if err != nil {
					return err
				}
				ours := w.books()[fmt.Sprintf(`evenkeel_rank_kv_tokens{group="main",rank="127.0.0.1:%d"}`, w.engines[name].port)]
				after, err := w.engines[name].series(ctx)
				if err != nil {
					return err
				}
				running := gauge(before, "num_requests_running")
				if running == 0 || running != gauge(after, "num_requests_running") {
					continue // one ended in between
				}
				compared++
				// Blocks are whole, and the last one of a request may have room for 31 more.
				// evenkeel may have read a step more or less than the engine tells.
				low := blocksUsed(before)*blockSize - running*(blockSize+slack)
				high := blocksUsed(after)*blockSize + running*slack
				if off := max(low-ours, ours-high, 0); off > most || worst == "" {
					most = off
					worst = fmt.Sprintf("%s: evenkeel %.0f, vLLM %.0f to %.0f tokens in %.0f blocks of %.0f requests", name, ours, low, high,
						blocksUsed(before), running)
				}
			}
			if err := testbed.Pause(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v", err), nil
	}
	if !t.all() || most > 0 || compared < 10 {
		return failed("%v; %d comparisons; furthest off: %s", t, compared, worst), nil
	}
	return passed("%d comparisons in %d looks, all within the blocks in use; for example %s", compared, looks, worst), nil
}

// slack is how many tokens of a request may be on the way between the engine's
// gauges and evenkeel's.
const slack = 4

// blocksUsed is what vLLM's gauge says, a share of all blocks but the one that
// stands for none.
func blocksUsed(series map[string]float64) float64 {
	return math.Round(gauge(series, kvUsage) * (blocks - 1))
}

// twoRanks has one decode engine with two data-parallel ranks behind one address.
func twoRanks(ctx context.Context, w *site) (outcome, error) {
	w.engines["d0"].Stop() // for their memory
	w.engines["d1"].Stop()
	s := setting{decode: []string{w.engines["dp"].url()}, slots: slots}
	if err := w.evenkeel(ctx, s); err != nil {
		return outcome{}, err
	}
	list := prompts(16, 300, 110)
	each := [2]float64{}
	t, err := w.under(ctx, list, func() error {
		series, err := w.engines["dp"].series(ctx)
		for name, v := range series {
			for rank := range each {
				if strings.HasPrefix(name, "vllm:num_requests_running{") && strings.Contains(name, fmt.Sprintf(`engine="%d"`, rank)) {
					each[rank] = v
				}
			}
		}
		return err
	})
	if err != nil {
		return outcome{}, err
	}
	if err := w.settled(ctx, t, "p0", "dp"); err != nil {
		return outcome{}, err
	}
	if each != [2]float64{slots, slots} {
		return failed("%v; %v requests ran on the ranks, not 8 on each", t, each), nil
	}
	var status struct {
		Dispatch struct {
			Models []struct{ Workers []struct{ Capacity float64 } }
		}
	}
	if !w.proxy.Read("/status", &status) {
		return failed("evenkeel does not tell its status"), nil
	}
	for _, m := range status.Dispatch.Models {
		for _, rank := range m.Workers {
			if rank.Capacity != blocks*blockSize {
				return failed("evenkeel takes a rank for one of %.0f KV tokens; it has %d blocks of %d", rank.Capacity, blocks, blockSize), nil
			}
		}
	}
	return passed("%v; 8 of 16 requests on each rank by vLLM's own gauges, %d KV tokens each by evenkeel; nothing is held", t,
		blocks*blockSize), nil
}
