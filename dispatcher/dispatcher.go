// Package dispatcher admits finished prefills to decode ranks.
//
// One goroutine owns a board for each model: the mirror of its decode ranks,
// what they hold, and the pool of entries that wait for them. Others reach it
// through the methods of Dispatcher, none of which waits for a decision.
package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// What a Result may say instead of a slot.
var (
	ErrPoolTimeout = pool.ErrTimeout
	ErrExpired     = pool.ErrExpired
	ErrTooLarge    = errors.New("dispatcher: the prompt is larger than the whole KV budget of every decode rank; shorten it or raise kv_tokens_per_rank")
	ErrNoWorkers   = errors.New("dispatcher: no decode rank is up for the model; check engines.decode and their health")
	ErrWithdrawn   = errors.New("dispatcher: the entry was withdrawn before a rank was found")
	ErrDraining    = errors.New("dispatcher: draining, no new admissions; retry against another proxy")
	ErrDuplicate   = errors.New("dispatcher: an entry with this ID waits already; give every entry its own")
)

// Defaults of Config.
const (
	DefaultWindow    = 3 * time.Millisecond
	DefaultTickLimit = 20 * time.Millisecond
	DefaultPolicy    = "evenkeel"
	DefaultDense     = "jsq-kv"
)

// Worker is one decode rank as the operator or discovery describes it.
type Worker struct {
	ID       int32 // identity: a worker that keeps its ID keeps its load
	Name     string
	Model    string
	Group    string
	Barrier  bool    // its group steps together
	Engine   string  // API server it is part of: what a hand-off of a prefiller reaches or does not
	Slots    int     // max_num_seqs
	Beyond   int     // requests its engine's own queue may have for want of slots or KV room, at their hand-offs' deadlines and without a Limit; 0 = none: it does not renew their hold
	Limit    int     // of them, as many as may be used now, while its engine is fresh in service; 0 = all
	Capacity int64   // KV tokens, 0 = unlimited
	Cost     float32 // what a KV token costs here, 1 = the group's mean; 0 reads as 1
	Others   int64   // KV tokens there of requests that are not ours: load, and room that is taken
	Up       bool    // false: takes nothing, but still holds its group's barrier unless it is down
	Down     bool    // its engine does not answer: it takes no part in the group's steps, sums and means. Never with Up
}

// Config is what Start needs. The zero value of a field is its default where
// one is named.
type Config struct {
	Policy      string        // of barrier groups; "" = DefaultPolicy
	DensePolicy string        // of ranks without barrier; "" = DefaultDense
	Window      time.Duration // waits this long after the first freed slot of a burst; 0 = off
	TickLimit   time.Duration // a slower decision brings the fallback; 0 = DefaultTickLimit
	TTL         time.Duration // longest time in the pool; 0 = only the hand-off's deadline
	Registerer  prometheus.Registerer
	// Places are those the entries hold, all but drains: Enqueue takes the
	// entry's over and it is released when the entry leaves the pool, whichever
	// way. nil = not counted.
	Places *pool.Places
	// OnRoom is called at the end of a turn after which Room says more than before. It
	// must not block. nil = nobody is told.
	OnRoom func()
	Log    *zap.Logger

	Predictor   PredictorConfig   // of output lengths; zero: what policies ask for, learned from nothing
	StepModel   StepModel         // of every barrier group until one is learned; zero: unknown
	DecisionLog DecisionLogConfig // zero: none is written
	Explain     bool              // slots say what their rank was chosen on
	Shadow      []string          // policies that decide the same rounds without effect, to be compared

	parse func(spec string) (policy.Policy, error) // a test's own policies; nil = policy.Parse
}

func (c Config) withDefaults() Config {
	if c.Policy == "" {
		c.Policy = DefaultPolicy
	}
	if c.DensePolicy == "" {
		c.DensePolicy = DefaultDense
	}
	if c.TickLimit == 0 {
		c.TickLimit = DefaultTickLimit
	}
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	if c.parse == nil {
		c.parse = c.Predictor.parser()
	}
	return c
}

func (c Config) check() error {
	if c.Window < 0 || c.TickLimit < 0 || c.TTL < 0 {
		return fmt.Errorf("dispatcher: window %v, tick_limit %v and ttl %v must not be negative", c.Window, c.TickLimit, c.TTL)
	}
	if m := c.StepModel; !(m.C0Ms >= 0 && m.C1Ms >= 0) {
		return fmt.Errorf("dispatcher: step model c0 %v ms, c1 %v ms a token: neither can be negative", m.C0Ms, m.C1Ms)
	}
	return nil
}

// Result is the one answer to an Enqueue: a slot, or why there is none.
type Result struct {
	Slot *Slot
	Err  error
}

// Dispatcher is the handle others hold on the goroutine that decides.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name, of barrier groups
	paces   sync.Map               // of *pace, by board
	done    chan struct{}
	last    Status // what was left at the end; read after done is closed
}

// Start runs a dispatcher until ctx is cancelled. Then every waiting entry
// gets ErrDraining; slots may still be released.
func Start(ctx context.Context, cfg Config) (*Dispatcher, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	d := &Dispatcher{cfg: cfg, inbox: newInbox(), done: make(chan struct{})}
	d.metrics = newMetrics()
	r, err := newRunner(cfg, d, d.inbox.push)
	if err != nil {
		return nil, err
	}
	if err := d.metrics.register(cfg.Registerer, d); err != nil {
		return nil, err
	}
	if r.declog, err = openDecisionLog(cfg.DecisionLog, cfg.Log, d.metrics); err != nil {
		return nil, err
	}
	go d.run(ctx, r)
	return d, nil
}

