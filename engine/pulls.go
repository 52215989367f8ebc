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

// Pulls are the requests that were sent to the engine at one address and whose first event has not come, with the salt of that address.
// If the hold of a hand-off ends without a first event, the engine may pull another prompt's KV later, and keep it in its prefix cache.
// An engine uses cached KV only for requests with the same cache_salt, so later requests get another salt, and those that wait are
// withheld. The salt belongs to the address: it outlives the engine's role, its ranks' numbers and its process.
type Pulls struct {
	// shortestSilence is the shortest MaxSilence of the answers in one piece that wait, in ns.
	shortestSilence atomic.Int64

	mu      sync.Mutex
	waiting []*PendingPull
	salt    string // the cache_salt of later requests; empty: the engine pulls no KV
}

// newPulls returns the Pulls of an address to which nothing was sent.
func newPulls() *Pulls {
	p := &Pulls{}
	p.shortestSilence.Store(math.MaxInt64)
	return p
}

// Wait describes a request that is sent to a rank.
type Wait struct {
	// KeptUntil is until when the prefill engine certainly keeps the KV of the request's hand-off; zero: it has none.
	KeptUntil time.Time
	// MaxSilence is how long the core may give no sign of life after the request was sent, and still have pulled the KV in time.
	MaxSilence time.Duration
	OnePiece   bool // the answer comes in one piece
	AnyRank    bool // the engine may run the request on another of its ranks than the one that the request names
}

// PendingPull is a request that was sent to a rank and whose first event has not come.
type PendingPull struct {
	Wait
	liveness *Liveness
	sent     time.Time
	salt     string
	silent   bool // see mooncake.Answer
	spoiled  bool // see mooncake.Answer
	lost     bool // the engine may have pulled, or may yet pull, another prompt's KV for it
	ended    bool // nothing waits for it any more, but the engine may still pull its KV
}

// AddPull begins the wait of a request for its first event, until End. It must be called before the request is written.
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

// Salt returns the cache_salt of the request, which keeps it from using wrong KV in the rank's prefix cache;
// empty: no KV there is known to be wrong.
func (p *PendingPull) Salt() string { return p.salt }

// endHolds changes the salt for each hand-off whose hold has ended without a first event, whoever still waits for it. An answer in one piece
// has no first event: it is doubted when its core was silent (recordSilence), or when it comes (Withhold). The caller holds mu.
func (pulls *Pulls) endHolds(now time.Time) {
	for _, p := range pulls.waiting {
		endsByTime := !p.OnePiece || p.ended
		if endsByTime && !p.lost && p.hasHold() && !now.Before(p.KeptUntil) {
			pulls.spoil(p)
		}
	}
	pulls.waiting = slices.DeleteFunc(pulls.waiting, func(p *PendingPull) bool { return p.ended && p.lost })
}

// spoil records that the prefix cache of the request's rank may have, or get, another prompt's KV under the request's salt. The caller holds
// mu.
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

// recordSilence records that the core of a rank gave no sign of life between two times. Of the answers in one piece that wait there, the
// core may pull the KV only now. The caller holds mu.
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

// FirstEvent records that the first event came at the time at, or the whole of an answer in one piece, and returns what is known of the
// answer. It is also a sign of life.
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

// Withhold records that the client does not get the answer, because its KV may be another prompt's.
func (p *PendingPull) Withhold() {
	pulls := p.liveness.pulls
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.spoil(p)
}

// End ends the wait. pullIsOver says that the engine does not pull the KV later: the first event has come, or the engine has refused the
// request, or did not get it. Otherwise the hand-off counts as under way until its hold ends. A second call does nothing.
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

// DistrustCache gives later requests to the address a cache_salt, if none has one yet: another process of the proxy may have had KV pulled
// there too late, and only that process knew.
func (t *Traffic) DistrustCache() {
	t.pulls.mu.Lock()
	defer t.pulls.mu.Unlock()
	if t.pulls.salt == "" {
		t.pulls.salt = rand.Text()
	}
}

// addRank is called when a rank gets a number at this address. A reload may have given the number of another rank to a rank whose prefix
// cache gets another prompt's KV later.
func (pulls *Pulls) addRank() {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	if slices.ContainsFunc(pulls.waiting, (*PendingPull).hasHold) {
		pulls.salt = rand.Text()
	}
}

// Salt returns the cache_salt with which a request finds no KV in the prefix cache of any rank at the address that may be wrong; empty: it
// needs none.
func (pulls *Pulls) Salt(now time.Time) string {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(now)
	return pulls.salt
}

// isIdle says that nothing need be known of the address any more.
func (pulls *Pulls) isIdle(now time.Time) bool {
	pulls.mu.Lock()
	defer pulls.mu.Unlock()
	pulls.endHolds(now)
	return pulls.salt == "" && len(pulls.waiting) == 0
}
