package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"evenkeel/bench/fit"
	"evenkeel/bench/trace"
	"evenkeel/dispatcher/board"
)

// run is one policy on the requests of one seed: engines in virtual time, and the server's own
// board before them. Times are ms since its start.
type run struct {
	*driver
	fleet *Fleet
	load  Load
	jobs  []job
	next  int   // the first job that has not arrived
	ready []int // open loop: jobs that have not arrived, by the end of their prefill
	back  []int // preempted jobs in prefill, by its end

	groups  []*group
	workers []*worker
	now     float64
	inside  int // jobs in the system
	waits   int // of them, in the pool
	law     bool
	meter   meter
	given   board.Release
	err     error  // a policy broke a limit
	stalled int    // turns in which nothing happened
	ended   func() // a request is done
}

// never is the end of a step that is not in progress.
var never = math.Inf(1)

// stallTurns is how often an idle fleet may look at a pool that its policy does
// not serve before that is an error.
const stallTurns = 100_000

func newRun(fleet *Fleet, load Load, w *workload, cfg board.Config) (*run, error) {
	r := &run{fleet: fleet, load: load, ended: func() {}}
	r.jobs = make([]job, len(w.jobs))
	for i, a := range w.jobs {
		r.jobs[i] = job{prompt: a.prompt, output: a.output, key: a.key, arrival: a.at, first: math.NaN()}
	}
	if load.Rho > 0 {
		r.ready = make([]int, len(r.jobs))
		for i := range r.ready {
			r.ready[i] = i
			r.jobs[i].entered = r.jobs[i].arrival + prefillTime(r.jobs[i].prompt)
		}
		r.sortByPrefill(r.ready)
	}
	for i := range fleet.Groups {
		g := &group{Group: fleet.Groups[i], index: i, ends: never, number: 1, since: math.NaN()}
		g.key = board.GroupKey{Model: model, Name: strconv.Itoa(i), Barrier: true}
		g.steps.Group = g.key
		for k := range g.Ranks {
			w := &worker{Rank: g.Ranks[k], id: int32(len(r.workers)), group: g}
			r.workers = append(r.workers, w)
			g.later = append(g.later, w)
		}
		r.groups = append(r.groups, g)
	}
	cfg.Predictor.Told = true // it is up to policies to ask
	err := grow(&cfg, w.past)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", cfg.Policy, err)
	}
	if r.driver, err = newDriver(cfg, w.history); err != nil {
		return nil, err
	}
	r.bound, r.refused, r.broken, r.decides = r.placed, r.turnedAway, r.breaks, r.meter.tick
	r.meter.warmUp(len(r.jobs), fleet.slots())
	return r, nil
}

// grow trains the trees of predictor learned on what came before the run, unless a fit has them.
func grow(cfg *board.Config, past []trace.Request) error {
	n, err := cfg.Needs()
	if err == nil && n.Predictor == learned && cfg.Predictor.Fit == nil {
		cfg.Predictor.Fit, err = fit.Trees(past, n)
	}
	return err
}

// learned is the predictor that trees are for.
const learned = "learned"

func prefillTime(prompt int32) float64 { return prefillMs + prefillPerTokenMs*float64(prompt) }

// sortByPrefill orders jobs by the end of their prefill, then by arrival.
func (r *run) sortByPrefill(jobs []int) {
	slices.SortFunc(jobs, func(a, b int) int {
		return cmp.Or(cmp.Compare(r.jobs[a].entered, r.jobs[b].entered), cmp.Compare(a, b))
	})
}

// all runs until every request is done.
func (r *run) all(ctx context.Context) error {
	for turn := 0; ; turn++ {
		if turn%256 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		over, err := r.instant()
		if err != nil || over {
			return err
		}
	}
}

