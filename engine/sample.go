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

// Series of a Sample: new vLLM, old vLLM, SGLang. The first that has a value is used.
var (
	kvUsageNames = []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"}
	// This is of full attention alone; token_usage is of the fullest pool.
	kvHeldNames  = []string{"sglang:full_token_usage"}
	runningNames = []string{"vllm:num_requests_running", "sglang:num_running_reqs"}
	waitingNames = []string{"vllm:num_requests_waiting", "sglang:num_queue_reqs"}
	outputNames  = []string{"vllm:generation_tokens_total", "sglang:generation_tokens_total"}
	preemptNames = []string{"vllm:num_preemptions_total"}
	// These are prompt tokens whose KV was wanted from other engines.
	wantedKVNames = []string{"vllm:external_prefix_cache_queries_total"}
	// These are those of them whose KV was pulled.
	pulledKVNames = []string{"vllm:external_prefix_cache_hits_total"}
	expiredNames  = []string{"vllm:nixl_num_kv_expired_reqs_total"}
	lateNames     = []string{"vllm:nixl_num_notifications_after_expiry_total"}
)

// SGLang has these only with SGLANG_ENABLE_METRICS_DP_ATTENTION=1.
const (
	stepWaitName = "sglang:dp_attention_sync_wait_seconds_sum"
	stepsName    = "sglang:dp_attention_sync_wait_seconds_count"
)

const capacityName = "sglang:max_total_num_tokens"

const (
	// In bytes; the page of a big deployment is below 1 MiB.
	metricsLimit = 16 << 20
	// This is not OpenMetrics, whose time stamps have another unit.
	metricsAccept = "text/plain;version=0.0.4;q=1,*/*"
)

// MetricNames are for an engine that does not use the names of vLLM or SGLang. An empty name means
// theirs.
type MetricNames struct{ KVUsage, Running, Waiting string }

// Sample is one reading of an engine's metrics, by DP rank. Rank -1 is the whole instance: the KV
// usage of the fullest rank, and sums of the others. The second result of a method is false if the
// series is missing or NaN. Counts are since the start of the engine's process.
//
// An idle engine's gauges may be out of date, so no decision to send a request may depend on a
// sample alone.
type Sample struct {
	// StartTime is that of the process, in Unix seconds; 0: unknown.
	StartTime float64
	// FirstRank is the engine's number of its first rank: with vLLM's hybrid load balancing it may not
	// be 0. The methods count from 0.
	FirstRank int

	memory map[string]Memory // by the label of the rank; nothing is Misread

	kvUsage, kvHeld, running, waiting, generated, preempted, wantedTokens, pulledTokens, expired, late map[string]float64

	stepWaits, steps map[string]float64 // seconds of waiting for other ranks, and number of steps
}

// Scrape reads GET /metrics. ctx should have a deadline.
func Scrape(ctx context.Context, c *Client, t *Target) (*Sample, error) {
	return MetricNames{}.Scrape(ctx, c, t)
}

// Scrape reads GET /metrics by these names. ctx should have a deadline.
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

// Metrics returns the page of GET /metrics.
func Metrics(ctx context.Context, c *Client, t *Target) ([]byte, error) {
	return c.read(ctx, t, "/metrics", metricsLimit, Header{"Accept", metricsAccept})
}

// Parse reads only lines with known names: a broken line among thousands of histogram buckets must
// not make the page unreadable. A value that cannot be right makes Parse fail, except in the series
// of SGLang's steps and full attention.
func (n MetricNames) Parse(page []byte) (*Sample, error) {
	kv, running, waiting := orDefault(n.KVUsage, kvUsageNames), orDefault(n.Running, runningNames), orDefault(n.Waiting, waitingNames)
	limits := Limits{}.Shares(kv...).Add(MostRequests, running...).Add(MostRequests, waiting...).Add(MostKVTokens, capacityName)
	counters := slices.Concat(outputNames, preemptNames, wantedKVNames, pulledKVNames, expiredNames, lateNames)
	families, err := ParseSeries(page, limits.Counters(counters...))
	if err != nil {
		return nil, err
	}
	first, err := firstRank(families)
	if err != nil {
		return nil, err
	}
	stepSeries, err := ParseSeries(page, Limits{}.Counters(stepWaitName, stepsName))
	if err != nil {
		stepSeries = nil // no decision depends on them
	}
	heldSeries, err := ParseSeries(page, Limits{}.Shares(kvHeldNames...))
	if err != nil {
		heldSeries = nil // SGLang's difference may be below 0; KVUsage counts then
	}
	s := &Sample{
		FirstRank:    first,
		kvUsage:      maxByRank(families, kv),
		kvHeld:       maxByRank(heldSeries, kvHeldNames),
		running:      maxByRank(families, running),
		waiting:      maxByRank(families, waiting),
		generated:    maxByRank(families, outputNames),
		preempted:    maxByRank(families, preemptNames),
		wantedTokens: maxByRank(families, wantedKVNames),
		pulledTokens: maxByRank(families, pulledKVNames),
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

// KVUsage is the share of KV blocks in use, 0 to 1.
func (s *Sample) KVUsage(rank int) (share float64, ok bool) {
	if rank < 0 {
		return fold(s.kvUsage, math.Max)
	}
	return s.rankValue(s.kvUsage, rank)
}

// HeldShare is the share of a rank's KV capacity that its tokens fill, 0 to 1. SGLang's KVUsage may
// be larger, because a pool for sliding windows or states may be fuller (0.5.23,
// managers/scheduler_components/pool_stats_observer.py).
func (s *Sample) HeldShare(rank int) (share float64, ok bool) {
	if share, ok = s.rankValue(s.kvHeld, rank); ok {
		return share, true
	}
	return s.rankValue(s.kvUsage, rank)
}

// Running counts the requests in a rank's batch.
func (s *Sample) Running(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.running, rank) }

// Waiting counts the requests in a rank's queue.
func (s *Sample) Waiting(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.waiting, rank) }

