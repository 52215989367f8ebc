package owner

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

// bar is why a group cannot be owned, and when that is tried again.
type bar struct {
	why   string
	pause time.Duration // between the last two tries
	until time.Time
}

// Scope is a region or a decode group: its claim, and the fence before its engines. A nil Scope is one that this proxy
// does not share with other proxies: it admits everything.
type Scope struct {
	Name       string
	claim      *lease.Claim       // nil: the order is static
	stopClaim  context.CancelFunc // of the claim
	claimEnded chan struct{}      // closed once the claim has ended
	view       atomic.Pointer[lease.View]
	sending    atomic.Int64  // requests that were admitted and are not written yet
	yielding   atomic.Bool   // the scope is about to go to another proxy: no new request is begun for it
	home       bool          // a region: it is this proxy's own, by the config
	share      float64       // above 0, up to 1: the part of a rank's slots that we use at most while cautious is true (see Set.Room)
	hold       time.Duration // others' requests may run there for so long after a takeover

	mu          sync.Mutex
	static      *lease.Static           // nil: there is a claim
	others      map[string]geo.Resident // requests of others, by rank, while we are cautious
	othersNamed bool                    // the owner before has named all of them
	handedBack  bool                    // the scope was handed back, and requests of ours may still run there
	adopted     time.Time               // since, while the scope is ours; zero: it is not ours
	epoch       int64                   // the epoch with which it became ours
	since       time.Time               // when it first became ours with that epoch
	ownerHeard  time.Time               // when its last other owner was heard of
}

// NewScope makes a scope that nobody owns.
func NewScope(name string) *Scope {
	a := &Scope{Name: name, share: 1, others: map[string]geo.Resident{}}
	a.view.Store(&lease.View{Phase: lease.Watching})
	return a
}

// Claim gives the scope its claim, and returns it. If hooks have no OnChange, a change of the claim's view changes only
// what the scope admits.
func (a *Scope) Claim(cfg lease.Config, engine lease.Engine, hooks lease.Hooks, log *zap.Logger) *lease.Claim {
	if hooks.OnChange == nil {
		hooks.OnChange = func(v lease.View) { a.view.Store(&v) }
	}
	a.claim = lease.NewClaim(cfg, engine, hooks, log)
	return a.claim
}

// sendPatience is how long a proxy that has lost a scope waits for the requests that it admitted before to be written.
const sendPatience = time.Second

// changed takes a new view of a scope's claim. If the view does not admit, then once changed returns no new request is
// bound to the scope's engines, and each request that was bound before is written, or is stopped by Ours.
func (s *Set) changed(a *Scope, v lease.View) {
	was := a.view.Load() // each scope has one caller at a time
	log := s.log.With(zap.String(string(s.kind), a.Name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder),
		zap.Int64("epoch", v.Epoch))
	if was.Admits == v.Admits {
		a.mu.Lock()
		if v.Admits {
			a.epoch = v.Epoch
		}
		a.mu.Unlock()
		if a.view.Store(&v); was.Phase != v.Phase {
			log.Info("ownership: a lease is in another phase; whether this proxy admits has not changed")
		}
		return
	}
	// A publish between these lines acts on the view: caution is noted before the view
	// admits, and forgotten only after it no longer admits.
	var after time.Duration
	a.mu.Lock()
	if v.Admits {
		s.ownersKnown.Store(true)
		after = s.adopt(a, v.Epoch, time.Now())
		a.view.Store(&v)
	} else {
		a.view.Store(&v)
		a.adopted, a.othersNamed = time.Time{}, false
		clear(a.others)
	}
	a.mu.Unlock()
	log.Warn("ownership of a "+s.kind.words()+" changed", zap.Bool("admits", v.Admits), zap.Duration("after_the_last_owner", after))
	if !v.Admits {
		s.mu.Lock()
		close(s.lost)
		s.lost = make(chan struct{})
		s.mu.Unlock()
	}
	s.host.Publish(s.ctx)
	if !v.Admits {
		a.flush(s.ctx)
	}
	select {
	case s.lookNow <- struct{}{}: // what runs there is not known yet
	default:
	}
}

