package predictor

import "slices"

// ring keeps the values that were pushed last, and forgets the oldest when it is full.
type ring struct {
	buf      []int32
	next     int // index of the oldest value, when the ring is full
	capacity int
}

func newRing(capacity int) ring { return ring{capacity: capacity} }

func (r *ring) push(v int32) {
	if len(r.buf) < r.capacity {
		r.buf = append(r.buf, v)
		return
	}
	r.buf[r.next] = v
	r.next = (r.next + 1) % r.capacity
}

// values puts the oldest first.
func (r *ring) values() []int32 {
	return append(slices.Clone(r.buf[r.next:]), r.buf[:r.next]...)
}

// last returns at most n of the newest values, the oldest of them first.
func (r *ring) last(n int) []int32 {
	v := r.values()
	return v[max(len(v)-n, 0):]
}
