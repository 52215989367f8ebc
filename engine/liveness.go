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
	begin    time.Time    // times are stored as ns after begin, which fit into an atomic and do not depend on the wall clock
	last     atomic.Int64 // the last sign, ns after begin
	shortGap atomic.Int64 // ns; only longer gaps between two signs are reported to the holds of waiting requests
	gauge    atomic.Bool  // the engine reports gauges that change while the rank works

	mu    sync.Mutex
	pulls []*PendingPull // requests whose first event has not come
	salt  string         // the cache_salt of later requests; empty: none is needed
	salts int            // how many salts there have been
}

// NewLiveness returns the Liveness of a rank that has given no sign yet.
func NewLiveness() *Liveness {
	l := &Liveness{begin: time.Now()}
	l.shortGap.Store(math.MaxInt64) // no gap matters until a request waits whose hold depends on signs
	return l
}

func (l *Liveness) since(t time.Time) int64 { return int64(t.Sub(l.begin)) }

func (l *Liveness) at(ns int64) time.Time { return l.begin.Add(time.Duration(ns)) }

// Last returns the last time at which the core is known to have worked. Before the first sign, it is the time of NewLiveness.
func (l *Liveness) LastSign() time.Time { return l.at(l.last.Load()) }

// Seen records that the core gave a sign of life at the time at. It is called for every event, so it does not allocate.
func (l *Liveness) RecordSign(at time.Time) {
	to := l.since(at)
	for {
		from := l.last.Load()
		switch {
		case to <= from:
			return
		case to-from > l.shortGap.Load(): // KV may have been lost meanwhile
			l.mu.Lock()
			l.endGap(to)
			l.mu.Unlock()
			return
		case l.last.CompareAndSwap(from, to):
			return
		}
	}
}

// endGap records a sign of life that came to ns after begin, and reports the gap since the last sign to the hold of each waiting
// request. If the KV of a request may have been lost in the gap, later requests get a new salt. The caller holds mu.
func (l *Liveness) endGap(to int64) {
	from := l.last.Load()
	if to <= from {
		return
	}
	l.last.Store(to)
	lost := false
	for _, p := range l.pulls {
		p.hold.Quiet(l.at(from), l.at(to))
		newlyLost := p.hold.Lost() && !p.counted
		lost = lost || newlyLost
		p.counted = p.hold.Lost()
	}
	if lost {
		l.resalt()
	}
	// Lost KV means that another prompt's KV may be in the rank's prefix cache by now. A request with an older salt could use it.
	for _, p := range l.pulls {
		if p.salts < l.salts {
			p.hold.Lose()
			p.counted = true
		}
	}
}

// resalt changes the salt, so that later requests do not use the KV that is in the rank's prefix cache now. An engine uses cached KV
// only for requests with the same cache_salt. The caller holds mu.
func (l *Liveness) resalt() {
	l.salt = rand.Text()
	l.salts++
}

// LastRead is the last read of bytes from a stream.
type LastRead struct {
	at    time.Time
	bytes int // how many bytes were read at this time
}

// enough is a number of bytes: a read of fewer has emptied the socket.
const enough = 2 << 10

// Came records that bytes were read now. If the previous read emptied the socket, the engine sent these bytes after that read:
// made is its time, and ok is true. The time is right even if a slow client made evenkeel read late. left says that not
// all bytes that have arrived were read.
func (r *LastRead) Record(bytes int, left bool, now time.Time) (made time.Time, ok bool) {
	if left { // this read has not emptied the socket
		bytes += enough
	}
	if r.at == now { // the bytes belong to the read that was recorded last
		r.bytes += bytes
		return now, false
	}
	made, ok = r.at, r.bytes < enough && !r.at.IsZero()
	*r = LastRead{now, bytes}
	return made, ok
}

// PendingPull is a request that was sent to a rank and whose first event has not come.
type PendingPull struct {
	liveness  *Liveness
	sent      time.Time
	keptUntil time.Time // up to this time the KV is kept even if nothing renews the hold
	hold      mooncake.Hold
	salt      string      // the cache_salt of the request
	salts     int         // Liveness.salts when the wait began
	counted   bool        // the loss of its KV has changed the salt already
	timer     *time.Timer // see Limit
}

