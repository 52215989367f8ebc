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

// Liveness records the signs of life of a decode rank's core, the process that makes its steps. A sign is an event of a stream, or a
// gauge that changed. Liveness also has the requests whose KV the rank has not pulled yet (PendingPull), because the prefill engines
// may keep this KV only as long as the core works (see mooncake.Hold). Methods may be called from any goroutine.
type Liveness struct {
	epoch          time.Time    // times are stored as ns after epoch, which fit into an atomic and do not depend on the wall clock
	lastSign       atomic.Int64 // time of the last sign, in ns after epoch
	minReportedGap atomic.Int64 // ns; only longer gaps between two signs are reported to the holds of waiting requests
	hasGauges      atomic.Bool  // the engine reports gauges that change while the rank works

	mu             sync.Mutex
	pendingPulls   []*PendingPull // requests to this rank whose first event has not come
	cacheSalt      string         // the cache_salt of later requests; empty: none is needed
	saltGeneration int            // number of salts so far, so that an older salt has a lower generation

	// anyRankSalt is the cache_salt of later requests that run on a rank of the engine's own choice; nil: none is needed. All ranks of
	// an engine share it, and it changes with the salt of each of them.
	anyRankSalt *atomic.Pointer[string]
}

// NewLiveness returns the Liveness of a rank. LastSign is the time of this call until the rank gives its first sign of life.
func NewLiveness() *Liveness {
	l := &Liveness{epoch: time.Now(), anyRankSalt: &atomic.Pointer[string]{}}
	l.minReportedGap.Store(math.MaxInt64) // no gap matters until a request waits whose hold depends on signs
	return l
}

func (l *Liveness) toNanos(t time.Time) int64 { return int64(t.Sub(l.epoch)) }

func (l *Liveness) fromNanos(ns int64) time.Time { return l.epoch.Add(time.Duration(ns)) }

// LastSign returns the last time at which the core is known to have worked. Before the first sign, it is the time of NewLiveness.
func (l *Liveness) LastSign() time.Time { return l.fromNanos(l.lastSign.Load()) }

// RecordSign records that the core gave a sign of life at the time at. The core of a decode engine also sends the heartbeats by which the
// prefill engines keep the KV of waiting requests. Therefore a long gap between two signs is reported to the holds of these requests. This
// needs the lock. All other signs are stored without it, and nothing is allocated, because RecordSign is called for every event.
func (l *Liveness) RecordSign(at time.Time) {
	sign := l.toNanos(at)
	for {
		previous := l.lastSign.Load()
		switch {
		case sign <= previous: // another goroutine has recorded a later sign
			return
		case sign-previous > l.minReportedGap.Load(): // a request that waits may have lost its KV in this gap
			l.mu.Lock()
			l.recordSignAndGap(sign)
			l.mu.Unlock()
			return
		case l.lastSign.CompareAndSwap(previous, sign):
			return
		}
	}
}

// recordSignAndGap records a sign of life, whose time is in ns after epoch, and reports the gap since the previous sign to each pending
// pull, a request whose KV the rank has not pulled yet. If the KV of any of them may have been lost, it changes the salt: an engine uses
// cached KV only for requests with the same salt, so later requests do not use the wrong KV that may be in the rank's prefix cache now.
// RecordSign may have recorded a later sign meanwhile, without the lock. Then this sign counts as one right after it, because a first event
// must be judged in any case. The caller holds mu.
func (l *Liveness) recordSignAndGap(sign int64) {
	previous := l.lastSign.Load()
	sign = max(sign, previous+1)
	l.lastSign.Store(sign)
	if anyNewlyLost := l.reportGap(previous, sign); anyNewlyLost {
		l.changeSalt()
	}
	l.markPullsWithOldSaltLost() // also if the salt did not change here: since the last report, another loss may have changed it
}

// reportGap reports to each pending pull that the core gave no sign of life between two times, in ns after epoch. The pull's hold computes
// whether the prefill engine kept the KV meanwhile. anyNewlyLost says that a pull may have lost its KV, and that the salt was not changed
// for it before. Then the caller must change the salt. The caller holds mu.
func (l *Liveness) reportGap(from, to int64) (anyNewlyLost bool) {
	for _, p := range l.pendingPulls {
		p.hold.RecordGap(l.fromNanos(from), l.fromNanos(to))
		newlyLost := p.hold.Lost() && !p.saltChangedSinceLoss
		anyNewlyLost = anyNewlyLost || newlyLost
		p.saltChangedSinceLoss = p.hold.Lost()
	}
	return anyNewlyLost
}

