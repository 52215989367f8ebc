package steer

import (
	"container/list"
	"math"
	"time"

	"evenkeel/prefill/policy"
)

// Affinity remembers the candidate of each session's last request. It drops a session that was not used for ttl, and the
// least recently used session when there are more than maxSessions.
type Affinity struct {
	ttl         time.Duration
	maxSessions int
	loadFactor  float64 // a session leaves a candidate whose batch would exceed its even share of all requests by this factor

	byUse list.List // sessions (*session), the most recently used first
	byKey map[uint64]*list.Element
}

// AffinityConfig configures session affinity: a session returns to the engine of its last request, as long as this engine
// does not have much more than its even share of the load.
type AffinityConfig struct {
	Enabled bool `yaml:"enabled"`

	// The others are constants except in tests. LoadFactor: a session leaves an engine that would
	// have more than this factor times its even share, so that sessions stay only while the engines
	// are about level. TTL and MaxKeys bound what is remembered.
	LoadFactor float64       `yaml:"-"`
	TTL        time.Duration `yaml:"-"`
	MaxKeys    int           `yaml:"-"`
}

// Outcomes of session affinity, as metrics name them. Affinity.Keep explains them.
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

// NewAffinity returns an Affinity that remembers no session yet.
func NewAffinity(c AffinityConfig) *Affinity {
	return &Affinity{ttl: c.TTL, maxSessions: c.MaxKeys, loadFactor: c.LoadFactor, byKey: map[uint64]*list.Element{}}
}

// Keep returns the index of the candidate that had the session's last request, if the session may stay on it (outcome Kept). Otherwise the
// index is 0 and means nothing. The outcome is New if the candidate is not known, Gone if it is not eligible, and Overloaded if it would
// have more than loadFactor times its even share of all requests. It is empty for a request without a session, or if affinity is off.
func (a *Affinity) Keep(key uint64, eligible []policy.Engine, now time.Time) (at int, outcome string) {
	if a == nil || key == 0 {
		return 0, ""
	}
	lastCandidate := a.lastCandidate(key, now)
	if lastCandidate == "" {
		return 0, New
	}
	at, totalBS := -1, 0.0 // BS is the batch size of a candidate: how many requests it has
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

// lastCandidate is the candidate of the session's last request; empty: unknown.
func (a *Affinity) lastCandidate(key uint64, now time.Time) string {
	a.expire(now)
	if e := a.byKey[key]; e != nil {
		return e.Value.(*session).candidate
	}
	return ""
}

// Record records the candidate to which a session's present request goes. If the session is new and maxSessions are remembered already, it
// first drops the session that was not used for the longest time. It also drops the sessions that were not used for ttl.
func (a *Affinity) Record(key uint64, candidate string, now time.Time) {
	a.expire(now)
	e := a.byKey[key]
	if e == nil {
		if len(a.byKey) >= a.maxSessions {
			a.drop(a.byUse.Back()) // the least recently used session
		}
		e = a.byUse.PushFront(&session{key: key})
		a.byKey[key] = e
	}
	s := e.Value.(*session)
	s.candidate, s.lastUsed = candidate, now
	a.byUse.MoveToFront(e)
}

// EndSession drops a session, because it sends no further request.
func (a *Affinity) EndSession(key uint64) {
	if e := a.byKey[key]; e != nil {
		a.drop(e)
	}
}

// expire drops the sessions that were not used for ttl.
func (a *Affinity) expire(now time.Time) {
	for e := a.byUse.Back(); e != nil && now.Sub(e.Value.(*session).lastUsed) >= a.ttl; e = a.byUse.Back() {
		a.drop(e)
	}
}

func (a *Affinity) drop(e *list.Element) {
	delete(a.byKey, a.byUse.Remove(e).(*session).key)
}

// withinLoad reports whether a candidate with a batch of bs requests may take one more: with it, the candidate must have at most factor
// times its even share of all requests. totalBS is the sum of the batches of all n eligible candidates.
func withinLoad(bs, totalBS float64, n int, factor float64) bool {
	return bs+1 <= math.Ceil(factor*(totalBS+1)/float64(n))
}
