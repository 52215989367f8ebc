package gateway

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo"
	"evenkeel/lease"
)

// decodeGroup is one of them with its claim.
type decodeGroup struct {
	name    string
	claim   *lease.Claim
	end     context.CancelFunc // of the claim
	view    atomic.Pointer[lease.View]
	sending atomic.Int64  // requests that were admitted and are not written yet
	yields  atomic.Bool   // it is about to be another's: nothing more is begun for it
	hold    time.Duration // others' requests may run there for so long after a takeover

	mu      sync.Mutex
	others  map[string]geo.Resident // requests of others, by rank, while we are cautious
	adopted time.Time               // when it last became ours; zero: it is not
	heard   time.Time               // when its last other owner was heard of
}

// changed takes a view of a group's claim. Once it returns from one that does
// not admit, nothing is bound to the group's engines any more, and what was
// bound before is on its way.
func (s *groups) changed(a *decodeGroup, v lease.View) {
	was := a.view.Swap(&v)
	log := s.gw.log.With(zap.String("group", a.name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
	if was.Admits == v.Admits {
		if was.Phase != v.Phase {
			log.Info("ownership")
		}
		return
	}
	now := time.Now()
	a.mu.Lock()
	a.adopted = time.Time{}
	if !v.Admits {
		clear(a.others)
	}
	var since time.Duration
	if v.Admits {
		s.known.Store(true)
		a.adopted = now
		if !a.heard.IsZero() {
			since = now.Sub(a.heard)
			s.after.Observe(since.Seconds())
		}
		s.taken.WithLabelValues(a.name).Inc()
	}
	a.mu.Unlock()
	log.Warn("ownership of a decode group changed", zap.Bool("admits", v.Admits), zap.Duration("after_the_last_owner", since))
	s.gw.fleet.publish()
	if !v.Admits {
		s.mu.Lock()
		close(s.lost)
		s.lost = make(chan struct{})
		s.mu.Unlock()
		a.flush(s.gw.ctx)
	}
	ctx, cancel := context.WithTimeout(s.gw.ctx, areaEvery)
	defer cancel()
	s.gw.regions.look(ctx) // the dispatcher has taken the news up once it answers
	s.gw.tier.Wake()
}

// flush waits until what was admitted is written. What takes longer finds in its
// last look that it is too late.
func (a *decodeGroup) flush(ctx context.Context) {
	for end := time.Now().Add(sendPatience); a.sending.Load() > 0 && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
}

// enter is where a request begins to be sent to the group's engines; leave must
// be called once it is written, or will not be. A nil group is always ours.
func (a *decodeGroup) enter() (leave func(), ok bool) {
	if a == nil {
		return func() {}, true
	}
	a.sending.Add(1)
	leave = sync.OnceFunc(func() { a.sending.Add(-1) })
	if a.ours() == nil {
		return leave, true
	}
	leave()
	return leave, false
}

// ours is the last look, right before a request is written: a process that stood
// still since it admitted finds out here, and so does a request whose connection
// took longer than flush waits. Else it is errNotOwner.
func (a *decodeGroup) ours() error {
	if a == nil || a.view.Load().Admits && a.claim.Admits(time.Now()) {
		return nil
	}
	return errNotOwner
}

// mark adds the epoch of our ownership, for whoever stands before an engine and
// holds requests of an older one off, or counts them.
func (a *decodeGroup) mark(h []engine.Header) []engine.Header {
	if a == nil {
		return h
	}
	return append(h, engine.Header{Name: epochHeader, Value: strconv.FormatInt(a.view.Load().Epoch, 10)})
}

const epochHeader = "X-Evenkeel-Epoch"

// errNotOwner is a request that would have gone to a group that is another's by
// then.
var errNotOwner = errors.New("another proxy admits to the decode group now")
