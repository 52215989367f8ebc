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

// Liveness records the signs of life of a decode rank's core, the process that makes its steps: events of its streams, and gauges that
// changed. It also has the requests whose KV the rank has not pulled yet (Wait), because the prefill engines may keep this KV only as
// long as the core works (see mooncake.Hold). Methods may be called from any goroutine.
type Liveness struct {
	begin    time.Time    // times are stored as ns after begin, which fit into an atomic and do not depend on the wall clock
	last     atomic.Int64 // the last sign, ns after begin
	shortGap atomic.Int64 // ns; a gap up to this length between two signs cannot harm a waiting request
	gauge    atomic.Bool  // the engine reports gauges that change while the rank works

	mu    sync.Mutex
	waits []*PendingPull // requests whose first event has not come
	salt  string         // the cache_salt of later requests; empty: none is needed
	salts int            // how many salts there have been
}

// NewLiveness returns the Liveness of a rank that has given no sign yet.
func NewLiveness() *Liveness {
	s := &Liveness{begin: time.Now()}
	s.shortGap.Store(math.MaxInt64) // no gap matters until a request waits whose hold depends on signs
	return s
}

func (s *Liveness) since(t time.Time) int64 { return int64(t.Sub(s.begin)) }

func (s *Liveness) at(ns int64) time.Time { return s.begin.Add(time.Duration(ns)) }

// Last returns the last time at which the core is known to have worked. Before the first sign, it is the time of NewSigns.
func (s *Liveness) Last() time.Time { return s.at(s.last.Load()) }

// Seen records that the core gave a sign of life at the time at. It is called for every event, so it does not allocate.
func (s *Liveness) Seen(at time.Time) {
	to := s.since(at)
	for {
		from := s.last.Load()
		switch {
		case to <= from:
			return
		case to-from > s.shortGap.Load():
			s.mu.Lock()
			s.endGap(to)
			s.mu.Unlock()
			return
		case s.last.CompareAndSwap(from, to):
			return
		}
	}
}

// endGap records a sign of life at the time to, in ns after begin, that comes after a long gap. It reports the gap to the hold of each
// waiting request. If the KV of a request may have been lost in the gap, later requests get a new salt. The caller holds mu.
func (s *Liveness) endGap(to int64) {
	from := s.last.Load()
	if to <= from {
		return
	}
	s.last.Store(to)
	lost := false
	for _, w := range s.waits {
		w.hold.Quiet(s.at(from), s.at(to))
		lost = lost || w.hold.Lost() && !w.counted
		w.counted = w.hold.Lost()
	}
	if lost {
		s.resalt()
	}
	// Lost KV means that another prompt's KV may be in the rank's prefix cache by now. A request with an older salt could use it.
	for _, w := range s.waits {
		if w.salts < s.salts {
			w.hold.Lose()
			w.counted = true
		}
	}
}

// resalt changes the salt, so that later requests do not use what is in the rank's prefix cache now. The caller holds mu.
func (s *Liveness) resalt() {
	s.salt = rand.Text()
	s.salts++
}

// LastRead is the last arrival of bytes on a stream.
type LastRead struct {
	at    time.Time
	bytes int // how many bytes were read at this time
}

// enough is a number of bytes: after an arrival with so many, the socket may still have more.
const enough = 2 << 10

// Came records that bytes were read now, and returns a time after which the engine must have sent them: the previous arrival, if it
// had emptied the socket. This time is right even if a slow client made evenkeel read late. left says that some bytes that have
// come were not read. ok is false if no such time is known.
func (a *LastRead) Came(bytes int, left bool, now time.Time) (made time.Time, ok bool) {
	if left {
		bytes += enough
	}
	if a.at == now {
		a.bytes += bytes
		return now, false
	}
	made, ok = a.at, a.bytes < enough && !a.at.IsZero()
	*a = LastRead{now, bytes}
	return made, ok
}

// PendingPull is a request that was sent to a rank and whose first event has not come.
type PendingPull struct {
	signs     *Liveness
	sent      time.Time
	keptUntil time.Time // up to this time the KV is kept even if nothing renews the hold
	hold      mooncake.Hold
	salt      string      // the cache_salt of the request
	salts     int         // Liveness.salts when the wait began
	counted   bool        // the loss of its KV has changed the salt already
	timer     *time.Timer // see Limit
}

