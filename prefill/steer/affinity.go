package steer

import (
	"container/list"
	"math"
	"time"

	"evenkeel/prefill/policy"
)

// Affinity remembers the candidate of each session's last request. It drops a session that was not
// used for ttl, and the least recently used one when there are more than maxSessions.
type Affinity struct {
	ttl         time.Duration
	maxSessions int
	loadFactor  float64 // see AffinityConfig

	byUse list.List // *session, the most recently used first
	byKey map[uint64]*list.Element
}

// AffinityConfig configures session affinity: a session returns to the engine of its last request,
// unless this engine has much more than its even share of the load.
type AffinityConfig struct {
	Enabled bool `yaml:"enabled"`

	// The others are constants except in tests. A session leaves an engine that would have more than
	// LoadFactor times its even share, so that sessions stay only while the engines are about level.
	LoadFactor float64       `yaml:"-"`
	TTL        time.Duration `yaml:"-"`
	MaxKeys    int           `yaml:"-"`
}

// Outcomes of session affinity, as metrics name them.
const (
	Kept       = "kept"
	Overloaded = "overloaded"
	Gone       = "gone"
	New        = "new"
)

type session struct {
	key       uint64
	candidate string
	lastUsed  time.Time
}

func NewAffinity(c AffinityConfig) *Affinity {
	return &Affinity{ttl: c.TTL, maxSessions: c.MaxKeys, loadFactor: c.LoadFactor, byKey: map[uint64]*list.Element{}}
}

// Keep returns the index of the candidate that had the session's last request, if the session may
// stay on it (Kept). New: that candidate is not known. Gone: it is not eligible. Overloaded: it
// would have more than loadFactor times its even share of all requests. Empty: there is no session,
// or affinity is off.
func (a *Affinity) Keep(key uint64, eligible []policy.Engine, now time.Time) (at int, outcome string) {
	if a == nil || key == 0 {
		return 0, ""
	}
	lastCandidate := a.lastCandidate(key, now)
	if lastCandidate == "" {
		return 0, New
	}
	at, totalBS := -1, 0.0
	for i := range eligible {
		totalBS += eligible[i].BS
		if eligible[i].ID == lastCandidate {
			at = i
		}
	}
	if at < 0 {
		return 0, Gone
	}
	if !withinLoad(eligible[at].BS, totalBS, len(eligible), a.loadFactor) {
		return 0, Overloaded
	}
	return at, Kept
}

func (a *Affinity) lastCandidate(key uint64, now time.Time) string {
	a.expire(now)
	if e := a.byKey[key]; e != nil {
		return e.Value.(*session).candidate
	}
	return ""
}

func (a *Affinity) Record(key uint64, candidate string, now time.Time) {
	a.expire(now)
	e := a.byKey[key]
	if e == nil {
		if len(a.byKey) >= a.maxSessions {
			a.drop(a.byUse.Back())
		}
		e = a.byUse.PushFront(&session{key: key})
		a.byKey[key] = e
	}
	s := e.Value.(*session)
	s.candidate, s.lastUsed = candidate, now
	a.byUse.MoveToFront(e)
}

func (a *Affinity) EndSession(key uint64) {
	if e := a.byKey[key]; e != nil {
		a.drop(e)
	}
}

func (a *Affinity) expire(now time.Time) {
	for e := a.byUse.Back(); e != nil && now.Sub(e.Value.(*session).lastUsed) >= a.ttl; e = a.byUse.Back() {
		a.drop(e)
	}
}

func (a *Affinity) drop(e *list.Element) {
	delete(a.byKey, a.byUse.Remove(e).(*session).key)
}

// withinLoad reports whether a candidate with bs requests, of totalBS on all n eligible candidates,
// may take one more.
func withinLoad(bs, totalBS float64, n int, factor float64) bool {
	return bs+1 <= math.Ceil(factor*(totalBS+1)/float64(n))
}
