//go:build linux

package main

import (
	"image/color"
	"math"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

	"evenkeel/bench/report"
)

// drawing is a figure over the number of streams, at 20,000 chunks a second.
type drawing struct {
	file, title, unit string
	of                func(Sample) float64
}

var figures = []drawing{
	{"relay-cpu.svg", "CPU time per chunk over the number of streams, for each proxy", "CPU µs per chunk", chunkCPU},
	{"relay-memory.svg", "Resident memory over the number of streams, for each proxy", "resident MiB", resident},
}

var colours = map[string]color.RGBA{
	nginxName: report.Green, bareName: report.Grey, routerName: report.Ochre, beforeName: report.Purple, evenkeelName: report.Blue,
}

// draw draws a figure of what was measured with one core.
func (s *store) draw(d drawing) ([]byte, error) {
	p := report.NewFigure("streams, 20,000 chunks/s in all, in steps", d.unit, false)
	p.X.Scale, p.X.Min, p.X.Max = plot.LogScale{}, 1000, 10000
	p.X.Tick.Marker = plot.TickerFunc(func(_, _ float64) (ticks []plot.Tick) {
		for _, x := range []int{1000, 2000, 4000, 10000} {
			ticks = append(ticks, plot.Tick{Value: float64(x), Label: grouped(x)})
		}
		return ticks
	})
	p.Y.Min = 0
	p.Legend.Top, p.Legend.Left = true, true
	for _, name := range s.measured() {
		var points plotter.XYs
		for _, r := range rows {
			y, ok := s.median(r.name, 1, name, d.of)
			x, _ := s.median(r.name, 1, name, func(m Sample) float64 { return float64(m.Streams) })
			if ok && r.shape == standing && r.rate == 20_000 && (len(points) == 0 || points[len(points)-1].X < x) {
				points = append(points, plotter.XY{X: x, Y: y})
				p.Y.Max = math.Max(p.Y.Max, y)
			}
		}
		if len(points) > 1 { // one point is in the table, and no line
			report.AddLine(p, name, colours[name], points)
		}
	}
	p.Y.Max *= 1.15
	p.Y.Tick.Marker = plot.TickerFunc(func(_, top float64) []plot.Tick {
		return report.Ticks(top, 5, func(y float64) string { return strconv.FormatFloat(y, 'f', -1, 64) })
	})
	return report.SVG(p, 640, 340)
}
