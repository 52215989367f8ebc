package decode

import (
	"errors"
	"slices"
)

// Prefill is what it takes to prefill a prompt.
type Prefill struct {
	Ms, PerTokenMs float64
	Engines        int // that prefill a prompt at a time, first come, first served; 0: there are always enough
}

// DefaultPrefill is what prefills take where nobody says another.
var DefaultPrefill = Prefill{Ms: 50, PerTokenMs: 0.05}

func (p Prefill) time(prompt int32) float64 { return p.Ms + p.PerTokenMs*float64(prompt) }

func (p Prefill) validate() error {
	if !(p.Ms >= 0 && p.Ms <= 1e6) || !(p.PerTokenMs >= 0 && p.PerTokenMs <= 1e3) || p.Engines < 0 || p.Engines > mostRanks {
		return errors.New("a prefill takes from 0 to 1000000 ms, and 0 to 1000 ms a token, on at most 100000 engines")
	}
	return nil
}

// prefillers are the engines that prefill.
type prefillers struct {
	Prefill
	free []float64 // when each has done what it was given, ms
}

func newPrefillers(l *Load) prefillers {
	p := prefillers{Prefill: DefaultPrefill}
	if l.Prefill != nil {
		p.Prefill = *l.Prefill
	}
	p.free = make([]float64, p.Engines)
	return p
}

// run gives a prompt to the engine that is done first, and returns when its prefill is finished.
func (p *prefillers) run(now float64, prompt int32) (ready float64) {
	if p.Engines == 0 {
		return now + p.time(prompt)
	}
	first := 0
	for i, at := range p.free {
		if at < p.free[first] {
			first = i
		}
	}
	p.free[first] = max(now, p.free[first]) + p.time(prompt)
	return p.free[first]
}

// idle counts the engines that could begin with a prompt now.
func (p *prefillers) idle(now float64) (n int) {
	for _, at := range p.free {
		if at <= now {
			n++
		}
	}
	return n
}

// next is when another engine is done.
func (p *prefillers) next(now float64) float64 {
	next := never
	for _, at := range p.free {
		if at > now {
			next = min(next, at)
		}
	}
	return next
}

// prefillComing prefills what arrives, where it is prefilled first and not all at once.
func (r *run) prefillComing() {
	for len(r.coming) > 0 && r.jobs[r.coming[0]].arrival <= r.Now {
		q := &r.jobs[r.coming[0]]
		q.entered = r.prefill.run(q.arrival, q.prompt)
		r.ready = r.insert(r.ready, r.coming[0])
		r.coming = r.coming[1:]
	}
}

// come lets a job into the pool. Where ranks are bound before the prefill, it waits outside until
// an engine could begin with it: bound earlier it would hold its slot without being prefilled.
func (r *run) come(at int) {
	if !r.load.AtArrival || r.prefill.Engines == 0 {
		r.enter(at)
		return
	}
	place, _ := slices.BinarySearch(r.line, at)
	r.line = slices.Insert(r.line, place, at)
}

// offer lets as many jobs into the pool as engines could begin with.
func (r *run) offer() {
	for r.offers() {
		at := r.line[0]
		r.line = r.line[1:]
		r.enter(at)
	}
}

func (r *run) offers() bool { return len(r.line) > 0 && r.waits < r.prefill.idle(r.Now) }
