package bind

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Landings are the requests of a decode engine whose KV is on its way, by the id that
// prefill engines write under.
type Landings struct {
	count Counts

	mu    sync.Mutex
	open  map[string]*Landing
	freed map[string]*freed
}

// Landing is a request that has blocks and waits for their KV.
type Landing struct {
	id      string
	engine  string // the decode engine's id
	rank    int
	workers int // of the prefill engine: as many must have written

	done    chan struct{} // closed when the engine believes that the KV is there, or gives up
	senders map[sender]Push
	orphan  func() // called when all is written after the client has left
	err     error
	spoilt  atomic.Bool
}

// sender is a worker of a prefill engine.
type sender struct {
	engine string
	worker int
}

// freed are pages that were given away while a prefill engine may still write them.
type freed struct {
	rank int
	heir *Landing // has the pages now; nil: no request does
}

// NewLandings is an engine that waits for nothing.
func NewLandings(count Counts) *Landings {
	return &Landings{count: count, open: map[string]*Landing{}, freed: map[string]*freed{}}
}

// Open has a request wait. If another one waits under the same id, that one waits for ever.
func (a *Landings) Open(id, engine string, rank, workers int) *Landing {
	l := &Landing{id: id, engine: engine, rank: rank, workers: workers, done: make(chan struct{}), senders: map[sender]Push{}}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open[id] = l
	for _, f := range a.freed {
		if f.rank == rank && f.heir == nil {
			f.heir = l // pages that were freed last are used first
		}
	}
	return l
}

// Land believes a worker. Its word about a request that does not wait is lost without a sign.
func (a *Landings) Land(p Push) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.freed[p.ID]; f != nil {
		delete(a.freed, p.ID)
		if f.heir != nil {
			f.heir.spoilt.Store(true)
			a.count.FreedWrites.Add(1)
		}
		return
	}
	l := a.open[p.ID]
	if l == nil || p.To != "" && p.To != l.engine {
		a.count.LostPushes.Add(1)
		return
	}
	a.count.Pushes.Add(1)
	l.senders[sender{p.Sender, p.Worker}] = p
	if len(l.senders) < l.workers {
		return
	}
	if l.mixed() {
		a.count.MixedPushes.Add(1)
	}
	if l.orphan != nil {
		l.orphan()
	}
	a.end(l, nil)
}

// Fail gives a request up.
func (a *Landings) Fail(l *Landing, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.end(l, err)
}

// FailID gives the request up that waits under an id, if one does.
func (a *Landings) FailID(id string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.open[id]; l != nil {
		a.end(l, err)
	}
}

// Orphan keeps the blocks of a request whose client has left: free is called when all of its KV
// was written. It reports whether that is still to come.
func (a *Landings) Orphan(l *Landing, free func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.over() {
		return false
	}
	l.orphan = free
	return true
}

// Free gives the pages of a request away, though its KV may still be written.
func (a *Landings) Free(l *Landing) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !l.over() {
		a.end(l, nil)
		a.freed[l.id] = &freed{rank: l.rank}
	}
}

// end needs the lock.
func (a *Landings) end(l *Landing, err error) {
	if a.open[l.id] == l {
		delete(a.open, l.id)
	}
	if !l.over() {
		l.err = err
		close(l.done)
	}
}

// Done is closed when the wait is over.
func (l *Landing) Done() <-chan struct{} { return l.done }

func (l *Landing) over() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// mixed says that the workers are of several prefill engines, so that the part of some
// worker was written by none.
func (l *Landing) mixed() bool {
	engines := map[string]bool{}
	for s := range l.senders {
		engines[s.engine] = true
	}
	return len(engines) > 1
}

// Result is what came, once Done is closed. whole: no part of it is missing.
func (l *Landing) Result() (p Push, whole bool, err error) {
	if l.err != nil {
		return Push{}, false, l.err
	}
	whole = !l.mixed()
	for _, p = range l.senders {
		whole = whole && !p.Broken
	}
	return p, whole, nil
}

// Spoilt is set when a prefill engine has written another request's KV over this one's.
func (l *Landing) Spoilt() *atomic.Bool { return &l.spoilt }

// Watch gives a request up after the time of limit, or when the prefill engine at address has
// missed two beats. It returns when the wait is over.
func (a *Landings) Watch(ctx context.Context, client *http.Client, l *Landing, address string, limit, beat time.Duration) {
	late := time.NewTimer(limit)
	defer late.Stop()
	beats := time.NewTicker(beat)
	defer beats.Stop()
	for misses := 0; misses < 2; {
		select {
		case <-beats.C:
			if misses++; alive(ctx, client, address) {
				misses = 0
			}
		case <-late.C:
			a.count.RoomTimeouts.Add(1)
			a.Fail(l, fmt.Errorf("no KV came within %v", limit))
			return
		case <-l.done:
			return
		case <-ctx.Done():
			return
		}
	}
	a.Fail(l, errors.New("the prefill engine's bootstrap server is gone"))
}

// alive says whether a bootstrap server answers.
func alive(ctx context.Context, client *http.Client, address string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/health", nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
}
