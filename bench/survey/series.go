package survey

import (
	"cmp"
	"math"
	"slices"
	"time"

	"evenkeel/stats"
)

// Series is what the page of one address told over time. It keeps a bounded number of samples: where there are more, only those of every
// second round are kept, then of every fourth, and so on. All addresses keep the same rounds.
type Series struct {
	Address string
	Model   string
	SGLang  bool
	Role    string // where the page tells it
	Silent  int    // times that no page came
	Err     error

	last    Page
	samples []sample
	every   int // rounds of which one is kept

	output, prompt, computed float64 // tokens that came while it was watched
	told                     bool    // what was computed
	ran                      bool    // requests ran
	prompts, outputs         Histogram
}

// mostSamples is how many of an address are kept, an hour of them at first.
const mostSamples = 3600

// sample is the ranks of an address at a time.
type sample struct {
	round   int
	at      time.Time
	started float64
	ranks   []Rank // without histograms
}

// Add takes what a page told in a round, which has a number.
func (s *Series) Add(round int, at time.Time, p Page) {
	if s.every == 0 {
		s.Model, s.SGLang, s.Role, s.every = p.Model, p.SGLang, p.Role, 1
	} else {
		s.count(&p)
	}
	s.last = p
	s.ran = s.ran || slices.ContainsFunc(p.Ranks, func(r Rank) bool { return r.Running > 0 })
	if len(s.samples) == mostSamples {
		s.every *= 2
		s.samples = slices.DeleteFunc(s.samples, func(k sample) bool { return k.round%s.every != 0 })
	}
	if round%s.every != 0 {
		return
	}
	ranks := slices.Clone(p.Ranks)
	for i := range ranks {
		ranks[i].Prompts, ranks[i].Outputs = Histogram{}, Histogram{}
	}
	s.samples = append(s.samples, sample{round: round, at: at, started: p.Started, ranks: ranks})
}

// count adds what came since the last page, if the engine is the same.
func (s *Series) count(p *Page) {
	if p.Started != s.last.Started || len(p.Ranks) != len(s.last.Ranks) {
		return
	}
	for i := range p.Ranks {
		a, b := &s.last.Ranks[i], &p.Ranks[i]
		if !(b.Output >= a.Output) {
			return
		}
	}
	for i := range p.Ranks {
		a, b := &s.last.Ranks[i], &p.Ranks[i]
		s.output += b.Output - a.Output
		s.prompt += zeroIfUnknown(b.Prompt - a.Prompt)
		s.computed += zeroIfUnknown(b.Computed - a.Computed)
		s.told = s.told || !math.IsNaN(b.Computed)
		s.prompts.add(b.Prompts.since(a.Prompts))
		s.outputs.add(b.Outputs.since(a.Outputs))
	}
}

// kind is what the ranks of an address do.
type kind string

const (
	decodes  kind = "decode"
	prefills kind = "prefill"
	both     kind = "prefill and decode"
	idle     kind = "idle"
	untold   kind = "do not count tokens"
)

// does says what the ranks of an address did meanwhile. SGLang tells it. Of vLLM, who computes hardly any prompt decodes, and who gives one token
// for each request prefills.
func (s *Series) does() kind {
	switch {
	case s.Role == "prefill":
		return prefills
	case s.last.Uncounted != "" && s.ran:
		return untold
	case !(s.output > 0):
		return idle
	case s.Role == "decode":
		return decodes
	case s.Role == "" && s.told && s.computed < s.prompt/20:
		return decodes
	case s.outputs.total() > 0 && s.outputs.mean() < 1.5:
		return prefills
	}
	return both
}

// Group is ranks that are taken to step together.
type Group struct {
	Name   string
	Model  string
	Kind   kind
	SGLang bool
	Ranks  []string
	Lacks  string // the counter of tokens of answers
	Lost   int    // windows in which an engine was silent or began anew

	windows          []window
	prompts, outputs Histogram
	room             float64 // tokens of a rank, the least; NaN: not told
}

