// Package dispatcher admits finished prefills to decode ranks.
//
// One goroutine owns a board for each model: the mirror of its decode ranks,
// what they hold, and the pool of entries that wait for them. Others reach it
// through the methods of Dispatcher, none of which waits for a decision.
package dispatcher

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/twin"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// Config is `dispatch` of the config file, and what Start needs beside it. The zero value
// of a field is its default where one is named.
type Config struct {
	board.Config `yaml:",inline"`
	DecisionLog  DecisionLogConfig `yaml:"log"`        // zero: none is written
	TwinShare    float64           `yaml:"twin_share"` // of one core, that the twin may use; 0 = DefaultTwinShare

	Registerer prometheus.Registerer `yaml:"-"`
	// Places are those the entries hold, all but drains: Enqueue takes the
	// entry's over and it is released when the entry leaves the pool, whichever
	// way. nil = not counted.
	Places *pool.Places `yaml:"-"`
	// OnRoom is called at the end of a turn after which Room says more than before. It
	// must not block. nil = nobody is told.
	OnRoom func()      `yaml:"-"`
	Log    *zap.Logger `yaml:"-"`
}

// Default is what an empty config file says.
func Default() Config {
	return Config{Config: board.Default(), DecisionLog: DecisionLogConfig{MaxBytes: DefaultLogBytes}, TwinShare: DefaultTwinShare}
}

// Check tells bad of every setting of the config file that cannot work, as that of the
// boards does.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	plain, left := c.leftToTwin()
	if left != nil {
		if slices.Contains(left.specs, "") {
			bad("dispatch.policy", "%q has an empty policy; write auto: and the policies to choose from, as in auto:br0,evenkeel", c.Policy)
			return
		}
		for _, spec := range left.specs[1:] {
			each := plain.Config
			each.Policy, each.Twin, each.Shadow = spec, nil, nil
			each.Check(func(key, format string, args ...any) {
				if key == "dispatch.policy" {
					bad(key, format, args...)
				}
			})
		}
		plain.Twin = c.Twin
	}
	plain.Config.Check(bad)
	if c.DecisionLog.MaxBytes < leastLogBytes {
		bad("dispatch.log.max_bytes", "%d; at least %d is needed", c.DecisionLog.MaxBytes, leastLogBytes)
	}
	if !(c.TwinShare >= 0.001 && c.TwinShare <= 1) {
		bad("dispatch.twin_share", "%v of a core; write 0.001 to 1, or dispatch.twin: off", c.TwinShare)
	}
}

func (c Config) withDefaults() Config {
	c.Config, c.Log, c.TwinShare = c.Config.WithDefaults(), cmp.Or(c.Log, zap.NewNop()), cmp.Or(c.TwinShare, DefaultTwinShare)
	return c
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
	last    board.Status // what was left at the end; read after done is closed
}

// Start runs a dispatcher until ctx is cancelled. Then every waiting entry
// gets ErrDraining; slots may still be released.
func Start(ctx context.Context, cfg Config) (*Dispatcher, error) {
	cfg, left := cfg.withDefaults().leftToTwin()
	d := &Dispatcher{cfg: cfg, inbox: newInbox(), done: make(chan struct{})}
	d.metrics = newMetrics()
	r, err := newRunner(cfg, d, d.inbox.push)
	if err != nil {
		return nil, err
	}
	if r.auto = left; left != nil {
		r.twins.choices = func(c twin.Choice) { d.inbox.push(func(r *runner) { r.choose(c) }) }
	}
	if err := d.metrics.register(cfg.Registerer, d); err != nil {
		return nil, err
	}
	if r.declog, err = openDecisionLog(cfg.DecisionLog, cfg.Log, d.metrics); err != nil {
		return nil, err
	}
	noteKeys(cfg.Log, cfg.Policy, slices.Concat(cfg.Shadow, cfg.Twin)...)
	go d.run(ctx, r)
	return d, nil
}

