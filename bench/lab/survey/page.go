package survey

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"

	dto "github.com/prometheus/client_model/go"

	"evenkeel/engine"
)

// Rank is what an engine's page of metrics tells of one of its ranks. What it does not tell is NaN.
type Rank struct {
	Name             string  // of the rank, as the page labels it
	Running, Waiting float64 // requests
	Coming           float64 // of those that wait, the ones whose prefill runs: SGLang's, which have their rank before it
	KV               float64 // tokens in use
	Room             float64 // tokens that there is room for
	memory           engine.Memory

	// Since the engine started.
	Output   float64 // tokens of answers
	Prompt   float64 // tokens of prompts
	Computed float64 // of those, neither cached nor pulled
	Pulled   float64 // of those, pulled from another engine
	Gaps     float64 // times between the tokens of answers
	GapsMs   float64 // their sum
	Ended    float64 // tokens of prompts and answers of the requests that have ended
	Hits     float64 // tokens of prompts that the prefix cache had, when they were admitted
	Barrier

	Prompts, Outputs Histogram // lengths of the requests that have ended, in tokens
}

// Barrier is what SGLang counts of the steps that ranks do together. Without
// SGLANG_ENABLE_METRICS_DP_ATTENTION=1 it counts none.
type Barrier struct {
	Steps      float64
	WaitedMs   float64 // until all ranks had come to the gather before a step
	Pairs      float64 // of a query and a key, that a rank's attention computed: where it decodes, the KV tokens that it read
	FewerPairs float64 // that the rank with the most computed beyond them
}

// Histogram is how many values there were up to each bound, since the engine started.
type Histogram struct {
	Bounds []float64 // the last is infinite
	Counts []float64
	Sum    float64
}

// family is where a figure stands: the first name with a value wins. Series of a rank are added up,
// if their label has that value; of a gauge the largest counts.
type family struct {
	names        []string
	label, value string
	gauge        bool
}

var (
	running  = family{gauge: true, names: []string{"vllm:num_requests_running", "sglang:num_running_reqs"}}
	waiting  = family{gauge: true, names: []string{"vllm:num_requests_waiting", "sglang:num_queue_reqs"}}
	prealloc = family{gauge: true, names: []string{"sglang:num_decode_prealloc_queue_reqs"}}
	transfer = family{gauge: true, names: []string{"sglang:num_decode_transfer_queue_reqs"}}
	usage    = family{gauge: true, names: []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}}
	used     = family{gauge: true, names: []string{"sglang:num_used_tokens"}}
	room     = family{gauge: true, names: []string{"sglang:max_total_num_tokens"}}
	output   = family{names: []string{"vllm:generation_tokens_total"}}
	prompt   = family{names: []string{"vllm:prompt_tokens_total"}}
	computed = family{names: []string{"vllm:prompt_tokens_by_source_total"}, label: "source", value: "local_compute"}
	pulled   = family{names: []string{"vllm:prompt_tokens_by_source_total"}, label: "source", value: "external_kv_transfer"}
	decoded  = family{names: []string{"sglang:realtime_tokens_total"}, label: "mode", value: "decode"}
	extended = family{names: []string{"sglang:realtime_tokens_total"}, label: "mode", value: "prefill_compute"}
	hits     = family{names: []string{"vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"}}
	cached   = family{names: []string{"sglang:realtime_tokens_total"}, label: "mode", value: "prefill_cache"}
	gaps     = family{names: []string{"vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"}}
	syncs    = family{names: []string{"sglang:dp_attention_sync_wait_seconds_count"}}
	waitedS  = family{names: []string{"sglang:dp_attention_sync_wait_seconds_sum"}}
	pairs    = family{names: []string{"sglang:dp_attention_pairs_total"}, label: "kind", value: "scheduled"}
	fewerP   = family{names: []string{"sglang:dp_attention_pairs_total"}, label: "kind", value: "imbalance"}
	gapsS    = family{names: []string{"vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"}}
)

// The histograms of lengths, by their names without what follows in those of series.
var (
	promptLengths = []string{"vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"}
	outputLengths = []string{"vllm:request_generation_tokens", "sglang:generation_tokens_histogram"}
)

// mostPairs is more than 2^53: a chunk of a long prompt has billions of pairs, and a sum of such
// numbers goes on above it.
const mostPairs = 1e20

// limits are the series that are read, with the largest values that they can be right about.
var limits = func() engine.Limits {
	l := engine.Limits{}.Shares(usage.names...)
	for _, f := range []family{running, waiting, prealloc, transfer} {
		l.Add(engine.MostRequests, f.names...)
	}
	for _, f := range []family{used, room} {
		l.Add(engine.MostKVTokens, f.names...)
	}
	for _, f := range []family{output, prompt, computed, decoded, hits, gaps, gapsS, syncs, waitedS} {
		l.Counters(f.names...)
	}
	l.Add(mostPairs, pairs.names...)
	for _, h := range slices.Concat(promptLengths, outputLengths) {
		l.Counters(h+"_bucket", h+"_sum")
	}
	return l
}()

