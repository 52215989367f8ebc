package bind

import "fmt"

// Gauges are what SGLang tells of a rank.
type Gauges struct {
	Rank                                  int
	Running, Waiting, Bootstrap, Inflight int64
	Prealloc, Transfer, Capacity, Used    int64
	Decoded, Computed, Cached             int64 // tokens since the start: of answers, but the first of each; of prompts
}

// appendTokens appends the counter of tokens, which has no series before its first token (srt/observability/metrics_collector.py).
func appendTokens(dst []byte, model, role string, ranks []Gauges) []byte {
	const name = "sglang:realtime_tokens_total"
	dst = fmt.Appendf(dst, "# HELP %s counter of the reference engine.\n# TYPE %[1]s counter\n", name)
	for _, g := range ranks {
		for _, of := range []struct {
			mode   string
			tokens int64
		}{{"prefill_compute", g.Computed}, {"prefill_cache", g.Cached}, {"decode", g.Decoded}} {
			if of.tokens > 0 {
				dst = fmt.Appendf(dst, "%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\",mode=%q} %d\n", name, model, role, g.Rank, of.mode, of.tokens)
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
			dst = fmt.Appendf(dst, "sglang:%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\"} %g\n", name, model, role, g.Rank, value(g))
		}
	}
	family("num_running_reqs", func(g Gauges) float64 { return float64(g.Running) })
	family("num_queue_reqs", func(g Gauges) float64 { return float64(g.Waiting) })
	family("token_usage", func(g Gauges) float64 { return float64(g.Used) / float64(g.Capacity) })
	family("num_used_tokens", func(g Gauges) float64 { return float64(g.Used) })
	family("max_total_num_tokens", func(g Gauges) float64 { return float64(g.Capacity) })
	dst = appendTokens(dst, model, role, ranks)
	if role == "prefill" {
		family("num_prefill_bootstrap_queue_reqs", func(g Gauges) float64 { return float64(g.Bootstrap) })
		family("num_prefill_inflight_queue_reqs", func(g Gauges) float64 { return float64(g.Inflight) })
		return dst
	}
	family("num_decode_prealloc_queue_reqs", func(g Gauges) float64 { return float64(g.Prealloc) })
	family("num_decode_transfer_queue_reqs", func(g Gauges) float64 { return float64(g.Transfer) })
	return dst
}