// Enqueue takes e over and answers exactly once on the channel, which has room
// for the answer: a caller may leave without reading it only after Withdraw,
// and must then look once more, for the assignment may have come first.
func (d *Dispatcher) Enqueue(e *pool.Entry) <-chan Result {
	return d.enqueue(e, nil)
}

// enqueue is Enqueue, or EnqueueLocal where ranks may compute the prompt.
func (d *Dispatcher) enqueue(e *pool.Entry, l *board.Local) <-chan Result {
	if e.Entered.IsZero() {
		e.Entered = time.Now()
	}
	w := waiting{entry: e, slot: newSlot(e, d.cfg.Explain), result: make(chan Result, 1), local: l}
	if !d.inbox.push(func(r *runner) { r.enqueue(w) }) {
		w.answer(d.cfg.Places, Result{Err: board.ErrDraining})
	}
	return w.result
}

// Withdraw takes e out of the pool because its client left; its channel then
// yields ErrWithdrawn. If the assignment came first the channel has the slot,
// and the caller owns and releases it.
func (d *Dispatcher) Withdraw(e *pool.Entry) {
	d.inbox.push(func(r *runner) { r.apply(board.Withdraw{Entry: e}) })
}

// Release gives a slot back. Only the first call counts: a second one is a bug
// of the caller that is counted and changes nothing.
func (d *Dispatcher) Release(s *Slot, o board.Outcome) {
	if !s.released.CompareAndSwap(false, true) {
		d.metrics.doubleReleases.Inc()
		return
	}
	d.inbox.push(func(r *runner) { r.giveBack(s, o) })
}

// SetWorkers replaces the fleet, of all models. A worker with a known ID keeps
// its load; the slots of one that is gone stay charged until released, and
// count again when it comes back. When it returns the rounds that decided on the
// fleet before are over: a rank that is up no more gets nothing that is not
// bound to it by then.
func (d *Dispatcher) SetWorkers(ws []board.Worker) {
	ws = slices.Clone(ws)
	_ = d.ask(func(r *runner) error { // after the end nothing is bound any more
		r.setWorkers(ws)
		return nil
	})
}

// SetPolicy changes the policy of the barrier groups from the next tick on.
func (d *Dispatcher) SetPolicy(spec string) error {
	noteKeys(d.cfg.Log, spec)
	return d.ask(func(r *runner) error {
		now, err := r.auto.named(spec)
		if err == nil && (now != "" || spec == "") { // no policy at all is refused
			err = r.set(board.SetPolicy{Spec: now})
		}
		if err == nil {
			r.auto.turn(spec)
		}
		return err
	})
}

// SetFit has predictors start anew from a fit, and learn on from there. One that
// a policy in use cannot work with is refused, and all stays as it was.
func (d *Dispatcher) SetFit(fit *predictor.Fit) error {
	return d.ask(func(r *runner) error { return r.set(board.SetFit{Fit: fit}) })
}

// Policy is the canonical name of the barrier groups' policy.
func (d *Dispatcher) Policy() string { return *d.policy.Load() }

// Loads samples the boards; ok is false when ctx or the dispatcher ends first.
func (d *Dispatcher) Loads(ctx context.Context) (l board.Loads, ok bool) {
	reply := make(chan board.Loads, 1)
	if !d.inbox.push(func(r *runner) { reply <- r.loads() }) {
		return board.Loads{}, false
	}
	select {
	case l = <-reply:
		return l, true
	case <-ctx.Done():
		return board.Loads{}, false
	}
}

// Status is a copy of what the boards hold. After the end it is what was left;
// when ctx ends first, it is empty.
func (d *Dispatcher) Status(ctx context.Context) board.Status {
	reply := make(chan board.Status, 1)
	if !d.inbox.push(func(r *runner) { reply <- r.status(time.Now()) }) {
		<-d.done
		return d.last
	}
	select {
	case s := <-reply:
		s.Score()
		return s
	case <-ctx.Done():
		return board.Status{}
	}
}