// markPullsWithOldSaltLost marks the KV of each pending pull as lost whose salt is older than the current one. The salt changes when some
// request's KV was lost: the rank may then have another prompt's KV in its prefix cache, under the old salt. A request with the old salt
// could use this KV, so its own answer may be wrong, too. The caller holds mu.
func (l *Liveness) markPullsWithOldSaltLost() {
	for _, p := range l.pendingPulls {
		if p.saltGeneration < l.saltGeneration || p.onAnyRank && p.anyRankSalt != l.anyRankSalt.Load() {
			p.hold.MarkLost()
			p.saltChangedSinceLoss = true // the current salt is newer already, so this loss does not change it once more
		}
	}
}

// changeSalt changes the salt, so that later requests do not use the KV that is in the rank's prefix cache now. An engine uses cached KV
// only for requests with the same cache_salt. The caller holds mu.
func (l *Liveness) changeSalt() {
	l.cacheSalt = rand.Text()
	l.saltGeneration++
	l.anyRankSalt.Store(new(rand.Text())) // the request may also run on this rank
}

// LastRead records the last read from a stream. With it, the next read shows since when the engine must have been alive.
type LastRead struct {
	at    time.Time
	bytes int // bytes that were read at the time at
}

// fullRead is a number of bytes: a read of fewer bytes has emptied the socket.
const fullRead = 2 << 10

// Record records a read of so many bytes at the time now. more says that bytes which have arrived were not read yet. If the previous read
// emptied the socket, the engine sent these bytes after that read: sentAfter is its time, and ok is true. So the engine was alive after
// sentAfter, even if a slow client made evenkeel read late.
func (r *LastRead) Record(bytes int, more bool, now time.Time) (sentAfter time.Time, ok bool) {
	if more { // the socket still has bytes, so this must count as a full read
		bytes += fullRead
	}
	if r.at == now { // the bytes belong to the read that was recorded last
		r.bytes += bytes
		return now, false
	}
	sentAfter, ok = r.at, r.bytes < fullRead && !r.at.IsZero() // zero: there was no read before
	*r = LastRead{now, bytes}
	return sentAfter, ok
}

// PendingPull is a request that was sent to a rank and whose first event has not come.
type PendingPull struct {
	liveness             *Liveness
	sent                 time.Time
	keptWithoutRenewal   time.Time // up to this time the prefill engine keeps the KV even if no sign renews the hold
	hold                 mooncake.Hold
	cacheSalt            string      // the cache_salt of the request; empty: it needs none
	saltGeneration       int         // Liveness.saltGeneration when the request was sent
	onAnyRank            bool        // the engine may run the request on any of its ranks
	anyRankSalt          *string     // Liveness.anyRankSalt when the request was sent
	saltChangedSinceLoss bool        // its KV is lost, and later requests have another salt already
	timer                *time.Timer // calls the function given to OnExpiry; nil: no timer runs
}

// AddPull begins the wait of a request for its first event, until End. It must be called before the request is written. hold says how
// long the prefill engine keeps the request's KV. The request gets the current salt of the rank (cache_salt), which keeps it from wrong KV
// in the rank's prefix cache. The salt's generation shows later whether the rank has got a newer salt meanwhile.
func (l *Liveness) AddPull(now time.Time, hold mooncake.Hold) *PendingPull {
	noSign := time.Time{} // as if no sign of life ever came, so that nothing renews the hold
	pull := &PendingPull{liveness: l, sent: now, keptWithoutRenewal: hold.KeptUntil(noSign), hold: hold}
	l.mu.Lock()
	defer l.mu.Unlock()
	pull.cacheSalt, pull.saltGeneration = l.cacheSalt, l.saltGeneration
	if maxSilence := hold.MaxSilence(); maxSilence > 0 { // 0: signs of life do not renew this hold
		const smallPart = 16 // a gap of less than 1/16 of the longest silence does not matter to a hold
		// Prefill engines may hold KV for different times, and a gap must be reported if it matters to any request that waits.
		minGap := int64(maxSilence / smallPart)
		if len(l.pendingPulls) > 0 {
			minGap = min(minGap, l.minReportedGap.Load())
		}
		l.minReportedGap.Store(minGap)
	}
	l.pendingPulls = append(l.pendingPulls, pull)
	return pull
}

// Sent records that the request has been written. It may be called later than AddPull, because a connection may have to be made.
func (p *PendingPull) Sent() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.hold.Sent(time.Now())
}

// RunsOnAnyRank says that the engine may run the request on another of its ranks than the one that the request names. It must be called
// before Salt. The prefix cache of each rank may have wrong KV, so the salt is one that changes with the salt of each rank.
func (p *PendingPull) RunsOnAnyRank() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.onAnyRank, p.anyRankSalt = true, p.liveness.anyRankSalt.Load()
	if p.anyRankSalt != nil {
		p.cacheSalt = *p.anyRankSalt
	}
}