// Await begins the wait of a request. It must be called before the request is written.
func (l *Liveness) AddPull(now time.Time, hold mooncake.Hold) *PendingPull {
	pull := &PendingPull{liveness: l, sent: now, keptUntil: hold.Until(time.Time{}), hold: hold}
	l.mu.Lock()
	defer l.mu.Unlock()
	pull.salt, pull.salts = l.salt, l.salts
	if p := hold.Patience(); p > 0 {
		l.shortGap.Store(int64(p / 16)) // a small part of the patience, so that longer gaps are reported to the hold
	}
	l.pulls = append(l.pulls, pull)
	return pull
}

// Salt returns the cache_salt of the request, which keeps it from using wrong KV in the rank's prefix cache;
// empty: no KV there is known to be wrong.
func (p *PendingPull) Salt() string { return p.salt }

// Limit calls expire, from another goroutine, once the prefill engine may have freed the KV, unless End is called before. When the
// timer fires, signs of life may have renewed the hold. In this case the timer is set again.
func (p *PendingPull) OnExpiry(expire func()) {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.timer = time.AfterFunc(time.Until(p.until()), func() {
		p.liveness.mu.Lock()
		left := time.Until(p.until())
		ended := p.timer == nil // End was called while this function waited for the lock
		over := left <= 0 && !ended
		switch {
		case over:
			p.lose()
		case !ended:
			p.timer.Reset(left)
		}
		p.liveness.mu.Unlock()
		if over {
			expire()
		}
	})
}

// until returns the time up to which the KV is certainly kept. The caller holds mu of the Liveness.
func (p *PendingPull) until() time.Time {
	return p.hold.Until(p.liveness.at(p.liveness.last.Load()))
}

// Gauged says whether the engine's gauges show if the rank's core works, so that they give signs even without streams.
func (l *Liveness) HasGauges() bool { return l.gauge.Load() }

// Renewed says whether, up to the time at, the KV was kept only because heartbeats renewed the hold.
func (p *PendingPull) KeptByRenewal(at time.Time) bool { return at.After(p.keptUntil) }

// Over says whether the prefill engine may have freed the KV by now. If so, later requests get another salt, so that they do not
// use this KV in the rank's prefix cache.
func (p *PendingPull) CheckExpired(now time.Time) bool {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	if !now.Before(p.until()) {
		p.lose()
	}
	return p.hold.Lost()
}

// mayNeedSalt says whether requests to the rank need a salt, or will need one if a request that waits there loses its KV.
func (l *Liveness) mayNeedSalt() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.salt != "" || len(l.pulls) > 0
}

// Lose records that the rank may have read the KV too late. Later requests get another salt, so that they do not use this KV in
// the rank's prefix cache.
func (p *PendingPull) MarkLost() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.lose()
}

// lose does what Lose does. The caller holds mu of the Liveness.
func (p *PendingPull) lose() {
	if p.hold.Lose(); !p.counted {
		p.counted = true
		p.liveness.resalt()
	}
}

// Arrived records that the first event came at the time at. held says whether the KV was certainly kept until the rank had
// read it.
func (p *PendingPull) RecordFirstEvent(at time.Time) (held bool) {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	p.liveness.endGap(max(p.liveness.since(at), p.liveness.last.Load()+1)) // +1 ns, because endGap ignores a time that is not later
	return !p.hold.Lost()
}

// End ends the wait. A second call does nothing.
func (p *PendingPull) End() {
	p.liveness.mu.Lock()
	defer p.liveness.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	if i := slices.Index(p.liveness.pulls, p); i >= 0 {
		last := len(p.liveness.pulls) - 1
		p.liveness.pulls[i], p.liveness.pulls[last] = p.liveness.pulls[last], nil
		p.liveness.pulls = p.liveness.pulls[:last]
	}
}

// quiet returns the largest share of its patience (see mooncake.Hold) that any waiting request has spent without a sign of
// life. It may be above 1; 0: no request waits whose hold depends on signs.
func (l *Liveness) quiet(now time.Time) (most float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.at(l.last.Load())
	for _, pull := range l.pulls {
		if p := pull.hold.Patience(); p > 0 {
			begin := last
			if pull.sent.After(begin) {
				begin = pull.sent
			}
			most = max(most, float64(now.Sub(begin))/float64(p))
		}
	}
	return most
}