// Await begins the wait of a request. It must be called before the request is written.
func (s *Liveness) Await(now time.Time, hold mooncake.Hold) *PendingPull {
	w := &PendingPull{signs: s, sent: now, keptUntil: hold.Until(time.Time{}), hold: hold}
	s.mu.Lock()
	defer s.mu.Unlock()
	w.salt, w.salts = s.salt, s.salts
	if p := hold.Patience(); p > 0 {
		s.shortGap.Store(int64(p / 16)) // a small part of the patience, so that longer gaps are reported to the hold
	}
	s.waits = append(s.waits, w)
	return w
}

// Salt returns the cache_salt of the request, which keeps it from using wrong KV in the rank's prefix cache;
// empty: no KV there is known to be wrong.
func (w *PendingPull) Salt() string { return w.salt }

// Limit calls expire, from another goroutine, once the prefill engine may have freed the KV, unless End is called before.
func (w *PendingPull) Limit(expire func()) {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.timer = time.AfterFunc(time.Until(w.until()), func() {
		w.signs.mu.Lock()
		left := time.Until(w.until())
		over := left <= 0 && w.timer != nil
		switch {
		case over:
			w.lose()
		case w.timer != nil:
			w.timer.Reset(left)
		}
		w.signs.mu.Unlock()
		if over {
			expire()
		}
	})
}

// until returns the time up to which the KV is certainly kept. The caller holds mu of the Liveness.
func (w *PendingPull) until() time.Time {
	return w.hold.Until(w.signs.at(w.signs.last.Load()))
}

// Gauged says whether the engine's gauges show if the rank's core works, so that they give signs even without streams.
func (s *Liveness) Gauged() bool { return s.gauge.Load() }

// Renewed says whether, up to the time at, the KV was kept only because heartbeats renewed the hold.
func (w *PendingPull) Renewed(at time.Time) bool { return at.After(w.keptUntil) }

// Over says whether the prefill engine may have freed the KV by now. If so, later requests get another salt, so that they do not
// use this KV in the rank's prefix cache.
func (w *PendingPull) Over(now time.Time) bool {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	if !now.Before(w.until()) {
		w.lose()
	}
	return w.hold.Lost()
}

// mayNeedSalt says whether requests to the rank need a salt, or will need one if a request that waits there loses its KV.
func (s *Liveness) mayNeedSalt() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.salt != "" || len(s.waits) > 0
}

// Lose records that the rank may have read the KV too late. Later requests get another salt, so that they do not use this KV in
// the rank's prefix cache.
func (w *PendingPull) Lose() {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.lose()
}

// lose does what Lose does. The caller holds mu of the Liveness.
func (w *PendingPull) lose() {
	if w.hold.Lose(); !w.counted {
		w.counted = true
		w.signs.resalt()
	}
}

// Arrived records that the first event came at the time at. held says whether the KV was certainly kept until the rank had
// read it.
func (w *PendingPull) Arrived(at time.Time) (held bool) {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.signs.endGap(max(w.signs.since(at), w.signs.last.Load()+1))
	return !w.hold.Lost()
}

// End ends the wait. A second call does nothing.
func (w *PendingPull) End() {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	if i := slices.Index(w.signs.waits, w); i >= 0 {
		last := len(w.signs.waits) - 1
		w.signs.waits[i], w.signs.waits[last] = w.signs.waits[last], nil
		w.signs.waits = w.signs.waits[:last]
	}
}

// quiet returns the largest share of its patience (see mooncake.Hold) that any waiting request has spent without a sign of
// life; 0: no request waits.
func (s *Liveness) quiet(now time.Time) (most float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.at(s.last.Load())
	for _, w := range s.waits {
		if p := w.hold.Patience(); p > 0 {
			begin := last
			if w.sent.After(begin) {
				begin = w.sent
			}
			most = max(most, float64(now.Sub(begin))/float64(p))
		}
	}
	return most
}
