package regions

import (
	"fmt"
	"math"
	"slices"

	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// Engine is how fast a replica is and what it holds.
type Engine struct {
	TPMs     float64 `yaml:"tp_ms"`               // prefill, a token that is not cached
	T0Ms     float64 `yaml:"t0_ms"`               // until a first token on an idle engine, beside that
	BusyMs   float64 `yaml:"busy_ms"`             // of it, in which the engine does nothing else; in the rest it does
	StepMs   float64 `yaml:"step_ms"`             // a decode step
	StepPer  float64 `yaml:"step_per_request_ms"` // and a request of its batch
	KVTokens int     `yaml:"kv_tokens"`

	// What the sources leave open. All of it is off unless a scenario asks for it.
	OnePass      bool `yaml:"one_pass"`           // whatever waits and fits is prefilled together, in one pass with one BusyMs
	PrefillPends bool `yaml:"pending_in_prefill"` // a request counts as pending until its prefill is done, not until it begins
	LogSteps     int  `yaml:"log_steps"`          // its metrics tell of the queue after a prefill and so many steps, as SGLang's (decode_log_interval); 0: at once
}

// presets of the sources. SkyLB measures 300 ms for 512 tokens on an L4, all of it
// for tokens; GORGO's table 1 has the line of an A100. All of its t0 keeps the engine
// busy.
var presets = map[string]Engine{
	"l4-llama8b":     {TPMs: 0.586, StepMs: 55, StepPer: 0.5, KVTokens: 32_000},
	"l4-llama8b-24k": {TPMs: 0.586, StepMs: 55, StepPer: 0.5, KVTokens: 24_000},
	"a100-mistral7b": {TPMs: 0.0938, T0Ms: 150.72, BusyMs: 150.72, StepMs: 11.5, StepPer: 0.06, KVTokens: 80_000},
}

// Validate says what no engine is like.
func (e *Engine) Validate() error {
	for _, x := range []struct {
		name string
		v    float64
	}{{"tp_ms", e.TPMs}, {"t0_ms", e.T0Ms}, {"busy_ms", e.BusyMs}, {"step_ms", e.StepMs}, {"step_per_request_ms", e.StepPer}} {
		if !(x.v >= 0) || math.IsInf(x.v, 0) {
			return fmt.Errorf("engine: %s %g: a number from 0", x.name, x.v)
		}
	}
	if e.StepMs <= 0 {
		return fmt.Errorf("engine: step_ms %g: above 0", e.StepMs)
	}
	if e.KVTokens < mostPrompt+mostOutput {
		return fmt.Errorf("engine: kv_tokens %d: at least %d, or the longest request never runs", e.KVTokens, mostPrompt+mostOutput)
	}
	if e.LogSteps < 0 {
		return fmt.Errorf("engine: log_steps %d: from 0", e.LogSteps)
	}
	return nil
}

const blockTokens = 16

// replica is one engine. Who waits longest and fits is prefilled, alone, while
// the rest of the batch stands still; when nobody does, the batch takes a step.
// Prefills and steps follow each other as long as there is something to do; steps
// in which nothing can change are one event.
type replica struct {
	Engine
	s      *simulation
	number int // among all
	region int

	waiting []*job // FCFS
	batch   []*job
	fresh   int // of the batch, the last so many are being prefilled
	tokens  int // prompts and answers of the batch, each counted in full
	steps   int // so far
	told    int // that wait, by metrics that are not told at once
	run     iteration
	cache   *index.Index
	slot    index.Slot
	prompts map[index.Key]int // blocks of the batch's prompts, and how many have them

	made float64 // tokens generated in the measured window
}

// iteration is what runs now: so many steps of equal length, or one prefill. A
// new plan has another number, and what was planned for the old one does nothing.
type iteration struct {
	number  int
	busy    bool
	start   float64
	step    float64 // ms
	count   int
	prefill bool
}

// job is a request in an engine.
type job struct {
	v       *visit
	r       *request
	end     int // of steps, when it has generated all
	got     int
	hit     int
	started bool // its first token was made
	gone    bool // its dispatcher no longer wants it
}

func newReplica(s *simulation, e Engine, number, region int) *replica {
	r := &replica{Engine: e, s: s, number: number, region: region, cache: index.New(index.Config{}), prompts: map[index.Key]int{}}
	r.slot = r.cache.Add("own", e.KVTokens/blockTokens)
	return r
}

// submit takes a request, and looks at it at the end of the step that runs.
func (r *replica) submit(v *visit) *job {
	j := &job{v: v, r: v.r}
	r.waiting = append(r.waiting, j)
	v.r.executions++
	switch {
	case !r.run.busy:
		r.iterate()
	case !r.run.prefill && len(r.waiting) == 1 && r.fits(j):
		r.cut()
	}
	return j
}

// withdraw lets the engine forget a request: its connection was closed.
func (r *replica) withdraw(j *job) {
	j.gone = true
	if r.run.busy && !r.run.prefill {
		r.cut()
	}
}

// cut ends the run after the step that is under way.
func (r *replica) cut() {
	done := math.Ceil((r.s.now - r.run.start) / r.run.step)
	if count := max(1, int(done)); count < r.run.count {
		r.plan(r.run.start, r.run.step, count, false)
	}
}

func (r *replica) plan(start, step float64, count int, prefill bool) {
	r.run = iteration{number: r.run.number + 1, busy: true, start: start, step: step, count: count, prefill: prefill}
	number := r.run.number
	r.s.after(start+step*float64(count)-r.s.now, func() {
		if r.run.number == number {
			r.finish()
			r.iterate()
		}
	})
}

// need is what a job holds once it is in the batch.
func (j *job) need() int { return j.r.tokens + j.got }

func (r *replica) fits(j *job) bool { return r.tokens+len(r.batch)+j.need()+1 <= r.KVTokens }

// pending is how many requests wait, as its metrics have it.
func (r *replica) pending() int {
	switch {
	case r.LogSteps > 0:
		return r.told
	case r.PrefillPends:
		return len(r.waiting) + r.fresh
	}
	return len(r.waiting)
}

// sample is what its metrics tell a scrape.
func (r *replica) sample() prefill.Sample {
	pending := r.pending()
	began := len(r.batch)
	if r.PrefillPends {
		began -= r.fresh
	}
	usage := float64(r.tokens) / float64(r.KVTokens)
	return prefill.Sample{KVUsage: usage, KVHeld: usage, Running: float64(began), Waiting: float64(pending)}
}

// iterate begins what comes next: a prefill, else decode steps until somebody
// ends or memory does.
func (r *replica) iterate() {
	r.run.busy = false
	r.drop()
	tokens := 0
	for len(r.waiting) > 0 && r.fits(r.waiting[0]) && (r.OnePass || r.fresh == 0) {
		tokens += r.admit(r.waiting[0])
		r.waiting = append(r.waiting[:0], r.waiting[1:]...)
		r.fresh++
	}
	if r.fresh > 0 {
		r.told = len(r.waiting)
		r.plan(r.s.now, r.BusyMs+r.TPMs*float64(tokens), 1, true)
		return
	}
	n := len(r.batch)
	if n == 0 {
		r.told = len(r.waiting)
		return
	}
	count := math.MaxInt
	for _, j := range r.batch {
		count = min(count, j.end-r.steps)
	}
	for r.tokens+n > r.KVTokens {
		r.preempt()
		n = len(r.batch)
	}
	count = min(count, (r.KVTokens-r.tokens)/n)
	if r.LogSteps > 0 {
		count = min(count, r.LogSteps-r.steps%r.LogSteps)
	}
	r.plan(r.s.now, r.StepMs+r.StepPer*float64(n), max(1, count), false)
}

// admit puts a job into the batch and returns the tokens to prefill.
func (r *replica) admit(j *job) int {
	r.cache.SetCapacity(r.slot, r.room())
	match := r.cache.Match(r.s.match, j.r.keys)
	r.s.match = match
	j.hit = index.UsableHit(int(match[r.slot.N])*blockTokens, j.r.tokens, blockTokens)
	r.cache.Insert(r.slot, j.r.keys)
	r.batch = append(r.batch, j)
	r.tokens += j.need()
	for _, k := range j.r.keys {
		r.prompts[k]++
	}
	return j.need() - j.hit
}

// vacate takes back what a job held that is no longer in the batch.
func (r *replica) vacate(j *job) {
	r.tokens -= j.need()
	for _, k := range j.r.keys {
		if r.prompts[k]--; r.prompts[k] == 0 {
			delete(r.prompts, k)
		}
	}
}

// room for prefixes, in blocks: the free KV, and the prompts of the batch, which
// are there to be hit as long as it has them.
func (r *replica) room() int {
	return max(1, (r.KVTokens-r.tokens)/blockTokens+len(r.prompts))
}

// preempt throws the latest request out, to be prefilled again.
func (r *replica) preempt() {
	last := len(r.batch) - 1
	j := r.batch[last]
	r.batch = r.batch[:last]
	r.vacate(j)
	r.waiting = append([]*job{j}, r.waiting...)
	r.s.meter.count(&r.s.meter.preempted, r.s.now)
}

// finish counts the tokens that were made, one of a prefill and one of each step,
// and lets go who has all.
func (r *replica) finish() {
	count, made := r.run.count, r.batch
	if r.run.prefill {
		made = r.batch[len(r.batch)-r.fresh:]
		r.fresh = 0
		for _, j := range made {
			j.end = r.steps + j.r.output - j.got - 1
		}
	} else if r.steps += count; r.LogSteps > 0 && r.steps%r.LogSteps == 0 {
		r.told = len(r.waiting)
	}
	if r.s.now > r.s.scenario.warmMs() {
		r.made += float64(len(made) * count)
	}
	ended := false
	for _, j := range made {
		j.got += count
		if !j.started {
			j.started = true
			r.s.firstToken(r, j)
		}
		ended = ended || j.end <= r.steps
	}
	r.tokens += len(made) * count
	if !ended {
		return
	}
	r.batch = slices.DeleteFunc(r.batch, func(j *job) bool {
		if j.end > r.steps {
			return false
		}
		r.vacate(j)
		if !j.gone {
			r.cache.SetCapacity(r.slot, r.room())
			r.cache.Insert(r.slot, j.r.all)
			r.s.lastToken(r, j)
		}
		return true
	})
}

// drop lets go of what nobody wants any more.
func (r *replica) drop() {
	r.waiting = slices.DeleteFunc(r.waiting, func(j *job) bool { return j.gone })
	r.batch = slices.DeleteFunc(r.batch, func(j *job) bool {
		if j.gone {
			r.vacate(j)
		}
		return j.gone
	})
}
