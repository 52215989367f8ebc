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

// bar says why a group cannot be claimed, and when the next try is due.
type bar struct {
	why   string
	pause time.Duration // pause before the next try
	until time.Time
}

// Scope is a region or a decode group, with this proxy's claim to own it. Requests pass a Scope before they are sent to its engines (Enter,
// Ours), so that none is sent after the scope is lost. A nil Scope stands for engines that this proxy does not share: it admits everything.
type Scope struct {
	Name       string
	claim      *lease.Claim       // nil: the scope has a static order
	stopClaim  context.CancelFunc // ends the claim
	claimEnded chan struct{}      // closed when the claim has ended
	view       atomic.Pointer[lease.View]
	sending    atomic.Int64  // number of requests that were admitted, but are not written yet
	yielding   atomic.Int32  // open questions after which the scope may go to another proxy; while there are any, no new request begins for it
	home       bool          // the scope is this proxy's own region
	share      float64       // above 0, up to 1: largest part of a rank's slots that this proxy uses while cautious (see Set.Room)
	hold       time.Duration // how long other proxies' requests may still run there after a takeover

	mu          sync.Mutex
	static      *lease.Static           // nil: the scope has a claim instead
	others      map[string]geo.Resident // other proxies' requests, by rank name, while cautious
	othersNamed bool                    // others is complete, because the previous owner has listed its requests
	handedBack  bool                    // this proxy has handed the scope back, and its requests may still run there
	adopted     time.Time               // value of since while this proxy owns the scope; zero: it does not
	epoch       int64                   // the epoch with which this proxy last owned the scope
	since       time.Time               // when this proxy first owned the scope with that epoch
	ownerHeard  time.Time               // last sign of life of another owner; zero: there was none
}

// NewScope returns a scope without an owner.
func NewScope(name string) *Scope {
	a := &Scope{Name: name, share: 1, others: map[string]geo.Resident{}}
	a.view.Store(&lease.View{Phase: lease.Watching})
	return a
}

// Claim gives the scope a claim, and returns the claim. If hooks have no OnChange, a new view of the claim only changes what the scope
// admits.
func (a *Scope) Claim(cfg lease.Config, engine lease.Engine, hooks lease.Hooks, log *zap.Logger) *lease.Claim {
	if hooks.OnChange == nil {
		hooks.OnChange = func(v lease.View) { a.view.Store(&v) }
	}
	a.claim = lease.NewClaim(cfg, engine, hooks, log)
	return a.claim
}

// sendPatience is how long a proxy that has lost a scope waits until the requests that it admitted before are written.
const sendPatience = time.Second

// changed puts a new view of a scope's claim into force. If the view does not admit, no new request is bound to the scope's engines after
// changed has returned, and each request that was bound before has been written or will be stopped by Ours. If the answer to whether this
// proxy admits has changed, changed also publishes it, and a loss closes the channel of Losses.
func (s *Set) changed(a *Scope, v lease.View) {
	old := a.view.Load() // changed is never called twice at the same time for a scope
	log := s.log.With(zap.String(string(s.kind), a.Name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder),
		zap.Int64("epoch", v.Epoch))
	if old.Admits == v.Admits {
		a.mu.Lock()
		if v.Admits {
			a.epoch = v.Epoch
		}
		a.mu.Unlock()
		a.view.Store(&v)
		if old.Phase != v.Phase {
			log.Info("ownership: a lease is in another phase; whether this proxy admits has not changed")
		}
		return
	}
	// The fleet may read the scope between these lines. Caution (a.adopted) therefore begins before the view admits, and ends only after the
	// view no longer admits.
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
	s.deps.Publish(s.ctx)
	if !v.Admits {
		a.flush(s.ctx)
	}
	select {
	case s.lookNow <- struct{}{}: // Run must find out which requests run on the scope's engines
	default:
	}
}