// Page is what an engine's page of metrics tells.
type Page struct {
	Model   string
	Started float64 // when its process did, Unix seconds; 0: not told
	SGLang  bool
	Role    string // prefill, decode or unified, where SGLang tells it
	Ranks   []Rank // by name

	Uncounted string // the counter of answers' tokens that it lacks; SGLang's is not there before the first token either
}

// fullest is how many times its room a rank's KV may fill: the two are read one after the other.
const fullest = 1.01

// mostRanks of a page; larger groups are several pages.
const mostRanks = 1024

// Read reads a page.
func Read(text []byte) (Page, error) {
	families, err := engine.ParseSeries(text, limits)
	if err != nil {
		return Page{}, err
	}
	p := Page{}
	ranks := map[string]*Rank{}
	for _, name := range running.names {
		for _, m := range families[name].GetMetric() {
			p.Model = cmp.Or(p.Model, engine.Label(m, "model_name"))
			p.SGLang = name == running.names[1]
			p.Role = cmp.Or(p.Role, engine.Label(m, "engine_type"))
			ranks[engine.RankLabel(m)] = &Rank{Name: engine.RankLabel(m)}
		}
	}
	if len(ranks) == 0 {
		return Page{}, fmt.Errorf("the page has neither %s nor %s; is it an engine of vLLM, or one of SGLang that was started with "+
			"--enable-metrics?",
			running.names[0], running.names[1])
	}
	if len(ranks) > mostRanks {
		return Page{}, fmt.Errorf("the page has %d ranks, and %d are the most that are looked at", len(ranks), mostRanks)
	}
	for _, m := range families[engine.StartTimeName].GetMetric() {
		p.Started = zeroIfUnknown(m.GetUntyped().GetValue())
	}
	memories, err := engine.PageMemories(families[engine.CacheConfigName].GetMetric())
	if err != nil {
		return Page{}, err
	}
	counter := output.names[0]
	if p.SGLang {
		counter = decoded.names[0]
	}
	if len(families[counter].GetMetric()) == 0 {
		p.Uncounted = counter
	}
	for name, r := range ranks {
		of := func(f family) float64 { return f.of(families, name) }
		r.Running, r.Waiting, r.Output, r.Prompt, r.Computed, r.Pulled = of(running), of(waiting), of(output), of(prompt), of(computed),
			of(pulled)
		r.Hits = of(hits)
		r.Gaps, r.GapsMs, r.Room = of(gaps), 1000*of(gapsS), of(room)
		r.Barrier = Barrier{Steps: of(syncs), WaitedMs: 1000 * of(waitedS), Pairs: of(pairs), FewerPairs: of(fewerP)}
		if p.SGLang { // its page counts tokens only once a request has ended, where ranks have no label
			r.Output, r.Computed, r.Pulled = zeroIfUnknown(of(decoded)), zeroIfUnknown(of(extended)), math.NaN()
			r.Prompt = r.Computed + zeroIfUnknown(of(cached))
			r.Coming = of(transfer)
			r.Waiting += zeroIfUnknown(of(prealloc)) + zeroIfUnknown(r.Coming)
		}
		r.memory = memories[name]
		if tokens := r.memory.Capacity.Tokens; tokens > 0 {
			r.Room = float64(tokens)
		}
		r.KV = of(usage) * r.Room
		if p.SGLang {
			r.KV = of(used)
		}
		if !(r.Room > 0) {
			r.Room = math.NaN()
		}
		if r.KV > r.Room*fullest {
			return Page{}, &engine.PageError{Name: used.names[0],
				Says: fmt.Sprintf("%.0f, which is more than the %.0f of %s", r.KV, r.Room, room.names[0])}
		}
	}
	for _, name := range slices.SortedFunc(maps.Keys(ranks),
		func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }) {
		r := ranks[name]
		if r.Prompts, r.Outputs, err = bothLengths(families, name); err != nil {
			return Page{}, err
		}
		if len(p.Ranks) == 0 && len(r.Prompts.Bounds) == 0 { // SGLang's are of all ranks
			if r.Prompts, r.Outputs, err = bothLengths(families, ""); err != nil {
				return Page{}, err
			}
		}
		r.Ended = r.Prompts.Sum + r.Outputs.Sum
		p.Ranks = append(p.Ranks, *r)
	}
	return p, nil
}

// fit leaves out the memory of an engine that has less than one request of its context may need,
// because the page means something else.
func (p *Page) fit(context int) {
	for i := range p.Ranks {
		if r := &p.Ranks[i]; r.memory.For(context).Misread.Tokens > 0 {
			r.Room, r.KV = math.NaN(), math.NaN()
		}
	}
}

// since is what came to it after it was like another one. Of two counters that belong together,
// none counts where one is not told.
func (b Barrier) since(o Barrier) (came Barrier) {
	if steps, waited := b.Steps-o.Steps, b.WaitedMs-o.WaitedMs; !math.IsNaN(steps + waited) {
		came.Steps, came.WaitedMs = steps, waited
	}
	if pairs, fewer := b.Pairs-o.Pairs, b.FewerPairs-o.FewerPairs; !math.IsNaN(pairs + fewer) {
		came.Pairs, came.FewerPairs = pairs, fewer
	}
	return came
}

