package engine

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
)

// Names of the series that a Sample reads: of new vLLM, old vLLM and SGLang. The first name that has a value is used.
var (
	kvUsageNames  = []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"}
	runningNames  = []string{"vllm:num_requests_running", "sglang:num_running_reqs"}
	waitingNames  = []string{"vllm:num_requests_waiting", "sglang:num_queue_reqs"}
	capacityNames = []string{"sglang:max_total_num_tokens"}
	outputNames   = []string{"vllm:generation_tokens_total", "sglang:generation_tokens_total"}
	preemptNames  = []string{"vllm:num_preemptions_total"}
	askedNames    = []string{"vllm:external_prefix_cache_queries_total"}
	pulledNames   = []string{"vllm:external_prefix_cache_hits_total"}
	expiredNames  = []string{"vllm:nixl_num_kv_expired_reqs_total"}
	waitedNames   = []string{"sglang:dp_attention_sync_wait_seconds_sum"} // only with SGLANG_ENABLE_METRICS_DP_ATTENTION=1
	stepsNames    = []string{"sglang:dp_attention_sync_wait_seconds_count"}
)

// Names of series that each page has.
const (
	CacheConfigName = "vllm:cache_config_info"     // the capacity is in its labels
	StartTimeName   = "process_start_time_seconds" // another value means that the engine restarted
)

const (
	metricsLimit  = 16 << 20                           // bytes; the page of a big deployment is below 1 MiB
	metricsAccept = "text/plain;version=0.0.4;q=1,*/*" // OpenMetrics writes time stamps another way
)

// MetricNames replace the known names if an operator's engine has other ones. An empty name keeps the known ones.
type MetricNames struct{ KVUsage, Running, Waiting string }

// Sample is one reading of an engine's metrics. Every value is kept by the `engine` label, one for each DP rank, and
// never averaged. A series that is absent or NaN is unknown: the second result is false. A page with a number that
// cannot be right is an error.
//
// Rank -1 stands for the instance as a whole: the KV usage of the fullest rank, and of all other values the sum over
// the ranks. Gauges freeze while an engine is idle: a sample is a hint about load that others cause, and never the only
// gate.
type Sample struct {
	// StartTime is the start of the engine's process in Unix seconds, 0 if unknown.
	StartTime float64
	// BlockTokens is the tokens of a KV block, 0 if unknown.
	BlockTokens int
	// FirstRank is the number of the first rank in its deployment. A node of vLLM under hybrid load balancing may
	// count from another number than 0; here its ranks are counted from 0.
	FirstRank int

	kvUsage, running, waiting, capacity, generated, preempted, asked, pulled, expired map[string]float64

	waited, steps map[string]float64 // seconds and steps, by DP rank where SGLang labels it
}

// Scrape reads GET /metrics with the known names, bounded by ctx. ctx should have a deadline.
func Scrape(ctx context.Context, c *Client, t *Target) (*Sample, error) {
	return MetricNames{}.Scrape(ctx, c, t)
}

// Scrape reads GET /metrics with an operator's own names where there are some.
func (n MetricNames) Scrape(ctx context.Context, c *Client, t *Target) (*Sample, error) {
	page, err := Metrics(ctx, c, t)
	if err != nil {
		return nil, err
	}
	s, err := n.Parse(page)
	if err != nil {
		return nil, fmt.Errorf("engine %s: %w", t.ID, err)
	}
	return s, nil
}

// Metrics is the page of GET /metrics, bounded by ctx.
func Metrics(ctx context.Context, c *Client, t *Target) ([]byte, error) {
	return c.read(ctx, t, "/metrics", metricsLimit, Header{"Accept", metricsAccept})
}

// Parse reads a page in the Prometheus text format. Only lines of known names reach the parser: an engine's page has
// thousands of histogram buckets, and a broken line among them must not make the whole page unreadable.
func (n MetricNames) Parse(page []byte) (*Sample, error) {
	kv, running, waiting := orDefault(n.KVUsage, kvUsageNames), orDefault(n.Running, runningNames), orDefault(n.Waiting, waitingNames)
	limits := Limits{}.Shares(kv...).Add(MostRequests, running...).Add(MostRequests, waiting...).Add(MostKVTokens, capacityNames...)
	families, err := Named(page, limits.Counters(slices.Concat(outputNames, preemptNames, askedNames, pulledNames, expiredNames)...))
	if err != nil {
		return nil, err
	}
	first, err := firstRank(families)
	if err != nil {
		return nil, err
	}
	clocks, err := Named(page, Limits{}.Counters(waitedNames[0], stepsNames[0]))
	if err != nil {
		clocks = nil // nothing is decided by these clocks, so the rest of the page is used without them
	}
	s := &Sample{
		FirstRank: first,
		kvUsage:   byEngine(families, kv),
		running:   byEngine(families, running),
		waiting:   byEngine(families, waiting),
		capacity:  byEngine(families, capacityNames),
		generated: byEngine(families, outputNames),
		preempted: byEngine(families, preemptNames),
		asked:     byEngine(families, askedNames),
		pulled:    byEngine(families, pulledNames),
		expired:   byEngine(families, expiredNames),
		waited:    sums(clocks[waitedNames[0]]),
		steps:     sums(clocks[stepsNames[0]]),
	}
	configs := families[CacheConfigName].GetMetric()
	rooms, err := Capacities(configs)
	if err != nil {
		return nil, err
	}
	maps.Copy(s.capacity, rooms)
	for _, m := range configs {
		size, err := blockTokens(m)
		if err != nil {
			return nil, err
		}
		if size > 0 {
			s.BlockTokens = size
		}
	}
	for _, m := range families[StartTimeName].GetMetric() {
		if v := m.GetUntyped().GetValue(); !math.IsNaN(v) {
			s.StartTime = v
		}
	}
	return s, nil
}

