package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/regions"
	"evenkeel/internal/stats"
)

// The grid on which our default is judged: lengths of answers, tokens in the mean;
// thought between turns, seconds; and what engines' gauges tell, and when.
var (
	gridAnswers = []float64{60, 120, 240, 500}
	gridThought = []float64{0, 3, 30}
	gridGauges  = []string{"vLLM", "SGLang"}
	rivals      = []string{skylb, "skylb-local", "region-local", "central-least-load", "prefix-blind", "prefix-blind:without=guard"}
)

// gridScenario is what every cell of the grid varies.
const gridScenario = "skew"

// meanAnswer of the scenarios, tokens.
const meanAnswer = 240

// cell is one of the grid.
type cell struct {
	preset          string
	answer, thought float64
	gauges          string
}

func cells() (all []cell) {
	for _, preset := range presets {
		for _, gauges := range gridGauges {
			for _, thought := range gridThought {
				for _, answer := range gridAnswers {
					all = append(all, cell{preset: preset, answer: answer, thought: thought, gauges: gauges})
				}
			}
		}
	}
	return all
}

func (c cell) String() string {
	return fmt.Sprintf("%s, answers of %g, %g s, %s", c.preset, c.answer, c.thought, c.gauges)
}

// scenario is the cell's name among the scenarios.
func (c cell) scenario() string {
	return fmt.Sprintf("%s, answers of %g, %g s, %s", gridScenario, c.answer, c.thought, c.gauges)
}

// change makes a scenario the cell's. Who thinks for long needs longer until the load
// is what it will be.
func (c cell) change(s *regions.Scenario) {
	s.WarmS += 3 * c.thought
	if c.gauges == "SGLang" {
		s.Engine.OnePass, s.Engine.LogSteps = true, 40
	}
	ofLoads(func(l *regions.Load) { l.Output, l.ThinkMs = l.Output*c.answer/meanAnswer, 1000*c.thought })(s)
}

func init() {
	for _, c := range cells() {
		if c.preset == presets[0] {
			variants = append(variants, variant{strings.TrimPrefix(c.scenario(), gridScenario+", "), c.change})
		}
	}
}

// ratioOf is a metric of our default over that of a rival in a cell, in the mean over
// the seeds drawn.
func (b *book) ratioOf(c cell, rival string, m report.Metric, drawn []int) float64 {
	o := b.on(c.scenario(), c.preset, append([]string{ours}, rivals...)...)
	if o.Refused != "" {
		return 1
	}
	mine, theirs := o.Seeds[ours], o.Seeds[rival]
	var a, r float64
	for _, seed := range drawn {
		a, r = a+mine[seed][m], r+theirs[seed][m]
	}
	return a / r
}

// median of the ratios over some cells.
func (b *book) median(of []cell, rival string, m report.Metric, drawn []int) float64 {
	ratios := make([]float64, len(of))
	for i, c := range of {
		ratios[i] = b.ratioOf(c, rival, m, drawn)
	}
	slices.Sort(ratios)
	return stats.Median(ratios)
}

// worst is the cell with the largest of the ratios, or with the least.
func (b *book) worst(of []cell, rival string, m report.Metric, largest bool, drawn []int) (worst cell) {
	better := func(x, y cell) int { return cmp.Compare(b.ratioOf(x, rival, m, drawn), b.ratioOf(y, rival, m, drawn)) }
	if largest {
		return slices.MaxFunc(of, better)
	}
	return slices.MinFunc(of, better)
}

// What our default must keep to against each rival.
var (
	inTheMedian = target{mostTTFT: 1, leastTokens: 1}
	atWorst     = target{mostTTFT: 1.05, leastTokens: 0.95}
)

// grid holds our default against its rivals.
func (b *book) grid() string {
	all := cells()
	seeds := make([]int, b.Seeds)
	for i := range seeds {
		seeds[i] = i
	}
	with := func(figure func(drawn []int) float64) string {
		low, high := stats.Bootstrap(b.Seeds, 0.95, figure)
		return fmt.Sprintf("%.2f (%.2f to %.2f)", figure(seeds), low, high)
	}
	var rows [][]string
	for _, rival := range rivals {
		row := []string{"`" + rival + "`"}
		var medians, worsts []float64
		for _, m := range []report.Metric{report.TTFTMean, report.TokensPerS} {
			bad := b.worst(all, rival, m, m == report.TTFTMean, seeds)
			row = append(row,
				with(func(drawn []int) float64 { return b.median(all, rival, m, drawn) }),
				with(func(drawn []int) float64 { return b.ratioOf(bad, rival, m, drawn) })+": "+bad.String())
			medians, worsts = append(medians, b.median(all, rival, m, seeds)), append(worsts, b.ratioOf(bad, rival, m, seeds))
		}
		rows = append(rows, append(row, verdict(inTheMedian.met(medians[0], medians[1]))+", "+verdict(atWorst.met(worsts[0], worsts[1]))))
	}
	return fmt.Sprintf("`make claim NAME=regions`, `%s`, %d cells, %d seeds. Wanted: in the median %s, at worst %s\n\n", gridScenario,
		len(all), b.Seeds, inTheMedian, atWorst) +
		table("`finish` against | mean TTFT, median | mean TTFT, worst | tokens/s, median | tokens/s, worst | in the median, at worst", rows) +
		"\n" + b.axes(all, seeds)
}

// axes are the medians of the grid's parts.
func (b *book) axes(all []cell, seeds []int) string {
	var rows [][]string
	add := func(name string, in func(c cell) bool) {
		part := slices.DeleteFunc(slices.Clone(all), func(c cell) bool { return !in(c) })
		row := []string{name}
		for _, rival := range rivals {
			row = append(row,
				fmt.Sprintf("%.2f, %.2f", b.median(part, rival, report.TTFTMean, seeds), b.median(part, rival, report.TokensPerS, seeds)))
		}
		rows = append(rows, row)
	}
	for _, x := range presets {
		add(x, func(c cell) bool { return c.preset == x })
	}
	for _, x := range gridAnswers {
		add(fmt.Sprintf("answers of %g", x), func(c cell) bool { return c.answer == x })
	}
	for _, x := range gridThought {
		add(fmt.Sprintf("%g s between turns", x), func(c cell) bool { return c.thought == x })
	}
	for _, x := range gridGauges {
		add("engines like "+x, func(c cell) bool { return c.gauges == x })
	}
	return table("cells with, medians of TTFT and tokens/s | `"+strings.Join(rivals, "` | `")+"`", rows)
}
