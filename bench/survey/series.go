package survey

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Series is what the page of one address told over time. It keeps a bounded number of samples: where there are more, every second one is
// dropped, and from then on samples are twice as far apart.
type Series struct {
	Address     string
	Model       string
	SGLang      bool
	Silent      int // times that no page came
	Err         error
	first, last Page
	samples     []sample
	every, skip int
}

// mostSamples is how many of an address are kept, an hour of them at first.
const mostSamples = 3600

// sample is the ranks of an address at a time.
type sample struct {
	at      time.Time
	started float64
	ranks   []Rank // without histograms
}

// Add takes what a page told at a time. Pages of all addresses that are told at the same time belong together.
func (s *Series) Add(at time.Time, p Page) {
	if len(s.samples) == 0 {
		s.first, s.Model, s.SGLang, s.every = p, p.Model, p.SGLang, 1
	}
	s.last = p
	if s.skip++; s.skip < s.every {
		return
	}
	s.skip = 0
	if len(s.samples) == mostSamples {
		for i := range mostSamples / 2 {
			s.samples[i] = s.samples[2*i+1]
		}
		s.samples, s.every = s.samples[:mostSamples/2], 2*s.every
	}
	ranks := slices.Clone(p.Ranks)
	for i := range ranks {
		ranks[i].Prompts, ranks[i].Outputs = Histogram{}, Histogram{}
	}
	s.samples = append(s.samples, sample{at: at, started: p.Started, ranks: ranks})
}

// kind is what the ranks of an address do.
type kind string

const (
	decodes  kind = "decode"
	prefills kind = "prefill"
	both     kind = "prefill and decode"
	idle     kind = "idle"
)

// does says what the ranks of an address did meanwhile: engines do not tell their role, but whose prompts come from elsewhere decodes,
// and who gives one token for each request prefills.
func (s *Series) does() kind {
	var output, prompt, computed, pulled float64
	prompts, outputs := s.lengths()
	for i := range min(len(s.first.Ranks), len(s.last.Ranks)) {
		a, b := &s.first.Ranks[i], &s.last.Ranks[i]
		output, prompt = output+b.Output-a.Output, prompt+b.Prompt-a.Prompt
		computed, pulled = computed+zeroIfUnknown(b.Computed-a.Computed), pulled+zeroIfUnknown(b.Pulled-a.Pulled)
	}
	switch {
	case !(output > 0):
		return idle
	case pulled > prompt/2, prompt == 0 && prompts.total() == 0, s.SGLang && computed < prompt/20 && prompts.total() > 0:
		return decodes
	case outputs.total() > 0 && outputs.mean() < 1.5:
		return prefills
	}
	return both
}

// lengths are those of the requests that ended meanwhile.
func (s *Series) lengths() (prompts, outputs Histogram) {
	for i := range min(len(s.first.Ranks), len(s.last.Ranks)) {
		prompts.add(s.last.Ranks[i].Prompts.since(s.first.Ranks[i].Prompts))
		outputs.add(s.last.Ranks[i].Outputs.since(s.first.Ranks[i].Outputs))
	}
	return prompts, outputs
}

// Group is ranks that are taken to step together.
type Group struct {
	Name   string
	Model  string
	Kind   kind
	SGLang bool
	Ranks  []string
	Lost   int // windows in which an engine was silent or began anew

	windows          []window
	prompts, outputs Histogram
	room             float64 // tokens of a rank, the least; NaN: not told
}

// window is the time between two samples.
type window struct {
	seconds float64
	ranks   []rankIn
	output  float64 // tokens of answers
	stepMs  float64 // the mean time between two tokens of an answer; NaN: nothing was answered
}

// rankIn is a rank within a window.
type rankIn struct {
	running, waiting, kv float64 // in the mean of its two ends
	computed             float64 // tokens of prompts
}

