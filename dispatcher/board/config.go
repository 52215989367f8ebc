package board

import (
	"cmp"
	"errors"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/verdict"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// PredictorConfig is `predictor` of the config file: where predictions of output lengths
// come from. This package opens no files: the caller reads those that the fields name.
type PredictorConfig struct {
	// Kind is the predictor that is learned for every model from the start, and that policies use
	// whose spec names none. Empty: each policy has its own default, which is learned once the policy decides.
	Kind       predictor.Kind `yaml:"kind"`
	File       string         `yaml:"file"`        // what `evenkeel fit` wrote, Fit; read again when it changes
	SecretFile string         `yaml:"secret_file"` // keys the hashes of prompts, exact only
	// Fit has the tables that learning starts from; nil: it starts from nothing.
	Fit *predictor.Fit `yaml:"-"`
	// KnownLengths says that each Enqueue has the length that the output will have, so that the predictor
	// oracle can be used. Only a simulation knows these lengths.
	KnownLengths bool `yaml:"-"`
}

// Why an entry gets no slot.
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

// Defaults of Config.
const (
	DefaultWindow    = 3 * time.Millisecond
	DefaultTickLimit = 20 * time.Millisecond
	DefaultPolicy    = "evenkeel"
	DefaultDense     = "jsq-kv"
	DefaultPredictor = predictor.KindSurvival // of the config file

	defaultBeyond = 16
)

// Worker is one decode rank as the operator or discovery describes it.
type Worker struct {
	ID      int32 // identity: a worker that keeps its ID keeps its load
	Name    string
	Model   string
	Group   string
	Barrier bool   // each decode step of the group waits for its slowest rank
	Engine  string // API server that the rank is part of; a pair of a prefill engine and this engine works or fails as a whole
	Lists   *Names // model names that a request may ask for on this rank; nil: not known, so any name
	Slots   int    // requests that the rank decodes at one time (max_num_seqs)
	// MaxEngineQueue is how many requests may wait in the engine's own queue, without a slot or KV room. They are sent there when their
	// hand-offs reach their deadlines, if Limit is 0. 0: none, because this engine does not make the prefill engine keep their KV for longer.
	MaxEngineQueue int
	Limit          int           // slots that may be used now, while the engine has just started or may run other proxies' requests; 0: all
	Capacity       int64         // KV tokens, 0 = unlimited
	Cost           float32       // step time per KV token on this rank, as a multiple of the group's mean; 0 means 1
	Others         int64         // KV tokens on the rank of requests that this proxy did not send: they count as load, and take room
	KeepsKVFor     time.Duration // how long its engine keeps the KV of an ended answer for the next turn of its chat; 0: it keeps none
	Up             bool          // false: the rank takes no requests, but still takes part in its group's steps unless it is down
	// Down: its engine does not answer, or goes on without this rank. The rank takes no part in the group's steps, sums and means. Up is
	// false then.
	Down    bool
	Awaited bool // the rank takes no requests now, but will soon, so requests wait for it; Up is false then

	// Unpinned: its engine runs requests of the Responses API on any of its ranks, whichever rank they name, and does not report on which.
	Unpinned bool
	// Early: its connector must know the decode rank before the prefill, so entries are bound before their prefill. All ranks of a model
	// are early, or none is.
	Early bool
	// AtOnce: the prefill engine does not keep the KV of an early entry for long, so the entry must have a slot when its prefill ends.
	AtOnce bool
	// Mixed: the rank prefills and decodes, so its entries come without a hand-off. All ranks of a model are mixed, or none is.
	Mixed bool
	// Budget is how many tokens of a mixed rank a step takes at most, decodes and prompts together; 0: not known.
	Budget int
	// Interval: a mixed rank computes prompts only in one of so many steps; 0 and 1: in each.
	Interval int
	// Process identifies the operating system's process of its engine. A restarted engine has another number, and has lost all KV;
	// 0: not known.
	Process uint64
}

// StepModel predicts how long a step of a barrier group takes, in ms, from the requests, KV tokens and prompts of its ranks.
type StepModel = step.Model

// Config has the section `dispatch` of the config file without its log, and what else New needs. A field that is zero means the default
// that its comment names.
type Config struct {
	Policy    string        `yaml:"policy"`     // of barrier groups; "" = DefaultPolicy
	Window    time.Duration `yaml:"window"`     // how long a round waits after the first freed slot of a burst; 0 = off
	TickLimit time.Duration `yaml:"tick_limit"` // after a slower round, FallbackSpec decides SlowRounds rounds; 0 = DefaultTickLimit
	StepModel StepModel     `yaml:"step_model"` // for every barrier group until its own is learned; zero: unknown
	// Beyond is how many requests without a free slot or KV room a rank gets when their hand-offs reach their deadline. They wait in the
	// engine's own queue. The boards read only Worker.MaxEngineQueue, which the fleet sets to this number for engines that make prefill
	// engines keep the KV of queued requests.
	Beyond int              `yaml:"beyond_slots"`
	Twin   verdict.Policies `yaml:"twin"` // policies that are compared with the present one, by replaying the last minutes under each

	DensePolicy string          `yaml:"-"` // of ranks without barrier; "" = DefaultDense
	TTL         time.Duration   `yaml:"-"` // longest time in the pool; 0 = only the hand-off's deadline
	Predictor   PredictorConfig `yaml:"-"` // predicts output lengths; zero: the predictors that policies ask for, which begin untrained
	Explain     bool            `yaml:"-"` // write into each entry's trace why its rank was chosen

	// Seed is the seed of policies that draw random numbers and whose spec names no seed; 0: each uses its default seed.
	Seed uint64 `yaml:"-"`

	// BindAhead is how many requests an early rank may have beyond its slots, or AheadAuto. A request that is still being prefilled needs
	// no slot of the decode engine yet.
	BindAhead int `yaml:"-"`

	Parse func(spec string) (policy.Policy, error) `yaml:"-"` // a test's own policies; nil = policy.Parse
}

// Default returns the settings that an empty config file stands for.
func Default() Config {
	return Config{Policy: DefaultPolicy, Window: DefaultWindow, TickLimit: DefaultTickLimit, Beyond: defaultBeyond,
		Twin: verdict.Policies{DefaultDense}}
}

// WithDefaults returns the config with the defaults of Policy, DensePolicy, TickLimit and Parse filled in.
func (c Config) WithDefaults() Config {
	c.Policy, c.DensePolicy = cmp.Or(c.Policy, DefaultPolicy), cmp.Or(c.DensePolicy, DefaultDense)
	c.TickLimit = cmp.Or(c.TickLimit, DefaultTickLimit)
	if c.Parse == nil {
		c.Parse = c.parser()
	}
	return c
}

// Needs returns what the policy of barrier groups wants to find in its Snapshots while the mean output is not known, as in the first one.
func (c Config) Needs() (policy.Requirements, error) {
	c = c.WithDefaults()
	p, err := c.Parse(c.Policy)
	if err != nil {
		return policy.Requirements{}, err
	}
	return policy.RequirementsOf(p, meanUnknown), nil
}
