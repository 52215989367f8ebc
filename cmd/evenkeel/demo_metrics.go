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

// readGateway takes the tick's time from the proxy's metrics and returns how
// far its books are off.
func readGateway(ctx context.Context, g *gateway.Gateway, into report.Sample) (drift int64, err error) {
	families, err := g.Registry().Gather()
	if err != nil {
		return 0, err
	}
	for _, f := range families {
		if f.GetName() != "evenkeel_tick_seconds" {
			continue
		}
		if q := quantile(f.GetMetric(), 0.99); !math.IsNaN(q) {
			into[report.TickP99] = q * 1e6
		}
	}
	d := g.Status(ctx).Dispatch.Drift
	return max(d.Slots, -d.Slots) + max(d.KVTokens, -d.KVTokens), nil
}

// quantile of histograms with equal buckets taken together, as PromQL's
// histogram_quantile: linear within the bucket. NaN: no observation, or it is
// beyond the last bucket.
func quantile(series []*dto.Metric, q float64) float64 {
	var total uint64
	var bounds []float64
	var counts []uint64 // cumulative
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
	rank, low, below := q*float64(total), 0.0, uint64(0)
	for i, n := range counts {
		if n > 0 && float64(n) >= rank {
			return low + (bounds[i]-low)*(rank-float64(below))/float64(n-below)
		}
		low, below = bounds[i], n
	}
	return math.NaN()
}

// millis writes a time as people compare them here.
func millis(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + " ms"
}

// micros writes a short time.
func micros(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Microsecond), 'f', -1, 64) + " µs"
}
