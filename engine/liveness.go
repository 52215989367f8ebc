package engine

import (
	"sync/atomic"
	"time"
)

// Liveness records the signs of life of a decode rank's core, the process that makes its steps:
// events of streams, and changed gauges. Methods may be called from any goroutine.
type Liveness struct {
	traffic *Traffic // of the engine in its role of now, in which the rank has its number
	pulls   *Pulls   // of the engine's address
	// Times are stored as ns after epoch: they fit into an atomic, without the wall clock.
	epoch    time.Time
	lastSign atomic.Int64 // in ns after epoch
}

// NewLiveness is for the only rank of an engine. Until its first sign, LastSign is now.
func NewLiveness() *Liveness { return &Liveness{pulls: newPulls(), epoch: time.Now()} }

// mayBe says whether two ranks at one address may be one.
func (l *Liveness) mayBe(other *Liveness) bool { return l == other || l.traffic != other.traffic }

// LastSign is when the core was last known to work; before the first sign, see NewLiveness.
func (l *Liveness) LastSign() time.Time { return l.epoch.Add(time.Duration(l.lastSign.Load())) }

// RecordSign is called for every event, so it takes no lock and allocates nothing, unless the gap
// matters to an answer in one piece (see Pulls.recordSilence).
func (l *Liveness) RecordSign(at time.Time) {
	sign := int64(at.Sub(l.epoch))
	for {
		previous := l.lastSign.Load()
		switch {
		case sign <= previous:
			return
		case sign-previous > l.pulls.shortestSilence.Load():
			l.pulls.mu.Lock()
			l.recordSignAfterSilence(sign)
			l.pulls.mu.Unlock()
			return
		case l.lastSign.CompareAndSwap(previous, sign):
			return
		}
	}
}

// recordSignAfterSilence: mu of the pulls is held, so that no answer is judged between the sign and
// the record of the silence.
func (l *Liveness) recordSignAfterSilence(sign int64) {
	for {
		previous := l.lastSign.Load()
		if sign <= previous {
			return
		}
		if l.lastSign.CompareAndSwap(previous, sign) {
			l.pulls.recordSilence(l, l.epoch.Add(time.Duration(previous)), l.epoch.Add(time.Duration(sign)))
			return
		}
	}
}

// LastRead is the last read from a stream. It shows since when the engine must have been alive.
type LastRead struct {
	at    time.Time
	bytes int
}

// fullRead: a read of fewer bytes has emptied the socket.
const fullRead = 2 << 10

// Record records a read; more: further bytes have arrived. If the previous read emptied the socket,
// the engine sent these bytes after it: it was alive after sentAfter, even if a slow client made
// evenkeel read late.
func (r *LastRead) Record(bytes int, more bool, now time.Time) (sentAfter time.Time, ok bool) {
	if more { // must count as a full read
		bytes += fullRead
	}
	if r.at == now { // the same read
		r.bytes += bytes
		return now, false
	}
	sentAfter, ok = r.at, r.bytes < fullRead && !r.at.IsZero()
	*r = LastRead{now, bytes}
	return sentAfter, ok
}

// silenceShare is the largest share of its allowed silence that a waiting request has spent. Two
// thirds of Wait.MaxSilence are allowed, so that the engine gets no more requests before answers
// are doubted. 0: no request with a hand-off waits.
func (l *Liveness) silenceShare(now time.Time) (share float64) {
	l.pulls.mu.Lock()
	defer l.pulls.mu.Unlock()
	for _, p := range l.pulls.waiting {
		if p.liveness != l || p.ended || p.AnyRank || !p.hasHold() {
			continue
		}
		silentSince := l.LastSign()
		if p.sent.After(silentSince) { // no sign was expected before
			silentSince = p.sent
		}
		share = max(share, float64(now.Sub(silentSince))/float64(p.MaxSilence*2/3))
	}
	return share
}
