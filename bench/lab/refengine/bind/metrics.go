package bind

import "fmt"

// Gauges are what SGLang tells of a rank.
type Gauges struct {
	Rank                                  int
	Running, Waiting, Bootstrap, Inflight int64
	Prealloc, Transfer, Capacity, Used    int64
	Decoded, Computed, Cached             int64 // tokens since the start: of answers, but the first of each; of prompts

	// Counted only where the engine is told to.
	Steps, WaitNanos  int64 // steps behind the barrier, and for how long the rank waited for the others in them
	Pairs, FewerPairs int64 // KV tokens that it read in those, and those that the fullest rank read beyond them
}

// appendBarrier appends what SGLang counts of its barrier with
// SGLANG_ENABLE_METRICS_DP_ATTENTION=1. Without it, the series are there and count nothing
// (srt/observability/metrics_collector.py, 0.5.22 and 0.5.23). Its clock runs while a scheduler
// gathers the sizes of all ranks before a step (srt/managers/scheduler_components/dp_attn.py). Real
// ranks also wait in the layers of a step, where no series counts it. The ranks here wait for each
// other once a step, and all of that is counted.
func appendBarrier(dst []byte, model, role string, ranks []Gauges) []byte {
	const waits, pairs = "sglang:dp_attention_sync_wait_seconds", "sglang:dp_attention_pairs_total"
	line := func(name string, g Gauges, label string, value any) {
		dst = fmt.Appendf(dst, "%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\"%s} %v\n",
			name, model, role, g.Rank, label, value)
	}
	dst = fmt.Appendf(dst, "# HELP %s histogram of the reference engine.\n# TYPE %[1]s histogram\n", waits)
	for _, g := range ranks {
		line(waits+"_bucket", g, `,le="+Inf"`, g.Steps)
		line(waits+"_sum", g, "", float64(g.WaitNanos)/1e9)
		line(waits+"_count", g, "", g.Steps)
	}
	dst = fmt.Appendf(dst, "# HELP %s counter of the reference engine.\n# TYPE %[1]s counter\n", pairs)
	for _, g := range ranks {
		line(pairs, g, `,kind="scheduled"`, g.Pairs)
		line(pairs, g, `,kind="imbalance"`, g.FewerPairs)
	}
	return dst
}

// appendTokens appends the counter of tokens, which has no series before its first token
// (srt/observability/metrics_collector.py).
func appendTokens(dst []byte, model, role string, ranks []Gauges) []byte {
	const name = "sglang:realtime_tokens_total"
	dst = fmt.Appendf(dst, "# HELP %s counter of the reference engine.\n# TYPE %[1]s counter\n", name)
	for _, g := range ranks {
		for _, of := range []struct {
			mode   string
			tokens int64
		}{{"prefill_compute", g.Computed}, {"prefill_cache", g.Cached}, {"decode", g.Decoded}} {
			if of.tokens > 0 {
				dst = fmt.Appendf(dst, "%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\",mode=%q} %d\n", name, model, role,
					g.Rank, of.mode, of.tokens)
			}
		}
	}
	return dst
}

// AppendMetrics appends the page of an engine: SGLang's names, one series a rank.
func AppendMetrics(dst []byte, model, role string, ranks []Gauges) []byte {
	family := func(name string, value func(g Gauges) float64) {
		dst = fmt.Appendf(dst, "# HELP sglang:%s gauge of the reference engine.\n# TYPE sglang:%s gauge\n", name, name)
		for _, g := range ranks {
			dst = fmt.Appendf(dst, "sglang:%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\"} %g\n", name, model, role,
				g.Rank, value(g))
		}
	}
	family("num_running_reqs", func(g Gauges) float64 { return float64(g.Running) })
	family("num_queue_reqs", func(g Gauges) float64 { return float64(g.Waiting) })
	family("token_usage", func(g Gauges) float64 { return float64(g.Used) / float64(g.Capacity) })
	family("num_used_tokens", func(g Gauges) float64 { return float64(g.Used) })
	family("max_total_num_tokens", func(g Gauges) float64 { return float64(g.Capacity) })
	dst = appendBarrier(appendTokens(dst, model, role, ranks), model, role, ranks)
	if role == "prefill" {
		family("num_prefill_bootstrap_queue_reqs", func(g Gauges) float64 { return float64(g.Bootstrap) })
		family("num_prefill_inflight_queue_reqs", func(g Gauges) float64 { return float64(g.Inflight) })
		return dst
	}
	family("num_decode_prealloc_queue_reqs", func(g Gauges) float64 { return float64(g.Prealloc) })
	family("num_decode_transfer_queue_reqs", func(g Gauges) float64 { return float64(g.Transfer) })
	return dst
}
