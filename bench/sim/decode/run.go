package decode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// run is one policy on the requests of one seed: engines in virtual time, and the server's own
// board in front of them. Times are ms since its start.
type run struct {
	*driver
	fleet *Fleet
	load  Load
	jobs  []job
	next  int   // the first job that has not arrived
	ready []int // open loop: jobs that have not arrived, by the end of their prefill
	back  []int // preempted jobs in prefill, by its end

	prefill prefillers
	early   bool    // ranks are bound before the prefill
	coming  []int   // open loop: jobs whose prefill waits for their arrival, where engines are few
	line    []int   // jobs that have arrived and wait outside the pool for an engine, in order of arrival
	stepMs  float64 // of the last step of any group

	groups  []*group
	workers []*worker // by id
	inside  int       // jobs in the system
	waits   int       // of them, in the pool
	law     bool
	meter   meter
	err     error  // a policy broke a limit
	stalled int    // turns in which nothing happened
	ended   func() // a request is done
}

// never is the end of a step that is not in progress.
var never = virtual.Never

// stallTurns is how often an idle fleet may look at a pool that its policy does
// not serve before that is an error.
const stallTurns = 100_000

func newRun(fleet *Fleet, load Load, w *workload, cfg board.Config) (*run, error) {
	r := &run{fleet: fleet, load: load, prefill: newPrefillers(&load), stepMs: fleet.Groups[0].C0Ms, ended: func() {}}
	r.jobs = make([]job, len(w.jobs))
	for i, a := range w.jobs {
		r.jobs[i] = job{prompt: a.prompt + a.age, output: a.output, age: a.age, key: a.key, arrival: a.at, first: math.NaN()}
	}
	if load.Rho > 0 {
		for i := range r.jobs {
			q := &r.jobs[i]
			switch {
			case i < w.running:
			case load.AtArrival:
				q.entered = q.arrival
			case r.prefill.Engines > 0:
				r.coming = append(r.coming, i)
				continue
			default:
				q.entered = q.arrival + r.prefill.time(q.prompt)
			}
			r.ready = append(r.ready, i)
		}
		slices.SortFunc(r.ready, r.byPrefill)
	}
	for i := range fleet.Groups {
		plan := &fleet.Groups[i]
		g := &group{Group: virtual.NewGroup(board.GroupKey{Model: model, Name: strconv.Itoa(i), Barrier: true},
			board.StepModel{C0Ms: plan.C0Ms, C1Ms: plan.C1Ms, RequestMs: plan.RequestMs}), plan: plan}
		if plan.Law != nil {
			g.Law = *plan.Law
		}
		for _, p := range plan.Ranks {
			w := &worker{Rank: &virtual.Rank{ID: int32(len(r.workers)), Slots: p.Slots, Capacity: p.Capacity, Cost: p.Cost, KeepsKVFor: p.Keeps,
				Group: g.Group}, plan: p}
			if fleet.Spare != nil {
				w.MaxRunning = p.Slots + *fleet.Spare
			}
			r.workers = append(r.workers, w)
			g.later = append(g.later, w)
		}
		r.groups = append(r.groups, g)
	}
	cfg.Predictor.KnownLengths, cfg.BindAhead = true, load.Ahead              // it is up to policies to ask
	r.early = load.AtArrival && (r.prefill.time(1) > 0 || fleet.Transfer > 0) // else binding at arrival is binding late
	history := w.history
	if cfg.Predictor.Fit != nil {
		history = nil // the fit stands in for it
	}
	var err error
	if r.driver, err = newDriver(cfg, history); err != nil {
		return nil, err
	}
	r.OnBind, r.OnRefuse, r.broken, r.Timed = r.placed, r.turnedAway, r.breaks, r.meter.timed
	r.serve()
	r.meter.warm = cmp.Or(w.warm, max(len(r.jobs)/warmShare, fleet.slots()))
	return r, nil
}

