package sim

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// run is one policy on the requests of one seed. Times are ms since its start.
type run struct {
	fleet *Fleet
	load  Load
	jobs  []job
	next  int   // the first job that has not arrived
	ready []int // open loop: jobs that have not arrived, by the end of their prefill
	back  []int // preempted jobs in prefill, by its end

	groups  []*group
	workers []*worker
	now     float64
	pool    []policy.Entry // ascending id: the order of arrival
	inside  int            // jobs in the system
	waits   waits
	slots   slotTable
	largest int64 // prompt that any rank could ever take

	policy    policy.Policy // of the first group: all are built alike
	watermark float64
	forecast  *forecast
	anew      bool // every r̂ is due
	meter     meter
	order     []*group
	assigned  []policy.Assignment
	stalled   int    // turns in which nothing happened
	ended     func() // a request is done
}

// never is the end of a step that is not in progress.
var never = math.Inf(1)

// stallTurns is how often an idle fleet may look at a pool that its policy does
// not serve, a step's time each, before that is an error.
const stallTurns = 100_000

func newRun(fleet *Fleet, load Load, w *workload, fit *predictor.Fit, build func(group int) (policy.Policy, error)) (*run, error) {
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
		p, err := build(i)
		if err != nil {
			return nil, err
		}
		g := &group{Group: fleet.Groups[i], index: i, ends: never, policy: p}
		for k := range g.Ranks {
			w := &worker{Rank: g.Ranks[k], id: int32(len(r.workers)), group: g}
			w.preempted = [2]float64{math.Inf(-1), math.Inf(-1)}
			r.workers = append(r.workers, w)
			g.later = append(g.later, w)
		}
		r.groups = append(r.groups, g)
	}
	r.policy = r.groups[0].policy
	r.watermark = policy.Watermark(r.policy)
	r.measureLargest()
	var err error
	if r.forecast, err = newForecast(r.policy, fit, w.history, r.jobs); err != nil {
		return nil, fmt.Errorf("policy %s: %w", r.policy.Name(), err)
	}
	r.meter.begin(len(r.jobs), fleet.slots())
	return r, nil
}

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
		over, err := r.turn()
		if err != nil || over {
			return err
		}
	}
}

// turn is one instant at which something may happen: where a step ends, or
// where an idle group has waited for a request.
func (r *run) turn() (over bool, err error) {
	for _, g := range r.groups {
		if g.ends <= r.now {
			r.finishStep(g)
		}
	}
	r.comeAndGo()
	r.arrive()
	if err := r.tick(); err != nil {
		return false, err
	}
	for _, g := range r.groups {
		if g.ends == never {
			r.startStep(g)
		}
	}
	if r.inside == 0 && r.next == len(r.jobs) {
		return true, nil
	}
	return false, r.wait()
}

// wait moves the clock to the next turn.
func (r *run) wait() error {
	next, busy, idle := never, false, false
	for _, g := range r.groups {
		next = min(next, g.ends)
		busy = busy || g.ends < never
		idle = idle || g.ends == never && len(g.workers)+len(g.later) > 0
	}
	if idle || !busy {
		if len(r.ready) > 0 {
			next = min(next, r.jobs[r.ready[0]].entered)
		}
		if len(r.back) > 0 {
			next = min(next, r.jobs[r.back[0]].entered)
		}
		for _, w := range r.workers {
			for _, m := range []Moment{w.Join, w.Leave} {
				if m.Ms > r.now {
					next = min(next, m.Ms)
				}
			}
		}
	}
	if busy || len(r.pool) == 0 {
		r.stalled = 0
	} else if r.stalled++; r.stalled > stallTurns {
		return fmt.Errorf("policy %s leaves %d requests waiting though every rank is idle", r.policy.Name(), len(r.pool))
	} else {
		next = min(next, r.now+r.groups[0].C0Ms) // a policy may hold back for a while
	}
	if next == never {
		return fmt.Errorf("%d requests are left and no rank will ever take them", r.inside+len(r.jobs)-r.next)
	}
	r.now = max(r.now, next)
	return nil
}

// comeAndGo lets ranks join and leave.
func (r *run) comeAndGo() {
	gone := false
	for _, g := range r.groups {
		g.later = slices.DeleteFunc(g.later, func(w *worker) bool {
			if w.Join.set() && !w.Join.due(g.step, r.now) {
				return false
			}
			w.up = true
			at, _ := slices.BinarySearchFunc(g.workers, w.id, func(o *worker, id int32) int { return cmp.Compare(o.id, id) })
			g.workers = slices.Insert(g.workers, at, w)
			return true
		})
		g.workers = slices.DeleteFunc(g.workers, func(w *worker) bool {
			if w.up && w.Leave.set() && w.Leave.due(g.step, r.now) {
				w.up = false
				for w.Fails && len(w.legs) > 0 {
					r.preempt(w, len(w.legs)-1)
				}
			}
			w.gone = !w.up && len(w.legs) == 0
			gone = gone || w.gone
			return w.gone
		})
	}
	if gone {
		r.measureLargest()
		r.pool = slices.DeleteFunc(r.pool, func(e policy.Entry) bool { return r.tooLarge(int(e.ID - 1)) })
	}
}

// measureLargest finds what any rank that is left, or will come, could take.
func (r *run) measureLargest() {
	r.largest = 0
	for _, w := range r.workers {
		if !w.gone {
			r.largest = max(r.largest, w.budget(r.watermark))
		}
	}
}

// tooLarge fails a request that no rank could ever take.
func (r *run) tooLarge(at int) bool {
	if int64(r.jobs[at].prompt) <= r.largest {
		return false
	}
	r.jobs[at].state = jobFailed
	r.inside--
	r.meter.failed++
	r.ended()
	return true
}

// arrive moves into the pool what has been prefilled by now.
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

// enter puts a job into the pool, in order of arrival.
func (r *run) enter(at int) {
	q := &r.jobs[at]
	if r.tooLarge(at) {
		return
	}
	q.state = jobWaiting
	e := policy.Entry{ID: uint64(at) + 1, Prompt: q.prompt, Age: q.age, Key: q.key}
	if n := len(r.pool); n == 0 || r.pool[n-1].ID < e.ID {
		r.pool = append(r.pool, e)
		return
	}
	i, _ := slices.BinarySearchFunc(r.pool, e.ID, func(e policy.Entry, id uint64) int { return cmp.Compare(e.ID, id) })
	r.pool = slices.Insert(r.pool, i, e)
}

// preempt sends the i-th request of a worker back: it is prefilled again with
// what it has generated, and keeps its place in the order of arrival.
func (r *run) preempt(w *worker, i int) {
	l := w.legs[i]
	q := &r.jobs[l.job]
	q.prompt += l.gen
	q.age += l.gen
	q.state = jobAhead
	q.entered = r.now + prefillTime(q.prompt)
	r.slots.put(w.view[i].Slot)
	w.remove(i)
	at, _ := slices.BinarySearchFunc(r.back, int(l.job), func(x, job int) int {
		return cmp.Or(cmp.Compare(r.jobs[x].entered, q.entered), cmp.Compare(x, job))
	})
	r.back = slices.Insert(r.back, at, int(l.job))
	r.meter.preempted++
}
