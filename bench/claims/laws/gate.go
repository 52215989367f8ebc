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
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/step"
	"evenkeel/internal/stats"
)

// gate is the question whether it matters that evenkeel knows the form of the law: loads drawn at random are served under each form, by
// the default policy that takes each form for true, and by the one that learns what it can.
type gate struct {
	seed  uint64
	loads int
	out   string
}

// judgement is the seed of the table in the page.
const judgement = 20261204

// What a policy knows: a form with its constants, or what it learns; that from nothing, from the middle of all laws, or from the
// constants as the config may have them.
const (
	learns     = len(step.Forms)
	fromMiddle = learns + 1
	fromItsOwn = learns + 2
	columns    = learns + 3
)

// candidates are the laws that loads are served under: of groups as large as loads are drawn for.
var candidates = sync.OnceValue(func() []laws.Entry {
	return slices.DeleteFunc(laws.All(), func(e laws.Entry) bool { return !e.Graphs || e.Ranks < fewest || e.Ranks > widest })
})

// The groups of the gate, in ranks.
const fewest, widest = 8, 32

// in is a law in another form than its engine's.
func in(e *laws.Entry, form step.Form) *step.Law {
	l := e.Law()
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

// outcomes are what came of a load under a truth, by what the policy knows.
type outcomes [len(step.Forms)][columns]report.Metrics

func runGate(ctx context.Context, args []string, out io.Writer) error {
	var g gate
	flags := flag.NewFlagSet("laws -gate", flag.ContinueOnError)
	flags.Uint64Var(&g.seed, "seed", judgement, "of the loads")
	flags.IntVar(&g.loads, "loads", 64, "how many")
	flags.StringVar(&g.out, "out", "", "document to write the tables into; empty: they are printed")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if g.loads < 1 {
		return fmt.Errorf("-loads %d: there must be one", g.loads)
	}
	all, err := g.try(ctx, os.Stderr)
	if err != nil {
		return err
	}
	if g.out != "" {
		return page.Write(g.out, "claim NAME=laws", "gate", "What it is worth to know the form", g.tables(all))
	}
	_, err = fmt.Fprintln(out, g.tables(all))
	return err
}

// load is the load of a number, and the law that it is served under, drawn like the rest of it.
func (g *gate) load(number int) (*draw.Load, *laws.Entry) {
	law := &candidates()[rand.New(rand.NewPCG(g.seed, uint64(number)+1<<32)).IntN(len(candidates()))]
	l := draw.New(g.seed, number)
	l.OnRanks(law.Ranks, in(law, step.Eager).Level())
	l.Tokens, l.Lasts = most, lasts
	return l, law
}

// How much of a load is played: less than in bench/claims/regret, because each is played 28 times.
const (
	most  = 3e6
	lasts = 30 * time.Second
)

func (g *gate) try(ctx context.Context, progress io.Writer) ([]outcomes, error) {
	all := make([]outcomes, g.loads)
	_, err := report.Trials(ctx, g.loads, 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		start := time.Now()
		l, law := g.load(i)
		plan := l.Plan([]string{"evenkeel"}, 0)
		for truth := range step.Forms {
			for assumed := range columns {
				one := plan
				one.Fleet.Groups = slices.Clone(plan.Fleet.Groups)
				group := &one.Fleet.Groups[0]
				group.Law = in(law, step.Form(truth))
				switch assumed {
				case learns:
				case fromMiddle:
					one.StepModel = middle()
				case fromItsOwn:
					one.StepModel = group.Law.Level()
				default:
					group.Assumed, group.RowsMs = in(law, step.Form(assumed)).Assumed()
				}
				got, err := one.RunAlone(ctx, 1)
				if err != nil {
					return struct{}{}, fmt.Errorf("load %s: %w", l, err)
				}
				all[i][truth][assumed] = got
			}
		}
		_, err := fmt.Fprintf(progress, "%5.1f s  %s, %s, %s, %d ranks: %s\n", time.Since(start).Seconds(), law.Model, law.Engine, law.GPU, law.Ranks, l)
		return struct{}{}, err
	})
	return all, err
}

// gateFigure is what policies are compared by.
type gateFigure struct {
	metric report.Metric
	name   string
	more   bool // is better
}

var gateFigures = []gateFigure{{report.StepMean, "mean step", false}, {report.TokensPerS, "tokens/s", true}, {report.TPOTP95, "TPOT p95", false}}

// ratios are a column's figures as multiples of those of the policy that takes the true form for true; above 1 is worse.
func (f gateFigure) ratios(all []outcomes, truth, column int) (list []float64) {
	for i := range all {
		x := all[i][truth][column][f.metric].Mean / all[i][truth][truth][f.metric].Mean
		if f.more {
			x = 1 / x
		}
		if !math.IsNaN(x) {
			list = append(list, x)
		}
	}
	return list
}

// names are those of the columns.
func names() (list []string) {
	for _, form := range step.Forms {
		list = append(list, "taken for "+form)
	}
	return append(list, "learned", "learned, from the middle", "learned, from its constants")
}

// tables show what a policy loses that knows less than the true form, beside one that knows it.
func (g *gate) tables(all []outcomes) string {
	m := middle()
	text := fmt.Sprintf("%d loads of seed %d, each under a law drawn from %d. A cell is what is lost beside the policy that takes the true form for true, in %%: the geometric "+
		"mean, and the worst load. In the middle of the laws a request weighs %s KV tokens.\n", g.loads, g.seed, len(candidates()), report.Grouped(m.Weight(), 0))
	for _, f := range gateFigures {
		t := page.Markdown{Head: append([]string{f.name + ": steps really are"}, names()...)}
		for truth, name := range step.Forms {
			row := []string{name}
			for column := range columns {
				list := f.ratios(all, truth, column)
				row = append(row, fmt.Sprintf("%s (%s)", percent(stats.GeometricMean(list)), percent(slices.Max(list))))
			}
			t.Add(row...)
		}
		text += "\n" + t.String()
	}
	return text + "\n" + g.verdict(all)
}

// verdict says which column loses least at worst, and what it is worth to know the form.
func (g *gate) verdict(all []outcomes) (text string) {
	for _, f := range gateFigures {
		best, least := 0, math.Inf(1)
		for column := range columns {
			worst := 0.0
			for truth := range step.Forms {
				worst = max(worst, slices.Max(f.ratios(all, truth, column)))
			}
			if worst < least {
				best, least = column, worst
			}
		}
		var known []float64 // what the learner loses, whatever the truth
		for truth := range step.Forms {
			known = append(known, f.ratios(all, truth, learns)...)
		}
		text += fmt.Sprintf("- %s: the least worst loss has *%s*, %.1f %%. Who knows form and constants gains %.1f %% in the mean over what is learned from nothing.\n",
			f.name, names()[best], 100*(least-1), 100*(stats.GeometricMean(known)-1))
	}
	return text
}

// percent is by how much a ratio is above 1; without the sign of a zero.
func percent(ratio float64) string { return fmt.Sprintf("%.1f", math.Round(1000*(ratio-1))/10+0) }