// Enqueue takes e over and answers exactly once on the channel, which has room
// for the answer: a caller may leave without reading it only after Withdraw,
// and must then look once more, for the assignment may have come first.
func (d *Dispatcher) Enqueue(e *pool.Entry) <-chan Result {
	if e.Entered.IsZero() {
		e.Entered = time.Now()
	}
	w := waiting{entry: e, slot: newSlot(e, d.cfg.Explain), result: make(chan Result, 1)}
	if !d.inbox.push(func(l *runner) { l.enqueue(w) }) {
		w.leave(d.cfg.Places, Result{Err: ErrDraining})
	}
	return w.result
}

// Withdraw takes e out of the pool because its client left; its channel then
// yields ErrWithdrawn. If the assignment came first the channel has the slot,
// and the caller owns and releases it.
func (d *Dispatcher) Withdraw(e *pool.Entry) {
	d.inbox.push(func(l *runner) { l.withdraw(e) })
}

// Release gives a slot back. Only the first call counts: a second one is a bug
// of the caller that is counted and changes nothing.
func (d *Dispatcher) Release(s *Slot, o Outcome) {
	if !s.released.CompareAndSwap(false, true) {
		d.metrics.doubleReleases.Inc()
		return
	}
	d.inbox.push(func(l *runner) { l.release(s, o) })
}

// SetWorkers replaces the fleet, of all models. A worker with a known ID keeps
// its load; the slots of one that is gone stay charged until released, and
// count again when it comes back. When it returns the rounds that decided on the
// fleet before are over: a rank that is up no more gets nothing that is not
// bound to it by then.
func (d *Dispatcher) SetWorkers(ws []Worker) {
	ws = slices.Clone(ws)
	_ = d.ask(func(l *runner) error { // after the end nothing is bound any more
		l.setWorkers(ws)
		return nil
	})
}

// SetPolicy changes the policy of the barrier groups from the next tick on.
func (d *Dispatcher) SetPolicy(spec string) error {
	return d.ask(func(l *runner) error { return l.setPolicy(spec) })
}

// SetFit has predictors start anew from a fit, and learn on from there. One that
// a policy in use cannot work with is refused, and all stays as it was.
func (d *Dispatcher) SetFit(fit *predictor.Fit) error {
	return d.ask(func(l *runner) error { return l.setFit(fit) })
}

// Policy is the canonical name of the barrier groups' policy.
func (d *Dispatcher) Policy() string { return *d.policy.Load() }

// Loads is a sample of all boards, as little as one can cost: in no order.
type Loads struct {
	Ranks        []Load          // present ones
	Pool         int             // entries that wait
	OutputTokens int64           // of all that left and of those that run
	Compared     []GroupCompared // groups with shadows
}

// Load is what one decode rank holds.
type Load struct {
	Worker   int32
	KVTokens int64
}

// GroupCompared is a group with its shadows.
type GroupCompared struct {
	Model, Group string
	Policies     []ComparedPolicy
}

// Loads samples the boards; ok is false when ctx or the dispatcher ends first.
func (d *Dispatcher) Loads(ctx context.Context) (l Loads, ok bool) {
	reply := make(chan Loads, 1)
	if !d.inbox.push(func(l *runner) { reply <- l.loads() }) {
		return Loads{}, false
	}
	select {
	case l = <-reply:
		return l, true
	case <-ctx.Done():
		return Loads{}, false
	}
}

// Status is a copy of what the boards hold. After the end it is what was left;
// when ctx ends first, it is empty.
func (d *Dispatcher) Status(ctx context.Context) Status {
	reply := make(chan Status, 1)
	if !d.inbox.push(func(l *runner) { reply <- l.status(time.Now()) }) {
		<-d.done
		return d.last
	}
	select {
	case s := <-reply:
		s.score()
		return s
	case <-ctx.Done():
		return Status{}
	}
}

// EnqueueLocal offers a prompt without a hand-off to the ranks that may compute
// it. It is decided at once, by the policy and within the limits that every
// admission has, but it goes behind those that wait: their KV is pinned
// already. The answer is a slot, charged with the whole prompt, or an error.
func (d *Dispatcher) EnqueueLocal(e *pool.Entry, l *Local) <-chan Result {
	if e.Entered.IsZero() {
		e.Entered = time.Now()
	}
	w := waiting{entry: e, slot: newSlot(e, d.cfg.Explain), result: make(chan Result, 1), local: l}
	if !d.inbox.push(func(l *runner) { l.enqueue(w) }) {
		w.leave(d.cfg.Places, Result{Err: ErrDraining})
	}
	return w.result
}

// Counted tells how many tokens the prompt really has that a slot was charged
// with: nobody had counted them before its rank did.
func (d *Dispatcher) Counted(s *Slot, prompt int) {
	d.inbox.push(func(r *runner) { r.recount(s, tokens(prompt)) })
}

// Preempted tells that the engine of a worker ran out of KV room and gave a
// request back.
func (d *Dispatcher) Preempted(worker int32) {
	d.inbox.push(func(l *runner) { l.preempted(worker) })
}

// Configure changes the settings between two rounds. Those that cannot work, or
// not together, are refused, and all stays as it was.
func (d *Dispatcher) Configure(s Settings) error {
	return d.ask(func(l *runner) error { return l.configure(s) })
}

// Accepts says what Configure would, and changes nothing.
func (d *Dispatcher) Accepts(s Settings) error {
	return d.ask(func(l *runner) error {
		_, err := l.examine(s)
		return err
	})
}

// ask has the loop run a command and waits for its answer.
func (d *Dispatcher) ask(command func(l *runner) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(l *runner) { reply <- command(l) }) {
		return ErrDraining
	}
	return <-reply // an accepted command is always run
}
