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

// Config is `prefill` of the config file, and what a Tier is given beside it. A zero field takes its value from
// Default, except Scrape.Interval, where 0 means never, and the switches, where false means off.
type Config struct {
	Policy      string  `yaml:"policy"` // empty: finish, or lmetric where an engine is in both lists and there are other regions
	Work        string  `yaml:"work"`   // what policy least-tokens weighs: tokens | vllm-ascend
	KVThreshold float64 `yaml:"kv_threshold"`
	// Policies of the user, in expressions over the indicators.
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

	Explain bool `yaml:"-"` // leases have a Trace of how their candidate was chosen
	// Early bounds the arrival queues of models whose requests are bound before their prefill. Zero: as Queue.
	Early  QueueConfig      `yaml:"-"`
	Clock  func() time.Time `yaml:"-"` // of a simulation; nil: the real one
	Places Places           `yaml:"-"` // room in the pool; nil: unlimited
	// Decode returns how many hand-offs for a model, beyond those that wait already for the ranks of a board, would
	// get a slot within a time; nil: all would. It is called under the tier's lock. own says that not all ranks of
	// the board list the model, so that the hand-offs for it are counted apart from the others.
	Decode func(board, model string, within time.Duration) (n int, own bool) `yaml:"-"`
	// Free returns how many slots are free for a model on the ranks of a board that prefill and decode; nil: there is
	// always one more. It must not wait. own is as for Decode.
	Free    func(board, model string) (n int, own bool) `yaml:"-"`
	Scraper Scraper                                     `yaml:"-"` // needed unless Scrape.Interval is 0
	Ranks   Ranks                                       `yaml:"-"` // the ranks that prefill and decode; nil: there are none

	Registerer prometheus.Registerer `yaml:"-"` // nil: metrics are kept but not exported
	Log        *zap.Logger           `yaml:"-"` // nil: silent
}

// Ranks knows what KV events say of the prefix caches of ranks that prefill and decode. The tier also calls it under
// its lock, so it must not call the tier.
type Ranks interface {
	Events() []RankEvents
	BlockTokens(model string) int // tokens in a KV block of the model's ranks; 0: not known
}

// PushConfig bounds what is sent before an engine has answered.
type PushConfig struct {
	MaxUnanswered int `yaml:"max_unanswered"` // probes of ours that an engine has at once
	// Lead is how long before an engine can begin its next prompt it may be sent a prompt whose connector needs the
	// decode rank before the prefill.
	Lead time.Duration `yaml:"-"`
}

// ScrapeConfig says how often a candidate's gauges are read.
type ScrapeConfig struct {
	Interval time.Duration `yaml:"interval"` // 0: never, and our own accounts alone move the gate
	Timeout  time.Duration `yaml:"timeout"`  // of one scrape
}

// QueueConfig bounds the arrival queue of each model.
type QueueConfig struct {
	Max     int           `yaml:"max"`     // waiting requests, retries not counted
	Timeout time.Duration `yaml:"timeout"` // counted from the request's first arrival
	// BatchTimeout is the timeout of batch requests. It is longer, because their senders do not watch, and free time
	// may come late.
	BatchTimeout time.Duration `yaml:"batch_timeout"`
}

// RetryConfig bounds the attempts of one request and of all of them.
type RetryConfig struct {
	Attempts int           `yaml:"attempts"` // in all, the first included; refusals of engines that ran nothing are not counted at first
	Base     time.Duration `yaml:"base"`     // upper bound of the first backoff
	Budget   float64       `yaml:"budget"`   // retries as a share of requests, over 10 s
}

// CalibrationConfig is where the lines of prefill times start from.
type CalibrationConfig = fit.Config

// IndexConfig bounds what is remembered of prompts, and says how they are read.
type IndexConfig struct {
	MaxBytes int64  `yaml:"max_bytes"`
	Tokenize string `yaml:"tokenize"` // who computes a prompt's token ids: off, engine

	TokenizeTimeout time.Duration `yaml:"tokenize_timeout"` // after which a prompt is looked up by its bytes
}

// The values of Tokenize: who computes a prompt's token ids if the client does not send them.
const (
	TokenizeOff    = "off"
	TokenizeEngine = "engine"
	tokenizeLocal  = "local" // a tokenizer of our own: there is none, so it is refused
)

// KVEventsConfig says where engines publish what their prefix caches hold. If an engine does not name its ports, its
// rank i publishes at these ports plus i.
type KVEventsConfig struct {
	Enabled       bool          `yaml:"enabled"`
	Port          int           `yaml:"port"`
	ReplayPort    int           `yaml:"replay_port"` // 0: engines replay nothing, so that after any gap nothing is known of the cache
	ReplayTimeout time.Duration `yaml:"replay_timeout"`
}

// HotspotConfig says whether requests with a very common prefix are kept for a while off the engines that hold it.
type HotspotConfig struct {
	Enabled bool `yaml:"enabled"`
}

// AffinityConfig says how long a session stays with its engine.
type AffinityConfig = steer.AffinityConfig

// Places is the room of the pool. A place is reserved before the probe is
// sent, so that a prefill is never thrown away for lack of one. No call
// may wait or call back into the Tier.
type Places interface {
	TryReserve() bool
	Room() bool // whether TryReserve would succeed
	Release()
}

// Scraper reads the gauges of one candidate's engine.
type Scraper func(ctx context.Context, c Candidate) (Sample, error)

// Sample is what one scrape says about a candidate.
type Sample = ledger.Sample

// Default returns the values that a zero field stands for, and the scrape
// interval to configure unless told otherwise.
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

		Scrape: ScrapeConfig{Interval: 500 * time.Millisecond, Timeout: 5 * time.Second}, // a busy Python server is slow, not dead
		Queue:  QueueConfig{Max: 1000, Timeout: time.Minute, BatchTimeout: 10 * time.Minute},
		// one prefiller of several that fails most of its probes does not use up the budget
		Retry: RetryConfig{Attempts: 3, Base: 50 * time.Millisecond, Budget: 0.5},
	}
}

// withDefaults returns the config with its zero fields filled in: from Default, and those of Early from Queue. If KV events
// or affinity are off, all their settings are the default ones.
func (c Config) withDefaults() Config {
	d := Default()
	c.Policy, c.Work = cmp.Or(c.Policy, d.Policy), cmp.Or(c.Work, d.Work)
	c.KVThreshold = cmp.Or(c.KVThreshold, d.KVThreshold)
	c.Push.MaxUnanswered = cmp.Or(c.Push.MaxUnanswered, d.Push.MaxUnanswered)
	if c.Calibration.TPMs == 0 && c.Calibration.T0Ms == 0 {
		c.Calibration.TPMs, c.Calibration.T0Ms = d.Calibration.TPMs, d.Calibration.T0Ms
	}
	i, j := &c.Index, &d.Index
	i.MaxBytes, i.Tokenize, i.TokenizeTimeout = cmp.Or(i.MaxBytes, j.MaxBytes), cmp.Or(i.Tokenize, j.Tokenize),
		cmp.Or(i.TokenizeTimeout, j.TokenizeTimeout)
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

// ledger returns the settings of the accounts.
func (c *Config) ledger() ledger.Config {
	return ledger.Config{KVThreshold: c.KVThreshold, Interval: c.Scrape.Interval}
}