// serve has the engines serve the jobs.
func (r *run) serve() {
	r.ReportDelaySteps = r.fleet.Stale
	for _, g := range r.groups {
		r.Groups = append(r.Groups, g.Group)
	}
	r.Length = func(g *virtual.Group) float64 {
		r.stepMs = r.meter.step(g, g == r.Groups[0], r.Now)
		return r.stepMs
	}
	if r.load.AtArrival {
		r.Prefill = func(prompt int32) (ready, took float64) { return r.prefill.run(r.Now, prompt), r.prefill.time(prompt) }
	}
	r.Token, r.Seated, r.Finished, r.Preempted = r.token, r.seated, r.finished, r.preempted
	r.Stepped = func(_ *virtual.Group, tokens int) { r.meter.generated(tokens) }
}

// byPrefill orders jobs by the end of their prefill, then by arrival.
func (r *run) byPrefill(a, b int) int {
	return cmp.Or(cmp.Compare(r.jobs[a].entered, r.jobs[b].entered), cmp.Compare(a, b))
}

// insert adds a job to those that are in the order of byPrefill.
func (r *run) insert(jobs []int, job int) []int {
	at, _ := slices.BinarySearchFunc(jobs, job, r.byPrefill)
	return slices.Insert(jobs, at, job)
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
	r.Turn(func() {
		r.comeAndGo()
		r.prefillComing()
		r.arrive()
		r.due(r.Now)
	})
	if r.err != nil {
		return false, r.err
	}
	if r.Begin() {
		r.look(r.Now)
	}
	if r.inside == 0 && r.next == len(r.jobs) {
		return true, nil
	}
	return false, r.wait()
}

