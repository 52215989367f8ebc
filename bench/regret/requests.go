package main

import (
	"fmt"
	"time"

	"evenkeel/bench/page"
	"evenkeel/bench/regret/draw"
	"evenkeel/bench/report"
)

// Where requests cost something in a step, the default is judged with that and without, and two simple policies beside it.
var withRequests = []string{"evenkeel:requests=false", "evenkeel", "jsq", "jsq-kv"}

// requestSteps is how many steps each load lasts at least, so that what a request costs is learned in the first part of them.
const requestSteps = 12_000

// lastRequests has a load last that long.
func lastRequests(l *draw.Load) {
	l.Lasts = time.Duration(requestSteps * l.C0 * float64(time.Millisecond))
}

// requestTable holds the default against itself without what requests cost.
func (t *trials) requestTable() string {
	m := page.Markdown{Text: 1, Head: []string{
		"load", "idle share without", "tokens/s", "TPOT p95", "TTFT p99", "tokens/s, law told", "TPOT p95, law told", "tokens/s of `jsq`", "of `jsq-kv`",
	}}
	const without, with = 0, 1
	ratio := func(of []outcome, p int, x report.Metric) float64 { return of[p].of(x) / of[without].of(x) }
	sums, numbers := map[bool][][]float64{}, map[bool][]int{}
	for i, l := range t.loads {
		row := []float64{
			ratio(t.of[i], with, report.TokensPerS), ratio(t.of[i], with, report.TPOTP95), ratio(t.of[i], with, report.TTFTP99),
			ratio(t.told[i], with, report.TokensPerS), ratio(t.told[i], with, report.TPOTP95),
			ratio(t.of[i], 2, report.TokensPerS), ratio(t.of[i], 3, report.TokensPerS),
		}
		costs := l.Request > 0
		sums[costs], numbers[costs] = append(sums[costs], row), append(numbers[costs], l.Number)
		cells := []string{l.String(), fmt.Sprintf("%.3f", t.of[i][without].of(report.IdleShare))}
		for _, x := range row {
			cells = append(cells, fmt.Sprintf("%.4f", x))
		}
		m.Add(cells...)
	}
	text := fmt.Sprintf("`go run ./bench/regret -seed %d -loads %d -cr`: the default as a multiple of itself without what requests cost (`requests=false`), "+
		"each load for %d steps or more. In about half of the loads a request costs nothing.\n\n%s\n",
		t.seed, t.drawn, requestSteps, m.String())
	for _, costs := range []bool{false, true} {
		rows := sums[costs]
		if len(rows) == 0 {
			continue
		}
		text += map[bool]string{false: "\nA request costs nothing", true: "\nA request costs something"}[costs] + fmt.Sprintf(" (%d loads):", len(rows))
		for c, name := range m.Head[2:] {
			values := make([]float64, len(rows))
			for i := range rows {
				values[i] = rows[i][c]
			}
			at, least, _ := worst(values, c != 1 && c != 2 && c != 4)
			text += fmt.Sprintf(" %s %s, worst %.4f (load %d);", name, interval(values), least, numbers[costs][at])
		}
		text += "\n"
	}
	return text
}
