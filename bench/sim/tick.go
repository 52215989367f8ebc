package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// tick lets every group that can take a request decide, the one with the fewest
// KV tokens a rank first; each sees the pool that is left.
func (r *run) tick() error {
	if len(r.pool) == 0 {
		return nil
	}
	r.order = r.order[:0]
	for _, g := range r.groups {
		if g.open() {
			r.order = append(r.order, g)
		}
	}
	if len(r.order) > 1 {
		slices.SortStableFunc(r.order, func(a, b *group) int { return cmp.Compare(a.meanKV(), b.meanKV()) })
	}
	for _, g := range r.order {
		r.fill(g)
		start := time.Now()
		r.assigned = g.policy.Decide(&g.snap, r.assigned[:0])
		r.meter.tick(time.Since(start))
		if len(r.assigned) == 0 {
			continue
		}
		for _, a := range r.assigned {
			if err := r.admit(g, a); err != nil {
				return fmt.Errorf("policy %s, step %d of group %q: %w", g.policy.Name(), g.step, g.Name, err)
			}
		}
		r.pool = slices.DeleteFunc(r.pool, func(e policy.Entry) bool { return r.jobs[e.ID-1].state != jobWaiting })
		r.forecast.flush()
		if len(r.pool) == 0 {
			break
		}
	}
	return nil
}

// open says whether the group's policy may admit anything.
func (g *group) open() bool {
	immediate := g.policy.Immediate()
	for _, w := range g.workers {
		if w.up && (immediate || w.free() > 0) {
			return true
		}
	}
	return false
}

func (g *group) meanKV() float64 {
	sum := int64(0)
	for _, w := range g.workers {
		sum += w.kv
	}
	return float64(sum) / float64(len(g.workers))
}

// guardWaits mean waits must have passed before an entry is overdue (algorithm 4.3).
const guardWaits = 6

// fill writes the group's snapshot.
func (r *run) fill(g *group) {
	s := &g.snap
	s.Workers = s.Workers[:0]
	largest := int64(0)
	for _, w := range g.workers {
		free := w.free()
		if w.up {
			largest = max(largest, w.budget(r.watermark))
		} else {
			free = min(free, 0)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: w.id, Free: int32(free), Up: w.up, Capacity: w.capacity(r.watermark, r.now), Cost: float32(w.Cost), Running: w.view,
		})
	}
	fits := true
	for i := range r.pool {
		e := &r.pool[i]
		q := &r.jobs[e.ID-1]
		since := q.entered
		if e.Age > 0 { // a preempted one stands for its whole life (algorithm 7)
			since = q.arrival
		}
		e.WaitMs = float32(r.now - since)
		fits = fits && int64(e.Prompt) <= largest
	}
	s.Pool = r.pool
	if !fits { // those wait for another group
		g.pool = g.pool[:0]
		for _, e := range r.pool {
			if int64(e.Prompt) <= largest {
				g.pool = append(g.pool, e)
			}
		}
		s.Pool = g.pool
	}
	if s.MaxAgeMs = g.policy.MaxAgeMs(); s.MaxAgeMs > 0 {
		s.MaxAgeMs = max(s.MaxAgeMs, float32(guardWaits*r.waits.mean()))
	}
	s.StepMs, s.C0Ms, s.C1Ms = float32(g.meanMs), float32(g.C0Ms), float32(g.C1Ms)
	s.Outlook = r.forecast.outlook()
}

// admit binds an entry to a rank. It trusts no policy: one that breaks a limit
// makes the run fail.
func (r *run) admit(g *group, a policy.Assignment) error {
	if a.Entry == 0 || a.Entry > uint64(len(r.jobs)) || r.jobs[a.Entry-1].state != jobWaiting {
		return fmt.Errorf("entry %d does not wait", a.Entry)
	}
	at, ok := slices.BinarySearchFunc(g.workers, a.Worker, func(w *worker, id int32) int { return cmp.Compare(w.id, id) })
	if !ok || !g.workers[at].up {
		return fmt.Errorf("entry %d was sent to worker %d, which takes nothing", a.Entry, a.Worker)
	}
	w, q := g.workers[at], &r.jobs[a.Entry-1]
	if !g.policy.Immediate() {
		if w.free() <= 0 {
			return fmt.Errorf("entry %d was sent to worker %d, which has no free slot", a.Entry, a.Worker)
		}
		if !w.fits(int64(q.prompt)) {
			return fmt.Errorf("entry %d of %d tokens was sent to worker %d, which holds %d of %d", a.Entry, q.prompt, a.Worker, w.kv, w.Capacity)
		}
	}
	q.state = jobPlaced
	wait := r.now - q.entered
	r.waits.add(wait)
	r.meter.admitted(wait)
	w.legs = append(w.legs, leg{job: int32(a.Entry - 1), left: q.output - q.age})
	w.view = append(w.view, policy.Request{
		Prompt: q.prompt, Age: q.age, Key: q.key, ID: a.Entry, Slot: r.slots.take(),
	})
	w.rhat = append(w.rhat, predictor.State{})
	r.forecast.ask(w, len(w.view)-1)
	w.pull(r.firstStep(g), r.fleet.Transfer)
	r.seat(w)
	return nil
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

// waits are the pool times of the last admissions.
type waits struct {
	last    [1000]float64
	n, next int
	sum     float64
}

func (w *waits) add(ms float64) {
	w.sum += ms - w.last[w.next]
	w.last[w.next] = ms
	w.next = (w.next + 1) % len(w.last)
	w.n = min(w.n+1, len(w.last))
}

func (w *waits) mean() float64 { return max(0, w.sum) / float64(max(1, w.n)) }

// slotTable hands out dense indices, the ones that were given back first.
type slotTable struct {
	free []int32
	made int32
}

func (t *slotTable) take() int32 {
	if n := len(t.free); n > 0 {
		s := t.free[n-1]
		t.free = t.free[:n-1]
		return s
	}
	t.made++
	return t.made - 1
}

func (t *slotTable) put(s int32) { t.free = append(t.free, s) }
