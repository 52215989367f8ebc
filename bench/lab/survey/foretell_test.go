package survey

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/sim/mixed"
	"evenkeel/dispatcher/virtual"
	"evenkeel/internal/race"
)

// engines counts as engines do, for pages of a virtual time.
type engines struct {
	model            string
	ranks            []Rank
	last             map[int32]float64
	prompts, outputs []int32
}

func newEngines(ranks int, room float64) *engines {
	e := &engines{model: "m", last: map[int32]float64{}}
	for i := range ranks {
		e.ranks = append(e.ranks, Rank{Name: fmt.Sprint(i), Room: room})
	}
	return e
}

// bounds are those of vLLM's histograms of lengths.
var bounds = func() (all []float64) {
	for _, size := range []float64{1, 10, 100, 1000, 10_000, 100_000} {
		all = append(all, size, 2*size, 5*size)
	}
	return append(all, math.Inf(1))
}()

func histogram(values []int32) (h Histogram) {
	h.Bounds, h.Counts = bounds, make([]float64, len(bounds))
	for _, v := range values {
		h.Sum += float64(v)
		for i, b := range bounds {
			if float64(v) <= b {
				h.Counts[i]++
			}
		}
	}
	return h
}

func (e *engines) page() Page {
	p := Page{Model: e.model, Started: 1, Ranks: append([]Rank{}, e.ranks...)}
	p.Ranks[0].Prompts, p.Ranks[0].Outputs = histogram(e.prompts), histogram(e.outputs)
	return p
}

// watchMixed serves a load under a contender, and keeps what a survey of some time sees.
func watchMixed(t *testing.T, l *mixed.Load, p mixed.Contender, most time.Duration) (*Series, mixed.Outcome) {
	t.Helper()
	r, err := mixed.New(l, p)
	require.NoError(t, err)
	room := 1e9
	if l.Room > 0 {
		room = float64(l.Room)
	}
	e := newEngines(l.Ranks, room)
	if l.Of != "" {
		e.model, _, _ = strings.Cut(l.Of, ",")
	}
	noise := rand.New(rand.NewPCG(uint64(l.Number), 5))
	s := &Series{Address: "virtual"}
	token, finished := r.MixedEngines.Token, r.MixedEngines.Finished
	r.MixedEngines.Token = func(g *virtual.MixedGroup, rank int, w *virtual.MixedRequest) {
		k := &e.ranks[rank]
		k.Output++
		if w.Gen == 1 {
			k.Prompt, k.Computed = k.Prompt+float64(w.Prompt), k.Computed+float64(w.Prompt)
		} else {
			k.Gaps, k.GapsMs = k.Gaps+1, k.GapsMs+r.Now-e.last[w.Job]
		}
		e.last[w.Job] = r.Now
		token(g, rank, w)
	}
	r.MixedEngines.Finished = func(g *virtual.MixedGroup, rank int, w *virtual.MixedRequest) {
		e.prompts, e.outputs = append(e.prompts, w.Prompt), append(e.outputs, w.Gen)
		e.ranks[rank].Ended += float64(w.Prompt + w.Gen)
		finished(g, rank, w)
	}
	r.Groups[0].VaryStepMs = func(ms float64) float64 { return ms * (1 + 0.03*(2*noise.Float64()-1)) }
	from, next, round := 5*l.Stays, 5*l.Stays, 0
	r.Before = func() {
		for ; r.Now >= next && next <= from+float64(most.Milliseconds()); next += 1000 {
			for i := range e.ranks {
				g, k := &r.Groups[0].Ranks[i], &e.ranks[i]
				k.Running, k.Waiting, k.KV = float64(len(g.Running)), float64(len(g.Waiting)), 0
				for w := range g.Running {
					k.KV += float64(g.Running[w].Done()) + float64(g.Running[w].Gen)
				}
			}
			s.Add(round, r.Instant(next), e.page())
			round++
		}
	}
	o, err := r.Do(t.Context())
	require.NoError(t, err)
	return s, o
}

