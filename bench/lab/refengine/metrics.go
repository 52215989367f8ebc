package refengine

import (
	"fmt"
	"math"

	"evenkeel/bench/lab/refengine/group"
)

// serveMetrics is Prometheus text with vLLM's names, one series a rank of the
// port.
func (l *life) serveMetrics(x *exchange) bool {
	const contentType = "text/plain; version=0.0.4; charset=utf-8"
	if !l.holdPage(x) {
		return false
	}
	hit := l.engine.faults.strike(func(r Rule) bool { return r.Fault == FrozenGauges && r.isAt(x.Port) })
	first, last := x.Port, x.Port
	if l.engine.cfg.DPMode == "internal" {
		first, last = 0, l.engine.cfg.DPSize-1
	}
	usage := math.NaN()
	if len(hit) > 0 && hit[0].Value > 0 {
		usage = hit[0].Value
	}
	render := l.metrics
	if l.engine.cfg.Connector == SGLang {
		render = l.sglangMetrics
	}
	page := render(first, last, usage)
	if len(hit) > 0 { // the first page of a port stays
		kept, _ := l.frozen.LoadOrStore(x.Port, page)
		page = kept.([]byte)
	}
	return x.Answer(200, contentType, page)
}

// metrics renders the ranks first to last. usage other than NaN stands where
// the KV usage would.
func (l *life) metrics(first, last int, usage float64) []byte {
	cfg := l.engine.cfg
	var out []byte
	family := func(name, kind string, value func(rank int) float64, labels string) {
		out = fmt.Appendf(out, "# HELP %s %s of the reference engine.\n# TYPE %s %s\n", name, kind, name, kind)
		for rank := first; rank <= last; rank++ {
			out = fmt.Appendf(out, "%s{engine=\"%d\",%smodel_name=%q} %g\n", name, cfg.DPFirst+rank, labels, cfg.Model.Name, value(rank))
		}
	}
	kvUsage, queries, hits := "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
	if cfg.Answers.OldMetricNames {
		kvUsage, queries, hits = "vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"
	}
	family("vllm:num_requests_running", "gauge", func(r int) float64 { return float64(l.rankStats(r).Running) }, "")
	family("vllm:num_requests_waiting", "gauge", func(r int) float64 { return float64(l.rankStats(r).Waiting) }, "")
	family(kvUsage, "gauge", func(r int) float64 {
		if !math.IsNaN(usage) {
			return usage
		}
		return l.kvUsage(l.rankStats(r))
	}, "")
	if !cfg.Answers.OldMetricNames {
		deferred := func(r int) float64 { return float64(l.group.Gauges(r).Deferred.Load()) }
		family("vllm:num_requests_waiting_by_reason", "gauge", deferred, `reason="deferred",`)
		family("vllm:generation_tokens_total", "counter", func(r int) float64 { return float64(l.group.Gauges(r).Generated.Load()) }, "")
		out = append(out, l.served(first, last)...)
	}
	family(queries, "counter", func(r int) float64 { return float64(l.prefills[r].Queries.Load() + l.group.Gauges(r).Queries.Load()) }, "")
	family(hits, "counter", func(r int) float64 { return float64(l.prefills[r].Hits.Load() + l.group.Gauges(r).Hits.Load()) }, "")
	if !cfg.Answers.OldMetricNames {
		family("vllm:external_prefix_cache_queries_total", "counter", func(r int) float64 { return float64(l.prefills[r].Asked.Load()) }, "")
		family("vllm:external_prefix_cache_hits_total", "counter", func(r int) float64 { return float64(l.prefills[r].Pulled.Load()) }, "")
	}
	if (cfg.Role == Prefill || cfg.Role == Decode) && (cfg.Connector == NIXLPull || cfg.Connector == NIXLPush) {
		family("vllm:nixl_num_kv_expired_reqs_total", "counter", func(int) float64 { return float64(l.engine.count.Leaks.Load()) }, "")
		family("vllm:nixl_num_notifications_after_expiry_total", "counter", func(int) float64 {
			c := &l.engine.count
			return float64(c.ExpiredPulls.Load() + c.Replays.Load() + c.SpentDrains.Load())
		}, "")
	}
	out = append(out, "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n"...)
	for rank := first; rank <= last; rank++ {
		// vLLM's API server tells the sum of its engines
		out = fmt.Appendf(out, "vllm:cache_config_info{block_size=\"%d\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1\n", blockSize, cfg.DPFirst+rank,
			(last-first+1)*(cfg.KV.Tokens/blockSize))
	}
	out = append(out, "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n# TYPE "+
		"process_start_time_seconds gauge\n"...)
	return fmt.Appendf(out, "process_start_time_seconds %.3f\n", float64(l.began.UnixMilli())/1e3)
}

