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

// Signs has the signs of life of a decode rank's core: events of its streams, and gauges that moved. Requests whose KV is on
// its way to the rank wait here, because the prefill engines keep this KV only as long as the core goes on. Methods may be
// called from any goroutine.
type Signs struct {
	begin    time.Time    // times are counted from here, so that they fit into an atomic and do not depend on the wall clock
	last     atomic.Int64 // the last sign, ns after begin
	shortGap atomic.Int64 // ns; a gap that is no longer than this cannot matter to the requests that wait
	gauge    atomic.Bool  // the engine's gauges show whether the rank goes on

	mu    sync.Mutex
	waits []*Wait
	salt  string // the cache_salt of later requests; empty: none is needed
	salts int    // how many salts there have been
}

// NewSigns returns the signs of a rank of which nothing is known yet.
func NewSigns() *Signs {
	s := &Signs{begin: time.Now()}
	s.shortGap.Store(math.MaxInt64) // no gap matters before a request waits whose hold the signs renew
	return s
}

func (s *Signs) since(t time.Time) int64 { return int64(t.Sub(s.begin)) }

func (s *Signs) at(ns int64) time.Time { return s.begin.Add(time.Duration(ns)) }

// Last is the last time at which the core is known to have worked. Before the first sign it is when the rank became
// known.
func (s *Signs) Last() time.Time { return s.at(s.last.Load()) }

// Seen records a sign of life. It is called for every event, and allocates nothing.
func (s *Signs) Seen(at time.Time) {
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

// endGap takes in a sign at the time to, in ns after begin, which ends a gap without signs. It tells each request that
// waits how long the gap was. If a request's KV may have been lost in the gap, later requests get a new salt. It needs
// mu.
func (s *Signs) endGap(to int64) {
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
	// KV that was lost may be in the rank's prefix cache by now, and a request with an older salt might find it there.
	for _, w := range s.waits {
		if w.salts < s.salts {
			w.hold.Lose()
			w.counted = true
		}
	}
}

// resalt changes the salt, so that later requests find nothing that is in the rank's prefix cache now. It needs mu.
func (s *Signs) resalt() {
	s.salt = rand.Text()
	s.salts++
}

// Arrival is what was read of a stream at one moment.
type Arrival struct {
	at    time.Time
	bytes int
}

// enough is so many bytes in one arrival that more may have been left in the socket.
const enough = 2 << 10

// Came takes how many bytes were read now. It returns a time after which they were made: the arrival before, if that
// left nothing in the socket. So it does not matter how late a slow client has them read. left: some of what has come
// was not read. ok is false if no such time is known.
func (a *Arrival) Came(bytes int, left bool, now time.Time) (made time.Time, ok bool) {
	if left {
		bytes += enough
	}
	if a.at == now {
		a.bytes += bytes
		return now, false
	}
	made, ok = a.at, a.bytes < enough && !a.at.IsZero()
	*a = Arrival{now, bytes}
	return made, ok
}

// Wait is a request that was sent to a rank and whose first event has not come.
type Wait struct {
	signs     *Signs
	sent      time.Time
	keptUntil time.Time // until then the KV is kept even if nothing renews the hold
	hold      mooncake.Hold
	salt      string
	salts     int
	counted   bool // its loss has changed the salt already
	timer     *time.Timer
}

// Await begins a wait, before the request is written.
func (s *Signs) Await(now time.Time, hold mooncake.Hold) *Wait {
	w := &Wait{signs: s, sent: now, keptUntil: hold.Until(time.Time{}), hold: hold}
	s.mu.Lock()
	defer s.mu.Unlock()
	w.salt, w.salts = s.salt, s.salts
	if p := hold.Patience(); p > 0 {
		s.shortGap.Store(int64(p / 16))
	}
	s.waits = append(s.waits, w)
	return w
}

// Salt is the cache_salt with which the request finds none of the KV in the rank's prefix cache that may be wrong;
// empty: all KV there is right.
func (w *Wait) Salt() string { return w.salt }

// Limit ends the wait as soon as the KV is not surely kept any more: it then calls expire, from another goroutine.
func (w *Wait) Limit(expire func()) {
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

// until is the time until which the KV is surely kept. It needs mu of the signs.
func (w *Wait) until() time.Time {
	return w.hold.Until(w.signs.at(w.signs.last.Load()))
}

// Gauged says whether the engine's gauges show if the rank's core goes on, also while no stream shows it.
func (s *Signs) Gauged() bool { return s.gauge.Load() }

// Renewed says whether the KV was kept until the time at only because the core went on.
func (w *Wait) Renewed(at time.Time) bool { return at.After(w.keptUntil) }

// Over says whether the time for which the KV was surely kept is over. If it is, later requests must not find this KV
// in the rank's prefix cache.
func (w *Wait) Over(now time.Time) bool {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	if !now.Before(w.until()) {
		w.lose()
	}
	return w.hold.Lost()
}

// Resalt gives later requests a new salt, so that they find nothing of what the rank's prefix cache holds now.
// Requests that wait are not changed.
func (w *Wait) Resalt() {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.signs.salt = rand.Text()
}

// salted says whether requests to the rank need a salt.
func (s *Signs) salted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.salt != ""
}

// Lose says that the KV may have been read too late, so that later requests must not find it in the rank's prefix
// cache.
func (w *Wait) Lose() {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.lose()
}

// lose is Lose; mu of the signs must be held.
func (w *Wait) lose() {
	if w.hold.Lose(); !w.counted {
		w.counted = true
		w.signs.resalt()
	}
}

// Arrived says that the first event came at the time at. held says whether the KV was surely kept until the rank had
// read it.
func (w *Wait) Arrived(at time.Time) (held bool) {
	w.signs.mu.Lock()
	defer w.signs.mu.Unlock()
	w.signs.endGap(max(w.signs.since(at), w.signs.last.Load()+1))
	return !w.hold.Lost()
}

// End ends the wait, whatever became of the request. A second call does nothing.
func (w *Wait) End() {
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

// quiet is the largest share of its patience that a waiting request has used up without a sign of life; 0: no request
// waits.
func (s *Signs) quiet(now time.Time) (most float64) {
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
