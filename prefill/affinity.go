package prefill

import (
	"math"
	"time"
)

// affinity remembers where the requests of a session went last.
// It is bounded: a key that was not used for ttl is gone, and of more than most
// the one used longest ago.
type affinity struct {
	ttl  time.Duration
	most int

	nodes  []session // 0 is the ring's head: next is the newest, prev the oldest
	byKey  map[uint64]int32
	unused []int32
}

type session struct {
	key        uint64
	candidate  string
	used       time.Time
	prev, next int32
}

func newAffinity(ttl time.Duration, most int) *affinity {
	return &affinity{ttl: ttl, most: most, nodes: make([]session, 1), byKey: map[uint64]int32{}}
}

// last is where the key's last request went, empty where nothing is known.
func (a *affinity) last(key uint64, now time.Time) string {
	a.expire(now)
	if i, ok := a.byKey[key]; ok {
		return a.nodes[i].candidate
	}
	return ""
}

// note remembers where a request of the key goes.
func (a *affinity) note(key uint64, candidate string, now time.Time) {
	a.expire(now)
	i, ok := a.byKey[key]
	switch {
	case ok:
		a.unlink(i)
	case len(a.byKey) >= a.most:
		i = a.nodes[0].prev
		a.drop(i)
		fallthrough
	default:
		i = a.take()
		a.byKey[key] = i
	}
	first := a.nodes[0].next
	a.nodes[i] = session{key: key, candidate: candidate, used: now, next: first}
	a.nodes[first].prev, a.nodes[0].next = i, i
}

func (a *affinity) expire(now time.Time) {
	for oldest := a.nodes[0].prev; oldest != 0 && now.Sub(a.nodes[oldest].used) >= a.ttl; oldest = a.nodes[0].prev {
		a.drop(oldest)
	}
}

func (a *affinity) drop(i int32) {
	a.unlink(i)
	delete(a.byKey, a.nodes[i].key)
	a.nodes[i] = session{}
	a.unused = append(a.unused, i)
}

func (a *affinity) unlink(i int32) {
	n := a.nodes[i]
	a.nodes[n.prev].next, a.nodes[n.next].prev = n.next, n.prev
}

func (a *affinity) take() int32 {
	if n := len(a.unused); n > 0 {
		i := a.unused[n-1]
		a.unused = a.unused[:n-1]
		return i
	}
	a.nodes = append(a.nodes, session{})
	return int32(len(a.nodes) - 1)
}

func (a *affinity) keys() int { return len(a.byKey) }

// withinLoad says whether a candidate with a batch of bs may take one more, the
// batches of all n eligible ones being sum together: no more than factor times
// its share.
func withinLoad(bs, sum float64, n int, factor float64) bool {
	return bs+1 <= math.Ceil(factor*(sum+1)/float64(n))
}