// wait moves the clock to the next turn.
func (r *run) wait() error {
	looks := r.Driver.Next()
	next, busy := r.Due()
	if len(r.ready) > 0 {
		next = min(next, r.jobs[r.ready[0]].entered)
	}
	if len(r.back) > 0 {
		next = min(next, r.jobs[r.back[0]].entered)
	}
	if len(r.coming) > 0 {
		next = min(next, r.jobs[r.coming[0]].arrival)
	}
	if len(r.line) > 0 {
		next = min(next, r.prefill.next(r.Now))
	}
	if r.offers() {
		next = r.Now
	}
	if r.load.AtArrival {
		for _, g := range r.groups {
			if g.Ends == never {
				next = min(next, g.FirstReady())
			}
		}
	}
	if busy {
		next = min(next, r.builds)
	} else {
		for _, w := range r.workers {
			for _, m := range []Moment{w.plan.Join, w.plan.Leave} {
				if m.Ms > r.Now {
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
		return fmt.Errorf("policy %s leaves %d requests waiting though every rank is idle", r.Boards.Policy(), r.waits)
	case next == never:
		return fmt.Errorf("%d requests are left and no rank will ever take them", r.inside+len(r.jobs)-r.next)
	case next <= r.Now && next == looks:
		return errors.New("the board wants to look at what it has looked at")
	}
	r.Now = max(r.Now, next)
	return nil
}

// comeAndGo lets ranks join and leave, and tells the board.
func (r *run) comeAndGo() {
	changed := false
	for _, g := range r.groups {
		g.later = slices.DeleteFunc(g.later, func(w *worker) bool {
			if w.plan.Join.set() && !w.plan.Join.due(g.Step, r.Now) {
				return false
			}
			w.up, changed = true, true
			at, _ := slices.BinarySearchFunc(g.Ranks, w.ID, func(o *virtual.Rank, id int32) int { return cmp.Compare(o.ID, id) })
			g.Ranks = slices.Insert(g.Ranks, at, w.Rank)
			return true
		})
		g.Ranks = slices.DeleteFunc(g.Ranks, func(e *virtual.Rank) bool {
			w := r.workers[e.ID]
			if w.up && w.plan.Leave.set() && w.plan.Leave.due(g.Step, r.Now) {
				w.up, changed = false, true
				for w.plan.Fails && len(w.Requests) > 0 {
					r.Preempt(w.Rank, len(w.Requests)-1)
				}
			}
			w.gone = !w.up && len(w.Requests) == 0
			changed = changed || w.gone
			return w.gone
		})
	}
	if !changed {
		return
	}
	var ws []board.Worker
	for _, g := range r.groups {
		for _, w := range g.Ranks {
			ws = append(ws, board.Worker{
				ID: w.ID, Name: strconv.Itoa(int(w.ID)), Model: model, Group: g.Key.Name, Barrier: true, Slots: w.Slots, Capacity: w.Capacity,
				Cost: float32(w.Cost),
				Up:   r.workers[w.ID].up, Early: r.early, KeepsKVFor: w.KeepsKVFor,
			})
		}
	}
	r.Count(r.Now)
	r.Apply(board.SetWorkers{Workers: ws}, r.Now)
	for _, g := range r.groups {
		told := g.plan.Assumed
		if told == nil && r.law {
			told = &g.Law
		}
		if told != nil && !g.told && len(g.Ranks) > 0 {
			g.told = true
			law, use := told.Assumed()
			r.Apply(board.SetStepModel{Group: g.Key, StepModel: law, Weights: use}, r.Now)
		}
	}
}

// arrive tells the board of what has been prefilled by now, or has arrived where that comes first.
func (r *run) arrive() {
	if r.load.Rho > 0 {
		for len(r.ready) > 0 && r.jobs[r.ready[0]].entered <= r.Now {
			r.inside++
			r.come(r.ready[0])
			r.ready = r.ready[1:]
			r.next++
		}
	} else {
		slots := 0
		for _, g := range r.groups {
			for _, w := range g.Ranks {
				if r.workers[w.ID].up {
					slots += w.Slots
				}
			}
		}
		for r.next < len(r.jobs) && r.inside < slots+r.load.Pool {
			q := &r.jobs[r.next]
			q.arrival, q.entered = r.Now, r.Now
			r.inside++
			r.come(r.next)
			r.next++
		}
	}
	for len(r.back) > 0 && r.jobs[r.back[0]].entered <= r.Now {
		r.come(r.back[0])
		r.back = r.back[1:]
	}
	r.offer()
	r.meter.phase(r.Now, r.next == len(r.jobs))
}

// enter hands a job to the board.
func (r *run) enter(at int) {
	q := &r.jobs[at]
	q.state = jobWaiting
	r.waits++
	r.Apply(board.Enqueue{Output: q.output, Entry: &board.Entry{
		ID: uint64(at) + 1, Model: model, Prompt: int(q.prompt), Age: int(q.age), Key: q.key, Arrival: instant(q.arrival),
		Entered: instant(q.entered),
		Early:   r.early,
	}}, r.Now)
}

// placed gives a request to the engine that the board bound it to.
func (r *run) placed(e *board.Effect) {
	q := &r.jobs[e.Entry.ID-1]
	q.state = jobPlaced
	r.waits--
	r.meter.admitted(r.Now - q.entered)
	r.Place(r.workers[e.Bound.Worker].Rank, virtual.Request{
		Job: int32(e.Entry.ID - 1), Slot: e.Bound.Slot, Prompt: q.prompt, Left: q.output - q.age,
		StepsToFirstToken: int64(r.fleet.Transfer),
	})
}

func (r *run) seated(l *virtual.Request) {
	r.meter.seated(r.Now - r.jobs[l.Job].entered - l.Prefill)
}

// token is one of a request.
func (r *run) token(l *virtual.Request) {
	q := &r.jobs[l.Job]
	if l.Gen == 1 && q.age == 0 {
		q.first = r.Now
		r.meter.firstToken(r.Now - q.arrival)
	}
}

// finished books a request out whose last token came.
func (r *run) finished(_ *virtual.Group, l virtual.Request) {
	q := &r.jobs[l.Job]
	q.state = jobDone
	r.inside--
	r.meter.finished(r.Now, q)
	r.ended()
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
		what = fmt.Errorf("entry %d of %d tokens was sent to worker %d, which holds %d of %d", e.ID, r.jobs[e.ID-1].prompt, e.Worker, w.KV,
			w.Capacity)
	}
	r.err = fmt.Errorf("policy %s, at %.0f ms: %w", r.Boards.Policy(), r.Now, what)
}

// preempted has a request prefilled again with what it has generated, before it waits for a rank or
// after it has one. It keeps its place in the order of arrival.
func (r *run) preempted(_ *virtual.Rank, l virtual.Request) {
	q := &r.jobs[l.Job]
	q.prompt += l.Gen
	q.age += l.Gen
	q.state = jobAhead
	q.entered = r.Now
	if !r.load.AtArrival {
		q.entered = r.prefill.run(r.Now, q.prompt)
	}
	r.back = r.insert(r.back, int(l.Job))
	r.meter.preempted++
}
