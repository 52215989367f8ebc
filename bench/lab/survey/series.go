package survey

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/internal/stats"
)

// Series is what the page of one address told over time. It keeps a bounded number of samples:
// where there are more, only those of every second round are kept, then of every fourth, and so on.
// All addresses keep the same rounds.
type Series struct {
	Address string
	Model   string
	SGLang  bool
	Role    string // where the page tells it
	Silent  int    // times that no page came, or one that cannot be right
	Err     error  // the last reason

	context int // tokens that a request may have; 0: not told
	last    Page
	at      time.Time // of it
	doubted bool      // a page came after it that could not
	life    int       // of the engine: another one for each time that it began anew
	samples []sample
	every   int // rounds of which one is kept

	output, prompt, computed float64 // tokens that came while it was watched
	told                     bool    // what was computed
	ran                      bool    // requests ran
	prompts, outputs         Histogram
	barrier                  Barrier // of all ranks
}

// mostSamples is how many of an address are kept, an hour of them at first.
const mostSamples = 3600

// sample is the ranks of an address at a time.
type sample struct {
	round int
	at    time.Time
	life  int
	ranks []Rank // without histograms
}

// Add takes what a page told in a round, which has a number. A page that cannot come after the one
// before is a PageError. Which of the two is wrong nobody knows, so that counting begins anew with
// the next.
func (s *Series) Add(round int, at time.Time, p Page) error {
	switch {
	case s.every == 0:
		s.Model, s.SGLang, s.Role, s.every = p.Model, p.SGLang, p.Role, 1
	case s.doubted:
		s.life++
	default:
		same, err := p.follows(&s.last, at.Sub(s.at))
		if err != nil {
			s.doubted = true
			return err
		}
		if same {
			s.count(&p)
		} else {
			s.life++
		}
	}
	s.at, s.doubted = at, false
	s.last = p
	s.ran = s.ran || slices.ContainsFunc(p.Ranks, func(r Rank) bool { return r.Running > 0 })
	if len(s.samples) == mostSamples {
		s.every *= 2
		s.samples = slices.DeleteFunc(s.samples, func(k sample) bool { return k.round%s.every != 0 })
	}
	if round%s.every != 0 {
		return nil
	}
	ranks := slices.Clone(p.Ranks)
	for i := range ranks {
		ranks[i].Prompts, ranks[i].Outputs = Histogram{}, Histogram{}
	}
	s.samples = append(s.samples, sample{round: round, at: at, life: s.life, ranks: ranks})
	return nil
}

// Between two pages of an engine, no rank counts more tokens than these, and no gap between two
// tokens is shorter or longer in the mean.
const (
	fastest     = 1e9  // tokens a second, those of cached prompts among them
	late        = 10.0 // seconds that a page may have come later than it was asked for
	shortestGap = 1e-3 // ms
	longestGap  = 3600 * 1e3
)

