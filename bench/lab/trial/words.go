package trial

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// asked are the settings that a law, or the balancing of the engine, depends on. Nothing else of
// what an engine tells is kept: paths, hosts and keys are none of ours.
var asked = []string{
	"all2all_backend", "async_scheduling", "attention_backend", "block_size", "cache_dtype", "chunked_prefill_size", "cuda_graph_bs",
	"cuda_graph_max_bs", "cudagraph_mode", "data_parallel_size", "deepep_mode", "disable_cuda_graph", "disable_radix_cache", "dp_size",
	"dtype",
	"enable_chunked_prefill", "enable_dbo", "enable_dp_attention", "enable_dp_lm_head", "enable_eplb", "enable_expert_parallel",
	"enable_mixed_chunk", "enable_prefill_delayer", "enable_prefix_caching", "enable_two_batch_overlap", "enforce_eager", "ep_size",
	"gpu_memory_utilization", "kv_cache_dtype", "load_balance_method", "max_cudagraph_capture_size", "max_model_len", "max_num_batched_tokens",
	"max_num_seqs", "max_running_requests", "max_total_num_tokens", "mem_fraction_static", "moe_a2a_backend", "moe_backend",
	"moe_dense_tp_size",
	"num_speculative_tokens", "prefill_decode_interval", "prefill_schedule_interval", "quantization", "speculative_algorithm",
	"tensor_parallel_size", "tp_size",
}

// settings finds them, however deep they stand. Where one stands several times, as with a draft
// model, the one that is least deep counts, and of these the first by the names on the way to it.
func settings(told map[string]any) map[string]any {
	found := map[string]any{}
	for level := []map[string]any{told}; len(level) > 0; {
		var deeper []map[string]any
		for _, in := range level {
			for _, key := range slices.Sorted(maps.Keys(in)) {
				if m, ok := in[key].(map[string]any); ok {
					deeper = append(deeper, m)
					continue
				}
				if _, known := slices.BinarySearch(asked, key); !known || found[key] != nil {
					continue
				}
				if v := setting(in[key]); v != nil {
					found[key] = v
				}
			}
		}
		level = deeper
	}
	return found
}

// mostNumbers is how long a list may be that is kept, such as that of the sizes of graphs.
const mostNumbers = 100

// setting is a value that may be kept, else nil.
func setting(v any) any {
	switch v := v.(type) {
	case bool, float64:
		return v
	case string:
		if w := word(v); w != "" {
			return w
		}
	case []any:
		other := func(x any) bool { _, number := x.(float64); return !number }
		if len(v) > 0 && len(v) <= mostNumbers && !slices.ContainsFunc(v, other) {
			return v
		}
	}
	return nil
}

// These are made when the first trial asks for them.
var (
	aWord    = lazily(`^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$`)
	aName    = lazily(`^[A-Za-z0-9._-]{1,128}$`)
	aVersion = lazily(`^v?[0-9]+\.[0-9]+(\.[0-9]+)?([.-]?(a|b|rc|dev|post)\.?[0-9]*)*(\+` + built + `(\.` + built + `)*)?$`)
)

func lazily(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}

// mostPoints has a word that is no version. Hosts and addresses have more.
const mostPoints = 1

// built is a part of what a version says of its build, such as a commit, a day or cu128.
const built = `(g?[0-9a-f]{6,40}|d[0-9]+|cu[0-9]+|rocm[0-9]+|cpu|tpu|xpu|npu|empty|precompiled)`

// word is a text that can hold no path, no sentence, and no host or address with several points;
// else it is empty.
func word(v any) string {
	s, ok := v.(string)
	if !ok || !aWord().MatchString(s) || strings.Count(s, ".") > mostPoints && !aVersion().MatchString(s) {
		return ""
	}
	return s
}

// modelName is the name of a model without the folders before it; empty: it has something else than
// letters, digits and . _ -.
func modelName(id string) string {
	id = strings.TrimRight(id, "/")
	if name := id[strings.LastIndexByte(id, '/')+1:]; aName().MatchString(name) {
		return name
	}
	return ""
}