// instant is one instant at which something happens: a step ends, a request arrives, or the board
// wants to look again. All of that is told, and then it ticks.
func (r *run) instant() (over bool, err error) {
	for _, g := range r.groups {
		if g.ends <= r.now {
			r.finishStep(g)
		}
	}
	r.comeAndGo()
	r.arrive()
	r.look(r.now)
	if r.err != nil {
		return false, r.err
	}
	preempted := r.meter.preempted
	for _, g := range r.groups {
		if g.ends == never {
			r.startStep(g)
		}
	}
	if r.meter.preempted > preempted {
		r.look(r.now)
	}
	if r.inside == 0 && r.next == len(r.jobs) {
		return true, nil
	}
	return false, r.wait()
}

// wait moves the clock to the next turn.
func (r *run) wait() error {
	next, busy := r.driver.next(), false
	looks := next
	for _, g := range r.groups {
		next = min(next, g.ends)
		busy = busy || g.ends < never
	}
	if len(r.ready) > 0 {
		next = min(next, r.jobs[r.ready[0]].entered)
	}
	if len(r.back) > 0 {
		next = min(next, r.jobs[r.back[0]].entered)
	}
	if busy {
		next = min(next, r.builds)
	} else {
		for _, w := range r.workers {
			for _, m := range []Moment{w.Join, w.Leave} {
				if m.Ms > r.now {
					next = min(next, m.Ms)
				}
			}
		}
	}
	r.stalled++
	if busy || r.waits == 0 {
		r.stalled = 0
	}
	switch {
	case r.stalled > stallTurns, next == never && r.waits > 0:
		return fmt.Errorf("policy %s leaves %d requests waiting though every rank is idle", r.boards.Policy(), r.waits)
	case next == never:
		return fmt.Errorf("%d requests are left and no rank will ever take them", r.inside+len(r.jobs)-r.next)
	case next <= r.now && next == looks:
		return errors.New("the board wants to look at what it has looked at")
	}
	r.now = max(r.now, next)
	return nil
}

// comeAndGo lets ranks join and leave, and tells the board.
func (r *run) comeAndGo() {
	changed := false
	for _, g := range r.groups {
		g.later = slices.DeleteFunc(g.later, func(w *worker) bool {
			if w.Join.set() && !w.Join.due(g.step, r.now) {
				return false
			}
			w.up, changed = true, true
			at, _ := slices.BinarySearchFunc(g.workers, w.id, func(o *worker, id int32) int { return cmp.Compare(o.id, id) })
			g.workers = slices.Insert(g.workers, at, w)
			return true
		})
		g.workers = slices.DeleteFunc(g.workers, func(w *worker) bool {
			if w.up && w.Leave.set() && w.Leave.due(g.step, r.now) {
				w.up, changed = false, true
				for w.Fails && len(w.legs) > 0 {
					r.preempt(w, len(w.legs)-1)
				}
			}
			w.gone = !w.up && len(w.legs) == 0
			changed = changed || w.gone
			return w.gone
		})
	}
	if !changed {
		return
	}
	var ws []board.Worker
	for _, g := range r.groups {
		for _, w := range g.workers {
			ws = append(ws, board.Worker{
				ID: w.id, Name: strconv.Itoa(int(w.id)), Model: model, Group: g.key.Name, Barrier: true, Slots: w.Slots, Capacity: w.Capacity, Cost: float32(w.Cost), Up: w.up,
			})
		}
	}
	r.count(r.now)
	r.apply(board.SetWorkers{Workers: ws}, r.now)
	for _, g := range r.groups {
		if r.law && !g.told && len(g.workers) > 0 {
			g.told = true
			r.apply(board.Law{Group: g.key, StepModel: board.StepModel{C0Ms: g.C0Ms, C1Ms: g.C1Ms}}, r.now)
		}
	}
}

// arrive tells the board of what has been prefilled by now.
func (r *run) arrive() {
	if r.load.Rho > 0 {
		for len(r.ready) > 0 && r.jobs[r.ready[0]].entered <= r.now {
			r.inside++
			r.enter(r.ready[0])
			r.ready = r.ready[1:]
			r.next++
		}
	} else {
		slots := 0
		for _, g := range r.groups {
			for _, w := range g.workers {
				if w.up {
					slots += w.Slots
				}
			}
		}
		for r.next < len(r.jobs) && r.inside < slots+r.load.Pool {
			q := &r.jobs[r.next]
			q.arrival, q.entered = r.now, r.now
			r.inside++
			r.enter(r.next)
			r.next++
		}
	}
	for len(r.back) > 0 && r.jobs[r.back[0]].entered <= r.now {
		r.enter(r.back[0])
		r.back = r.back[1:]
	}
	r.meter.phase(r.now, r.next == len(r.jobs))
}