// On ranks that prefill a survey sees in which share of the steps prompts are computed, and on how
// many ranks at once. What it says could be gained at most, rounds do not exceed.
func TestASurveySeesHowPromptsMeet(t *testing.T) {
	race.Alone(t)
	bases := []mixed.Contender{{Name: "rr", Spec: "rr"}, {Name: "least tokens", Route: mixed.LeastTokens}}
	served, told := 0, 0
	for number := 0; served < 12; number++ {
		l := mixed.DrawDense(seedOfMixed, number)
		if l.Chats > 0 || l.Rho > 0 || l.Ranks*l.Slots > 600 || l.Stays > 60_000 {
			continue
		}
		served++
		base := bases[served%2]
		s, before := watchMixed(t, l, base, 15*time.Minute)
		all := Judge(t.Context(), []*Series{s}, Given{Budget: int(l.Budget), Slots: l.Slots}, func(int, int) {})
		f := all[0]
		require.Equal(t, both, f.Kind)
		after, err := mixed.Serve(t.Context(), l, mixed.Contender{Name: "rounds", Spec: "evenkeel"})
		require.NoError(t, err)
		gain := after.Tokens/before.Tokens - 1
		t.Logf("load %s, %s: %.1f %% at most (%.1f to %.1f), really %.1f %%; prompts in %.2f of the steps, really %.2f; on %.2f, really %.2f; %v",
			l, base.Name,
			100*f.Most.Middle, 100*f.Most.Low, 100*f.Most.High, 100*gain, f.Prefilling.Share, before.Prefill, f.Prefilling.Ranks,
			float64(l.Ranks)*(1-before.Empty), f.Why)
		require.InDelta(t, before.Prefill, f.Prefilling.Share, 0.25)
		require.InEpsilon(t, float64(l.Ranks)*(1-before.Empty), f.Prefilling.Ranks, 0.3)
		if f.Why != nil {
			continue
		}
		told++
		require.LessOrEqual(t, gain, f.Most.High+0.02)
	}
	require.Positive(t, told)
}

// Under round robin and jsq-kv, at 2 to 32 ranks whose law is not told, a survey foretells what
// levelling is worth. evenkeel knows the law, which it learns in some minutes: some runs are
// shorter.
func TestASurveyForetellsWhatLevellingIsWorth(t *testing.T) {
	race.Alone(t)
	score := verdicts{t: t}
	for number := range *cases {
		l := drawDecode(uint64(number))
		base := []string{"rr", "jsq-kv"}[number%2]
		result, err := (&decode.Plan{
			Fleet: l.fleet, Load: l.load, Policies: []string{base, "evenkeel"}, Seeds: 1, Steps: true, TellLaw: true,
			Source: decode.Source{Drawn: l.requests},
		}).Run(t.Context())
		require.NoError(t, err)
		s := watchSteps(&result.Runs[0], l, number)
		found := Judge(t.Context(), []*Series{s}, Given{Slots: l.slots}, func(int, int) {})
		require.Len(t, found, 1)
		require.Equal(t, decodes, found[0].Kind)
		before, after := result.Runs[0].Metrics, result.Runs[1].Metrics
		gain := after[report.TokensPerS].Mean/before[report.TokensPerS].Mean - 1
		if l.load.Rho > 0 {
			gain = before[report.StepMean].Mean/after[report.StepMean].Mean - 1
		}
		score.add(fmt.Sprintf("load %d: %s, %s", number, l.text, base), found[0], levelled, gain)
	}
	score.judge()
}

