package board

import (
	"cmp"
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// PredictorConfig is the section `predictor` of the config file. The caller reads the files that it
// names.
type PredictorConfig struct {
	// Kind learns for every model from the start, for policies whose spec names no predictor. Empty:
	// each policy has a default kind, which learns from its first decision on.
	Kind predictor.Kind `yaml:"kind"`
	// File is written by `evenkeel fit`. The caller reads it into Fit, again when it changes.
	File string `yaml:"file"`
	// SecretFile has the key for the hashes of prompts, for the kind exact.
	SecretFile string `yaml:"secret_file"`
	// Fit is where learning starts; nil: from nothing.
	Fit *predictor.Fit `yaml:"-"`
	// KnownLengths: each Enqueue brings its output length, as only a simulation can, so that the
	// predictor oracle can be used.
	KnownLengths bool `yaml:"-"`
}

// Errors of entries that get no slot.
var (
	ErrPoolTimeout = pool.ErrTimeout
	ErrExpired     = pool.ErrExpired
	ErrTooLarge    = errors.New("dispatcher: the prompt is larger than the whole KV budget of every decode rank; shorten it or raise " +
		"kv_tokens_per_rank")
	ErrNoWorkers = errors.New("dispatcher: no decode rank is up for the model; check engines.decode and their health")
	ErrNotListed = errors.New("dispatcher: no decode engine lists the name that the request asks for any more; GET /status has what each " +
		"lists")
	ErrWithdrawn = errors.New("dispatcher: the entry was withdrawn before a rank was found")
	ErrDraining  = errors.New("dispatcher: this proxy drains and admits no new requests; send the request to another proxy")
	ErrDuplicate = errors.New("dispatcher: an entry with this ID waits already; give every entry an ID of its own")
)

// Entry is a request that waits for a rank. Usually its prefill is finished.
type Entry = pool.Entry

// Default values of Config.
const (
	DefaultWindow    = 3 * time.Millisecond
	DefaultTickLimit = 20 * time.Millisecond
	DefaultPolicy    = "evenkeel"
	DefaultDense     = "jsq-kv"
	DefaultPredictor = predictor.KindSurvival // of a config file that names none
)

// Worker is one decode rank as the operator or discovery describes it.
type Worker struct {
	ID      int32 // identity of the rank: a worker that keeps its ID keeps its requests
	Name    string
	Model   string
	Group   string
	Barrier bool // true: the ranks of the group step together, so each decode step waits for the slowest rank
	// Engine is the API server that the rank is part of. Hand-offs from a prefill engine work or fail
	// for all ranks of an Engine alike.
	Engine string
	Lists  *Names // model names that a request may ask for on this rank; nil: not known, so any name
	Slots  int    // requests that the rank decodes at one time (max_num_seqs)
	// Limit is how many slots may be used now, while the engine has just started or may run requests
	// of other proxies; 0: all slots.
	Limit    int
	Capacity int64   // KV tokens that the rank has room for; 0: unlimited
	Cost     float32 // step time per KV token on this rank, as a multiple of the mean of its group; 0 means 1
	// Others is the number of KV tokens on the rank that belong to requests of other proxies. They
	// count as load, and take KV room.
	Others int64
	// KeepsKVFor is how long the engine keeps the KV of an ended answer for the next turn of its chat;
	// 0: the engine keeps no KV.
	KeepsKVFor time.Duration
	// Up says whether the rank takes requests. If it does not, it still takes part in the steps of its
	// group, unless it is down.
	Up bool
	// Down: the engine does not answer, or goes on without this rank. The rank then takes no part in
	// the steps of its group, and is left out of its sums and means. Up is false while Down is true.
	Down bool
	// Awaited: the rank takes no requests now, but soon will, so requests wait for it. Up is false
	// while Awaited is true.
	Awaited bool

	// Unpinned: the engine runs a request of the Responses API on any of its ranks, and does not
	// report on which.
	Unpinned bool
	// Early: the connector of the engine must know the decode rank before the prefill begins, so
	// entries get a slot before their prefill. All ranks of a model are early, or none is.
	Early bool
	// Mixed: the rank is one of an engine whose role is aggregated. It prefills and decodes, so its
	// entries come without a hand-off. All ranks of a model are mixed, or none is.
	Mixed bool
	// Budget is the largest number of tokens that one step of a mixed rank computes, decodes and
	// prompts together; 0: not known.
	Budget int
	// Interval: a mixed rank computes prompts only in every Interval-th step; 0 and 1: in every step.
	Interval int
	// AfterPrompts: the Interval begins anew with each step in which a rank of the group computes
	// prompts.
	AfterPrompts bool
	// Process identifies the operating system's process of the engine. A changed number shows that the
	// engine has restarted, and has lost all KV; 0: not known.
	Process uint64
}

// StepModel predicts the length of a step of a barrier group, in ms.
type StepModel = step.Model

// Config is the section `dispatch` of the config file without its decision log, and what else New
// needs. For a field that is zero, the default counts.
type Config struct {
	Policy string `yaml:"policy"` // of barrier groups
	// Window is how long the board waits after the first free slot of a burst; 0 = off.
	Window time.Duration `yaml:"window"`
	// TickLimit: after a round in which the policy computed for longer (CPU time), FallbackSpec
	// decides the next SlowRounds rounds. By the wall clock a round may take longer, because other
	// processes may have the CPU.
	TickLimit time.Duration `yaml:"tick_limit"`
	StepModel StepModel     `yaml:"step_model"` // until one is learned; zero: unknown

	DensePolicy string        `yaml:"-"` // of ranks without a barrier
	TTL         time.Duration `yaml:"-"` // longest wait in the pool; 0 = until the deadline of the hand-off
	// Predictor says where predictions come from; zero: from the kinds that policies ask for, at first
	// without data.
	Predictor PredictorConfig `yaml:"-"`
	Explain   bool            `yaml:"-"` // write into traces why ranks were chosen

	// Seed is for policies whose spec names none; 0: their own defaults.
	Seed uint64 `yaml:"-"`

	// BindAhead is how many requests an early rank may have beyond its slots, because a request needs
	// no slot while it is still being prefilled. AheadAuto: the board learns the number.
	BindAhead int `yaml:"-"`

	// Parse builds policies, for tests with policies of their own; nil: a parser that uses Predictor
	// and Seed.
	Parse func(spec string) (policy.Policy, error) `yaml:"-"`
}

// Default is what an empty config file stands for.
func Default() Config {
	return Config{Policy: DefaultPolicy, Window: DefaultWindow, TickLimit: DefaultTickLimit}
}

// WithDefaults fills in the fields that are zero.
func (c Config) WithDefaults() Config {
	c.Policy, c.DensePolicy = cmp.Or(c.Policy, DefaultPolicy), cmp.Or(c.DensePolicy, DefaultDense)
	c.TickLimit = cmp.Or(c.TickLimit, DefaultTickLimit)
	if c.Parse == nil {
		c.Parse = c.parser()
	}
	return c
}

// Needs is for barrier groups, with the Horizon for a mean output length that is not known yet.
func (c Config) Needs() (policy.Requirements, error) {
	c = c.WithDefaults()
	p, err := c.Parse(c.Policy)
	if err != nil {
		return policy.Requirements{}, err
	}
	return policy.RequirementsOf(p, meanUnknown), nil
}
