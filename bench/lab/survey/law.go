package survey

import (
	"math"

	"evenkeel/dispatcher/step"
	"evenkeel/internal/stats"
)

// fitted is what the windows of ranks that decode tell of their law.
type fitted struct {
	step.Model
	R2      float64
	Windows int
	ok      bool
}

// point is a window as the law sees it.
type point struct {
	ms, steps                       float64
	kv, running                     float64 // of the fullest rank
	meanKV, meanRunning, meanPrompt float64 // of all ranks; tokens of prompts in a step
	prompting, computing            float64 // in what share of the steps a rank computes a prompt, and how many do in a step, about
}

// points are the windows of a group in which something was answered, each of so many seconds at
// least. A chunk of a prompt has so many tokens at most.
func (g *Group) points(seconds, chunk float64) (all []point) {
	var p point
	var lasted, weight float64
	add := func(w *window) {
		n := 1000 * w.seconds / w.stepMs
		n *= busy(w)
		meanKV, meanRunning, computed, none := 0.0, 0.0, 0.0, 1.0
		for i := range w.ranks {
			r := &w.ranks[i]
			meanKV += r.kv / float64(len(w.ranks))
			meanRunning += r.running / float64(len(w.ranks))
			computed += r.computed
			share := min(1, r.computed/(n*chunk))
			none *= 1 - share // ranks compute in steps of their own
			p.computing += n * share
		}
		p.prompting += n * (1 - none)
		p.ms += n * w.stepMs
		p.kv, p.running = p.kv+n*w.most.kv, p.running+n*w.most.running
		p.meanKV, p.meanRunning = p.meanKV+n*meanKV, p.meanRunning+n*meanRunning
		p.meanPrompt += computed / float64(len(w.ranks))
		weight, lasted = weight+n, lasted+w.seconds
	}
	for i := range g.windows {
		w := &g.windows[i]
		if !(w.stepMs > 0) || math.IsInf(w.stepMs, 0) {
			continue
		}
		if add(w); lasted >= seconds && weight > 0 {
			p.steps = weight
			for _, x := range []*float64{&p.ms, &p.kv, &p.running, &p.meanKV, &p.meanRunning, &p.meanPrompt, &p.prompting, &p.computing} {
				*x /= weight
			}
			all, p, lasted, weight = append(all, p), point{}, 0, 0
		}
	}
	return all
}

// busy is in what share of a window the group stepped, about: what was answered, against what those
// that ran would have got.
func busy(w *window) float64 {
	running := 0.0
	for i := range w.ranks {
		running += w.ranks[i].running
	}
	if running == 0 {
		return 1
	}
	return min(1, w.output*w.stepMs/(1000*w.seconds*running))
}

// fit finds the law of some windows. A term that is less than so many standard errors above nothing
// is left out: it is in c0 then.
func fit(all []point, sure float64) (f fitted) {
	type column struct {
		value func(p *point) float64
		into  func(v float64)
	}
	columns := []column{
		{func(*point) float64 { return 1 }, func(v float64) { f.C0Ms = v }},
		{func(p *point) float64 { return p.kv }, func(v float64) { f.C1Ms = v }},
		{func(p *point) float64 { return p.running }, func(v float64) { f.RequestMs = v }},
	}
	y := make([]float64, len(all))
	for i := range all {
		y[i] = all[i].ms
	}
	for len(columns) > 0 {
		rows := make([][]float64, len(all))
		for i := range all {
			for _, c := range columns {
				rows[i] = append(rows[i], c.value(&all[i]))
			}
		}
		r, ok := stats.Regress(rows, y)
		worst, at := sure, -1
		for i := 1; i < len(columns); i++ {
			t := 0.0
			if ok {
				t = r.Of[i] / max(r.Error[i], 1e-12)
			}
			if t < worst || !ok && i == len(columns)-1 {
				worst, at = t, i
			}
		}
		if at > 0 {
			columns = append(columns[:at:at], columns[at+1:]...)
			continue
		}
		if !ok || !(r.Of[0] > 0) {
			return f
		}
		for i, c := range columns {
			c.into(r.Of[i])
		}
		f.R2, f.Windows, f.ok = r.R2, r.N, true
		return f
	}
	return f
}

// surely is how many standard errors a term of the law that is printed must be above nothing.
const surely = 2.5
