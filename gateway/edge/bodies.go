package edge

import (
	"sync"
	"sync/atomic"

	"github.com/valyala/fasthttp"
)

// Bodies bounds the bytes of all request bodies that are in memory: those being
// read, counted by their declared length, and those the handler keeps.
type Bodies struct {
	limit int64
	held  atomic.Int64
}

// NewBodies returns an empty account of so many bytes; 0: no limit.
func NewBodies(limit int64) *Bodies { return &Bodies{limit: limit} }

// Held is how many bytes are taken now.
func (b *Bodies) Held() int64 { return b.held.Load() }

// Keep takes n bytes that are in memory already, for a handler that keeps a body
// beyond its return; whoever does gives them back.
func (b *Bodies) Keep(n int) { b.held.Add(int64(n)) }

// Give gives n bytes back.
func (b *Bodies) Give(n int) { b.held.Add(-int64(n)) }

// take takes n bytes for a body that is about to be read, if there are so many.
func (b *Bodies) take(n int) bool {
	if now := b.held.Add(int64(n)); b.limit > 0 && now > b.limit {
		b.held.Add(-int64(n))
		return false
	}
	return true
}

// reading are the bodies being read now. fasthttp tells of a request's head
// without its connection, so the head, which is the connection's own as long as
// it is served, stands for it.
type reading struct {
	bodies *Bodies
	mu     sync.Mutex
	taken  map[*fasthttp.RequestHeader]int // bytes; -1: refused
}

// begin takes room for a body of n bytes; false: there is none.
func (r *reading) begin(h *fasthttp.RequestHeader, n int) bool {
	ok := r.bodies.take(n)
	if !ok {
		n = -1
	}
	r.mu.Lock()
	before := r.taken[h]
	r.taken[h] = n
	r.mu.Unlock()
	r.give(before) // of a request that ended without a word
	return ok
}

// end gives back what begin took; refused: nothing.
func (r *reading) end(h *fasthttp.RequestHeader) (refused bool) {
	r.mu.Lock()
	n := r.taken[h]
	delete(r.taken, h)
	r.mu.Unlock()
	r.give(n)
	return n < 0
}

func (r *reading) give(n int) {
	if n > 0 {
		r.bodies.Give(n)
	}
}
