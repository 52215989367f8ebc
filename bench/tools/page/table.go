package page

import (
	"fmt"
	"strconv"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/stats"
)

// Markdown is a table for a document: the first column is text, the others are
// numbers.
type Markdown struct {
	Head []string
	Rows [][]string
	Text int // columns beyond the first that are text, the last ones
}

// Add adds a row.
func (t *Markdown) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

func (t *Markdown) String() string {
	var b strings.Builder
	line := func(cells []string) { b.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	line(t.Head)
	numbers := max(0, len(t.Head)-1-t.Text)
	b.WriteString("|---|" + strings.Repeat("--:|", numbers) + strings.Repeat("---|", len(t.Head)-1-numbers) + "\n")
	for _, r := range t.Rows {
		line(r)
	}
	return b.String()
}

// Rows is a table with a row for each of a list, under the names that label gives them.
func Rows[T any](first string, list []T, label func(T) string, columns ...Cells[T]) string {
	t := Markdown{Head: []string{first}}
	for _, c := range columns {
		t.Head = append(t.Head, c.Title)
	}
	for _, x := range list {
		row := []string{label(x)}
		for _, c := range columns {
			row = append(row, c.Of(x))
		}
		t.Add(row...)
	}
	return t.String()
}

// Cells are a column: what it shows in each row.
type Cells[T any] struct {
	Title string
	Of    func(T) string
}

// Code is a name as pages show it.
func Code(name string) string { return "`" + name + "`" }

// Fenced is a command below a table; none is nothing.
func Fenced(line string) string {
	if line == "" {
		return ""
	}
	return "\n```\n" + line + "\n```\n"
}

// Joined makes a part of a block of each of a list.
func Joined[T any](list []T, part func(T) string) string {
	var parts []string
	for _, x := range list {
		parts = append(parts, part(x))
	}
	return strings.Join(parts, "\n")
}

// Column is how a table shows a metric.
type Column struct {
	Metric report.Metric
	Title  string
	Scale  float64 // from the metric's unit to the shown one
	Digits int     // after the point; below 0: as many as make three in all
}

// Show is mean and deviation.
func (c Column) Show(v report.Value) string {
	s := c.Alone(v)
	if v.SD > 0 {
		s += " ± " + report.Grouped(v.SD*c.Scale, c.places(v))
	}
	return s
}

// Alone is the mean.
func (c Column) Alone(v report.Value) string { return report.Grouped(v.Mean*c.Scale, c.places(v)) }

func (c Column) places(v report.Value) int {
	if c.Digits >= 0 {
		return c.Digits
	}
	switch x := v.Mean * c.Scale; {
	case x < 10:
		return 2
	case x < 100:
		return 1
	}
	return 0
}

// Shown and Deviation are mean and deviation as numbers, as Show writes them. Verdicts are on
// these, so that a reader of the table comes to the same.
func (c Column) Shown(v report.Value) float64 { return Rounded(v.Mean*c.Scale, c.places(v)) }

// Deviation is a deviation as a number, as Show writes it.
func (c Column) Deviation(v report.Value) float64 { return Rounded(v.SD*c.Scale, c.places(v)) }

// Rounded is a number with so many digits after the point.
func Rounded(x float64, digits int) float64 {
	y, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', digits, 64), 64) // of what was just written: never fails
	return y
}

// Ratio is how ratios are written.
func Ratio(x float64) string { return fmt.Sprintf("%.2f", x) }

// Percents is by how much values are more than 1 in the geometric mean, with the 95 % interval that
// other values would give.
func Percents(values []float64) string {
	percent := func(values []float64) float64 { return 100 * (stats.GeometricMean(values) - 1) }
	low, high := stats.Bootstrap(len(values), 0.95, func(drawn []int) float64 {
		some := make([]float64, len(drawn))
		for i, k := range drawn {
			some[i] = values[k]
		}
		return percent(some)
	})
	return fmt.Sprintf("%+.1f (%+.1f to %+.1f)", percent(values), low, high)
}
