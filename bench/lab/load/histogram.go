package load

import (
	"math"
	"math/bits"
	"time"
)

// histogram counts durations in buckets of at most 1/128 of their size, so that
// memory does not grow with the run: a percentile is off by 0.4 % at most.
// Sum, count and largest are exact.
type histogram struct {
	buckets []int64 // grows to the largest
	n, sum  int64   // sum in ns
	largest time.Duration
}

const subBuckets = 128 // a power of two

func bucketOf(d time.Duration) int {
	v := uint64(max(0, d)) >> 10 // about microseconds
	if v < subBuckets {
		return int(v)
	}
	shift := bits.Len64(v) - bits.Len64(subBuckets)
	return (shift+1)*subBuckets + int(v>>shift) - subBuckets
}

// middle is the duration that a bucket stands for.
func middle(bucket int) time.Duration {
	if bucket < subBuckets {
		return time.Duration(bucket<<10 + 1<<9)
	}
	shift := bucket/subBuckets - 1
	low := uint64(bucket%subBuckets+subBuckets) << shift
	return time.Duration(low<<10 + 1<<(shift+9))
}

func (h *histogram) add(d time.Duration) {
	i := bucketOf(d)
	if i >= len(h.buckets) {
		h.buckets = append(h.buckets, make([]int64, i+1-len(h.buckets))...)
	}
	h.buckets[i]++
	h.n++
	h.sum += int64(d)
	h.largest = max(h.largest, d)
}

// percentile is by nearest rank.
func (h *histogram) percentile(p float64) time.Duration {
	left := max(1, int64(math.Ceil(p*float64(h.n))))
	for i, n := range h.buckets {
		if left -= n; left <= 0 {
			return min(middle(i), h.largest)
		}
	}
	return 0
}

// Millis describes durations in milliseconds.
type Millis struct {
	N    int64   `json:"n"`
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

func (h *histogram) millis() Millis {
	if h.n == 0 {
		return Millis{}
	}
	ms := func(d time.Duration) float64 { return math.Round(float64(d)/1e3) / 1e3 }
	return Millis{N: h.n, Mean: ms(time.Duration(h.sum / h.n)), P50: ms(h.percentile(0.50)), P90: ms(h.percentile(0.90)),
		P95: ms(h.percentile(0.95)), P99: ms(h.percentile(0.99)), Max: ms(h.largest)}
}