// adopt notes that a scope has become ours. This is a takeover if the epoch is new: a scope that comes back with the epoch that it had,
// once the store of the leases can be reached again, belonged to no other proxy meanwhile. A scope without a claim has no epochs, so each
// time is a takeover. after is the time since another owner was last heard of; 0: there was none, or this is no takeover. The caller holds
// a.mu.
func (s *Set) adopt(a *Scope, epoch int64, now time.Time) (after time.Duration) {
	a.handedBack = false
	if a.claim == nil || epoch != a.epoch {
		a.epoch, a.since = epoch, now
		if a.hold > 0 {
			a.hold = s.host.Hold() // a reload may have changed it since the scope was made
		}
		if !a.ownerHeard.IsZero() {
			after = now.Sub(a.ownerHeard)
		}
		s.metrics.countTakeover(a.Name, after, !a.ownerHeard.IsZero())
	}
	a.adopted = a.since // not now: if this is no takeover, the caution that began at the last takeover does not begin again
	return after
}

// Sending is how many requests have entered and are not written yet.
func (a *Scope) Sending() int64 { return a.sending.Load() }

// flush waits until the requests that were admitted are written, for at most sendPatience. A request that takes longer
// is stopped by Ours, right before it would be written.
func (a *Scope) flush(ctx context.Context) {
	for end := time.Now().Add(sendPatience); a.Sending() > 0 && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
}

// Enter begins the sending of a request to the scope's engines. ok is false if the scope is not ours. Otherwise leave
// must be called once the request is written, or will not be.
func (a *Scope) Enter() (leave func(), ok bool) {
	if a == nil {
		return func() {}, true
	}
	a.sending.Add(1)
	leave = sync.OnceFunc(func() { a.sending.Add(-1) })
	if a.Ours() == nil {
		return leave, true
	}
	leave()
	return leave, false
}

// Ours is the last check, right before a request is written; ErrNotOwner: the scope is not ours any more. It stops a
// request if the process stood still since it admitted the request, or if the request's connection took longer than
// flush waits.
func (a *Scope) Ours() error {
	if a == nil || a.view.Load().Admits && (a.claim == nil || a.claim.Admits(time.Now())) {
		return nil
	}
	return ErrNotOwner
}

// Epoch is the epoch of the scope's ownership, as known now.
func (a *Scope) Epoch() int64 { return a.view.Load().Epoch }

// Still is Ours for a request that is marked with an epoch. The scope may be ours with a later epoch by now, because a
// lease that the store had lost is taken again without a pause. An engine that has seen the later epoch would take this
// request for one of another owner.
func (a *Scope) Still(epoch int64) error {
	if err := a.Ours(); err != nil || a.Epoch() == epoch {
		return err
	}
	return ErrNotOwner
}

// Admits says whether new work may be bound to the scope's engines.
func (a *Scope) Admits() bool { return a == nil || a.view.Load().Admits }

// Begins says whether requests that the scope's engines will serve may begin here: the scope is ours, and is not about
// to go to another proxy.
func (a *Scope) Begins() bool { return a.Admits() && (a == nil || !a.yielding.Load()) }

// Mark adds the header with the epoch of our ownership, for a guard in front of an engine that keeps requests of an
// older epoch off, or counts them.
func (a *Scope) Mark(h []engine.Header) []engine.Header {
	if a == nil || a.claim == nil {
		return h
	}
	return append(h, engine.Header{Name: EpochHeader, Value: strconv.FormatInt(a.Epoch(), 10)})
}

// Refused takes the epoch header of an answer that refuses a request; empty: there is none. A guard in front of an
// engine that refuses an old epoch says in it which epoch it has seen.
func (a *Scope) Refused(header string) {
	if a == nil || a.claim == nil || header == "" {
		return
	}
	if epoch, err := strconv.ParseInt(header, 10, 64); err == nil && epoch > a.Epoch() {
		a.claim.Refused(epoch)
	}
}

// EpochHeader is the header with the epoch of the owner that sends a request. An engine, or a guard in front of it, can tell by
// it requests of a former owner.
const EpochHeader = "X-Evenkeel-Epoch"

// ErrNotOwner is the error of a request whose engines belong to another proxy by the time it would be written.
var ErrNotOwner = errors.New("another proxy admits to these engines now")
