package engine

import (
	"sync/atomic"
	"time"
)

// Liveness records the signs of life of a decode rank's core, the process that makes its steps. A sign is an event of a stream, or a
// gauge that changed. Methods may be called from any goroutine.
type Liveness struct {
	traffic  *Traffic     // of the engine in its role of now; a rank has another number in another role
	pulls    *Pulls       // of the engine's address
	epoch    time.Time    // times are stored as ns after epoch, which fit into an atomic and do not depend on the wall clock
	lastSign atomic.Int64 // time of the last sign, in ns after epoch
}

// NewLiveness returns the Liveness of the only rank of an engine. LastSign is the time of this call until the rank gives its first sign of
// life.
func NewLiveness() *Liveness { return &Liveness{pulls: newPulls(), epoch: time.Now()} }

// mayBe says whether two ranks at one address may be one.
func (l *Liveness) mayBe(other *Liveness) bool { return l == other || l.traffic != other.traffic }

// LastSign returns the last time at which the core is known to have worked. Before the first sign, it is the time of NewLiveness.
func (l *Liveness) LastSign() time.Time { return l.epoch.Add(time.Duration(l.lastSign.Load())) }

// RecordSign records that the core gave a sign of life at the time at. It is called for every event, so it takes no lock and allocates
// nothing, unless the gap since the last sign is so long that it matters to an answer in one piece (see Pulls.recordSilence).
func (l *Liveness) RecordSign(at time.Time) {
	sign := int64(at.Sub(l.epoch))
	for {
		previous := l.lastSign.Load()
		switch {
		case sign <= previous: // another goroutine has recorded a later sign
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

// recordSignAfterSilence is called with mu of the pulls held, so that no answer is judged between the sign and the record of the silence.
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

// silenceShare returns the largest share of its longest allowed silence that any request which waits on the rank has spent without a sign of
// life. It is two thirds of Wait.MaxSilence, so that the engine gets no more requests before answers are doubted. Above 1, the silence is
// longer than allowed; 0: no request with a hand-off waits.
func (l *Liveness) silenceShare(now time.Time) (share float64) {
	l.pulls.mu.Lock()
	defer l.pulls.mu.Unlock()
	for _, p := range l.pulls.waiting {
		if p.liveness != l || p.ended || p.AnyRank || !p.hasHold() {
			continue
		}
		silentSince := l.LastSign()
		if p.sent.After(silentSince) { // no sign was expected for this request before it was sent
			silentSince = p.sent
		}
		share = max(share, float64(now.Sub(silentSince))/float64(p.MaxSilence*2/3))
	}
	return share
}
