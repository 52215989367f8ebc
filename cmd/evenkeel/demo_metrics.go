package main

import (
	"context"
	"math"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"

	"evenkeel/bench/lab/report"
	"evenkeel/gateway"
)

// readGateway reads the 99th percentile of a tick's time, in µs, from the proxy's metrics into a
// sample. drift is by how many slots and KV tokens the proxy's accounts do not balance; it should
// be 0.
func readGateway(ctx context.Context, g *gateway.Gateway, into report.Sample) (drift int64, err error) {
	families, err := g.Registry().Gather()
	if err != nil {
		return 0, err
	}
	for _, f := range families {
		if f.GetName() != "evenkeel_tick_seconds" {
			continue
		}
		if seconds := quantile(f.GetMetric(), 0.99); !math.IsNaN(seconds) { // NaN: there was no tick, or the quantile is above the last bucket
			into[report.TickP99] = seconds * 1e6
		}
	}
	d := g.Status(ctx).Dispatch.Drift
	return max(d.Slots, -d.Slots) + max(d.KVTokens, -d.KVTokens), nil // the sum of the absolute values
}

// quantile returns the quantile q (0 to 1) of the sum of histograms with equal buckets. It
// interpolates within a bucket, as PromQL's histogram_quantile does. NaN: there are no
// observations, or the quantile is above the last bucket.
func quantile(series []*dto.Metric, q float64) float64 {
	var total uint64
	var bounds []float64
	var counts []uint64 // counts[i] is how many observations are at most bounds[i]
	for _, m := range series {
		h := m.GetHistogram()
		total += h.GetSampleCount()
		for i, b := range h.GetBucket() {
			if i == len(bounds) {
				bounds, counts = append(bounds, b.GetUpperBound()), append(counts, 0)
			}
			counts[i] += b.GetCumulativeCount()
		}
	}
	rank := q * float64(total)   // how many observations are at most the quantile
	low, below := 0.0, uint64(0) // the lower bound of bucket i, and how many observations are at most that bound
	for i, n := range counts {
		if n > 0 && float64(n) >= rank { // the quantile is in this bucket
			return low + (bounds[i]-low)*(rank-float64(below))/float64(n-below)
		}
		low, below = bounds[i], n
	}
	return math.NaN()
}

// millis returns a time in milliseconds as text, without rounding.
func millis(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + " ms"
}

// micros is like millis, but in microseconds, for times per token, which are far below a
// millisecond.
func micros(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Microsecond), 'f', -1, 64) + " µs"
}
