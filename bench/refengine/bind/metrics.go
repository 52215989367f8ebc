package bind

import "fmt"

// Gauges are what SGLang tells of a rank.
type Gauges struct {
	Rank                                  int
	Running, Waiting, Bootstrap, Inflight int64
	Prealloc, Transfer, Capacity, Used    int64
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
	family("max_total_num_tokens", func(g Gauges) float64 { return float64(g.Capacity) })
	if role == "prefill" {
		family("num_prefill_bootstrap_queue_reqs", func(g Gauges) float64 { return float64(g.Bootstrap) })
		family("num_prefill_inflight_queue_reqs", func(g Gauges) float64 { return float64(g.Inflight) })
		return dst
	}
	family("num_decode_prealloc_queue_reqs", func(g Gauges) float64 { return float64(g.Prealloc) })
	family("num_decode_transfer_queue_reqs", func(g Gauges) float64 { return float64(g.Transfer) })
	return dst
}
