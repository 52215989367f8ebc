package main

import (
	"strconv"

	"evenkeel/bench/report"
)

// column is how a table shows a metric.
type column struct {
	metric report.Metric
	title  string
	scale  float64 // from the metric's unit to the shown one
	digits int     // after the point; below 0: as many as make three in all
}

var (
	imbalance   = column{report.Imbalance, "imbalance, 1,000 tokens", 1e-3, -1}
	spread      = column{report.MaxMinusMin, "max - min, 1,000 tokens", 1e-3, -1}
	idle        = column{report.IdleShare, "idle, %", 100, 1}
	throughput  = column{report.TokensPerS, "tokens/s", 1, 0}
	tpot        = column{report.TPOTP95, "TPOT p95, ms", 1, 1}
	ttft        = column{report.TTFTP99, "TTFT p99, s", 1e-3, 1}
	e2e         = column{report.E2EP99, "E2E p99, s", 1e-3, 1}
	meanWait    = column{report.WaitMean, "mean wait, s", 1e-3, 1}
	longestWait = column{report.WaitMax, "longest wait, s", 1e-3, 0}
	preempted   = column{report.Preempted, "preempted", 1, 0}
)

// show is mean and deviation.
func (c column) show(v report.Value) string {
	s := c.alone(v)
	if v.SD > 0 {
		s += " ± " + report.Grouped(v.SD*c.scale, c.places(v))
	}
	return s
}

// alone is the mean.
func (c column) alone(v report.Value) string { return report.Grouped(v.Mean*c.scale, c.places(v)) }

func (c column) places(v report.Value) int {
	if c.digits >= 0 {
		return c.digits
	}
	switch x := v.Mean * c.scale; {
	case x < 10:
		return 2
	case x < 100:
		return 1
	}
	return 0
}

// shown and deviation are mean and deviation as numbers, as show writes them. Verdicts are on these, so
// that whoever reads a table comes to the same.
func (c column) shown(v report.Value) float64 { return rounded(v.Mean*c.scale, c.places(v)) }

func (c column) deviation(v report.Value) float64 { return rounded(v.SD*c.scale, c.places(v)) }

// rounded is a number with so many digits after the point.
func rounded(x float64, digits int) float64 {
	y, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', digits, 64), 64)
	return y
}

// hundredths is how ratios are written.
const hundredths = 2
