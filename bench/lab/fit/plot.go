package fit

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"evenkeel/bench/lab/report"
	"evenkeel/predictor"
)

const (
	plotSide    = 420 * vg.Length(1)
	largestMark = 13 * vg.Length(1) // radius of a point that stands for all rows
	leastMark   = 1.5 * vg.Length(1)
)

// plotPath puts the plot beside the fit file.
func plotPath(out string) (string, error) {
	ext := filepath.Ext(out)
	plot := strings.TrimSuffix(out, ext) + ".svg"
	if plot == out {
		return "", fmt.Errorf("%s: the reliability plot goes there; give the fit file another ending, as .json", out)
	}
	return plot, nil
}

// reliabilityPlot draws the observed share over the predicted probability. A
// point's area is its share of the rows; on the dashed line predictions hold.
func reliabilityPlot(f *predictor.Fit) ([]byte, error) {
	p := report.NewFigure("predicted probability to end within the horizon", "share that did", true)
	p.Title.Text = fmt.Sprintf("%s, horizon %d: Brier %s, base rate %s", f.Kind, f.Holdout.Horizon, figure(f.Holdout.Brier),
		figure(f.Holdout.Base.Brier))
	report.StyleText(&p.Title.TextStyle, 10.5, report.Muted)
	p.Title.Padding = 8
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Min, axis.Max = 0, 1
		axis.Tick.Marker = plot.TickerFunc(fifths)
	}
	perfect := &plotter.Line{XYs: plotter.XYs{{X: 0, Y: 0}, {X: 1, Y: 1}},
		LineStyle: draw.LineStyle{Color: report.Ink, Width: 1.1, Dashes: []vg.Length{4, 2.5}}}
	var points plotter.XYs
	for _, r := range f.Holdout.Reliability {
		points = append(points, plotter.XY{X: r.P, Y: r.Ended})
	}
	p.Add(perfect, &plotter.Line{XYs: points, LineStyle: draw.LineStyle{Color: report.Blue, Width: 1.6}}, marks(f.Holdout.Reliability, points))
	return report.SVG(p, plotSide, plotSide)
}

func marks(bins []predictor.Reliability, points plotter.XYs) *plotter.Scatter {
	rows := 0
	for _, r := range bins {
		rows += r.Rows
	}
	return &plotter.Scatter{XYs: points, GlyphStyleFunc: func(i int) draw.GlyphStyle {
		radius := largestMark * vg.Length(math.Sqrt(float64(bins[i].Rows)/float64(rows)))
		return draw.GlyphStyle{Color: report.Blue, Radius: max(leastMark, radius), Shape: draw.CircleGlyph{}}
	}}
}

func fifths(_, _ float64) (ticks []plot.Tick) {
	for i := range 6 {
		ticks = append(ticks, plot.Tick{Value: float64(i) / 5, Label: fmt.Sprintf("%.1f", float64(i)/5)})
	}
	return ticks
}

// writeReliability is the plot for a terminal: a bar is the share that ended,
// the | where the prediction is.
func writeReliability(out io.Writer, bins []predictor.Reliability) {
	const width = 50
	fmt.Fprintf(out, "\npredicted   ended     rows  0%s1\n", strings.Repeat(" ", width-1))
	for _, r := range bins {
		bar := []byte(strings.Repeat("#", int(math.Round(r.Ended*width))) + strings.Repeat(" ", width+1))[:width+1]
		bar[int(math.Round(r.P*width))] = '|'
		fmt.Fprintf(out, "%9.3f %7.3f %8d  %s\n", r.P, r.Ended, r.Rows, strings.TrimRight(string(bar), " "))
	}
}