// KVUsage is the share of KV blocks in use, 0 to 1.
func (s *Sample) KVUsage(rank int) (float64, bool) {
	if rank < 0 {
		return fold(s.kvUsage, math.Max)
	}
	return s.at(s.kvUsage, rank)
}

// Running is the number of requests in the engine's batch.
func (s *Sample) Running(rank int) (float64, bool) { return s.total(s.running, rank) }

// Waiting is the number of requests that the engine holds back.
func (s *Sample) Waiting(rank int) (float64, bool) { return s.total(s.waiting, rank) }

// Generated counts the output tokens of all requests since the start.
func (s *Sample) Generated(rank int) (float64, bool) { return s.total(s.generated, rank) }

// Expired counts the hand-offs, since the start, whose KV the instance freed before a decode engine had fetched it.
func (s *Sample) Expired() (float64, bool) { return s.total(s.expired, -1) }

// Preempted counts the requests, since the start, that had to give their KV back before they were done.
func (s *Sample) Preempted(rank int) (float64, bool) { return s.total(s.preempted, rank) }

// Waited counts the seconds, since the start, that a rank waited for the others before its steps, by SGLang's own clock.
func (s *Sample) Waited(rank int) (float64, bool) { return s.total(s.waited, rank) }

// Steps counts the steps, since the start, before which a rank waited.
func (s *Sample) Steps(rank int) (float64, bool) { return s.total(s.steps, rank) }

// NotPulled counts the prompt tokens, since the start, whose KV the engine asked other engines for and did not get:
// it computed them itself.
func (s *Sample) NotPulled(rank int) (tokens float64, ok bool) {
	asked, ok := s.total(s.asked, rank)
	pulled, both := s.total(s.pulled, rank)
	return asked - pulled, ok && both
}

// CacheTokens is the KV capacity in tokens: num_gpu_blocks x block_size.
func (s *Sample) CacheTokens(rank int) (int64, bool) {
	v, ok := s.total(s.capacity, rank)
	return int64(v), ok
}

// Capacities is CacheTokens of every rank, by its number from 0 on. If the engine does not number its ranks, the key
// is empty.
func (s *Sample) Capacities() map[string]int64 {
	out := make(map[string]int64, len(s.capacity))
	for e, v := range s.capacity {
		if n, err := strconv.Atoi(e); err == nil {
			e = strconv.Itoa(n - s.FirstRank)
		}
		out[e] = int64(v)
	}
	return out
}

// Engines lists the `engine` labels that have a KV usage, by number, from FirstRank on.
func (s *Sample) Engines() []string {
	return slices.SortedFunc(maps.Keys(s.kvUsage), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	})
}

// Gauges are what an engine says of one of its ranks. A value that it does not say is below 0.
type Gauges struct {
	Running, Waiting float64 // requests in its batch, and those that it holds back
	KVShare          float64 // share of its KV memory in use
	Preempted        float64 // requests, since the reading before
	Computed         float64 // prompt tokens whose KV it asked other engines for and did not get, since the reading before
	WaitMs           float64 // mean wait for others before a step, since the reading before; below 0 also if it made no step
}

// mostWaitMs is the longest mean wait that is believed: an hour before each step.
const mostWaitMs = 3600 * 1000

// gaugesOf is what a rank says now, with the growth of its counters since the reading before. before is nil at the
// first reading.
func gaugesOf(before, now *Sample, rank int) Gauges {
	known := func(v float64, ok bool) float64 {
		if !ok {
			return -1
		}
		return v
	}
	g := Gauges{Running: known(now.Running(rank)), Waiting: known(now.Waiting(rank)), KVShare: known(now.KVUsage(rank))}
	g.Preempted, g.Computed, g.WaitMs = -1, -1, -1
	if before == nil || before.StartTime != now.StartTime {
		return g
	}
	grew := func(of func(*Sample, int) (float64, bool)) float64 {
		was, had := of(before, rank)
		is, has := of(now, rank)
		return known(is-was, had && has && is >= was) // a counter that went back was reset, although the start time does not show it
	}
	g.Preempted, g.Computed = grew((*Sample).Preempted), grew((*Sample).NotPulled)
	if steps := grew((*Sample).Steps); steps > 0 {
		if ms := 1000 * grew((*Sample).Waited) / steps; ms >= 0 && ms <= mostWaitMs {
			g.WaitMs = ms
		}
	}
	return g
}

// total is the value of a rank; for rank -1 it is the sum over all ranks.
func (s *Sample) total(values map[string]float64, rank int) (float64, bool) {
	if rank < 0 {
		return fold(values, func(a, b float64) float64 { return a + b })
	}
	return s.at(values, rank)
}

// fold combines the values of all ranks, beginning with 0; ok is false if there are none.
func fold(values map[string]float64, combine func(a, b float64) float64) (result float64, ok bool) {
	for _, v := range values { // values are not negative, so 0 can begin a maximum as well as a sum
		result, ok = combine(result, v), true
	}
	return result, ok
}

// at is the value of a rank. An engine that is too old to label its series has one rank.
func (s *Sample) at(values map[string]float64, rank int) (float64, bool) {
	if v, ok := values[strconv.Itoa(s.FirstRank+rank)]; ok {
		return v, true
	}
	v, ok := values[""]
	return v, ok && rank == 0
}

func orDefault(name string, defaults []string) []string {
	if name == "" {
		return defaults
	}
	return []string{name}
}