// enter hands a job to the board.
func (r *run) enter(at int) {
	q := &r.jobs[at]
	q.state = jobWaiting
	r.waits++
	r.apply(board.Enqueue{Output: q.output, Entry: &board.Entry{
		ID: uint64(at) + 1, Model: model, Prompt: int(q.prompt), Age: int(q.age), Key: q.key, Arrival: instant(q.arrival), Entered: instant(q.entered),
	}}, r.now)
}

// placed gives a request to the engine that the board bound it to.
func (r *run) placed(e *board.Effect) {
	q, w := &r.jobs[e.Entry.ID-1], r.workers[e.Bound.Worker]
	q.state = jobPlaced
	r.waits--
	r.meter.admitted(r.now - q.entered)
	w.legs = append(w.legs, leg{job: int32(e.Entry.ID - 1), slot: e.Bound.Slot, prompt: q.prompt, left: q.output - q.age})
	w.pull(r.firstStep(w.group), r.fleet.Transfer)
	r.seat(w)
}

// firstStep is the first one that a request admitted now can take part in.
func (r *run) firstStep(g *group) int64 {
	if g.ends < never {
		return g.step + 1
	}
	return g.step
}

// seat gives free slots to those that wait in the engine.
func (r *run) seat(w *worker) {
	for w.active < min(w.Slots, len(w.legs)) && w.legs[w.active].pulled {
		r.meter.seated(r.now - r.jobs[w.legs[w.active].job].entered)
		w.active++
	}
}

// turnedAway fails a request that no rank can take.
func (r *run) turnedAway(e *board.Effect) {
	r.jobs[e.Entry.ID-1].state = jobFailed
	r.waits--
	r.inside--
	r.meter.failed++
	r.ended()
}

// breaks ends the run: a policy that breaks a limit is a bug here, whatever stands in for it.
func (r *run) breaks(e *board.Effect) {
	if r.err != nil {
		return
	}
	what := e.Err
	switch {
	case e.Kind == board.EffectFallback:
		what = fmt.Errorf("it failed: %s", e.Label)
	case e.Kind != board.EffectInvalid:
	case e.Label == board.FaultEntry:
		what = fmt.Errorf("entry %d does not wait", e.ID)
	case e.Label == board.FaultWorker, e.Label == board.FaultDown:
		what = fmt.Errorf("entry %d was sent to worker %d, which takes nothing", e.ID, e.Worker)
	case e.Label == board.FaultSlot:
		what = fmt.Errorf("entry %d was sent to worker %d, which has no free slot", e.ID, e.Worker)
	default:
		w := r.workers[e.Worker]
		what = fmt.Errorf("entry %d of %d tokens was sent to worker %d, which holds %d of %d", e.ID, r.jobs[e.ID-1].prompt, e.Worker, w.kv, w.Capacity)
	}
	r.err = fmt.Errorf("policy %s, at %.0f ms: %w", r.boards.Policy(), r.now, what)
}

// preempt sends the i-th request of a worker back: it is prefilled again with
// what it has generated, and keeps its place in the order of arrival.
func (r *run) preempt(w *worker, i int) {
	l := w.legs[i]
	w.remove(i)
	r.release(w.group, l, board.Failed)
	q := &r.jobs[l.job]
	q.prompt += l.gen
	q.age += l.gen
	q.state = jobAhead
	q.entered = r.now + prefillTime(q.prompt)
	at, _ := slices.BinarySearchFunc(r.back, int(l.job), func(x, job int) int {
		return cmp.Or(cmp.Compare(r.jobs[x].entered, q.entered), cmp.Compare(x, job))
	})
	r.back = slices.Insert(r.back, at, int(l.job))
	r.meter.preempted++
}
