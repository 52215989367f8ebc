package engine

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// Names of the series that a Sample reads, in the order new vLLM, old vLLM, SGLang. The first name that has a value is used.
var (
	kvUsageNames  = []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"}
	kvHeldNames   = []string{"sglang:full_token_usage"} // of full attention alone; token_usage is that of the fullest pool
	runningNames  = []string{"vllm:num_requests_running", "sglang:num_running_reqs"}
	waitingNames  = []string{"vllm:num_requests_waiting", "sglang:num_queue_reqs"}
	outputNames   = []string{"vllm:generation_tokens_total", "sglang:generation_tokens_total"}
	preemptNames  = []string{"vllm:num_preemptions_total"}
	wantedKVNames = []string{"vllm:external_prefix_cache_queries_total"} // prompt tokens whose KV was wanted from other engines
	pulledKVNames = []string{"vllm:external_prefix_cache_hits_total"}    // those of them whose KV was pulled
	expiredNames  = []string{"vllm:nixl_num_kv_expired_reqs_total"}
	lateNames     = []string{"vllm:nixl_num_notifications_after_expiry_total"}
)

// Names of SGLang's series about its steps. It has them only with SGLANG_ENABLE_METRICS_DP_ATTENTION=1.
const (
	stepWaitName = "sglang:dp_attention_sync_wait_seconds_sum"
	stepsName    = "sglang:dp_attention_sync_wait_seconds_count"
)

// capacityName is read from each page, whatever names the config gives other series.
const capacityName = "sglang:max_total_num_tokens"

const (
	metricsLimit  = 16 << 20                           // largest page in bytes; the page of a big deployment is below 1 MiB
	metricsAccept = "text/plain;version=0.0.4;q=1,*/*" // not OpenMetrics, whose time stamps have another unit
)

// MetricNames are names of series, for an engine that does not use those of vLLM or SGLang. An empty name means the names that vLLM and
// SGLang use.
type MetricNames struct{ KVUsage, Running, Waiting string }

// Sample is one reading of an engine's metrics. It has a value for each DP rank (RankLabel).
// The second result of a method is false if the series is missing or NaN.
//
// Rank -1 stands for the whole instance: its KV usage is that of the fullest rank, and its other values are sums over
// the ranks. The gauges of an idle engine may be out of date, so no decision to send a request may depend on a sample alone.
type Sample struct {
	// StartTime is when the engine's process started, in Unix seconds; 0: unknown.
	StartTime float64
	// FirstRank is the engine's number of the first rank on the page. With vLLM's hybrid load balancing, a node may not number its
	// ranks from 0. The methods of Sample always count from 0.
	FirstRank int

	memory map[string]Memory // by the label of the rank, as the page says it; nothing is Misread

	kvUsage, kvHeld, running, waiting, generated, preempted, wantedTokens, pulledTokens, expired, late map[string]float64

	stepWaits, steps map[string]float64 // seconds of waiting for other ranks, and number of steps; by DP rank if SGLang labels them
}

// Scrape reads GET /metrics by the names of series that vLLM and SGLang use. ctx should have a deadline.
func Scrape(ctx context.Context, c *Client, t *Target) (*Sample, error) {
	return MetricNames{}.Scrape(ctx, c, t)
}

// Scrape reads GET /metrics of an engine whose series have the names n. ctx should have a deadline.
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

// Metrics returns the page of GET /metrics, bounded by ctx.
func Metrics(ctx context.Context, c *Client, t *Target) ([]byte, error) {
	return c.read(ctx, t, "/metrics", metricsLimit, Header{"Accept", metricsAccept})
}

