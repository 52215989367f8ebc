package bind

import "fmt"

// Gauges are what SGLang tells of a rank.
type Gauges struct {
	Rank                                           int
	Running, Waiting, Bootstrap, Inflight          int64
	Prealloc, Transfer, Capacity, Used             int64
	Queries, Hits, Retracted, FailedBoot, FailedKV int64
}

// AppendMetrics appends the page of an engine: SGLang's names, one series a rank.
func AppendMetrics(dst []byte, model, role string, ranks []Gauges) []byte {
	family := func(name, kind string, value func(g Gauges) float64) {
		dst = fmt.Appendf(dst, "# HELP sglang:%s %s of the reference engine.\n# TYPE sglang:%s %s\n", name, kind, name, kind)
		for _, g := range ranks {
			dst = fmt.Appendf(dst, "sglang:%s{model_name=%q,engine_type=%q,tp_rank=\"0\",pp_rank=\"0\",dp_rank=\"%d\"} %g\n", name, model, role, g.Rank, value(g))
		}
	}
	share := func(part, of int64) float64 {
		if of == 0 {
			return 0
		}
		return float64(part) / float64(of)
	}
	family("num_running_reqs", "gauge", func(g Gauges) float64 { return float64(g.Running) })
	family("num_queue_reqs", "gauge", func(g Gauges) float64 { return float64(g.Waiting) })
	family("token_usage", "gauge", func(g Gauges) float64 { return share(g.Used, g.Capacity) })
	family("num_used_tokens", "gauge", func(g Gauges) float64 { return float64(g.Used) })
	family("max_total_num_tokens", "gauge", func(g Gauges) float64 { return float64(g.Capacity) })
	family("cache_hit_rate", "gauge", func(g Gauges) float64 { return share(g.Hits, g.Queries) })
	family("num_retracted_reqs", "gauge", func(g Gauges) float64 { return float64(g.Retracted) })
	if role == "prefill" {
		family("num_prefill_bootstrap_queue_reqs", "gauge", func(g Gauges) float64 { return float64(g.Bootstrap) })
		family("num_prefill_inflight_queue_reqs", "gauge", func(g Gauges) float64 { return float64(g.Inflight) })
		family("num_bootstrap_failed_reqs_total", "counter", func(g Gauges) float64 { return float64(g.FailedBoot) })
		return dst
	}
	family("num_decode_prealloc_queue_reqs", "gauge", func(g Gauges) float64 { return float64(g.Prealloc) })
	family("num_decode_transfer_queue_reqs", "gauge", func(g Gauges) float64 { return float64(g.Transfer) })
	family("num_transfer_failed_reqs_total", "counter", func(g Gauges) float64 { return float64(g.FailedKV) })
	return dst
}
