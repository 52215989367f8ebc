package survey

import (
	"math"

	"evenkeel/dispatcher/step"
)

// Window is a stretch of time in which a group stepped, for who compares its steps with a law.
type Window struct {
	StepMs    float64     // in the mean
	Steps     float64     // about
	Ranks     []step.Rank // in the mean; prompts are those of a step that has any
	Prompting float64     // the share of the steps in which a rank computes a prompt, about
}

// Windows are those of all groups that decode. A chunk of a prompt has so many tokens at most.
func Windows(all []*Series, chunk float64) (out []Window) {
	for _, g := range groups(all) {
		if g.Kind != both && g.Kind != decodes {
			continue
		}
		out = append(out, g.seen(chunk)...)
	}
	return out
}

// seen are those of a group.
func (g *Group) seen(chunk float64) (out []Window) {
	for i := range g.windows {
		if w, ok := g.windows[i].seen(chunk); ok {
			out = append(out, w)
		}
	}
	return out
}

// Unread says whether the page of each address was hardly ever read, so that nothing can be known
// of it, and why not.
func Unread(all []*Series) (unread bool, why error) {
	for _, s := range all {
		if len(s.samples) > 1 || s.Err == nil {
			return false, nil
		}
		why = s.Err
	}
	return why != nil, why
}

// Counted is what the engines counted of their barrier while they were watched.
func Counted(all []*Series) (b Barrier) {
	for _, s := range all {
		b.add(s.barrier)
	}
	return b
}

// seen is not ok where nothing was answered, or where the page does not tell what the ranks hold.
func (w *window) seen(chunk float64) (s Window, ok bool) {
	if !(w.stepMs > 0) || math.IsInf(w.stepMs, 0) {
		return s, false
	}
	s.StepMs, s.Steps = w.stepMs, 1000*w.seconds/w.stepMs*busy(w)
	none := 1.0
	for i := range w.ranks {
		none *= 1 - min(1, w.ranks[i].computed/(s.Steps*chunk))
	}
	s.Prompting = 1 - none
	for i := range w.ranks {
		r := &w.ranks[i]
		if math.IsNaN(r.kv) {
			return s, false
		}
		x := step.Rank{Requests: r.running, KV: r.kv}
		if s.Prompting > 0 {
			x.Prompt = r.computed / (s.Steps * s.Prompting)
		}
		s.Ranks = append(s.Ranks, x)
	}
	return s, s.Steps > 0
}