// Parse reads a page in the Prometheus text format. It parses only lines with known names, because an engine's page has
// thousands of histogram buckets, and a broken line among them must not make the whole page unreadable. A value that cannot be right
// makes Parse fail, except in the series of SGLang's steps and of its full attention, which are then left out.
func (n MetricNames) Parse(page []byte) (*Sample, error) {
	kv, running, waiting := orDefault(n.KVUsage, kvUsageNames), orDefault(n.Running, runningNames), orDefault(n.Waiting, waitingNames)
	limits := Limits{}.Shares(kv...).Add(MostRequests, running...).Add(MostRequests, waiting...).Add(MostKVTokens, capacityName)
	counters := slices.Concat(outputNames, preemptNames, wantedKVNames, pulledKVNames, expiredNames, lateNames)
	families, err := ParseSeries(page, limits.Counters(counters...))
	if err != nil {
		return nil, err
	}
	first, err := firstRank(families) // the lowest number of a rank on the page, which need not be 0
	if err != nil {
		return nil, err
	}
	stepSeries, err := ParseSeries(page, Limits{}.Counters(stepWaitName, stepsName))
	if err != nil {
		stepSeries = nil // no decision depends on these series, so the rest of the page is still used
	}
	heldSeries, err := ParseSeries(page, Limits{}.Shares(kvHeldNames...))
	if err != nil {
		heldSeries = nil // SGLang computes it as a difference, which may be below 0; KVUsage counts then
	}
	s := &Sample{
		FirstRank:    first,
		kvUsage:      maxByRank(families, kv),
		kvHeld:       maxByRank(heldSeries, kvHeldNames),
		running:      maxByRank(families, running),
		waiting:      maxByRank(families, waiting),
		generated:    maxByRank(families, outputNames),
		preempted:    maxByRank(families, preemptNames),
		wantedTokens: maxByRank(families, wantedKVNames), // prompt tokens whose KV was wanted from other engines
		pulledTokens: maxByRank(families, pulledKVNames), // those of them whose KV was pulled
		expired:      maxByRank(families, expiredNames),
		late:         maxByRank(families, lateNames),
		stepWaits:    sumByRank(stepSeries[stepWaitName]),
		steps:        sumByRank(stepSeries[stepsName]),
	}
	capacities := maxByRank(families, []string{capacityName})
	if err := s.readMemory(families[CacheConfigName].GetMetric(), capacities, capacityName); err != nil {
		return nil, err
	}
	for _, m := range families[StartTimeName].GetMetric() {
		if v := m.GetUntyped().GetValue(); !math.IsNaN(v) {
			s.StartTime = v
		}
	}
	return s, nil
}

// KVUsage returns the share of KV blocks in use on a rank, 0 to 1; for rank -1 that of the fullest rank. ok is false if it is not known.
func (s *Sample) KVUsage(rank int) (share float64, ok bool) {
	if rank < 0 { // for the whole instance, the fullest rank counts
		return fold(s.kvUsage, math.Max)
	}
	return s.rankValue(s.kvUsage, rank)
}

// HeldShare returns the share of a rank's KV capacity that its tokens fill, 0 to 1. It is below KVUsage on an SGLang server with pools for
// sliding windows or states, one of which may be fuller (0.5.23, managers/scheduler_components/pool_stats_observer.py).
func (s *Sample) HeldShare(rank int) (share float64, ok bool) {
	if share, ok = s.rankValue(s.kvHeld, rank); ok {
		return share, true
	}
	return s.rankValue(s.kvUsage, rank)
}

// Running returns the number of requests in a rank's batch; for rank -1, in the batches of all ranks.
func (s *Sample) Running(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.running, rank) }

// Waiting returns the number of requests in a rank's queue; for rank -1, in the queues of all ranks.
func (s *Sample) Waiting(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.waiting, rank) }

// Generated returns how many output tokens a rank has generated since the engine's start; for rank -1, all ranks together.
func (s *Sample) Generated(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.generated, rank)
}

// Expired returns how many hand-offs since the start have expired: the engine freed their KV before a decode engine fetched it.
func (s *Sample) Expired() (handOffs float64, ok bool) { return s.rankValueOrSum(s.expired, -1) }

// ReadLate returns how many hand-offs since the start a decode engine has reported when the engine had
// freed their KV. If they were read, it may have been another prompt's by then. vLLM counts one for
// each of the decode engine's workers, and also those of requests that were aborted before they were
// scheduled, of which nothing was read (0.32, nixl/pull_worker.py and pull_scheduler.py).
func (s *Sample) ReadLate() (handOffs float64, ok bool) { return s.rankValueOrSum(s.late, -1) }

// Expiries is how many hand-offs of a prefill engine expired before a decode engine fetched them, by its metrics. vLLM counts them in the
// call that frees their KV (0.32, nixl/base_worker.py).
type Expiries struct {
	HandOffs float64 // since the start of the process
	Start    float64 // start time of the process, in Unix seconds; 0: not known
	Known    bool    // the engine counts them

	ReadLate   float64   // hand-offs that were reported after that, see Sample.ReadLate
	ReadLateAt time.Time // when ReadLate was last seen to grow; zero: never
}

// Preempted returns how many requests of a rank since the engine's start lost their KV to other requests before they were complete.
func (s *Sample) Preempted(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.preempted, rank)
}

// StepWaitSeconds returns how many seconds since the start a rank has waited for the other ranks before its steps, by SGLang's own clock.
func (s *Sample) StepWaitSeconds(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.stepWaits, rank)
}

// Steps returns how many steps a rank has made since the engine's start. StepWaitSeconds adds up its waits before these steps.
func (s *Sample) Steps(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.steps, rank) }

// NotPulledTokens returns for how many prompt tokens since the start a rank wanted KV of other engines and did not get it, so that
// it computed them itself; for rank -1, all ranks together.
func (s *Sample) NotPulledTokens(rank int) (tokens float64, ok bool) {
	wanted, hasWanted := s.rankValueOrSum(s.wantedTokens, rank)
	pulled, hasPulled := s.rankValueOrSum(s.pulledTokens, rank)
	return wanted - pulled, hasWanted && hasPulled
}

