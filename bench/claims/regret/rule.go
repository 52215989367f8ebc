package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// lowest says how far the lowest of three rows of the table in docs/fit.md is from what a load
// really gains. For each load the rows are made of the other ones.
func (o options) lowest(ctx context.Context) (string, error) {
	t := &trials{seed: o.seed, policies: append(slices.Clone(rivals), "evenkeel")}
	for i := range o.loads {
		t.loads = append(t.loads, draw.Judged(o.seed, o.from+i))
	}
	if err := t.try(ctx, os.Stderr); err != nil {
		return "", err
	}
	m := page.Markdown{Text: 1, Head: []string{
		"over", "told, mean, %", "really, mean, %", "loads that gained as much as told", "loads told 2 % or more", "of these, loads that lost",
		"furthest below what was told, points", "its load",
	}}
	for _, rival := range rivals {
		told, really := t.expected(rival)
		enough, promised, lost, worst := 0, 0, 0, 0
		for i := range told {
			if really[i] >= told[i] {
				enough++
			}
			if told[i] >= 1+promise {
				promised++
				if really[i] < 1 {
					lost++
				}
			}
			if told[i]-really[i] > told[worst]-really[worst] {
				worst = i
			}
		}
		m.Add("`"+rival+"`", fmt.Sprintf("%+.1f", 100*(stats.GeometricMean(told)-1)), page.Percents(really),
			fmt.Sprintf("%d of %d", enough, len(told)),
			fmt.Sprint(promised), fmt.Sprint(lost), fmt.Sprintf("%.1f", 100*(told[worst]-really[worst])), fmt.Sprint(t.loads[worst].Number))
	}
	return fmt.Sprintf("`go run ./bench/claims/regret -rule -seed %d -loads %d`: tokens per second of `evenkeel`. For each load, the rows "+
		"are made of the other loads.\n\n%s",
		o.seed, len(t.loads), m.String()), nil
}

// promise is a gain that somebody would install evenkeel for.
const promise = 0.02

// expected is what each load is told to gain over a policy, and what it really gains, as shares.
func (t *trials) expected(rival string) (told, really []float64) {
	base, ours := slices.Index(t.policies, rival), slices.Index(t.policies, "evenkeel")
	vllm := slices.Index(t.policies, vllmOwn)
	really = make([]float64, len(t.loads))
	for i := range really {
		really[i] = t.of[i][ours].of(report.TokensPerS) / t.of[i][base].of(report.TokensPerS)
	}
	told = make([]float64, len(t.loads))
	for i := range told {
		told[i] = math.Inf(1)
		for _, has := range t.rowsOf(i, vllm) {
			row := []float64{}
			for k := range t.loads {
				if k != i && has(k) {
					row = append(row, really[k])
				}
			}
			if len(row) > 0 {
				told[i] = min(told[i], stats.GeometricMean(row))
			}
		}
	}
	return told, really
}

// rowsOf are the three rows that somebody with this load reads: those of the prompts, of the ranks
// and of the share of KV.
func (t *trials) rowsOf(load, vllm int) (rows []func(int) bool) {
	for _, c := range draw.Classes() {
		if (strings.HasPrefix(c.Name, "prompts") || strings.HasPrefix(c.Name, "ranks")) && c.Has(t.loads[load]) {
			rows = append(rows, func(i int) bool { return c.Has(t.loads[i]) })
		}
	}
	class := func(i int) int {
		share := t.of[i][vllm].of(report.KVShare)
		return slices.IndexFunc(kvShares, func(from float64) bool { return share < from })
	}
	return append(rows, func(i int) bool { return class(i) == class(load) })
}