// follows says whether a page is of the same life of an engine as one before, so that what it
// counts goes on, and why it cannot be.
func (p *Page) follows(last *Page, after time.Duration) (same bool, odd error) {
	if p.Started != last.Started || len(p.Ranks) != len(last.Ranks) {
		return false, nil
	}
	tokens, lengths := output.names[0], 0
	if p.SGLang {
		tokens, lengths = decoded.names[0], 1
	}
	for i := range p.Ranks {
		a, b := &last.Ranks[i], &p.Ranks[i]
		for _, c := range []struct {
			name string
			a, b float64
			most float64
		}{
			{tokens, a.Output, b.Output, fastest},
			{prompt.names[0], a.Prompt, b.Prompt, fastest},
			{computed.names[0], a.Computed, b.Computed, fastest},
			{pulled.names[0], a.Pulled, b.Pulled, fastest},
			{hits.names[0], a.Hits, b.Hits, fastest},
			{gaps.names[0], a.Gaps, b.Gaps, fastest},
			{gapsS.names[0], a.GapsMs, b.GapsMs, math.Inf(1)},
			{syncs.names[0], a.Steps, b.Steps, fastest},
			{waitedS.names[0], a.WaitedMs, b.WaitedMs, math.Inf(1)},
			{pairs.names[0], a.Pairs, b.Pairs, mostPairs},
			{fewerP.names[0], a.FewerPairs, b.FewerPairs, mostPairs},
		} {
			switch more := c.b - c.a; {
			case math.IsNaN(c.a) != math.IsNaN(c.b): // what came in between cannot be judged
				return false, nil
			case more < 0 && p.Started == 0: // nothing else tells that it began anew
				return false, nil
			case more < 0:
				return false, &engine.PageError{Name: c.name,
					Says: fmt.Sprintf("%.0f, although it said %.0f before and the engine did not start anew", c.b, c.a)}
			case more > c.most*(after.Seconds()+late):
				return false, &engine.PageError{Name: c.name, Says: fmt.Sprintf("%.0f more within %v", more, after.Round(time.Millisecond))}
			}
		}
		n, ms := b.Gaps-a.Gaps, b.GapsMs-a.GapsMs
		if gap := ms / max(n, 1); n > 0 && gap < shortestGap || gap > longestGap {
			return false, &engine.PageError{Name: gapsS.names[0], Says: fmt.Sprintf("that a token came every %.3g ms", gap)}
		}
		if n := b.Steps - a.Steps; (b.WaitedMs-a.WaitedMs)/max(n, 1) > longestGap {
			more := fmt.Sprintf("%.0f s more for %.0f steps", (b.WaitedMs-a.WaitedMs)/1000, n)
			return false, &engine.PageError{Name: waitedS.names[0], Says: more}
		}
		for _, h := range []struct {
			name string
			Histogram
		}{{promptLengths[lengths], b.Prompts.since(a.Prompts)}, {outputLengths[lengths], b.Outputs.since(a.Outputs)}} {
			if err := h.odd(h.name); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// count adds what came since the last page.
func (s *Series) count(p *Page) {
	for i := range p.Ranks {
		if !(p.Ranks[i].Output >= s.last.Ranks[i].Output) { // not told
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
		s.barrier.add(b.Barrier.since(a.Barrier))
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

// does says what the ranks of an address did meanwhile. SGLang tells it. Of vLLM, who computes
// hardly any prompt decodes, and who gives one token for each request prefills.
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
	barrier          Barrier
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
	full                         float64 // the share of its KV room that is in use; NaN: not told
	computed                     float64 // tokens of prompts
}

// groups puts the addresses together whose ranks step together: those of one page always do, and
// addresses with one rank each if they have a model and do the same.
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
		g := &Group{Model: k.model, Kind: k.kind, SGLang: of[k][0].SGLang, Lacks: of[k][0].last.Uncounted, Name: cmp.Or(k.alone, string(k.kind)),
			room: math.NaN()}
		for _, s := range of[k] {
			g.prompts.add(s.prompts)
			g.outputs.add(s.outputs)
			g.barrier.add(s.barrier)
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

// computedIn is how many tokens of prompts a rank computed between two samples. SGLang counts them
// as it computes them. vLLM counts a prompt when all of it is computed, so that a long one is told
// late; but its KV grows with each chunk, by what is computed and answered, and shrinks by what has
// ended.
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
		if a[i].life != b[i].life || len(a[i].ranks) != len(b[i].ranks) {
			return w, false
		}
		for k := range a[i].ranks {
			x, y := &a[i].ranks[k], &b[i].ranks[k]
			if !(y.Output >= x.Output) || y.Gaps < x.Gaps || math.IsNaN(x.Running+y.Running) {
				return w, false
			}
			r := rankIn{running: (x.Running + y.Running) / 2, waiting: zeroIfUnknown(x.Waiting+y.Waiting) / 2, coming: (x.Coming + y.Coming) / 2,
				kv: (x.KV + y.KV) / 2, full: (x.KV/x.Room + y.KV/y.Room) / 2, computed: computedIn(x, y, direct)}
			w.ranks = append(w.ranks, r)
			for e, at := range []*Rank{x, y} {
				ends[e].running, ends[e].kv = max(ends[e].running, at.Running), max(ends[e].kv, at.KV)
			}
			w.output += y.Output - x.Output
			running += r.running
			if n, ms := y.Gaps-x.Gaps, y.GapsMs-x.GapsMs; !math.IsNaN(n + ms) { // a sum says nothing without its count
				gaps, gapsMs = gaps+n, gapsMs+ms
			}
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
