package report

import (
	"cmp"
	_ "embed" // the page
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"
	"sync"
)

//go:embed page.html
var pageText string

var page = sync.OnceValue(func() *template.Template { return template.Must(template.New("page").Parse(pageText)) })

// The page as the template reads it.
type (
	view struct {
		*Report
		Columns   []column
		Rows      []viewRow
		Level     []string // the balanced row
		Waterline template.HTML
		Loads     []viewPlot
		Lines     []viewPlot
		Legend    []legend
		Prefills  bool // ranks prefill, too
	}
	viewRow struct {
		Policy string
		Color  template.CSS
		Cells  []viewCell
	}
	viewCell struct{ Value, Ratio string }
	viewPlot struct {
		Title, Text string
		Color       template.CSS
		SVG         template.HTML
	}
	legend struct {
		Name   string
		Color  template.CSS
		Dashed bool
	}
)

// HTML writes one page with table and plots. It loads nothing from anywhere.
func (r *Report) HTML(w io.Writer) error {
	v := view{Report: r, Columns: r.present(), Waterline: template.HTML(strings.Replace(r.Waterline(), ` xmlns="http://www.w3.org/2000/svg"`, "", 1))}
	for i, run := range r.Runs {
		color := template.CSS(seriesVar(i))
		row := viewRow{Policy: run.Policy, Color: color}
		for _, c := range v.Columns {
			value, ratio := r.cell(i, c, "–")
			row.Cells = append(row.Cells, viewCell{value, ratio})
		}
		v.Rows = append(v.Rows, row)
		_, prefills := run.Metrics[MixedSteps]
		v.Prefills = v.Prefills || prefills
		v.Legend = append(v.Legend, legend{run.Policy, color, i >= seriesColors})
	}
	for i, c := range v.Columns {
		if v.Prefills {
			v.Columns[i].Help = cmp.Or(mixedHelp[c.metric], c.Help)
		}
		v.Level = append(v.Level, r.level(c, ""))
	}
	if err := r.draw(&v); err != nil {
		return err
	}
	return page().Execute(w, v)
}

// draw makes the plots of the runs that have steps.
func (r *Report) draw(v *view) error {
	until := r.longest().Seconds()
	if until == 0 {
		return nil
	}
	var load, imbalance, length float64
	for _, run := range r.Runs {
		for _, p := range condense(run.Steps, plotPoints) {
			load = max(load, p.largest)
		}
		for _, p := range condense(run.Steps, plotPoints/4) {
			imbalance, length = max(imbalance, p.imbalance), max(length, p.length)
		}
	}
	for i, run := range r.Runs {
		if len(run.Steps) == 0 {
			continue
		}
		svg, err := loadPlot(run, i, axes{until: until, top: ceiling(load), label: "KV tokens of a rank", tick: thousands})
		if err != nil {
			return err
		}
		v.Loads = append(v.Loads, viewPlot{Title: run.Policy, Text: run.text(), Color: template.CSS(seriesVar(i)), SVG: template.HTML(svg)})
	}
	bound := r.Bound[StepMean].Mean
	for _, l := range []struct {
		title, text string
		axes        axes
		value       func(point) float64
		reference   float64
	}{
		{"Imbalance", "sum over ranks of (largest KV load less the rank's own), over the whole run with filling and draining",
			axes{until, ceiling(imbalance), "KV tokens", thousands},
			func(p point) float64 { return p.imbalance }, 0},
		{"Step time", fmt.Sprintf("what every rank of the group waits for, over the whole run; dashed: the mean step if ranks were level, %.2f "+
			"ms", bound),
			axes{until, ceiling(max(length, bound)), "ms", trimmed},
			func(p point) float64 { return p.length }, bound},
	} {
		svg, err := r.linesPlot(l.axes, l.title+" over time, one line a policy", l.value, l.reference)
		if err != nil {
			return err
		}
		v.Lines = append(v.Lines, viewPlot{Title: l.title, Text: l.text, SVG: template.HTML(svg)})
	}
	return nil
}

// text stands beside the plot of a run.
func (run Run) text() string {
	w := run.Window
	if w.Length() == 0 {
		return "nothing was measured: the run was too short"
	}
	return fmt.Sprintf("imbalance %s KV tokens, idle share %.1f %%, step %.2f ms; measured from %.1f to %.1f s",
		Grouped(run.Metrics[Imbalance].Mean, 0), 100*run.Metrics[IdleShare].Mean, run.Metrics[StepMean].Mean, w.From.Seconds(), w.To.Seconds())
}

// ceiling is a little room above the largest value, and at least 1.
func ceiling(x float64) float64 { return math.Max(1, x*1.04) }
