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
// come from. Whoever has the config file reads the files that it names.
type PredictorConfig struct {
	// Kind is learned for every model from the start, and is that of policies
	// whose spec names none. Empty: each policy's own, learned once it decides.
	Kind       predictor.Kind `yaml:"kind"`
	File       string         `yaml:"file"`        // what `evenkeel fit` wrote, Fit; read again when it changes
	SecretFile string         `yaml:"secret_file"` // keys the hashes of prompts, exact only
	// Fit is what the tables start from; nil: from nothing.
	Fit *predictor.Fit `yaml:"-"`
	// KnownLengths: entries come with the lengths that their outputs will have, so that predictor
	// oracle can be had. Only a simulation knows them.
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

// Entry is one finished prefill that waits for a rank.
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
	Barrier bool   // its group steps together
	Engine  string // API server it is part of: what a hand-off of a prefiller reaches or does not
	Lists   *Names // what may be asked for there; nil on all ranks of a model: whatever it is
	Slots   int    // max_num_seqs
	// requests its engine's own queue may have for want of slots or KV room, at their hand-offs' deadlines and without a Limit; 0 = none: it
	// does not renew their hold
	Beyond   int
	Limit    int           // of them, as many as may be used now, while its engine is fresh in service; 0 = all
	Capacity int64         // KV tokens, 0 = unlimited
	Cost     float32       // what a KV token costs here, 1 = the group's mean; 0 reads as 1
	Others   int64         // KV tokens there of requests that are not ours: load, and room that is taken
	Keeps    time.Duration // how long its engine keeps the KV of an answer that has ended, for the next turn of its chat; 0: it does not
	Up       bool          // false: takes nothing, but still holds its group's barrier unless it is down
	// its engine does not answer, or goes on without it: it takes no part in the group's steps, sums and means. Never with Up
	Down    bool
	Awaited bool // it takes nothing for now, and requests wait for it. Never with Up

	// Strays: its engine runs responses on any of its ranks, and does not say which.
	Strays bool
	// Early: its connector wants to know the rank before the prefill, so that entries are bound while they wait
	// for theirs. All ranks of a model are early, or none is.
	Early bool
	// AtOnce: no other engine keeps the KV of an early entry for long. The entry must have a slot when its prefill ends.
	AtOnce bool
	// Mixed: it prefills and decodes, so that its entries come without a hand-off. All ranks of a model are mixed, or none is.
	Mixed bool
	// Budget is how many tokens of a mixed rank a step takes at most, decodes and prompts together; 0: not known.
	Budget int
	// Interval: a mixed rank computes prompts in every so many steps; 0 and 1: in each.
	Interval int
	// Process is another number for another process of its engine, which has nothing of what the one
	// before had; 0: nobody knows.
	Process uint64
}

// StepModel is how long a step of a barrier group takes.
type StepModel = step.Model

// Config is `dispatch` of the config file, without its log, and what New needs beside it.
// The zero value of a field is its default where one is named.
type Config struct {
	Policy    string        `yaml:"policy"`     // of barrier groups; "" = DefaultPolicy
	Window    time.Duration `yaml:"window"`     // waits this long after the first freed slot of a burst; 0 = off
	TickLimit time.Duration `yaml:"tick_limit"` // a slower decision brings the fallback; 0 = DefaultTickLimit
	StepModel StepModel     `yaml:"step_model"` // of every barrier group until one is learned; zero: unknown
	// Beyond is how many hand-offs at their deadline a rank's engine may have in its own queue, beyond its slots or KV room.
	// Whoever lists the workers gives it to those whose queue renews their hold.
	Beyond int              `yaml:"beyond_slots"`
	Twin   verdict.Policies `yaml:"twin"` // policies under which the last minutes are replayed, to be compared

	DensePolicy string          `yaml:"-"` // of ranks without barrier; "" = DefaultDense
	TTL         time.Duration   `yaml:"-"` // longest time in the pool; 0 = only the hand-off's deadline
	Predictor   PredictorConfig `yaml:"-"` // of output lengths; zero: what policies ask for, learned from nothing
	Explain     bool            `yaml:"-"` // slots say what their rank was chosen on

	// Seed is that of policies that draw and name none; 0: their own.
	Seed uint64 `yaml:"-"`

	// BindAhead is how many requests a rank that is early may have beyond its slots, since one
	// that is being prefilled needs none; or AheadAuto.
	BindAhead int `yaml:"-"`

	Parse func(spec string) (policy.Policy, error) `yaml:"-"` // a test's own policies; nil = policy.Parse
}

// Default is what an empty config file says.
func Default() Config {
	return Config{Policy: DefaultPolicy, Window: DefaultWindow, TickLimit: DefaultTickLimit, Beyond: defaultBeyond,
		Twin: verdict.Policies{DefaultDense}}
}

// WithDefaults fills in what is left out.
func (c Config) WithDefaults() Config {
	c.Policy, c.DensePolicy = cmp.Or(c.Policy, DefaultPolicy), cmp.Or(c.DensePolicy, DefaultDense)
	c.TickLimit = cmp.Or(c.TickLimit, DefaultTickLimit)
	if c.Parse == nil {
		c.Parse = c.parser()
	}
	return c
}

// Needs are what the policy of barrier groups wants to know of the future, before anything is known.
func (c Config) Needs() (policy.Needs, error) {
	c = c.WithDefaults()
	p, err := c.Parse(c.Policy)
	if err != nil {
		return policy.Needs{}, err
	}
	return policy.NeedsOf(p, 0), nil
}