// window is the time between two samples.
type window struct {
	seconds float64
	ranks   []rankIn
	most    rankIn  // the most of each that a rank has, in the mean of the two ends
	output  float64 // tokens of answers
	stepMs  float64 // the mean time between two tokens of an answer; NaN: nothing was answered
}

// rankIn is a rank within a window.
type rankIn struct {
	running, waiting, coming, kv float64 // in the mean of its two ends
	computed                     float64 // tokens of prompts
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
		if len(s.last.Ranks) > 1 {
			k.alone = s.Address
		}
		if of[k] == nil {
			order = append(order, k)
		}
		of[k] = append(of[k], s)
	}
	for _, k := range order { // a rank that does nothing leaves its group as uneven as can be
		if k.kind != idle || k.alone != "" {
			continue
		}
		var others []key
		for _, o := range order {
			if o.model == k.model && o.alone == "" && o.kind != idle && o.kind != prefills {
				others = append(others, o)
			}
		}
		if len(others) == 1 {
			of[others[0]] = append(of[others[0]], of[k]...)
			delete(of, k)
		}
	}
	var out []*Group
	for _, k := range order {
		if of[k] == nil {
			continue
		}
		g := &Group{Model: k.model, Kind: k.kind, SGLang: of[k][0].SGLang, Lacks: of[k][0].last.Uncounted, Name: cmp.Or(k.alone, string(k.kind)), room: math.NaN()}
		for _, s := range of[k] {
			g.prompts.add(s.prompts)
			g.outputs.add(s.outputs)
			for i := range s.last.Ranks {
				name := s.Address
				if len(s.last.Ranks) > 1 {
					name += "/" + s.last.Ranks[i].Name
				}
				g.Ranks = append(g.Ranks, name)
				if r := s.last.Ranks[i].Room; !math.IsNaN(r) && !(r >= g.room) {
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
	defer g.dropLong()
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
			if last != nil {
				g.Lost++
			}
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

// dropLong leaves windows out in which an engine was silent for a while.
func (g *Group) dropLong() {
	if len(g.windows) == 0 {
		return
	}
	lengths := make([]float64, len(g.windows))
	for i := range g.windows {
		lengths[i] = g.windows[i].seconds
	}
	slices.Sort(lengths)
	most := 3 * stats.Median(lengths)
	was := len(g.windows)
	g.windows = slices.DeleteFunc(g.windows, func(w window) bool { return w.seconds > most })
	g.Lost += was - len(g.windows)
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
	var ends [2]rankIn
	for i := range a {
		if a[i].started != b[i].started || len(a[i].ranks) != len(b[i].ranks) {
			return w, false
		}
		for k := range a[i].ranks {
			x, y := &a[i].ranks[k], &b[i].ranks[k]
			if !(y.Output >= x.Output) || y.Gaps < x.Gaps || math.IsNaN(x.Running+y.Running) {
				return w, false
			}
			r := rankIn{running: (x.Running + y.Running) / 2, waiting: zeroIfUnknown(x.Waiting+y.Waiting) / 2, coming: (x.Coming + y.Coming) / 2, kv: (x.KV + y.KV) / 2, computed: computedIn(x, y, direct)}
			w.ranks = append(w.ranks, r)
			for e, at := range []*Rank{x, y} {
				ends[e].running, ends[e].kv = max(ends[e].running, at.Running), max(ends[e].kv, at.KV)
			}
			w.output += y.Output - x.Output
			running += r.running
			gaps, gapsMs = gaps+zeroIfUnknown(y.Gaps-x.Gaps), gapsMs+zeroIfUnknown(y.GapsMs-x.GapsMs)
		}
	}
	w.most.running, w.most.kv = (ends[0].running+ends[1].running)/2, (ends[0].kv+ends[1].kv)/2
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
