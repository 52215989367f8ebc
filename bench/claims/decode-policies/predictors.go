package main

import (
	"fmt"

	"evenkeel/bench/lab/fit"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
	"evenkeel/predictor"
)

// fitHorizon is the paper's, in decode steps.
const fitHorizon = 80

// holdOut scores every kind of predictor on the last quarter of a trace.
func (b *book) holdOut(on *policytables.Source) string {
	t := on.From.Trace
	requests := t.Requests
	if b.Most > 0 {
		requests = requests[:min(len(requests), 2*b.Most)]
	}
	samples := fit.Samples(requests)
	fmt.Fprintf(b.Progress, "%s: fitting predictors\n", on.Name)
	f, err := predictor.Train(predictor.Auto, samples, predictor.Options{Horizon: fitHorizon})
	if err != nil {
		return fmt.Sprintf("**%s**\n\nLeft out: %s.\n", on.Name, err)
	}
	tab := page.Markdown{Head: []string{"kind", "AUC", "Brier", "conditional MAE, tokens"}}
	for _, c := range f.Compared {
		name := "`" + string(c.Kind) + "`"
		if c.Kind == f.Kind {
			name += ", what `auto` takes"
		}
		tab.Add(name, figure(c.AUC, 3), figure(c.Brier, 4), figure(c.ConditionalMAE, 1))
	}
	base := f.Holdout.Base
	tab.Add("base rate", figure(base.AUC, 3), figure(base.Brier, 4), figure(base.ConditionalMAE, 1))
	text := fmt.Sprintf("**%s, horizon %d: trained on the first %s requests, scored on the %s after them, %s rows**\n\n%s", on.Name,
		fitHorizon,
		report.Grouped(float64(len(samples)-f.Holdout.Requests), 0), report.Grouped(float64(f.Holdout.Requests), 0),
		report.Grouped(float64(base.Rows), 0), &tab)
	if !b.Quick {
		text += fmt.Sprintf("\n```\nevenkeel fit --trace %s --horizon %d --out fit.json\n```\n", on.Flag, fitHorizon)
	}
	return text
}

func figure(f predictor.Figure, digits int) string {
	if !f.Defined() {
		return "-"
	}
	return fmt.Sprintf("%.*f", digits, float64(f))
}
