package predictor

import (
	"slices"
)

// ring keeps the last values pushed, at most cap(buf) of them.
type ring struct {
	buf  []int32
	next int // the oldest, once full
	most int
}

func newRing(most int) ring { return ring{most: most} }

// push adds a value and returns the one it forgot.
func (r *ring) push(v int32) (old int32, forgot bool) {
	if len(r.buf) < r.most {
		r.buf = append(r.buf, v)
		return 0, false
	}
	old, r.buf[r.next] = r.buf[r.next], v
	r.next = (r.next + 1) % r.most
	return old, true
}

// values returns them, the oldest first.
func (r *ring) values() []int32 {
	return append(slices.Clone(r.buf[r.next:]), r.buf[:r.next]...)
}

// last returns at most n of the newest, the oldest of them first.
func (r *ring) last(n int) []int32 {
	v := r.values()
	return v[max(len(v)-n, 0):]
}

const recentMost = 256 // values behind the mean and the 90th percentile

// recent describes the lengths of the requests that finished last: what tells
// the trees how traffic differs just now from the past.
type recent struct {
	fast, slow float64 // exponentially weighted means, old weight 0.9 and 0.99
	ring       ring
	sorted     []int32 // what ring holds, ascending
	sum        int64
}

func newRecent() *recent { return &recent{ring: newRing(recentMost)} }

func (r *recent) push(v int32) {
	if len(r.sorted) == 0 {
		r.fast, r.slow = float64(v), float64(v)
	} else {
		r.fast += 0.1 * (float64(v) - r.fast)
		r.slow += 0.01 * (float64(v) - r.slow)
	}
	if old, forgot := r.ring.push(v); forgot {
		at, _ := slices.BinarySearch(r.sorted, old)
		r.sorted = slices.Delete(r.sorted, at, at+1)
		r.sum -= int64(old)
	}
	at, _ := slices.BinarySearch(r.sorted, v)
	r.sorted = slices.Insert(r.sorted, at, v)
	r.sum += int64(v)
}

// features are the two means, the mean of the last 256 and their 90th
// percentile; zeros before anything finished.
func (r *recent) features() [4]float32 {
	n := len(r.sorted)
	if n == 0 {
		return [4]float32{}
	}
	return [4]float32{float32(r.fast), float32(r.slow), float32(float64(r.sum) / float64(n)), float32(r.sorted[n*9/10])}
}

// recentJSON is how a fit file carries it.
type recentJSON struct {
	Fast float64 `json:"ewma_0.9"`
	Slow float64 `json:"ewma_0.99"`
	Last []int32 `json:"last"` // the oldest first
}

func (r *recent) export() recentJSON {
	return recentJSON{Fast: r.fast, Slow: r.slow, Last: r.ring.values()}
}

func (j recentJSON) restore() *recent {
	r := newRecent()
	for _, v := range j.Last {
		r.push(v)
	}
	r.fast, r.slow = j.Fast, j.Slow
	return r
}
