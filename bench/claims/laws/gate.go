package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/sim/mixed"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/step"
	"evenkeel/internal/stats"
)

// gate is the question whether it matters that evenkeel knows the form of the law: loads drawn at
// random are served under each form, by the default policy that takes each form for true, and by
// the one that learns what it can.
type gate struct {
	seed  uint64
	loads int // on decode ranks
	mixed int // on ranks that do both
	out   string
}

// judgement is the seed of the tables in the page.
const judgement = 20261212

// What a policy knows: a form with its constants, or what it learns, with what its config may say
// of the constants. The first columns are the forms.
const (
	learns      = len(step.Forms)
	fromNothing = learns + 1 // what a request costs
	fromItsOwn  = learns + 2
)

// columnNames are what the policy knows.
func columnNames() (list []string) {
	for _, form := range step.Forms {
		list = append(list, "taken for "+form)
	}
	return append(list, "learned", "learned, from requests that cost nothing", "learned, from its constants")
}

// candidates are the laws that loads are served under: of groups as large as loads are drawn for.
var candidates = sync.OnceValue(func() []laws.Entry {
	return slices.DeleteFunc(laws.All(), func(e laws.Entry) bool { return !e.Graphs || e.Ranks < fewest || e.Ranks > widest })
})

// The groups of the gate, in ranks.
const fewest, widest = 8, 32

// in is a law in another form than its engine's. Prompts take as long as in whole steps that were
// published.
func in(e *laws.Entry, form step.Form) *step.Law {
	l := e.Served()
	l.Form = form
	return &l
}

// middle is the geometric mean of the laws, for an engine of which nothing is known.
func middle() step.Model {
	var c0, c1, request []float64
	for _, e := range candidates() {
		m := in(&e, step.Eager).Level()
		c0, c1, request = append(c0, m.C0Ms), append(c1, m.C1Ms), append(request, m.RequestMs)
	}
	return step.Model{C0Ms: stats.GeometricMean(c0), C1Ms: stats.GeometricMean(c1), RequestMs: stats.GeometricMean(request)}
}

// figures are what policies are compared by.
type figures [3]float64

// outcomes are what came of a load under a truth, by what the policy knows.
type outcomes [len(step.Forms)][]figures

// figure is one of them.
type figure struct {
	name string
	more bool // is better
}

// study is the gate on one kind of ranks.
type study struct {
	of      string
	loads   int
	figures [3]figure
	columns int // the first so many
	try     func(ctx context.Context, i int) (outcomes, string, error)
}

func (g *gate) studies() []*study {
	return []*study{
		{
			of: "Decode ranks", loads: g.loads, columns: len(columnNames()), try: g.decode,
			figures: [3]figure{{"mean step", false}, {"tokens/s", true}, {"TPOT p95", false}},
		},
		{
			of: "Ranks that prefill and decode", loads: g.mixed, columns: learns + 1, try: g.both,
			figures: [3]figure{{"tokens/s", true}, {"mean TTFT", false}, {"TPOT p95", false}},
		},
	}
}

func runGate(ctx context.Context, args []string, out io.Writer) error {
	var g gate
	flags := flag.NewFlagSet("laws -gate", flag.ContinueOnError)
	flags.Uint64Var(&g.seed, "seed", judgement, "of the loads")
	flags.IntVar(&g.loads, "loads", 64, "how many on decode ranks")
	flags.IntVar(&g.mixed, "mixed", 32, "how many on ranks that prefill and decode")
	flags.StringVar(&g.out, "out", "", "document to write the tables into; empty: they are printed")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if g.loads < 1 || g.mixed < 1 {
		return fmt.Errorf("-loads %d, -mixed %d: there must be one of each", g.loads, g.mixed)
	}
	m := middle()
	text := fmt.Sprintf("Loads of seed %d, each under a law drawn from %d. A cell is what is lost beside the policy that takes the true form "+
		"for true, in %%: the geometric mean, and the worst load. In the middle of the laws a request weighs %s KV tokens.\n",
		g.seed, len(candidates()), report.Grouped(m.Weight(), 0))
	for _, s := range g.studies() {
		all, err := s.play(ctx, os.Stderr)
		if err != nil {
			return err
		}
		text += "\n" + s.tables(all)
	}
	learned, err := g.learnedTable(ctx)
	if err != nil {
		return err
	}
	return page.Show(out, g.out, "claim NAME=laws", "gate", "What it is worth to know the form", text+"\n"+learned)
}

func (s *study) play(ctx context.Context, progress io.Writer) ([]outcomes, error) {
	all := make([]outcomes, s.loads)
	_, err := report.Trials(ctx, s.loads, 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		start := time.Now()
		one, load, err := s.try(ctx, i)
		if err != nil {
			return struct{}{}, fmt.Errorf("load %s: %w", load, err)
		}
		all[i] = one
		_, err = fmt.Fprintf(progress, "%5.1f s  %s\n", time.Since(start).Seconds(), load)
		return struct{}{}, err
	})
	return all, err
}

// law is the one that a load is served under, drawn like the rest of it.
func (g *gate) law(number int) *laws.Entry {
	return &candidates()[rand.New(rand.NewPCG(g.seed, uint64(number)+1<<32)).IntN(len(candidates()))]
}

// How much of a load is played: less than in bench/claims/regret, because each is played 28 times.
const (
	most  = 3e6
	lasts = 30 * time.Second
)

