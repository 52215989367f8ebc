// Package suspect says whether engines or the request itself are why attempts to serve it fail.
package suspect

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/prefill"
)

// Tries is what is remembered of a request's failed attempts.
type Tries struct {
	Count, Unsent int      // since the last start: of a resumed answer, those of its next part
	Prefill       []string // candidates tried since then
	Decode        []int32  // workers that failed, and those beside them
	Refused       int      // by prefill engines, attempts not counted

	suspect int // engines that it may have broken
	broke   []breach
}

// breach is a connection that broke under a request.
type breach struct {
	engine string
	at     time.Time
}

// MostRefused is how many refusals of prefill engines do not count as attempts,
// because the engines ran nothing. If engines refuse a fifth of their probes, three
// attempts alone would fail one request in a hundred.
const MostRefused = 3

// poison is how many engines a request may have broken before it is stopped.
const poison = 2

// Forget drops the attempts before, as far as they count against the next ones.
func (t *Tries) Forget() {
	t.Restart()
	t.Prefill = nil
}

// Restart does so for a request that may be served here once more: until it is its
// turn, the prefill engines that failed are passed over.
func (t *Tries) Restart() { t.Count, t.Unsent, t.Refused = 0, 0, 0 }

// Shun keeps the next attempts off a rank, and off those behind the same API
// server, while there are others.
func (t *Tries) Shun(f *fleet.Fleet, worker int32) {
	t.Decode = f.Beside(worker, t.Decode)
}

// Breaks tells whether a request may be what breaks engines: two answered it
// with 500, or died under it. A request whose KV did not arrive fails in any case.
func (t *Tries) Breaks(engines *fleet.Fleet, status int, engine string, err error) bool {
	if errors.Is(err, failure.ErrUndelivered) {
		return false
	}
	if status == http.StatusInternalServerError {
		return t.Suspected()
	}
	return status == 0 && engine != "" && prefill.Broke(err) && t.Died(engines, engine)
}

// Poisons tells whether the request is taken for what breaks engines.
func (t *Tries) Poisons() bool { return t.suspect >= poison }

// Suspected counts an engine that failed at the request, and tells whether it
// was one too many.
func (t *Tries) Suspected() bool {
	t.suspect++
	return t.suspect >= poison
}

// Died notes an engine whose connection broke under the request, and tells
// whether another one of its side broke before and went down then. A
// connection that broke with its engine alive is no sign, and a cluster may
// lose one engine of each side at once.
func (t *Tries) Died(engines *fleet.Fleet, engine string) bool {
	role, _, _ := strings.Cut(engine, " ")
	for _, b := range t.broke {
		if b.engine != engine && strings.HasPrefix(b.engine, role+" ") && engines.DownSince(b.engine, b.at) {
			return true
		}
	}
	t.broke = append(t.broke, breach{engine, time.Now()})
	return t.suspect+1 >= poison // it answered 500 elsewhere
}
