package prefill

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/prefill/fit"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/steer"
)

// Config is the section `prefill` of the config file, together with further parameters of a
// Scheduler. A zero field takes its value from Default, except Scrape.Interval, where 0 means
// never, and bool fields.
type Config struct {
	// Policy is the default policy. Empty: finish, or lmetric if there are other regions and an engine
	// both prefills and decodes.
	Policy string `yaml:"policy"`
	// Work is what the policy least-tokens weighs: tokens, or vllm-ascend for the weights of its
	// example proxy.
	Work        string                       `yaml:"work"`
	KVThreshold float64                      `yaml:"kv_threshold"`
	Policies    map[string]policy.Definition `yaml:"policies"`
	Push        PushConfig                   `yaml:"push"`
	Calibration CalibrationConfig            `yaml:"calibration"`
	Index       IndexConfig                  `yaml:"index"`
	KVEvents    KVEventsConfig               `yaml:"kv_events"`
	Hotspot     HotspotConfig                `yaml:"hotspot"`
	Affinity    AffinityConfig               `yaml:"affinity"`

	Disaggregation Disaggregation `yaml:"disaggregation"`

	Scrape ScrapeConfig `yaml:"scrape"`
	Queue  QueueConfig  `yaml:"queue"`
	Retry  RetryConfig  `yaml:"retry"`

	Explain bool `yaml:"-"` // each lease gets a Trace
	// Early bounds the arrival queues of models whose decode rank is chosen before the prefill. A zero
	// field is that of Queue.
	Early  QueueConfig      `yaml:"-"`
	Clock  func() time.Time `yaml:"-"` // of a simulation; nil: the real clock
	Places Semaphore        `yaml:"-"` // in the pool of hand-offs; nil: unlimited
	// Decode returns how many further hand-offs for a model would get a slot on the ranks of a board
	// within the given time; nil: any number. It is called under the scheduler's lock. onlySomeRanks:
	// not all ranks of the board list the model, so that its hand-offs are counted separately.
	Decode func(board, model string, within time.Duration) (n int, onlySomeRanks bool) `yaml:"-"`
	// Free returns how many slots are free for a model on the ranks of a board that prefill and
	// decode; nil: any number. It must not wait. onlySomeRanks is as in Decode.
	Free    func(board, model string) (n int, onlySomeRanks bool) `yaml:"-"`
	Scraper Scraper                                               `yaml:"-"` // needed unless Scrape.Interval is 0
	Ranks   Ranks                                                 `yaml:"-"` // that prefill and decode; nil: none

	Registerer prometheus.Registerer `yaml:"-"` // nil: metrics are not exported
	Log        *zap.Logger           `yaml:"-"` // nil: nothing is logged
}

// Ranks reports the KV events of ranks that prefill and decode. The scheduler also calls it under
// its lock, so that it must not call the scheduler.
type Ranks interface {
	Events() []RankEvents
	BlockTokens(model string) int // of the model's ranks; 0: not known
}

type PushConfig struct {
	MaxUnanswered int `yaml:"max_unanswered"` // probes of this proxy per engine
	// Lead is how long before the predicted end of its present work an engine may get a prompt whose
	// decode rank is chosen first.
	Lead time.Duration `yaml:"-"`
}

type ScrapeConfig struct {
	// Interval 0 means never, so that the KV gate depends on this proxy's accounts alone.
	Interval time.Duration `yaml:"interval"`
	Timeout  time.Duration `yaml:"timeout"` // of one scrape
}

type QueueConfig struct {
	Max     int           `yaml:"max"`     // without retries
	Timeout time.Duration `yaml:"timeout"` // longest wait, from the first arrival
	// BatchTimeout is longer, because no person waits for batch requests, and free capacity may come
	// late.
	BatchTimeout time.Duration `yaml:"batch_timeout"`
}

type RetryConfig struct {
	// Attempts per request include the first. The first maxUnsent attempts of which no byte reached an
	// engine do not count.
	Attempts int           `yaml:"attempts"`
	Base     time.Duration `yaml:"base"`   // longest wait before the first retry; doubles with each further one
	Budget   float64       `yaml:"budget"` // most retries in the last 10 s, as a share (0 to 1) of the requests
}

// CalibrationConfig is the latency that predicts prefill times until one is learned.
type CalibrationConfig = fit.Config

type IndexConfig struct {
	MaxBytes int64  `yaml:"max_bytes"`
	Tokenize string `yaml:"tokenize"` // what computes token ids: off (nothing) or engine (an engine's /tokenize)

	TokenizeTimeout time.Duration `yaml:"tokenize_timeout"` // after this time, a prompt is looked up by its bytes
}

// The values of Tokenize, for clients that do not send token ids.
const (
	TokenizeOff    = "off"
	TokenizeEngine = "engine"
	tokenizeLocal  = "local" // refused, because evenkeel has no tokenizer of its own
)