// onDecode is the load of a number on decode ranks, and its law.
func (g *gate) onDecode(i int) (*laws.Entry, *draw.Load) {
	law := g.law(i)
	l := draw.New(g.seed, i)
	l.OnRanks(law.Ranks, in(law, step.Eager).Level())
	l.Tokens, l.Lasts = most, lasts
	return law, l
}

// onBoth is that on ranks that prefill and decode.
func (g *gate) onBoth(i int) (*laws.Entry, *mixed.Load) {
	law := g.law(i)
	l := mixed.Draw(g.seed, i)
	room := 0.0
	if l.Room > 0 {
		room = 1
	}
	l.Of, l.Ranks = law.Name(), law.Ranks
	l.Law = *in(law, step.Eager)
	l.Measure(room)
	return law, l
}

// decode plays a load on decode ranks.
func (g *gate) decode(ctx context.Context, i int) (all outcomes, _ string, _ error) {
	law, l := g.onDecode(i)
	text := fmt.Sprintf("%s, %s, %s, %d ranks: %s", law.Model, law.Engine, law.GPU, law.Ranks, l)
	plan := l.Plan([]string{"evenkeel"}, 0)
	for truth := range step.Forms {
		for assumed := range columnNames() {
			one := plan
			one.Fleet.Groups = slices.Clone(plan.Fleet.Groups)
			group := &one.Fleet.Groups[0]
			group.Law = in(law, step.Form(truth))
			switch assumed {
			case learns:
			case fromNothing:
				one.StepModel = group.Law.Level()
				one.StepModel.RequestMs *= 1e-6 // with nothing it would begin as without a config
			case fromItsOwn:
				one.StepModel = group.Law.Level()
			default:
				group.Assumed = in(law, step.Form(assumed))
			}
			got, err := one.RunAlone(ctx, 1)
			if err != nil {
				return all, text, err
			}
			all[truth] = append(all[truth], figures{got[report.StepMean].Mean, got[report.TokensPerS].Mean, got[report.TPOTP95].Mean})
		}
	}
	return all, text, nil
}

// both plays a load on ranks that prefill and decode.
func (g *gate) both(ctx context.Context, i int) (all outcomes, _ string, _ error) {
	law, l := g.onBoth(i)
	text := fmt.Sprintf("%s, %s, %s: %s", law.Model, law.Engine, law.GPU, l)
	for truth := range step.Forms {
		for assumed := range learns + 1 {
			one := *l
			one.Law = *in(law, step.Form(truth))
			p := mixed.Contender{Spec: "evenkeel", Learn: assumed == learns}
			if form := step.Form(assumed); !p.Learn {
				p.Form = &form
			}
			got, err := mixed.Serve(ctx, &one, p)
			if err != nil {
				return all, text, err
			}
			all[truth] = append(all[truth], figures{got.Tokens, got.TTFT, got.TPOT95})
		}
	}
	return all, text, nil
}

// ratios are a column's figures as multiples of those of the policy that takes the true form for
// true; above 1 is worse.
func (s *study) ratios(all []outcomes, of, truth, column int) (list []float64) {
	for i := range all {
		x := all[i][truth][column][of] / all[i][truth][truth][of]
		if s.figures[of].more {
			x = 1 / x
		}
		if !math.IsNaN(x) {
			list = append(list, x)
		}
	}
	return list
}

// tables show what a policy loses that knows less than the true form, beside one that knows it.
func (s *study) tables(all []outcomes) string {
	names := columnNames()[:s.columns]
	text := fmt.Sprintf("**%s**, %d loads.\n", s.of, s.loads)
	for of, f := range s.figures {
		t := page.Markdown{Head: append([]string{f.name + ": steps really are"}, names...)}
		for truth, name := range step.Forms {
			row := []string{name}
			for column := range names {
				list := s.ratios(all, of, truth, column)
				row = append(row, fmt.Sprintf("%s (%s)", percent(stats.GeometricMean(list)), percent(slices.Max(list))))
			}
			t.Add(row...)
		}
		text += "\n" + t.String()
	}
	return text + "\n" + s.verdict(all, names)
}

// verdict says which column loses least at worst, and what it is worth to know the form.
func (s *study) verdict(all []outcomes, names []string) (text string) {
	for of, f := range s.figures {
		best, least := 0, math.Inf(1)
		for column := range names {
			worst := 0.0
			for truth := range step.Forms {
				worst = max(worst, slices.Max(s.ratios(all, of, truth, column)))
			}
			if worst < least {
				best, least = column, worst
			}
		}
		known := func(loads []int) float64 { // what the learner loses, whatever the truth
			var list []float64
			for _, i := range loads {
				for truth := range step.Forms {
					list = append(list, s.ratios(all[i:i+1], of, truth, learns)...)
				}
			}
			return stats.GeometricMean(list)
		}
		everything := make([]int, len(all))
		for i := range everything {
			everything[i] = i
		}
		low, high := stats.Bootstrap(len(all), 0.95, known)
		text += fmt.Sprintf("- %s: the least worst loss has *%s*, %.1f %%. "+
			"Who knows form and constants gains %s %% in the mean over what is learned, with other loads %s to %s %%.\n",
			f.name, names[best], 100*(least-1), percent(known(everything)), percent(low), percent(high))
	}
	return text
}

// percent is by how much a ratio is above 1; without the sign of a zero.
func percent(ratio float64) string { return fmt.Sprintf("%.1f", math.Round(1000*(ratio-1))/10+0) }
