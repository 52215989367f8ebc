package main

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

	"evenkeel/bench/lab/report"
)

// figure is something over the length of prefills, of the first part of the grid.
type figure struct {
	file, y string
	lines   []curve
}

// curve is a line of a figure: the mean over scenarios of one load.
type curve struct {
	name  string
	load  string
	color color.RGBA
	of    func(b *book, all []*scenario, steps float64) (float64, bool)
}

var figures = []figure{
	{"bind-kept.svg", "kept of what evenkeel gains over jsq-kv, %", []curve{
		{"closed loop", closed, report.Blue, meanKept}, {"rho 0.9", "0.9", report.Green, meanKept}, {"rho 0.7", "0.7", report.Ochre, meanKept},
	}},
	{"bind-tokens.svg", "tokens/s, % of those of evenkeel bound late", []curve{
		{"late, jsq-kv", closed, report.Purple, tokensOf(lateKV)}, {"arrival, evenkeel, slots ahead", closed, report.Green, tokensOf(arrivalAhead)},
		{"arrival, evenkeel", closed, report.Blue, tokensOf(arrivalNow)}, {"arrival, jsq-kv", closed, report.Grey, tokensOf(arrivalKV)},
	}},
}

// meanKept is what is kept of the gains of all scenarios together.
func meanKept(b *book, all []*scenario, steps float64) (float64, bool) {
	late, arrival := 0.0, 0.0
	for _, s := range all {
		l, a, ok := b.gains(s, steps)
		if !ok {
			return 0, false
		}
		late, arrival = late+l, arrival+a
	}
	return 100 * arrival / late, late > 0
}

// tokensOf is the mean share of the late tokens/s that an arm has.
func tokensOf(arm int) func(b *book, all []*scenario, steps float64) (float64, bool) {
	return func(b *book, all []*scenario, steps float64) (share float64, _ bool) {
		for _, s := range all {
			lost, ok := b.lost(s, steps, arm)
			if !ok {
				return 0, false
			}
			share += 100 * (1 - lost) / float64(len(all))
		}
		return share, true
	}
}

// draw draws a figure. A length of prefills of which a scenario was not run has no point.
func (b *book) draw(f figure) ([]byte, error) {
	p := report.NewFigure("length of a prefill, mean steps", f.y, false)
	p.X.Scale, p.X.Min, p.X.Max = plot.LogScale{}, 1, 100
	p.X.Tick.Marker = plot.TickerFunc(func(_, _ float64) (ticks []plot.Tick) {
		for _, x := range b.parts[0].steps {
			if x > 0 {
				ticks = append(ticks, plot.Tick{Value: x, Label: fmt.Sprint(x)})
			}
		}
		return ticks
	})
	low, high := math.Inf(1), 100.0
	for _, c := range f.lines {
		var all []*scenario
		for _, s := range b.scenarios {
			if s.load == c.load && s.ranks == b.parts[0].ranks[0] && s.slots == b.parts[0].slots[0] {
				all = append(all, s)
			}
		}
		var points plotter.XYs
		for _, steps := range b.parts[0].steps {
			if y, ok := c.of(b, all, steps); ok && steps > 0 && len(all) > 0 {
				points = append(points, plotter.XY{X: steps, Y: y})
				low, high = min(low, y), max(high, y)
			}
		}
		if len(points) > 1 {
			report.AddLine(p, c.name, c.color, points)
		}
	}
	if math.IsInf(low, 1) {
		low = 0
	}
	p.Y.Min, p.Y.Max = 10*math.Floor(low/10), 10*math.Ceil(high/10)
	p.Y.Tick.Marker = plot.TickerFunc(func(from, to float64) (ticks []plot.Tick) {
		every := 10.0
		if to-from > 100 {
			every = 50
		}
		for y := every * math.Ceil(from/every); y <= to; y += every {
			ticks = append(ticks, plot.Tick{Value: y, Label: fmt.Sprint(y)})
		}
		return ticks
	})
	p.Legend.Left = true
	return report.SVG(p, 640, 340)
}
