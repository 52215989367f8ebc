package engine

import (
	"crypto/rand"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/mooncake"
)

// Pulls are the requests that were sent to one address and whose first event has not come. If the
// hold of a hand-off ends without a first event, the engine may pull another prompt's KV later, and
// keep it in its prefix cache. It uses cached KV only for requests with the same cache_salt, so
// later requests get another salt, and those that wait are withheld. The salt outlives the engine's
// role, its ranks' numbers and its process.
type Pulls struct {
	shortestSilence atomic.Int64 // ns, the shortest MaxSilence of the answers in one piece that wait

	mu      sync.Mutex
	waiting []*PendingPull
	salt    string // of later requests; empty: the engine pulls no KV
}

func newPulls() *Pulls {
	p := &Pulls{}
	p.shortestSilence.Store(math.MaxInt64)
	return p
}

// Wait describes a request that is sent to a rank.
type Wait struct {
	// KeptUntil is until when the prefill engine certainly keeps the KV; zero: there is no hand-off.
	KeptUntil time.Time
	// MaxSilence is how long the core may give no sign of life, and still have pulled the KV in time.
	MaxSilence time.Duration
	OnePiece   bool // the answer comes in one piece
	AnyRank    bool // the engine may run the request on another of its ranks
}

// PendingPull is a request whose first event has not come.
type PendingPull struct {
	Wait
	liveness *Liveness
	sent     time.Time
	salt     string
	silent   bool // see mooncake.Answer
	spoiled  bool // see mooncake.Answer
	lost     bool // the engine may have pulled, or may yet pull, another prompt's KV
	ended    bool // nothing waits for it, but the engine may still pull its KV
}

// AddPull must be called before the request is written.
func (l *Liveness) AddPull(now time.Time, w Wait) *PendingPull {
	pulls := l.pulls
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(now)
	p := &PendingPull{Wait: w, liveness: l, sent: now, salt: pulls.salt, silent: w.AnyRank}
	if p.OnePiece && p.hasHold() {
		pulls.shortestSilence.Store(min(pulls.shortestSilence.Load(), int64(p.MaxSilence)))
	}
	pulls.waiting = append(pulls.waiting, p)
	return p
}

func (p *PendingPull) hasHold() bool { return !p.KeptUntil.IsZero() }

// Salt returns the cache_salt that keeps the request from wrong KV in the prefix cache; empty: none
// is needed.
func (p *PendingPull) Salt() string { return p.salt }

// endHolds changes the salt for each hand-off whose hold has ended without a first event. An answer
// in one piece has none: it is doubted when its core was silent, or when it comes (Withhold). The
// caller holds mu.
func (pulls *Pulls) endHolds(now time.Time) {
	for _, p := range pulls.waiting {
		endsByTime := !p.OnePiece || p.ended
		if endsByTime && !p.lost && p.hasHold() && !now.Before(p.KeptUntil) {
			pulls.spoil(p)
		}
	}
	pulls.waiting = slices.DeleteFunc(pulls.waiting, func(p *PendingPull) bool { return p.ended && p.lost })
}

// spoil: the prefix cache may have, or get, another prompt's KV under the request's salt. The
// caller holds mu.
func (pulls *Pulls) spoil(lost *PendingPull) {
	lost.lost = true
	if pulls.salt == lost.salt {
		pulls.salt = rand.Text()
	}
	for _, p := range pulls.waiting {
		sameRank := p.liveness.mayBe(lost.liveness) || p.AnyRank || lost.AnyRank
		p.spoiled = p.spoiled || p != lost && p.salt == lost.salt && sameRank
	}
}

// recordSilence records that the core gave no sign of life between the two times, so that it may
// pull the KV of answers in one piece only now. The caller holds mu.
func (pulls *Pulls) recordSilence(of *Liveness, from, to time.Time) {
	for _, p := range pulls.waiting {
		since := from
		if p.sent.After(from) {
			since = p.sent
		}
		concerned := p.OnePiece && p.hasHold() && (p.liveness.mayBe(of) || p.AnyRank)
		if !concerned || to.Sub(since) <= p.MaxSilence {
			continue
		}
		p.silent = true
		if !p.lost && !to.Before(p.KeptUntil) {
			pulls.spoil(p)
		}
	}
}

// FirstEvent records the first event, or the whole answer in one piece, as a sign of life, too.
func (p *PendingPull) FirstEvent(at time.Time) mooncake.Answer {
	if !p.AnyRank {
		p.liveness.RecordSign(at)
	}
	pulls := p.liveness.pulls
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(at)
	keptUntil := p.KeptUntil
	if !p.hasHold() {
		keptUntil = at.Add(1)
	}
	return mooncake.Answer{KeptUntil: keptUntil, Came: at, Whole: p.OnePiece, Silent: p.silent, Spoiled: p.spoiled}
}

// Withhold records that the client does not get the answer: its KV may be another prompt's.
func (p *PendingPull) Withhold() {
	pulls := p.liveness.pulls
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.spoil(p)
}

// End ends the wait. pullIsOver: the first event has come, or the engine refused or did not get the
// request. Otherwise the hand-off counts as under way until its hold ends. A second call does
// nothing.
func (p *PendingPull) End(now time.Time, pullIsOver bool) {
	pulls := p.liveness.pulls
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	if pullIsOver || !p.hasHold() {
		pulls.waiting = slices.DeleteFunc(pulls.waiting, func(q *PendingPull) bool { return q == p })
	}
	pulls.endHolds(now)
	shortest := int64(math.MaxInt64)
	for _, q := range pulls.waiting {
		if q.OnePiece && q.hasHold() && !q.ended {
			shortest = min(shortest, int64(q.MaxSilence))
		}
	}
	pulls.shortestSilence.Store(shortest)
}

// DistrustCache gives later requests to the address a cache_salt, if none has one yet: another
// process of the proxy may have had KV pulled there too late, and only that process knew.
func (t *Traffic) DistrustCache() {
	t.pulls.mu.Lock()
	defer t.pulls.mu.Unlock()
	if t.pulls.salt == "" {
		t.pulls.salt = rand.Text()
	}
}

// addRank: a reload may give a number to another rank, whose prefix cache gets wrong KV later.
func (pulls *Pulls) addRank() {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	if slices.ContainsFunc(pulls.waiting, (*PendingPull).hasHold) {
		pulls.salt = rand.Text()
	}
}

// Salt returns a cache_salt with which a request finds no wrong KV at the address; empty: none is
// needed.
func (pulls *Pulls) Salt(now time.Time) string {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(now)
	return pulls.salt
}

func (pulls *Pulls) isIdle(now time.Time) bool {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(now)
	return pulls.salt == "" && len(pulls.waiting) == 0
}