// adopt notes that this proxy owns a scope now. It counts a takeover if the epoch is new, or if the scope has no claim and therefore no
// epochs. With the old epoch, no other proxy has owned the scope in between. after is the time since the last sign of life of another
// owner; 0: there was none, or this is no takeover. The caller holds a.mu.
func (s *Set) adopt(a *Scope, epoch int64, now time.Time) (after time.Duration) {
	a.handedBack = false
	if a.claim == nil || epoch != a.epoch {
		a.epoch, a.since = epoch, now
		if a.hold > 0 {
			a.hold = s.deps.KVHoldTimeout() // a reload may have changed the value since the scope was made
		}
		if !a.ownerHeard.IsZero() {
			after = now.Sub(a.ownerHeard)
		}
		s.metrics.countTakeover(a.Name, after, !a.ownerHeard.IsZero())
	}
	a.adopted = a.since // not the present time, because caution only begins anew with a takeover
	return after
}

// Sending is how many requests have entered, but are not written yet.
func (a *Scope) Sending() int64 { return a.sending.Load() }

// flush waits until the requests that were admitted are written, for at most sendPatience. A request that takes longer
// is stopped by Ours, right before it would be written.
func (a *Scope) flush(ctx context.Context) {
	end := time.Now().Add(sendPatience)
	for a.Sending() > 0 && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

// Enter begins the sending of a request to the scope's engines. ok is false if this proxy does not own the scope. Otherwise the caller must
// call leave when the request is written, or will not be written.
func (a *Scope) Enter() (leave func(), ok bool) {
	if a == nil { // this proxy does not share the engines, so it need not own them
		return func() {}, true
	}
	// The request is counted before Ours is asked. If the scope is lost after that, flush waits until the request is written.
	a.sending.Add(1)
	leave = sync.OnceFunc(func() { a.sending.Add(-1) })
	if err := a.CheckOwned(); err != nil {
		leave()
		return leave, false
	}
	return leave, true
}

// Ours is the last check, right before a request is written. It returns ErrNotOwner if this proxy does not own the scope any more. This
// stops a request if the process was paused after it admitted the request, or if connecting took longer than flush waits.
func (a *Scope) CheckOwned() error {
	if a == nil || a.view.Load().Admits && (a.claim == nil || a.claim.Admits(time.Now())) {
		return nil
	}
	return ErrNotOwner
}

// Epoch is the epoch of the scope's ownership, as known now.
func (a *Scope) Epoch() int64 { return a.view.Load().Epoch }

// Still is Ours for a request that is marked with an epoch. It also returns ErrNotOwner if this proxy owns the scope with a later epoch by
// now, which happens when the store has lost a lease and the proxy takes it again. An engine that has seen the later epoch would take the
// request for that of a former owner.
func (a *Scope) CheckEpoch(epoch int64) error {
	if err := a.CheckOwned(); err != nil || a.Epoch() == epoch {
		return err
	}
	return ErrNotOwner
}

// Admits says whether new work may be bound to the scope's engines.
func (a *Scope) Admits() bool { return a == nil || a.view.Load().Admits }

// Begins says whether requests for the scope's engines may begin here: this proxy owns the scope, and the scope is not about to go to
// another proxy.
func (a *Scope) Begins() bool { return a.Admits() && (a == nil || a.yielding.Load() == 0) }

// Mark adds the header with the epoch of the ownership. A guard in front of an engine can use it to refuse or count requests with an older
// epoch.
func (a *Scope) AppendEpochHeader(h []engine.Header) []engine.Header {
	if a == nil || a.claim == nil {
		return h
	}
	return append(h, engine.Header{Name: EpochHeader, Value: strconv.FormatInt(a.Epoch(), 10)})
}

// Refused records the epoch header of an answer that refuses a request; empty: the answer has none. In this header, a guard that refuses an
// old epoch names the epoch that it has seen.
func (a *Scope) RecordRefusal(header string) {
	if a == nil || a.claim == nil || header == "" {
		return
	}
	if epoch, err := strconv.ParseInt(header, 10, 64); err == nil && epoch > a.Epoch() {
		a.claim.Refused(epoch)
	}
}

// EpochHeader is the header with the epoch of the owner that sends a request. With it, an engine or a guard in front of the engine can
// recognise requests of a former owner.
const EpochHeader = "X-Evenkeel-Epoch"

// ErrNotOwner is the error of a request that must not be sent, because another proxy owns its engines now.
var ErrNotOwner = errors.New("another proxy admits to these engines now")