// add adds what another rank counted.
func (b *Barrier) add(o Barrier) {
	b.Steps, b.WaitedMs, b.Pairs, b.FewerPairs = b.Steps+o.Steps, b.WaitedMs+o.WaitedMs, b.Pairs+o.Pairs, b.FewerPairs+o.FewerPairs
}

func zeroIfUnknown(x float64) float64 {
	if math.IsNaN(x) {
		return 0
	}
	return x
}

// of is the figure of a rank. SGLang's workers of a rank tell the same each, so the largest counts
// there.
func (f family) of(families map[string]*dto.MetricFamily, rank string) float64 {
	for _, name := range f.names {
		sum, found := map[string]float64{}, false
		for _, m := range families[name].GetMetric() {
			v := m.GetUntyped().GetValue()
			if engine.RankLabel(m) != rank || math.IsNaN(v) || math.IsInf(v, 0) || f.label != "" && engine.Label(m, f.label) != f.value {
				continue
			}
			if tp := engine.Label(m, "tp_rank") + " " + engine.Label(m, "pp_rank"); f.gauge {
				sum[tp] = max(sum[tp], v)
			} else {
				sum[tp] += v
			}
			found = true
		}
		if found {
			return slices.Max(slices.Collect(maps.Values(sum)))
		}
	}
	return math.NaN()
}

// bothLengths are those of a rank's prompts and answers.
func bothLengths(families map[string]*dto.MetricFamily, rank string) (prompts, outputs Histogram, err error) {
	if prompts, err = lengths(families, promptLengths, rank); err == nil {
		outputs, err = lengths(families, outputLengths, rank)
	}
	return prompts, outputs, err
}

// lengths are those of a rank in the first histogram that is there.
func lengths(families map[string]*dto.MetricFamily, names []string, rank string) (h Histogram, err error) {
	for _, name := range names {
		at := map[float64]float64{}
		for _, m := range families[name+"_bucket"].GetMetric() {
			le, err := strconv.ParseFloat(engine.Label(m, "le"), 64)
			if err != nil || math.IsNaN(le) || engine.RankLabel(m) != rank {
				continue
			}
			at[le] += zeroIfUnknown(m.GetUntyped().GetValue())
		}
		if len(at) == 0 {
			continue
		}
		for _, m := range families[name+"_sum"].GetMetric() {
			if engine.RankLabel(m) == rank {
				h.Sum += zeroIfUnknown(m.GetUntyped().GetValue())
			}
		}
		h.Bounds = slices.Sorted(maps.Keys(at))
		for _, b := range h.Bounds {
			h.Counts = append(h.Counts, at[b])
		}
		return h, h.odd(name)
	}
	return h, nil
}

// odd says why a histogram of lengths of this name cannot be right.
func (h *Histogram) odd(name string) error {
	below := 0.0
	for i, n := range h.Counts {
		switch b := h.Bounds[i]; {
		case !math.IsInf(b, 1) && (b < 0 || b > engine.MostContext):
			return &engine.PageError{Name: name + "_bucket", Says: fmt.Sprintf("that requests are counted up to %g tokens", b)}
		case n < below:
			return &engine.PageError{Name: name + "_bucket",
				Says: fmt.Sprintf("%.0f up to %g, which is less than it says of shorter ones or said before", n, b)}
		}
		below = n
	}
	// One request may be in the sum and not in the count yet.
	if h.Sum < 0 || h.Sum > (h.total()+1)*engine.MostContext {
		return &engine.PageError{Name: name + "_sum", Says: fmt.Sprintf("%.0f more tokens for %.0f more requests", h.Sum, h.total())}
	}
	return nil
}

// since is what came to a histogram after it was like another one.
func (h Histogram) since(o Histogram) Histogram {
	if !slices.Equal(h.Bounds, o.Bounds) {
		return h
	}
	d := Histogram{Bounds: h.Bounds, Sum: h.Sum - o.Sum}
	for i := range h.Counts {
		d.Counts = append(d.Counts, h.Counts[i]-o.Counts[i])
	}
	return d
}

// add adds the values of another one with the same bounds.
func (h *Histogram) add(o Histogram) {
	if len(h.Bounds) == 0 {
		*h = Histogram{Bounds: o.Bounds, Counts: slices.Clone(o.Counts), Sum: o.Sum}
		return
	}
	if slices.Equal(h.Bounds, o.Bounds) {
		for i := range h.Counts {
			h.Counts[i] += o.Counts[i]
		}
		h.Sum += o.Sum
	}
}

// total is how many values there are.
func (h *Histogram) total() float64 {
	if len(h.Counts) == 0 {
		return 0
	}
	return h.Counts[len(h.Counts)-1]
}

func (h *Histogram) mean() float64 { return h.Sum / h.total() }