// groups puts the addresses together whose ranks step together: those of one page always do, and addresses with one rank each if they
// have a model and do the same.
func groups(all []*Series) []*Group {
	type key struct {
		model string
		kind  kind
		alone string
	}
	of := map[key][]*Series{}
	var order []key
	for _, s := range all {
		if len(s.samples) < 2 {
			continue
		}
		k := key{model: s.Model, kind: s.does()}
		if len(s.first.Ranks) > 1 {
			k.alone = s.Address
		}
		if of[k] == nil {
			order = append(order, k)
		}
		of[k] = append(of[k], s)
	}
	var out []*Group
	for _, k := range order {
		g := &Group{Model: k.model, Kind: k.kind, SGLang: of[k][0].SGLang, Name: cmp.Or(k.alone, string(k.kind)), room: math.NaN()}
		for _, s := range of[k] {
			p, o := s.lengths()
			g.prompts.add(p)
			g.outputs.add(o)
			for i := range s.first.Ranks {
				name := s.Address
				if len(s.first.Ranks) > 1 {
					name += "/" + s.first.Ranks[i].Name
				}
				g.Ranks = append(g.Ranks, name)
				if r := s.first.Ranks[i].Room; !math.IsNaN(r) && !(r >= g.room) {
					g.room = r
				}
			}
		}
		g.join(of[k])
		out = append(out, g)
	}
	return out
}

// join makes windows of the samples of addresses that were taken at the same times.
func (g *Group) join(all []*Series) {
	at := make([]int, len(all))
	var last []sample
	for {
		latest := time.Time{}
		for i, s := range all {
			if at[i] == len(s.samples) {
				return
			}
			if t := s.samples[at[i]].at; t.After(latest) {
				latest = t
			}
		}
		now := make([]sample, len(all))
		together := true
		for i, s := range all {
			if s.samples[at[i]].at.Before(latest) {
				at[i]++
				together = false
				continue
			}
			now[i] = s.samples[at[i]]
		}
		if !together {
			last = nil
			continue
		}
		for i := range at {
			at[i]++
		}
		if last != nil {
			if w, ok := between(last, now, g.SGLang); ok {
				g.windows = append(g.windows, w)
			} else {
				g.Lost++
			}
		}
		last = now
	}
}

// computedIn is how many tokens of prompts a rank computed between two samples. SGLang counts them as it computes them. vLLM counts a prompt
// when all of it is computed, so that a long one is told late; but its KV grows with each chunk, by what is computed and answered, and
// shrinks by what has ended.
func computedIn(x, y *Rank, direct bool) float64 {
	n := (y.KV - x.KV) - (y.Output - x.Output) + (y.Ended - x.Ended) - zeroIfUnknown(y.Hits-x.Hits) - zeroIfUnknown(y.Pulled-x.Pulled)
	if direct || math.IsNaN(n) {
		n = zeroIfUnknown(y.Computed - x.Computed)
	}
	return max(0, n)
}

// between is the window between two times; not ok: an engine began anew, or other ranks are there.
func between(a, b []sample, direct bool) (w window, ok bool) {
	w.seconds = b[0].at.Sub(a[0].at).Seconds()
	var gaps, gapsMs, running float64
	for i := range a {
		if a[i].started != b[i].started || len(a[i].ranks) != len(b[i].ranks) {
			return w, false
		}
		for k := range a[i].ranks {
			x, y := &a[i].ranks[k], &b[i].ranks[k]
			if y.Output < x.Output || y.Gaps < x.Gaps {
				return w, false
			}
			r := rankIn{running: (x.Running + y.Running) / 2, waiting: (x.Waiting + y.Waiting) / 2, kv: (x.KV + y.KV) / 2, computed: computedIn(x, y, direct)}
			w.ranks = append(w.ranks, r)
			w.output += y.Output - x.Output
			running += r.running
			gaps, gapsMs = gaps+zeroIfUnknown(y.Gaps-x.Gaps), gapsMs+zeroIfUnknown(y.GapsMs-x.GapsMs)
		}
	}
	switch {
	case gaps > 0:
		w.stepMs = gapsMs / gaps
	case w.output > 0 && running > 0:
		w.stepMs = 1000 * w.seconds * running / w.output
	default:
		w.stepMs = math.NaN()
	}
	return w, true
}
