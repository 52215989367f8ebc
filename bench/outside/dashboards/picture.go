package main

import (
	"context"
	"fmt"
	"image/color"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/prometheus/common/model"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// hues are told apart by most of those who do not see all colours (Okabe and
// Ito).
var hues = []color.Color{
	color.RGBA{0, 114, 178, 255}, color.RGBA{230, 159, 0, 255}, color.RGBA{0, 158, 115, 255}, color.RGBA{204, 121, 167, 255},
	color.RGBA{213, 94, 0, 255}, color.RGBA{86, 180, 233, 255}, color.RGBA{120, 120, 120, 255}, color.RGBA{180, 170, 40, 255},
}

const (
	across      = 3
	panelWidth  = 11 * vg.Centimeter
	panelHeight = 5.2 * vg.Centimeter
	mostLegends = 8
)

// draw makes a picture of each dashboard, as of this run: its graphs, three a
// row, as Grafana has them.
func (w *site) draw(ctx context.Context, folder string, out io.Writer) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for _, d := range dashboards {
		var plots []*plot.Plot
		for _, r := range d.rows {
			for _, p := range r.panels {
				if p.kind != graph {
					continue
				}
				one, err := w.plot(ctx, p)
				if err != nil {
					return err
				}
				if one != nil {
					plots = append(plots, one)
				}
			}
		}
		file := filepath.Join(folder, "grafana-"+strings.TrimSuffix(d.file, ".json")+".png")
		if err := save(plots, file); err != nil {
			return err
		}
		fmt.Fprintln(out, file)
	}
	return nil
}

// plot draws a panel; nil if it has nothing to show but zeros.
func (w *site) plot(ctx context.Context, p panel) (*plot.Plot, error) {
	pic := plot.New()
	pic.Title.Text = p.title + "  (" + p.unit + ")"
	for _, style := range []*text.Style{&pic.Title.TextStyle, &pic.Legend.TextStyle, &pic.X.Tick.Label, &pic.Y.Tick.Label} {
		style.Font.Typeface, style.Font.Variant = "Liberation", "Sans"
	}
	pic.Title.TextStyle.Font.Size, pic.Legend.TextStyle.Font.Size = vg.Points(9), vg.Points(6.5)
	pic.X.Tick.Label.Font.Size, pic.Y.Tick.Label.Font.Size = vg.Points(7), vg.Points(7)
	pic.Legend.Top, pic.Legend.Padding = true, vg.Points(1.5)
	pic.Add(plotter.NewGrid())
	drawn, moves := 0, false
	for _, l := range p.lines {
		all, err := w.ask(ctx, l.expr)
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			var run plotter.XYs
			for _, v := range s.Values {
				if y := float64(v.Value); !math.IsNaN(y) && !math.IsInf(y, 0) {
					run = append(run, plotter.XY{X: float64(v.Timestamp)/1e3 - float64(w.began.Unix()), Y: y})
					moves = moves || y != 0
				}
			}
			if len(run) == 0 {
				continue
			}
			trace, err := plotter.NewLine(run)
			if err != nil {
				return nil, err
			}
			trace.Color, trace.Width = hues[drawn%len(hues)], vg.Points(1)
			pic.Add(trace)
			if drawn < mostLegends {
				pic.Legend.Add(w.legend(l.legend, s.Metric), trace)
			}
			drawn++
		}
	}
	if !moves {
		return nil, nil
	}
	pic.Y.Min = min(0, pic.Y.Min)
	pic.Y.Max += (pic.Y.Max - pic.Y.Min) * 0.12 * float64(min(drawn, mostLegends)+1) // room for the legend
	return pic, nil
}

var placeholder = regexp.MustCompile(`\{\{(\w+)\}\}`)

// legend fills in a legend's labels; ports of this run become what they are.
func (w *site) legend(form string, labels model.Metric) string {
	text := placeholder.ReplaceAllStringFunc(form, func(m string) string { return string(labels[model.LabelName(strings.Trim(m, "{}"))]) })
	for _, p := range w.proxies {
		text = strings.ReplaceAll(text, p.Address, p.Name)
	}
	if text = strings.ReplaceAll(text, "→", "to"); text == "" {
		for _, value := range slices.Sorted(maps.Values(labels)) {
			text += " " + string(value)
		}
		text = strings.TrimSpace(text)
	}
	return text
}

func save(plots []*plot.Plot, file string) error {
	down := (len(plots) + across - 1) / across
	grid := make([][]*plot.Plot, down)
	for i := range grid {
		grid[i] = make([]*plot.Plot, across)
		copy(grid[i], plots[i*across:])
	}
	canvas := vgimg.NewWith(vgimg.UseWH(across*panelWidth, vg.Length(down)*panelHeight), vgimg.UseDPI(110))
	tiles := draw.Tiles{Rows: down, Cols: across, PadX: vg.Points(8), PadY: vg.Points(10), PadTop: vg.Points(6), PadBottom: vg.Points(4),
		PadLeft:  vg.Points(4),
		PadRight: vg.Points(10)}
	for i, line := range plot.Align(grid, tiles, draw.New(canvas)) {
		for j, at := range line {
			if grid[i][j] != nil {
				grid[i][j].Draw(at)
			}
		}
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	if _, err := (vgimg.PngCanvas{Canvas: canvas}).WriteTo(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
