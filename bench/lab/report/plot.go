package report

import (
	"fmt"
	"image/color"
	"math"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

const (
	plotWidth  = 760 * vg.Length(1) // points
	plotHeight = 190 * vg.Length(1)
	plotPoints = 380 // along the time axis: two points of width each
)

// point is what the steps of one stretch of time showed.
type point struct {
	at                 float64 // s, its middle
	largest, smallest  float64 // KV tokens of a rank, over steps and ranks
	meanLargest, mean  float64 // mean over steps of the largest rank; of all ranks
	imbalance, length  float64 // means over steps; tokens, ms
	stepsIn, ranksSeen int
}

// condense puts steps into stretches of equal length, so that a plot of a long
// run stays small. A stretch without a step is left out.
func condense(steps []Step, stretches int) []point {
	if len(steps) == 0 || stretches < 1 {
		return nil
	}
	width := max(1, steps[len(steps)-1].End()/time.Duration(stretches)+1)
	var points []point
	last := time.Duration(-1)
	for _, s := range steps {
		stretch := s.Start / width
		if stretch != last {
			last = stretch
			points = append(points, point{at: (stretch*width + width/2).Seconds(), smallest: math.Inf(1)})
		}
		p := &points[len(points)-1]
		largest, smallest, sum := s.load()
		p.largest, p.smallest = max(p.largest, float64(largest)), min(p.smallest, float64(smallest))
		p.meanLargest += float64(largest)
		p.mean += float64(sum)
		p.imbalance += float64(s.imbalance())
		p.length += millis(float64(s.Length))
		p.stepsIn++
		p.ranksSeen += len(s.KVTokens)
	}
	for i := range points {
		p := &points[i]
		n := float64(p.stepsIn)
		p.meanLargest /= n
		p.imbalance /= n
		p.length /= n
		p.mean /= float64(max(1, p.ranksSeen))
	}
	return points
}

// axes of a plot: time to the right, and one scale for all plots of a kind.
type axes struct {
	until float64 // s
	top   float64
	label string
	tick  func(float64) string
}

// loadPlot is the band between the fullest and the emptiest rank of a run.
func loadPlot(run Run, series int, a axes) (string, error) {
	points := condense(run.Steps, plotPoints)
	var band plotter.XYs
	for _, p := range points {
		band = append(band, plotter.XY{X: p.at, Y: p.largest})
	}
	for _, p := range slices.Backward(points) {
		band = append(band, plotter.XY{X: p.at, Y: p.smallest})
	}
	fill, err := plotter.NewPolygon(band)
	if err != nil {
		return "", fmt.Errorf("report: plot of %s: %w", run.Policy, err)
	}
	fill.Color, fill.LineStyle.Width = bandColor(series), 0
	p := newPlot(a)
	p.Add(fill,
		line(points, seriesColor(series), 1.5, nil, func(p point) float64 { return p.meanLargest }),
		line(points, ink, 1.1, []vg.Length{4, 2.5}, func(p point) float64 { return p.mean }))
	p.Add(veils(run.Window, a)...)
	return render(p,
		fmt.Sprintf("KV load of the ranks over time under %s: the band reaches from the emptiest to the fullest rank", run.Policy))
}

// linesPlot is one line a run, of what value reads.
func (r *Report) linesPlot(a axes, what string, value func(point) float64, reference float64) (string, error) {
	p := newPlot(a)
	for i, run := range r.Runs {
		if points := condense(run.Steps, plotPoints/4); len(points) > 0 {
			var dashes []vg.Length
			if i >= seriesColors { // the colours begin again
				dashes = []vg.Length{5, 2}
			}
			p.Add(line(points, seriesColor(i), 1.6, dashes, value))
		}
	}
	if reference > 0 {
		across := []point{{at: 0}, {at: a.until}}
		p.Add(line(across, ink, 1.1, []vg.Length{4, 2.5}, func(point) float64 { return reference }))
	}
	return render(p, what)
}

func line(points []point, c color.Color, width vg.Length, dashes []vg.Length, value func(point) float64) *plotter.Line {
	xys := make(plotter.XYs, len(points))
	for i, p := range points {
		xys[i] = plotter.XY{X: p.at, Y: value(p)}
	}
	return &plotter.Line{XYs: xys, LineStyle: draw.LineStyle{Color: c, Width: width, Dashes: dashes}}
}

// veils lie over what was not measured.
func veils(w Window, a axes) (out []plot.Plotter) {
	for _, span := range [][2]float64{{0, min(w.From.Seconds(), a.until)}, {w.To.Seconds(), a.until}} {
		if w.Length() == 0 || span[1] <= span[0] {
			continue
		}
		rect := plotter.XYs([]plotter.XY{{X: span[0]}, {X: span[1]}, {X: span[1], Y: a.top}, {X: span[0], Y: a.top}})
		if area, err := plotter.NewPolygon(rect); err == nil { // four finite points
			area.Color, area.LineStyle.Width = veil, 0
			out = append(out, area)
		}
	}
	return out
}

func newPlot(a axes) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	p.X.Label.Text, p.Y.Label.Text = "seconds", a.label
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, a.until, 0, a.top
	p.X.Tick.Marker = plot.TickerFunc(func(_, top float64) []plot.Tick {
		return Ticks(top, 10, trimmed)
	})
	p.Y.Tick.Marker = plot.TickerFunc(func(_, top float64) []plot.Tick { return Ticks(top, 4, a.tick) })
	lines := plotter.NewGrid()
	lines.Vertical.Color = nil
	lines.Horizontal = StyleAxes(p, grid, muted)
	p.Add(lines)
	return p
}

// StyleAxes gives both axes the look of our plots, and returns that of a grid.
func StyleAxes(p *plot.Plot, grid, words color.Color) draw.LineStyle {
	line := draw.LineStyle{Color: grid, Width: 0.75}
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Padding = 0
		axis.LineStyle.Width = 0
		axis.Tick.LineStyle = line
		axis.Tick.Length = 3
		axis.Label.Padding = 4
		StyleText(&axis.Label.TextStyle, 9.5, words)
		StyleText(&axis.Tick.Label, 9, words)
	}
	return line
}

// StyleText is the look of words in our plots.
func StyleText(s *text.Style, size vg.Length, words color.Color) {
	s.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
	s.Color = words
}

// Ticks from 0 at round distances, about so many.
func Ticks(top float64, about int, label func(float64) string) (out []plot.Tick) {
	if !(top > 0) || math.IsInf(top, 0) {
		return nil
	}
	step := math.Pow(10, math.Floor(math.Log10(top/float64(about))))
	for _, f := range []float64{5, 2} {
		if top/(step*f) >= float64(about)*0.8 {
			step *= f
			break
		}
	}
	for i := 0; float64(i)*step <= top*1.0001; i++ {
		out = append(out, plot.Tick{Value: float64(i) * step, Label: label(float64(i) * step)})
	}
	return out
}

// thousands writes 12500 as 12.5k.
func thousands(x float64) string {
	if x >= 1000 {
		return trimmed(x/1000) + "k"
	}
	return trimmed(x)
}

func trimmed(x float64) string {
	s := fmt.Sprintf("%.2f", x)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

// render draws to SVG that takes its colours from the page around it.
func render(p *plot.Plot, what string) (string, error) {
	canvas := vgsvg.New(plotWidth, plotHeight)
	p.Draw(draw.New(canvas))
	var b strings.Builder
	if _, err := canvas.WriteTo(&b); err != nil {
		return "", fmt.Errorf("report: drawing %q: %w", what, err)
	}
	return themed(b.String(), what), nil
}