// EnqueueLocal offers a prompt without a hand-off to the ranks that may compute
// it. It is decided at once, by the policy and within the limits that every
// admission has, but it goes behind those that wait: their KV is pinned
// already. The answer is a slot, charged with the whole prompt, or an error.
func (d *Dispatcher) EnqueueLocal(e *pool.Entry, l *board.Local) <-chan Result {
	return d.enqueue(e, l)
}

// Counted tells how many tokens the prompt really has that a slot was charged
// with: nobody had counted them before its rank did.
func (d *Dispatcher) Counted(s *Slot, prompt int) {
	d.inbox.push(func(r *runner) { r.recount(s, prompt) })
}

// Shunned are the prefillers from which no KV should go to a slot's rank now, because it lately did not arrive.
func (d *Dispatcher) Shunned(s *Slot) (prefillers []string) {
	if s.owner.pace.watched.Load() == 0 {
		return nil
	}
	_ = d.ask(func(r *runner) error { // after the end nothing is avoided any more
		if s.held() {
			prefillers = r.boards.Shunned(s.owner.model, s.Slot, time.Now())
		}
		return nil
	})
	return prefillers
}

// Blocked are the prefillers from which no KV should go to some rank of a board now.
func (d *Dispatcher) Blocked(board string) (prefillers []string) {
	if p, ok := d.paces.Load(board); !ok || p.(*published).watched.Load() == 0 {
		return nil
	}
	_ = d.ask(func(r *runner) error { // after the end nothing is avoided any more
		prefillers = r.boards.Shunned(board, -1, time.Now())
		return nil
	})
	return prefillers
}

// Rerouted tells that the KV of a slot, which was bound before its prefill, comes from another prefiller.
func (d *Dispatcher) Rerouted(s *Slot, prefiller string) {
	d.inbox.push(func(r *runner) {
		if s.held() {
			r.apply(board.Rerouted{Model: s.owner.model, Slot: s.Slot, Prefiller: prefiller})
		}
	})
}

// Preempted tells that the engine of a worker ran out of KV room and gave a
// request back.
func (d *Dispatcher) Preempted(worker int32) {
	d.inbox.push(func(r *runner) { r.apply(board.Preempted{Worker: worker}) })
}

// Gauged tells how many KV tokens are in use on a worker by its engine's gauges, read just now.
// It is of interest only where there are orphans.
func (d *Dispatcher) Gauged(worker int32, kvTokens int64) {
	g := board.Gauged{Worker: worker, KVTokens: kvTokens, At: time.Now()}
	d.inbox.push(func(r *runner) {
		r.countAll()
		r.apply(g)
	})
}

// Configure changes the settings between two rounds. Those that cannot work, or
// not together, are refused, and all stays as it was.
func (d *Dispatcher) Configure(s board.Settings) error {
	noteKeys(d.cfg.Log, s.Policy)
	return d.ask(func(r *runner) error {
		now, err := r.auto.named(s.Policy)
		if err != nil {
			return err
		}
		named := s.Policy
		s.Policy = now
		if err := r.set(s); err != nil {
			return err
		}
		r.auto.turn(named)
		return nil
	})
}

// Accepts says what Configure would, and changes nothing.
func (d *Dispatcher) Accepts(s board.Settings) error {
	return d.ask(func(r *runner) (err error) {
		if s.Policy, err = r.auto.named(s.Policy); err != nil {
			return err
		}
		return r.boards.Accepts(s)
	})
}

// noteKeys warns of keys of policies that do nothing.
func noteKeys(log *zap.Logger, spec string, more ...string) {
	for _, text := range append([]string{spec}, more...) {
		sp, err := policy.ParseSpec(text)
		if err != nil {
			continue // that is told elsewhere
		}
		for _, note := range sp.Notes() {
			log.Warn("dispatcher: " + note)
		}
	}
}

// ask has the loop run a command and waits for its answer.
func (d *Dispatcher) ask(command func(r *runner) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(r *runner) { reply <- command(r) }) {
		return board.ErrDraining
	}
	return <-reply // an accepted command is always run
}