// KVEventsConfig says where engines publish their KV events. If an engine does not report its
// ports, its rank i publishes at these ports plus i.
type KVEventsConfig struct {
	Enabled    bool `yaml:"enabled"`
	Port       int  `yaml:"port"`
	ReplayPort int  `yaml:"replay_port"` // 0: no replays, so that a gap drops all known blocks
	// ReplayTimeout is a constant except in tests: missed events are in the engine's memory, and an
	// engine that stays silent for 2 s sends none.
	ReplayTimeout time.Duration `yaml:"-"`
}

// HotspotConfig says whether requests with a very common prefix are kept off the engines that hold
// it for a while, so that others get it, too.
type HotspotConfig struct {
	Enabled bool `yaml:"enabled"`
}

// AffinityConfig configures session affinity.
type AffinityConfig = steer.AffinityConfig

// Semaphore are the places for hand-offs in the pool. A place is reserved before the probe is sent,
// so that no prefill is wasted because the pool is full. The methods must not wait, and must not
// call the Scheduler.
type Semaphore interface {
	TryAcquire() bool
	Room() bool // TryAcquire would succeed
	Release()
}

// Scraper reads the gauges of one candidate's engine.
type Scraper func(ctx context.Context, c Candidate) (Sample, error)

type Sample = ledger.Sample

// Default returns the values that a zero field stands for, and the default scrape interval.
func Default() Config {
	return Config{
		Policy:      "finish",
		Work:        "tokens",
		KVThreshold: 0.90,
		Push:        PushConfig{MaxUnanswered: 8},
		Calibration: CalibrationConfig{TPMs: 0.0938, T0Ms: 150.72}, // Mistral-7B on an A100: GORGO's Table 1
		Index:       IndexConfig{MaxBytes: 256 << 20, Tokenize: TokenizeOff, TokenizeTimeout: 250 * time.Millisecond},
		KVEvents:    KVEventsConfig{Port: 5557, ReplayPort: 5558, ReplayTimeout: 2 * time.Second},
		Hotspot:     HotspotConfig{Enabled: true},
		Affinity:    AffinityConfig{LoadFactor: 1.25, TTL: 10 * time.Minute, MaxKeys: 100_000},

		Disaggregation: Disaggregation{Mode: DisaggregateAlways, ThresholdTokens: strconv.Itoa(DefaultLocalThreshold), MaxLocalTokens: 512},

		// The timeout is long, because the Python server of a busy engine answers late.
		Scrape: ScrapeConfig{Interval: 500 * time.Millisecond, Timeout: 5 * time.Second},
		Queue:  QueueConfig{Max: 1000, Timeout: time.Minute, BatchTimeout: 10 * time.Minute},
		// The budget is so large that one of several prefill engines can fail most of its probes without
		// using up all retries.
		Retry: RetryConfig{Attempts: 3, Base: 50 * time.Millisecond, Budget: 0.5},
	}
}

// withDefaults also resets the settings of KV events or affinity that are off, so that Validate
// does not refuse a setting without effect.
func (c Config) withDefaults() Config {
	d := Default()
	c.Policy, c.Work = cmp.Or(c.Policy, d.Policy), cmp.Or(c.Work, d.Work)
	c.KVThreshold = cmp.Or(c.KVThreshold, d.KVThreshold)
	c.Push.MaxUnanswered = cmp.Or(c.Push.MaxUnanswered, d.Push.MaxUnanswered)
	if c.Calibration.TPMs == 0 && c.Calibration.T0Ms == 0 { // a configured latency may have one of them 0
		c.Calibration.TPMs, c.Calibration.T0Ms = d.Calibration.TPMs, d.Calibration.T0Ms
	}
	c.Index.MaxBytes, c.Index.Tokenize = cmp.Or(c.Index.MaxBytes, d.Index.MaxBytes), cmp.Or(c.Index.Tokenize, d.Index.Tokenize)
	c.Index.TokenizeTimeout = cmp.Or(c.Index.TokenizeTimeout, d.Index.TokenizeTimeout)
	if !c.KVEvents.Enabled {
		c.KVEvents = d.KVEvents
	}
	if !c.Affinity.Enabled {
		c.Affinity = d.Affinity
	}
	c.Scrape.Timeout = cmp.Or(c.Scrape.Timeout, d.Scrape.Timeout)
	c.Queue.Max, c.Queue.Timeout = cmp.Or(c.Queue.Max, d.Queue.Max), cmp.Or(c.Queue.Timeout, d.Queue.Timeout)
	c.Queue.BatchTimeout = cmp.Or(c.Queue.BatchTimeout, d.Queue.BatchTimeout)
	c.Early.Max, c.Early.Timeout = cmp.Or(c.Early.Max, c.Queue.Max), cmp.Or(c.Early.Timeout, c.Queue.Timeout)
	c.Retry.Attempts, c.Retry.Base, c.Retry.Budget = cmp.Or(c.Retry.Attempts, d.Retry.Attempts), cmp.Or(c.Retry.Base, d.Retry.Base),
		cmp.Or(c.Retry.Budget, d.Retry.Budget)
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	return c
}

func (c *Config) ledger() ledger.Config {
	return ledger.Config{KVThreshold: c.KVThreshold, Interval: c.Scrape.Interval}
}