// Generated counts output tokens since the engine's start.
func (s *Sample) Generated(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.generated, rank)
}

// Expired counts hand-offs whose KV the engine freed before a decode engine fetched it.
func (s *Sample) Expired() (handOffs float64, ok bool) { return s.rankValueOrSum(s.expired, -1) }

// ReadLate counts hand-offs that a decode engine has reported after the engine had freed their KV:
// what it read may have been another prompt's. vLLM counts one for each worker of the decode
// engine, and also requests that were aborted before they were scheduled, of which nothing was read
// (0.32, nixl/pull_worker.py and pull_scheduler.py).
func (s *Sample) ReadLate() (handOffs float64, ok bool) { return s.rankValueOrSum(s.late, -1) }

// Expiries is how many hand-offs of a prefill engine expired. vLLM counts them in the call that
// frees their KV (0.32, nixl/base_worker.py).
type Expiries struct {
	HandOffs float64 // since the process started
	Start    float64 // Unix seconds; 0: not known
	Known    bool    // the engine counts them

	ReadLate   float64   // see Sample.ReadLate
	ReadLateAt time.Time // when ReadLate last grew; zero: never
}

// Preempted counts requests that lost their KV to other requests before they were complete.
func (s *Sample) Preempted(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.preempted, rank)
}

// StepWaitSeconds is how long a rank has waited for the others before its steps, by SGLang's clock.
func (s *Sample) StepWaitSeconds(rank int) (value float64, ok bool) {
	return s.rankValueOrSum(s.stepWaits, rank)
}

// Steps counts the steps of StepWaitSeconds.
func (s *Sample) Steps(rank int) (value float64, ok bool) { return s.rankValueOrSum(s.steps, rank) }

// NotPulledTokens are prompt tokens whose KV a rank wanted from other engines and did not get, so
// that it computed them itself.
func (s *Sample) NotPulledTokens(rank int) (tokens float64, ok bool) {
	wanted, hasWanted := s.rankValueOrSum(s.wantedTokens, rank)
	pulled, hasPulled := s.rankValueOrSum(s.pulledTokens, rank)
	return wanted - pulled, hasWanted && hasPulled
}

// Engines returns the labels of the ranks, sorted as numbers.
func (s *Sample) Engines() []string {
	return slices.SortedFunc(maps.Keys(s.kvUsage), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) // fewer digits: the smaller number
	})
}

// Gauges are of one rank. A value below 0 is not known. Preempted, Computed and WaitMs count since
// the previous sample.
type Gauges struct {
	Running, Waiting float64
	KVShare          float64 // share of its KV memory that is in use, 0 to 1
	Preempted        float64
	Computed         float64 // prompt tokens whose KV was wanted and not pulled
	WaitMs           float64 // mean wait for other ranks before a step; below 0 also without one
}

const maxWaitMs = 3600 * 1000

// gaugesOf: previous is nil for the first sample.
func gaugesOf(previous, s *Sample, rank int) Gauges {
	g := Gauges{Running: orUnknown(s.Running(rank)), Waiting: orUnknown(s.Waiting(rank)), KVShare: orUnknown(s.KVUsage(rank))}
	g.Preempted, g.Computed, g.WaitMs = -1, -1, -1
	if previous == nil || previous.StartTime != s.StartTime { // after a restart counters begin at 0
		return g
	}
	growth := func(counter func(*Sample, int) (float64, bool)) float64 {
		old, hadOld := counter(previous, rank)
		latest, hasLatest := counter(s, rank)
		// A counter that fell was reset, even with the same start time.
		return orUnknown(latest-old, hadOld && hasLatest && latest >= old)
	}
	g.Preempted, g.Computed = growth((*Sample).Preempted), growth((*Sample).NotPulledTokens)
	if steps := growth((*Sample).Steps); steps > 0 {
		if ms := 1000 * growth((*Sample).StepWaitSeconds) / steps; ms >= 0 && ms <= maxWaitMs {
			g.WaitMs = ms
		}
	}
	return g
}

func orUnknown(v float64, ok bool) float64 {
	if !ok {
		return -1
	}
	return v
}

func (s *Sample) rankValueOrSum(values map[string]float64, rank int) (value float64, ok bool) {
	if rank < 0 {
		return fold(values, func(a, b float64) float64 { return a + b })
	}
	return s.rankValue(values, rank)
}

func fold(values map[string]float64, combine func(a, b float64) float64) (result float64, ok bool) {
	for _, v := range values { // values are not negative, so 0 can begin a maximum, too
		result, ok = combine(result, v), true
	}
	return result, ok
}

// rankValue counts ranks from 0. A series without a label, as in old engines, belongs to rank 0.
func (s *Sample) rankValue(values map[string]float64, rank int) (value float64, ok bool) {
	if value, ok = values[strconv.Itoa(s.FirstRank+rank)]; ok {
		return value, true
	}
	value, ok = values[""]
	return value, ok && rank == 0
}

func orDefault(name string, defaults []string) []string {
	if name == "" {
		return defaults
	}
	return []string{name}
}

// Memories is by rank; nil: the page tells none, or s is nil.
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
