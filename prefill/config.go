package prefill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/prefill/policy"
)

// Config of a Tier. A zero field takes its value from Default, except
// Scrape.Interval, where 0 means never.
type Config struct {
	Policy      string  // as policy.Parse takes it, or a name of Policies
	KVThreshold float64 // share of a candidate's KV tokens from which its gate is closed

	Policies    map[string]policy.Definition // of the user
	Push        int                          // unanswered probes that an engine may have
	Calibration CalibrationConfig
	Index       IndexConfig
	Hotspot     HotspotConfig
	Affinity    AffinityConfig
	Shadow      []string // policies that are asked about the same candidates, without effect
	Explain     bool     // leases say what their candidate was chosen on

	Scrape ScrapeConfig
	Queue  QueueConfig
	Retry  RetryConfig

	Clock  func() time.Time // of a simulation; nil: the real one
	Places Places           // room in the pool; nil: unlimited
	// Decode tells how many hand-offs more than wait for the ranks of a board would get a slot within a time; nil: all. It
	// is called under the tier's lock.
	Decode  func(board string, within time.Duration) int
	Scraper Scraper // needed unless Scrape.Interval is 0

	Registerer prometheus.Registerer // nil: metrics are kept but not exported
	Log        *zap.Logger           // nil: silent
}

// ScrapeConfig says how often a candidate's gauges are read.
type ScrapeConfig struct {
	Interval time.Duration // 0: never, and our own accounts alone move the gate
	Timeout  time.Duration // of one scrape
	Misses   int           // so many in a row make its gauges stale, so that it stands behind the others
}

// QueueConfig bounds the arrival queue of each model.
type QueueConfig struct {
	Max     int           // waiting requests, retries not counted
	Timeout time.Duration // counted from the request's first arrival
}

// RetryConfig bounds the attempts of one request and of all of them.
type RetryConfig struct {
	Attempts int           // in all, the first included; refusals of engines that ran nothing are not counted at first
	Base     time.Duration // upper bound of the first backoff
	Budget   float64       // retries as a share of requests, over 10 s
}

// CalibrationConfig is where the lines of prefill times start from.
type CalibrationConfig struct {
	Line     policy.Line // zero TPMs and T0Ms: Mistral-7B on an A100
	Known    bool        // trust it as it is; else it counts for nothing until it was learned
	HalfLife int         // samples after which one counts half
}

// IndexConfig bounds what is remembered of prompts.
type IndexConfig struct {
	MaxBytes       int64         // 0: 256 MiB
	SpeculativeTTL time.Duration // of the blocks of a probe whose outcome is not known; 0: 2 s
}

