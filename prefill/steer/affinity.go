package steer

import (
	"math"
	"time"

	"evenkeel/prefill/policy"
)

// Affinity remembers where the requests of a session went last.
// It is bounded: a key that was not used for ttl is gone, and of more than most
// the one used longest ago.
type Affinity struct {
	ttl    time.Duration
	most   int
	factor float64 // of a candidate's share of all requests, beyond which a session moves

	nodes  []session // 0 is the ring's head: next is the newest, prev the oldest
	byKey  map[uint64]int32
	unused []int32
}

// AffinityConfig sends a session where it was last, while that is not loaded
// more than its share.
type AffinityConfig struct {
	Enabled    bool          `yaml:"enabled"`
	LoadFactor float64       `yaml:"load_factor"` // of a candidate's share of all requests, beyond which the session moves
	TTL        time.Duration `yaml:"ttl"`
	MaxKeys    int           `yaml:"max_keys"`
}

// Outcomes of session affinity, as metrics name them.
const (
	Kept       = "kept"
	Overloaded = "overloaded"
	Gone       = "gone"
	New        = "new"
)

type session struct {
	key        uint64
	candidate  string
	used       time.Time
	prev, next int32
}

// NewAffinity remembers no session yet.
func NewAffinity(c AffinityConfig) *Affinity {
	return &Affinity{ttl: c.TTL, most: c.MaxKeys, factor: c.LoadFactor, nodes: make([]session, 1), byKey: map[uint64]int32{}}
}

// Keep finds where a session was last, by its index, if it may stay there. The
// outcome is empty for a request without a session, or where affinity is off.
func (a *Affinity) Keep(key uint64, eligible []policy.Candidate, now time.Time) (at int, outcome string) {
	if a == nil || key == 0 {
		return 0, ""
	}
	last := a.last(key, now)
	if last == "" {
		return 0, New
	}
	at, sum := -1, 0.0
	for i := range eligible {
		sum += eligible[i].BS
		if eligible[i].ID == last {
			at = i
		}
	}
	if at < 0 {
		return 0, Gone
	}
	if !withinLoad(eligible[at].BS, sum, len(eligible), a.factor) {
		return 0, Overloaded
	}
	return at, Kept
}

// last is where the key's last request went, empty where nothing is known.
func (a *Affinity) last(key uint64, now time.Time) string {
	a.expire(now)
	if i, ok := a.byKey[key]; ok {
		return a.nodes[i].candidate
	}
	return ""
}

// Went remembers where a request of the session goes.
func (a *Affinity) Went(key uint64, candidate string, now time.Time) {
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

func (a *Affinity) expire(now time.Time) {
	for oldest := a.nodes[0].prev; oldest != 0 && now.Sub(a.nodes[oldest].used) >= a.ttl; oldest = a.nodes[0].prev {
		a.drop(oldest)
	}
}

func (a *Affinity) drop(i int32) {
	a.unlink(i)
	delete(a.byKey, a.nodes[i].key)
	a.nodes[i] = session{}
	a.unused = append(a.unused, i)
}

func (a *Affinity) unlink(i int32) {
	n := a.nodes[i]
	a.nodes[n.prev].next, a.nodes[n.next].prev = n.next, n.prev
}

func (a *Affinity) take() int32 {
	if n := len(a.unused); n > 0 {
		i := a.unused[n-1]
		a.unused = a.unused[:n-1]
		return i
	}
	a.nodes = append(a.nodes, session{})
	return int32(len(a.nodes) - 1)
}

func (a *Affinity) keys() int { return len(a.byKey) }

// withinLoad says whether a candidate with a batch of bs may take one more, the
// batches of all n eligible ones being sum together: no more than factor times
// its share.
func withinLoad(bs, sum float64, n int, factor float64) bool {
	return bs+1 <= math.Ceil(factor*(sum+1)/float64(n))
}