// Where SGLang serves, ranks are chosen before the prefill, so that a survey does not promise what
// choosing them after it would gain.
func TestASurveyOfSGLangCountsTheEmptySlots(t *testing.T) {
	race.Alone(t)
	tried := 0
	for number := uint64(0); tried < 2; number++ {
		l := drawDecode(number)
		if l.load.Rho > 0 {
			continue
		}
		tried++
		prefill := 40 * l.fleet.Groups[0].C0Ms
		l.load.AtArrival, l.load.Prefill = true, &decode.Prefill{Ms: prefill}
		result, err := (&decode.Plan{
			Fleet: l.fleet, Load: l.load, Policies: []string{"jsq-kv", "evenkeel"}, Seeds: 1, Steps: true, TellLaw: true,
			Source: decode.Source{Drawn: l.requests},
		}).Run(t.Context())
		require.NoError(t, err)
		s := watchSteps(&result.Runs[0], l, int(number))
		late := Judge(t.Context(), []*Series{s}, Given{Slots: l.slots}, func(int, int) {})[0]
		s.SGLang, s.Role = true, "decode"
		ended := s.outputs.total() / s.samples[len(s.samples)-1].at.Sub(s.samples[0].at).Seconds()
		for i := range s.samples {
			s.samples[i].ranks[0].Coming = ended * prefill / 1000
		}
		early := Judge(t.Context(), []*Series{s}, Given{Slots: l.slots}, func(int, int) {})[0]
		require.NoError(t, late.Why)
		require.NoError(t, early.Why)
		require.InEpsilon(t, prefill, early.ComingMs, 0.05)
		require.Contains(t, strings.Join(early.Assumed, "\n"), "because SGLang needs the rank before it")
		require.Contains(t, strings.Join(late.Assumed, "\n"), "evenkeel chooses ranks after the prefill")
		before, after := result.Runs[0].Metrics, result.Runs[1].Metrics
		gain := after[report.TokensPerS].Mean/before[report.TokensPerS].Mean - 1
		got, was := early.Changes[0].Gain, late.Changes[0].Gain
		t.Logf("load %d: %s: %.3f, late %.3f, really %.3f", number, l.text, got, was, gain)
		require.Less(t, got.Middle, was.Middle)
		require.InDelta(t, gain, got.Middle, 0.05)
	}
}

type decodeLoad struct {
	fleet    decode.Fleet
	load     decode.Load
	slots    int
	room     float64
	requests *decode.Drawn
	text     string
}

func drawDecode(number uint64) *decodeLoad {
	r := rand.New(rand.NewPCG(*seed, number))
	texts := draw.NewTexts(r)
	log := func(from, to float64) float64 { return from * math.Pow(to/from, r.Float64()) }
	ranks := int(math.Round(log(2, 32)))
	l := &decodeLoad{slots: int(math.Round(log(8, 32)))}
	c0, c1, cr := log(10, 60), log(2e-5, 3e-4), log(0.05, 0.4)
	var deployment *laws.Entry // half of the groups step as one of the table, the others by wider ranges
	of := "a drawn law"
	if all := deployments(); number%4 == 0 || number%4 == 3 {
		deployment = &all[r.IntN(len(all))]
		ranks = deployment.Ranks
	}
	n := min(60*ranks*l.slots, 15_000)
	all := make([]trace.Request, n+1000)
	longest, at := 0, time.Duration(0)
	for i := range all {
		all[i] = texts.Next(r, float64(i)/float64(len(all)))
		longest = max(longest, all[i].Prompt+all[i].Output)
		at += time.Duration(float64(time.Second) * r.ExpFloat64())
		all[i].At = at
	}
	l.room = max(1.06*float64(longest), 2*float64(l.slots)*trace.Resident(all))
	l.fleet = decode.Uniform(ranks, l.slots, int64(l.room))
	g := &l.fleet.Groups[0]
	g.C0Ms, g.C1Ms = c0, c1
	if number%4 >= 2 {
		g.RequestMs = cr
	}
	if deployment != nil {
		law := deployment.Law()
		level := law.Level()
		g.C0Ms, g.C1Ms, g.RequestMs, g.Law = level.C0Ms, level.C1Ms, level.RequestMs, &law
		of = deployment.Name()
	}
	if r.IntN(2) == 0 {
		l.load.Rho = 0.4 + 0.3*r.Float64() // so that nobody waits in an engine: steps do not tell of those
	} else {
		l.load.Pool = 1 + int(float64(ranks*l.slots)*r.Float64()/2)
	}
	l.requests = &decode.Drawn{Before: all[:1000], Requests: all[1000:], Warm: n / 8}
	l.text = fmt.Sprintf("%s, %d ranks of %d slots, c0 %.0f, c1 %.5f, cr %.2f, rho %.2f, %s", of, ranks, l.slots, g.C0Ms, g.C1Ms, g.RequestMs,
		l.load.Rho, texts.String())
	return l
}