// AffinityConfig sends a session where it was last, while that is not loaded
// more than its share.
type AffinityConfig struct {
	MaxKeys    int // 0: off
	TTL        time.Duration
	LoadFactor float64 // of a candidate's share of all requests
}

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
type Sample struct {
	KVUsage          float64       // 0..1, NaN: not reported
	Running, Waiting float64       // requests, NaN: not reported
	CapacityTokens   int64         // KV tokens the candidate can hold, 0: not reported
	BlockTokens      int           // of a KV block, 0: not reported
	RTT              time.Duration // to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Default returns the values that a zero field stands for, and the scrape
// interval to configure unless told otherwise.
func Default() Config {
	return Config{
		Policy:      "finish",
		KVThreshold: 0.90,
		Push:        8,
		Calibration: CalibrationConfig{Line: policy.Line{TPMs: 0.0938, T0Ms: 150.72}, HalfLife: 500}, // GORGO's Table 1
		Scrape:      ScrapeConfig{Interval: 500 * time.Millisecond, Timeout: 5 * time.Second, Misses: 3},
		Queue:       QueueConfig{Max: 1000, Timeout: 60 * time.Second},
		Retry:       RetryConfig{Attempts: 3, Base: 50 * time.Millisecond, Budget: 0.5},
	}
}

// DefaultHotspot is how the config watches classes of requests unless told otherwise.
func DefaultHotspot() HotspotConfig {
	return HotspotConfig{Window: time.Minute, ClassTokens: []int{512, 4096}, Least: 20, MaxClasses: 256, MaxFilter: time.Minute}
}

func (c Config) withDefaults() Config {
	d := Default()
	c.Policy = cmp.Or(c.Policy, d.Policy)
	c.KVThreshold = cmp.Or(c.KVThreshold, d.KVThreshold)
	c.Push = cmp.Or(c.Push, d.Push)
	if c.Calibration.Line.TPMs == 0 && c.Calibration.Line.T0Ms == 0 {
		c.Calibration.Line.TPMs, c.Calibration.Line.T0Ms = d.Calibration.Line.TPMs, d.Calibration.Line.T0Ms
	}
	c.Calibration.HalfLife = cmp.Or(c.Calibration.HalfLife, d.Calibration.HalfLife)
	c.Scrape.Timeout = cmp.Or(c.Scrape.Timeout, d.Scrape.Timeout)
	c.Scrape.Misses = cmp.Or(c.Scrape.Misses, d.Scrape.Misses)
	c.Queue.Max = cmp.Or(c.Queue.Max, d.Queue.Max)
	c.Queue.Timeout = cmp.Or(c.Queue.Timeout, d.Queue.Timeout)
	c.Retry.Attempts = cmp.Or(c.Retry.Attempts, d.Retry.Attempts)
	c.Retry.Base = cmp.Or(c.Retry.Base, d.Retry.Base)
	c.Retry.Budget = cmp.Or(c.Retry.Budget, d.Retry.Budget)
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	return c
}

// Validate reports every setting that cannot work, zero fields aside.
func (c Config) Validate() error {
	c = c.withDefaults()
	policies, err := newPolicies(c.Policies)
	if err == nil {
		_, err = policies.named(c.Policy)
	}
	errs := []error{err}
	if policies != nil {
		for _, spec := range c.Shadow {
			if _, err := policies.named(spec); err != nil {
				errs = append(errs, fmt.Errorf("prefill.shadow: %w", err))
			}
		}
	}
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf("prefill."+format, args...))
		}
	}
	refuse(!(c.KVThreshold > hysteresis && c.KVThreshold <= 1),
		"kv_threshold is %v: set a share above %v and up to 1, such as 0.9", c.KVThreshold, hysteresis)
	if h := c.Hotspot; h.Window != 0 {
		refuse(h.Window < windowBuckets, "hotspot.window is %v: set a minute or so", h.Window)
		refuse(h.MaxClasses < 1 || h.Least < 0 || h.MaxFilter <= 0, "hotspot is %+v: set max_classes to 1 or more and max_filter to a time", h)
		refuse(!slices.IsSorted(h.ClassTokens), "hotspot.class_tokens is %v: list them in ascending order", h.ClassTokens)
	}
	if a := c.Affinity; a.MaxKeys != 0 {
		refuse(a.MaxKeys < 0 || a.TTL <= 0 || !(a.LoadFactor >= 1), "affinity is %+v: set max_keys and ttl, and load_factor to 1 or more", a)
	}
	refuse(c.Push < 0, "push.max_unanswered is %d: set 1 or more", c.Push)
	refuse(c.Calibration.HalfLife < 0, "calibration.half_life is %d: set 1 or more", c.Calibration.HalfLife)
	refuse(c.Calibration.Line.TPMs < 0 || c.Calibration.Line.T0Ms < 0 || c.Calibration.Line.Beta2 < 0,
		"calibration is %v ms a token, %v ms and %v ms a token²: set none below 0", c.Calibration.Line.TPMs, c.Calibration.Line.T0Ms, c.Calibration.Line.Beta2)
	refuse(c.Scrape.Interval < 0, "scrape.interval is %v: set 0s to never scrape", c.Scrape.Interval)
	refuse(c.Scrape.Interval > 0 && c.Scraper == nil, "scrape.interval is %v but there is no scraper: set it to 0s", c.Scrape.Interval)
	refuse(c.Scrape.Timeout < 0, "scrape.timeout is %v: set a positive time", c.Scrape.Timeout)
	refuse(c.Scrape.Misses < 0, "scrape.misses is %d: set 1 or more", c.Scrape.Misses)
	refuse(c.Queue.Max < 0, "queue.max is %d: set 1 or more", c.Queue.Max)
	refuse(c.Queue.Timeout < 0, "queue.timeout is %v: set a positive time", c.Queue.Timeout)
	refuse(c.Retry.Attempts < 0, "retry.attempts is %d: set 1 for no retry", c.Retry.Attempts)
	refuse(c.Retry.Base < 0, "retry.base is %v: set a positive time", c.Retry.Base)
	refuse(!(c.Retry.Budget >= 0 && c.Retry.Budget <= 1), "retry.budget is %v: set a share from 0 to 1", c.Retry.Budget)
	return errors.Join(errs...)
}