// Engines returns the labels of the ranks for which there is a KV usage, sorted as numbers.
func (s *Sample) Engines() []string {
	return slices.SortedFunc(maps.Keys(s.kvUsage), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) // of two decimal numbers, the one with fewer digits is the smaller
	})
}

// Gauges are values that an engine reported about one of its ranks. A value below 0 is not known.
// "New" means since the previous sample.
type Gauges struct {
	Running, Waiting float64 // requests in the rank's batch and in its queue
	KVShare          float64 // share of its KV memory that is in use, 0 to 1
	Preempted        float64 // requests preempted since the previous sample
	Computed         float64 // new prompt tokens whose KV the rank wanted from other engines and did not get
	WaitMs           float64 // mean wait for other ranks before a new step, in ms; below 0 also if there was no new step
}

// maxWaitMs is the longest mean wait that is believed: an hour, in ms.
const maxWaitMs = 3600 * 1000

// gaugesOf returns the gauges of a rank: values of the sample s, and the growth of counters since the previous sample; previous is nil
// for the first one.
func gaugesOf(previous, s *Sample, rank int) Gauges {
	g := Gauges{Running: orUnknown(s.Running(rank)), Waiting: orUnknown(s.Waiting(rank)), KVShare: orUnknown(s.KVUsage(rank))}
	g.Preempted, g.Computed, g.WaitMs = -1, -1, -1            // not known
	if previous == nil || previous.StartTime != s.StartTime { // after a restart the counters begin at 0 again
		return g
	}
	growth := func(counter func(*Sample, int) (float64, bool)) float64 {
		old, hadOld := counter(previous, rank)
		latest, hasLatest := counter(s, rank)
		return orUnknown(latest-old, hadOld && hasLatest && latest >= old) // a counter that fell was reset, even with the same start time
	}
	g.Preempted, g.Computed = growth((*Sample).Preempted), growth((*Sample).NotPulledTokens)
	if steps := growth((*Sample).Steps); steps > 0 {
		if ms := 1000 * growth((*Sample).StepWaitSeconds) / steps; ms >= 0 && ms <= maxWaitMs { // a longer wait cannot be right
			g.WaitMs = ms
		}
	}
	return g
}

// orUnknown returns v; -1, which stands for an unknown value, if ok is false.
func orUnknown(v float64, ok bool) float64 {
	if !ok {
		return -1
	}
	return v
}

// rankValueOrSum returns the value of a rank; for rank -1 the sum over all ranks. ok is false if there is no value.
func (s *Sample) rankValueOrSum(values map[string]float64, rank int) (value float64, ok bool) {
	if rank < 0 {
		return fold(values, func(a, b float64) float64 { return a + b })
	}
	return s.rankValue(values, rank)
}

// fold combines 0 and the values of all ranks; ok is false if there are no values.
func fold(values map[string]float64, combine func(a, b float64) float64) (result float64, ok bool) {
	for _, v := range values { // values are not negative, so 0 can begin a maximum as well as a sum
		result, ok = combine(result, v), true
	}
	return result, ok
}

// rankValue returns the value of a rank, counted from 0, though the page counts from FirstRank; ok is false if there is none. If a series
// has no label, as in old engines, it belongs to rank 0.
func (s *Sample) rankValue(values map[string]float64, rank int) (value float64, ok bool) {
	if value, ok = values[strconv.Itoa(s.FirstRank+rank)]; ok {
		return value, true
	}
	value, ok = values[""]
	return value, ok && rank == 0
}

// orDefault returns a list with name alone, or defaults if name is empty.
func orDefault(name string, defaults []string) []string {
	if name == "" {
		return defaults
	}
	return []string{name}
}

// Memories returns the KV memory of each rank; nil: the page does not tell any, or s is nil. models are those that the engine lists.
func (s *Sample) Memories(models []Model) Memories {
	if s == nil || len(s.memory) == 0 {
		return nil
	}
	context := LongestContext(models)
	out := make(Memories, len(s.memory))
	for label, m := range s.memory {
		if number, err := strconv.Atoi(label); err == nil {
			label = strconv.Itoa(number - s.FirstRank)
		}
		out[label] = m.For(context)
	}
	return out
}

// readMemory sets the KV memory of each rank: by the labels of vllm:cache_config_info or, for SGLang, by capacities, the values of the
// series from.
func (s *Sample) readMemory(configs []*dto.Metric, capacities map[string]float64, from string) error {
	s.memory = map[string]Memory{}
	for label, tokens := range capacities {
		if tokens > 0 {
			s.memory[label] = Memory{Capacity: Reading{int64(tokens), from}}
		}
	}
	vllm, err := PageMemories(configs)
	for label, m := range vllm {
		s.memory[label] = m
	}
	return err
}
