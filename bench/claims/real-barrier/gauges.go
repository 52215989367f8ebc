package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/internal/stats"
)

// every is how often the gauges are read. The engine answers on the thread that
// also writes its streams, so more would slow down what is measured.
const every = 500 * time.Millisecond

// look is what the gauges showed at one time.
type look struct {
	at       time.Time
	proxy    float64              // evenkeel_imbalance_tokens
	kv       [ranks.Count]float64 // KV tokens, by vLLM's gauge of each rank
	running  float64
	waiting  float64
	complete bool // the engine answered
}

// looks are the gauges of a run, and the step model at its end.
type looks struct {
	list  []look
	model stepModel
}

// stepModel is what evenkeel learned, as its metrics tell it.
type stepModel struct {
	known      bool
	c0, c1, r2 float64 // ms, ms per KV token
	steps      float64
}

// watch reads the gauges of the engine and of evenkeel until the function it
// returns is called.
func (w *site) watch(ctx context.Context) (done func() *looks) {
	ctx, stop := context.WithCancel(ctx)
	all, engine := &looks{}, w.At(strings.TrimPrefix(w.decode.URL, "http://"))
	var wait sync.WaitGroup
	wait.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				l := look{at: time.Now()}
				page, err := w.proxy.Page()
				if err != nil {
					continue
				}
				l.proxy = testbed.Sum(page, "evenkeel_imbalance_tokens{")
				if page, err = engine.Page(); err == nil {
					l.read(page)
				}
				all.list = append(all.list, l)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() *looks {
		stop()
		wait.Wait()
		if page, err := w.proxy.Page(); err == nil {
			all.model.read(page)
		}
		return all
	}
}

// read takes the engine's own gauges. The KV cache of a rank is told as a share
// of its blocks, one of which is never used.
func (l *look) read(page []byte) {
	l.complete = true
	for name, v := range testbed.Series(page) {
		series, labels, _ := strings.Cut(name, "{")
		for rank := range ranks.Count {
			if !strings.Contains(labels, fmt.Sprintf(`engine="%d"`, rank)) {
				continue
			}
			switch series {
			case "vllm:kv_cache_usage_perc":
				l.kv[rank] += v * (blocksOf(page, rank) - 1) * ranks.Block
			case "vllm:num_requests_running":
				l.running += v
			case "vllm:num_requests_waiting":
				l.waiting += v
			}
		}
	}
}

// blocksOf is how many blocks the KV cache of a rank has. The label of vLLM's
// series is the sum over all ranks of the API server.
func blocksOf(page []byte, rank int) (n float64) {
	for line := range strings.Lines(string(page)) {
		if !strings.HasPrefix(line, "vllm:cache_config_info{") || !strings.Contains(line, fmt.Sprintf(`engine="%d"`, rank)) {
			continue
		}
		if _, value, ok := strings.Cut(line, `num_gpu_blocks="`); ok {
			_, _ = fmt.Sscanf(value, "%g", &n) // 0 where it is none, and then the imbalance is 0, too
		}
	}
	return n / ranks.Count
}

func (m *stepModel) read(page []byte) {
	for name, v := range testbed.Series(page) {
		switch {
		case strings.HasPrefix(name, "evenkeel_step_model_c0_seconds{"):
			m.c0, m.known = 1e3*v, true
		case strings.HasPrefix(name, "evenkeel_step_model_c1_seconds{"):
			m.c1 = 1e3 * v
		case strings.HasPrefix(name, "evenkeel_step_model_r2_ratio{"):
			m.r2 = v
		case strings.HasPrefix(name, "evenkeel_step_seconds_count{"):
			m.steps = v
		}
	}
}

// levels takes the means of the gauges over the full part.
func (r *run) levels(all *looks, full, empty time.Time) {
	var proxy, engine, top, running, waiting []float64
	for _, l := range all.list {
		if l.at.Before(full) || l.at.After(empty) {
			continue
		}
		proxy = append(proxy, l.proxy)
		if l.complete {
			most, sum := 0.0, 0.0
			for _, kv := range l.kv {
				most, sum = max(most, kv), sum+kv
			}
			engine, top = append(engine, ranks.Count*most-sum), append(top, most)
			running, waiting = append(running, l.running), append(waiting, l.waiting)
		}
	}
	for metric, values := range map[report.Metric][]float64{
		report.Imbalance: proxy, engineLevel: engine, engineTop: top, engineRuns: running, engineWaits: waiting,
	} {
		if len(values) > 0 {
			r.Sample[metric] = stats.Mean(values)
		}
	}
}