// served renders what vLLM counts of the requests that its ranks have answered.
func (l *life) served(first, last int) (out []byte) {
	cfg := &l.engine.cfg
	line := func(name string, rank int, labels string, value any) {
		out = fmt.Appendf(out, "%s{engine=\"%d\",%smodel_name=%q} %v\n", name, cfg.DPFirst+rank, labels, cfg.Model.Name, value)
	}
	each := func(name, kind string, of func(rank int, g *group.Gauges)) {
		out = fmt.Appendf(out, "# HELP %s %s of the reference engine.\n# TYPE %s %s\n", name, kind, name, kind)
		for rank := first; rank <= last; rank++ {
			of(rank, l.group.Gauges(rank))
		}
	}
	const prompt = "vllm:prompt_tokens_total"
	each(prompt, "counter", func(rank int, g *group.Gauges) { line(prompt, rank, "", g.Prompt.Load()) })
	const source = "vllm:prompt_tokens_by_source_total"
	each(source, "counter", func(rank int, g *group.Gauges) {
		line(source, rank, `source="local_compute",`, max(0, g.Prompt.Load()-g.Pulled.Load()-g.Hits.Load()-l.prefills[rank].Hits.Load()))
		line(source, rank, `source="local_cache_hit",`, g.Hits.Load()+l.prefills[rank].Hits.Load())
		line(source, rank, `source="external_kv_transfer",`, g.Pulled.Load())
	})
	const gaps = "vllm:inter_token_latency_seconds"
	each(gaps, "histogram", func(rank int, g *group.Gauges) {
		line(gaps+"_bucket", rank, `le="+Inf",`, g.Gaps.Load())
		line(gaps+"_sum", rank, "", float64(g.GapNanos.Load())/1e9)
		line(gaps+"_count", rank, "", g.Gaps.Load())
	})
	lengths := func(name string, of func(g *group.Gauges) *group.Lengths) {
		each(name, "histogram", func(rank int, g *group.Gauges) {
			out = appendLengths(out, name, fmt.Sprintf("engine=\"%d\",model_name=%q", cfg.DPFirst+rank, cfg.Model.Name), of(g))
		})
	}
	lengths("vllm:request_prompt_tokens", func(g *group.Gauges) *group.Lengths { return &g.Prompts })
	lengths("vllm:request_generation_tokens", func(g *group.Gauges) *group.Lengths { return &g.Answers })
	return out
}

// appendLengths appends a histogram of the lengths of all of these together.
func appendLengths(out []byte, name, labels string, all ...*group.Lengths) []byte {
	var count, tokens int64
	for i := range len(group.LengthBounds) + 1 {
		le := "+Inf"
		if i < len(group.LengthBounds) {
			le = fmt.Sprintf("%d.0", group.LengthBounds[i])
		}
		for _, h := range all {
			count += h.Counts[i].Load()
		}
		out = fmt.Appendf(out, "%s_bucket{%s,le=%q} %d\n", name, labels, le, count)
	}
	for _, h := range all {
		tokens += h.Sum.Load()
	}
	return fmt.Appendf(out, "%s_sum{%s} %d\n%[1]s_count{%[2]s} %[4]d\n", name, labels, tokens, count)
}

// kvUsage is the share of a rank's KV cache that is in use.
func (l *life) kvUsage(of RankStats) float64 {
	return float64(of.KVUsed) / float64(l.engine.cfg.KV.Tokens/blockSize*blockSize)
}
