package request

import (
	"net/http"
	"strings"
	"time"

	"evenkeel/gateway/fleet"
	"evenkeel/prefill"
)

// tries is what a job remembers of its failed attempts.
type tries struct {
	count, unsent int      // since the last start: of a resumed answer, those of its next part
	prefill       []string // candidates tried since then
	decode        []int32  // workers that failed, and those beside them
	refused       int      // by prefill engines, attempts not counted
	suspect       int      // engines that it may have broken
	broke         []breach
}

// breach is a connection that broke under a request.
type breach struct {
	engine string
	at     time.Time
}

// mostRefused is how many refusals of prefill engines do not count as attempts,
// because the engines ran nothing. If engines refuse a fifth of their probes, three
// attempts alone would fail one request in a hundred.
const mostRefused = 3

// poison is how many engines a request may have broken before it is stopped.
const poison = 2

// forget drops the attempts before, as far as they count against the next ones.
func (t *tries) forget() {
	t.restart()
	t.prefill = nil
}

// restart does so for a request that may be served here once more: until it is its
// turn, the prefill engines that failed are passed over.
func (t *tries) restart() { t.count, t.unsent, t.refused = 0, 0, 0 }

// shun keeps the next attempts off a rank, and off those behind the same API
// server, while there are others.
func (t *tries) shun(f *fleet.Fleet, worker int32) {
	t.decode = f.Beside(worker, t.decode)
}

// breaks tells whether a request may be what breaks engines: two answered it
// with 500, or died under it.
func (t *tries) breaks(engines *fleet.Fleet, f *fault) bool {
	if f.status == http.StatusInternalServerError {
		return t.suspected()
	}
	return f.status == 0 && f.engine != "" && prefill.Broke(f.err) && t.died(engines, f.engine)
}

// suspected counts an engine that failed at the request, and tells whether it
// was one too many.
func (t *tries) suspected() bool {
	t.suspect++
	return t.suspect >= poison
}

// died notes an engine whose connection broke under the request, and tells
// whether another one of its side broke before and went down then. A
// connection that broke with its engine alive is no sign, and a cluster may
// lose one engine of each side at once.
func (t *tries) died(engines *fleet.Fleet, engine string) bool {
	role, _, _ := strings.Cut(engine, " ")
	for _, b := range t.broke {
		if b.engine != engine && strings.HasPrefix(b.engine, role+" ") && engines.DownSince(b.engine, b.at) {
			return true
		}
	}
	t.broke = append(t.broke, breach{engine, time.Now()})
	return t.suspect+1 >= poison // it answered 500 elsewhere
}