// deployments are those of as many ranks as such groups have.
func deployments() []laws.Entry {
	return slices.DeleteFunc(laws.All(), func(e laws.Entry) bool { return !e.Graphs || e.Ranks > 32 })
}

// watchSteps is what a survey sees of the steps that are measured: their lengths with some noise.
func watchSteps(run *report.Run, l *decodeLoad, number int) *Series {
	steps := slices.DeleteFunc(run.Steps, func(s report.Step) bool { return s.Start < run.Window.From || s.Start > run.Window.To })
	noise := rand.New(rand.NewPCG(uint64(number), 5))
	e := newEngines(len(l.fleet.Groups[0].Ranks), l.room)
	s := &Series{Address: "virtual"}
	next := steps[0].Start
	ended, answered := l.requests.Requests[l.requests.Warm:], 0
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, st := range steps {
		ms := 1000 * st.Length.Seconds() * (1 + 0.03*(2*noise.Float64()-1))
		for k := range e.ranks {
			r := &e.ranks[k]
			n := float64(st.Running[k])
			r.Running, r.KV = n, float64(st.KVTokens[k])
			r.Output, r.Gaps, r.GapsMs = r.Output+n, r.Gaps+n, r.GapsMs+n*ms
			r.Prompt, r.Pulled, r.Computed = r.Prompt+n, r.Pulled+n, 0
		}
		for k := range e.ranks {
			answered += st.Running[k]
		}
		for len(ended) > 0 && answered >= ended[0].Output { // about those that ended by then: only how long they are matters
			answered -= ended[0].Output
			e.prompts, e.outputs = append(e.prompts, int32(ended[0].Prompt)), append(e.outputs, int32(ended[0].Output))
			ended = ended[1:]
		}
		e.ranks[0].Waiting = 0
		if l.load.Rho == 0 { // as many are there as slots and pool have, and immediate policies send all of them
			e.ranks[0].Waiting = float64(len(e.ranks)*l.slots + l.load.Pool)
			for _, n := range st.Running {
				e.ranks[0].Waiting -= float64(n)
			}
		}
		if st.Start < next && i < len(steps)-1 || s.samples != nil && st.Start > 15*time.Minute+steps[0].Start {
			continue
		}
		next += time.Second
		p := e.page()
		if s.samples == nil {
			p.Ranks[0].Prompts, p.Ranks[0].Outputs = histogram(nil), histogram(nil)
		}
		s.Add(len(s.samples), began.Add(st.Start), p)
	}
	return s
}

// The loads on which it is judged what a survey foretells. docs/fit.md tells of 20 of each of the
// seeds 20261205 and 20261206, which take a minute each.
var (
	cases = flag.Int("cases", 5, "loads")
	seed  = flag.Uint64("seed", 20261203, "of the loads")
)

const seedOfMixed = 20261201

// verdicts counts what came true.
type verdicts struct {
	t                   *testing.T
	cases, within, told int
}

func (v *verdicts) add(load string, f *Finding, what string, gain float64) {
	v.cases++
	if f.Why != nil {
		v.t.Logf("%s: %s: cannot be told: %v; really %.1f %%", load, what, f.Why, 100*gain)
		return
	}
	for _, c := range f.Changes {
		if c.What != what {
			continue
		}
		in := c.Gain.Low <= gain && gain <= c.Gain.High
		v.t.Logf("%s: %s: %.1f (%.1f to %.1f) %%, really %.1f %%: in %v, told %v; law %+v; at most %.1f %%, closed %v", load, what,
			100*c.Gain.Middle, 100*c.Gain.Low, 100*c.Gain.High, 100*gain, in, c.Narrow, f.Law, 100*f.Most.Middle, f.Closed)
		if in {
			v.within++
		}
		if c.Narrow {
			v.told++
		}
	}
}

func (v *verdicts) judge() {
	v.t.Logf("%d cases: %d within, %d told", v.cases, v.within, v.told)
	require.GreaterOrEqual(v.t, v.within, v.cases*8/10)
	require.GreaterOrEqual(v.t, v.told, v.cases*6/10)
}
