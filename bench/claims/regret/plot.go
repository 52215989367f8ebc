package main

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

	"evenkeel/bench/lab/report"
)

// drawn are the policies of the plot, each with its colour.
var drawn = []struct {
	policy string
	color  color.RGBA
}{
	{"jsq-kv", report.Grey},
	{"br0", report.Ochre},
	{"brh:window=64", report.Purple},
	{"evenkeel", report.Blue},
}

// The plot's lower edge: shares below it are drawn there.
const leastShown = 0.8

// plot draws each policy's shares of the best tokens/s, the worst load first.
func (t *trials) plot() ([]byte, error) {
	p := report.NewFigure("loads, each policy's worst first", "tokens/s, times the best", false)
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 1, float64(len(t.loads)), leastShown, 1
	p.Y.Tick.Marker = plot.TickerFunc(func(low, high float64) (ticks []plot.Tick) {
		for y := low; y < high+1e-9; y += 0.05 {
			ticks = append(ticks, plot.Tick{Value: y, Label: fmt.Sprintf("%.2f", y)})
		}
		return ticks
	})
	for _, d := range drawn {
		at := slices.Index(t.policies, d.policy)
		if at < 0 {
			continue
		}
		shares := slices.Clone(t.shares(at, throughput))
		slices.SortFunc(shares, cmp.Compare)
		var points plotter.XYs
		for i, s := range shares {
			points = append(points, plotter.XY{X: float64(i + 1), Y: math.Max(leastShown, s)})
		}
		report.AddLine(p, d.policy, d.color, points)
	}
	return report.SVG(p, 640, 340)
}