// Salt returns the cache_salt of the request, which keeps it from using wrong KV in the rank's prefix cache;
// empty: no KV there is known to be wrong.
func (p *PendingPull) Salt() string { return p.cacheSalt }

// OnExpiry marks the KV as lost and calls expire, from another goroutine, once the prefill engine may have freed the KV, unless End is
// called before. When the timer fires, signs of life may have renewed the hold. In this case the timer is set again.
func (p *PendingPull) OnExpiry(expire func()) {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.timer = time.AfterFunc(time.Until(p.keptUntil()), func() {
		p.liveness.mu.Lock()
		remaining := time.Until(p.keptUntil())
		ended := p.timer == nil // End was called while this function waited for the lock
		expired := remaining <= 0 && !ended
		switch {
		case expired:
			p.markLostLocked()
		case !ended:
			p.timer.Reset(remaining)
		}
		p.liveness.mu.Unlock()
		if expired {
			expire()
		}
	})
}

// keptUntil returns the time up to which the KV is certainly kept. The caller holds mu of the Liveness.
func (p *PendingPull) keptUntil() time.Time {
	return p.hold.KeptUntil(p.liveness.fromNanos(p.liveness.lastSign.Load()))
}

// HasGauges says whether the engine's gauges show if the rank's core works, so that they give signs even without streams.
func (l *Liveness) HasGauges() bool { return l.hasGauges.Load() }

// KeptByRenewal says whether, up to the time at, the KV was kept only because heartbeats renewed the hold.
func (p *PendingPull) KeptByRenewal(at time.Time) bool { return at.After(p.keptWithoutRenewal) }

// CheckExpired says whether the prefill engine may have freed the KV by now. If so, it marks the KV as lost: later requests get another
// salt, so that they do not use this KV in the rank's prefix cache.
func (p *PendingPull) CheckExpired(now time.Time) bool {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	if !now.Before(p.keptUntil()) {
		p.markLostLocked()
	}
	return p.hold.Lost()
}

// mayNeedSalt says whether requests to the rank need a salt, or may need one later. A request needs a salt if KV in the rank's prefix cache
// may be wrong: with another salt it does not use that KV. Wrong KV gets there if the prefill engine gives the memory of a waiting
// request's KV to another prompt before the rank has pulled it.
func (l *Liveness) mayNeedSalt() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cacheSalt != "" || len(l.pendingPulls) > 0
}

// MarkLost records that the rank may have read the KV too late. Later requests get another salt, so that they do not use this KV in
// the rank's prefix cache.
func (p *PendingPull) MarkLost() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.markLostLocked()
}

// markLostLocked records that the rank may have read the KV too late, and so may have another prompt's KV in its prefix cache. It changes
// the salt that later requests get: an engine uses cached KV only for requests with the same salt. Later calls for the same request change
// nothing. The caller holds mu of the Liveness.
func (p *PendingPull) markLostLocked() {
	p.hold.MarkLost()
	if !p.saltChangedSinceLoss {
		p.saltChangedSinceLoss = true
		p.liveness.changeSalt()
	}
}

// RecordFirstEvent records that the first event came at the time at, which is also a sign of life. kvValid says whether the KV was
// certainly kept until the rank had read it.
func (p *PendingPull) RecordFirstEvent(at time.Time) (kvValid bool) {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.liveness.recordSignAndGap(p.liveness.toNanos(at))
	return !p.hold.Lost()
}

// End ends the wait for the first event and stops the timer of OnExpiry. A second call does nothing.
func (p *PendingPull) End() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	if i := slices.Index(p.liveness.pendingPulls, p); i >= 0 { // the last element takes its place, because the order does not matter
		last := len(p.liveness.pendingPulls) - 1
		p.liveness.pendingPulls[i], p.liveness.pendingPulls[last] = p.liveness.pendingPulls[last], nil
		p.liveness.pendingPulls = p.liveness.pendingPulls[:last]
	}
}

// silenceShare returns the largest share of its longest allowed silence (see mooncake.Hold.MaxSilence) that any waiting request has spent
// without a sign of life. Above 1, the silence is longer than allowed; 0: no request waits whose hold depends on signs.
func (l *Liveness) silenceShare(now time.Time) (share float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lastSign := l.fromNanos(l.lastSign.Load())
	for _, pull := range l.pendingPulls {
		if maxSilence := pull.hold.MaxSilence(); maxSilence > 0 { // 0: signs of life do not renew this hold
			silentSince := lastSign
			if pull.sent.After(silentSince) { // no sign was expected for this request before it was sent
				silentSince = pull.sent
			}
			share = max(share, float64(now.Sub(silentSince))/float64(maxSilence))
		}
	}
	return share
}
