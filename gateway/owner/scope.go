package owner

import (
	"context"
	"errors"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo"
	"evenkeel/lease"
)

// claimFailure says why a group cannot be claimed, and when the next try is due.
type claimFailure struct {
	why   string
	pause time.Duration // pause before the next try
	until time.Time
}

// Scope is a region or a decode group, with this proxy's claim to own it. Requests pass a Scope before they are sent to its engines (Enter,
// CheckOwned), so that no request is sent after the scope is lost. A nil Scope stands for engines that this proxy does not share: it admits
// everything.
type Scope struct {
	Name       string
	claim      *lease.Claim       // nil: the scope has a static order
	stopClaim  context.CancelFunc // ends the claim
	claimEnded chan struct{}      // closed when the claim has ended
	view       atomic.Pointer[lease.View]
	sending    atomic.Int64 // number of requests that were admitted, but are not written yet
	// Number of hand-back requests of other proxies that are being answered. While there are any, no new request begins for the scope,
	// because another proxy may get it.
	handBacksPending atomic.Int32
	home             bool          // the scope is this proxy's own region
	maxShare         float64       // largest share of a rank's slots, at most 1, to use while requests of other proxies may run there
	othersMayRunFor  time.Duration // how long after a takeover requests of other proxies may still run; withoutEnd: at any time

	mu             sync.Mutex
	static         *lease.Static           // nil: the scope has a claim instead
	othersLoad     map[string]geo.Resident // other proxies' requests, by rank name, while they may run
	othersReported bool                    // othersLoad is complete, because the previous owner has listed its requests
	handedBack     bool                    // this proxy has handed the scope back, and its requests may still run there
	ownedSince     time.Time               // equal to epochBegan while this proxy owns the scope; zero: it does not own the scope
	lastOwnedEpoch int64                   // the epoch with which this proxy last owned the scope
	epochBegan     time.Time               // when this proxy first owned the scope with that epoch
	ownerLastSeen  time.Time               // last sign of life of another owner; zero: there was none
}

// withoutEnd is the value of Scope.othersMayRunFor if requests of other proxies may run on the scope's engines at any time.
const withoutEnd = time.Duration(math.MaxInt64)

// NewScope returns a scope without an owner. It admits nothing until a view of its claim or static order admits.
func NewScope(name string) *Scope {
	scope := &Scope{Name: name, maxShare: 1, othersLoad: map[string]geo.Resident{}}
	scope.view.Store(&lease.View{Phase: lease.Watching})
	return scope
}

// Claim gives the scope a claim, and returns the claim. If hooks have no OnChange, a new view of the claim only changes what the scope
// admits.
func (scope *Scope) Claim(cfg lease.Config, store lease.Engine, hooks lease.Hooks, log *zap.Logger) *lease.Claim {
	if hooks.OnChange == nil {
		hooks.OnChange = func(v lease.View) { scope.view.Store(&v) }
	}
	scope.claim = lease.NewClaim(cfg, store, hooks, log)
	return scope.claim
}

// writeTimeout bounds how long a proxy that has lost a scope waits until the requests that it admitted before are written.
const writeTimeout = time.Second

// applyView puts a new view of a scope's claim into force. If the view does not admit, no new request is bound to the scope's engines after
// applyView has returned, and each request that was bound before has been written or will be stopped by CheckOwned. If the view changes
// whether this proxy admits, applyView also publishes that, and a loss closes the channel of Losses.
func (s *Set) applyView(scope *Scope, v lease.View) {
	old := scope.view.Load() // applyView is never called twice at the same time for a scope
	log := s.log.With(zap.String(string(s.kind), scope.Name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder),
		zap.Int64("epoch", v.Epoch))
	if old.Admits == v.Admits { // nothing was won or lost, so nothing is announced
		scope.storeUnchanged(v)
		if old.Phase != v.Phase {
			log.Info("ownership: a lease is in another phase; whether this proxy admits has not changed")
		}
		return
	}
	var sinceOtherOwner time.Duration
	if v.Admits {
		sinceOtherOwner = s.storeWin(scope, v)
	} else {
		scope.storeLoss(v) // from here on, the scope admits nothing
	}
	log.Warn("ownership of a "+s.kind.text()+" changed", zap.Bool("admits", v.Admits), zap.Duration("after_the_last_owner", sinceOtherOwner))
	if !v.Admits {
		s.announceLoss()
	}
	s.deps.Publish(s.ctx) // after a loss, no request is bound to the scope's engines from here on, so only bound ones are left to be written
	if !v.Admits {
		scope.waitForWrites(s.ctx)
	}
	s.checkSoon() // Run must find out which requests run on the scope's engines
}

// checkSoon makes Run look at peers and engines at once, without waiting for its interval.
func (s *Set) checkSoon() {
	select {
	case s.checkNow <- struct{}{}:
	default: // Run has not taken the last token yet, and will check anyway
	}
}

// storeUnchanged stores a view that does not change whether this proxy admits. It may have a new epoch: this proxy has acquired a lease
// again that the store had lost. A later win of the scope is a takeover if its epoch is not lastOwnedEpoch. So storeUnchanged records the
// new epoch there: no other proxy has owned the scope since.
func (scope *Scope) storeUnchanged(v lease.View) {
	if v.Admits {
		scope.mu.Lock()
		scope.lastOwnedEpoch = v.Epoch
		scope.mu.Unlock()
	}
	scope.view.Store(&v)
}

// storeWin stores a view by which this proxy owns the scope now. sinceOtherOwner is the time since the last sign of life of the owner
// before; 0: there was none. For a while after a takeover (from ownedSince), the proxy sends little, because requests of the owner before
// may still run. The fleet reads the view without the lock, and then asks how much the proxy may send (RankQuota). Therefore
// recordOwnership sets ownedSince before the view admits.
func (s *Set) storeWin(scope *Scope, v lease.View) (sinceOtherOwner time.Duration) {
	scope.mu.Lock()
	defer scope.mu.Unlock()
	s.ownersKnown.Store(true) // some scope has an owner, so requests can be served (see UnreadyReason)
	sinceOtherOwner = s.recordOwnership(scope, v.Epoch, time.Now())
	scope.view.Store(&v)
	return sinceOtherOwner
}

// storeLoss stores a view by which this proxy does not own the scope any more. ownedSince is cleared only after the view no longer admits,
// for the reason that storeWin names. What other proxies run on the scope's ranks is forgotten, and counted anew after the next takeover.
func (scope *Scope) storeLoss(v lease.View) {
	scope.mu.Lock()
	defer scope.mu.Unlock()
	scope.view.Store(&v)
	scope.ownedSince = time.Time{} // zero: this proxy does not own the scope
	clear(scope.othersLoad)
	scope.othersReported = false // othersLoad is not complete
}

// announceLoss closes the channel that Losses has returned, and makes a new one for the next loss.
func (s *Set) announceLoss() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.lost)
	s.lost = make(chan struct{})
}

// recordOwnership records that this proxy owns a scope now. It is a takeover if the epoch is new, or if the scope has no claim and
// therefore no epochs. With the old epoch, no other proxy has owned the scope in between. sinceOtherOwner is the time since the last sign
// of life of another owner; 0: there was none, or this is no takeover. The caller holds the scope's mu.
func (s *Set) recordOwnership(scope *Scope, epoch int64, now time.Time) (sinceOtherOwner time.Duration) {
	scope.handedBack = false // the scope is this proxy's again
	if isTakeover := scope.claim == nil || epoch != scope.lastOwnedEpoch; isTakeover {
		sinceOtherOwner = s.recordTakeover(scope, epoch, now) // sets epochBegan to now
	}
	// Requests of other proxies may run for a time after ownedSince. After a takeover this is now. If this proxy only lost the scope
	// for a moment, and got it again with the same epoch, the time does not begin anew: it still counts from the takeover.
	scope.ownedSince = scope.epochBegan
	return sinceOtherOwner
}

// recordTakeover records that this proxy owns a scope with a new epoch, or without epochs, and counts this in the metrics. Requests of the
// owner before may still run for othersMayRunFor from now on. With a lease, this is KVHoldTimeout (see newScope). With a static order, it
// has no end. sinceOtherOwner is the time since the last sign of life of another owner; 0: there was none. The caller holds the scope's mu.
func (s *Set) recordTakeover(scope *Scope, epoch int64, now time.Time) (sinceOtherOwner time.Duration) {
	scope.lastOwnedEpoch, scope.epochBegan = epoch, now
	if scope.othersMayRunFor != withoutEnd {
		scope.othersMayRunFor = s.deps.KVHoldTimeout() // a reload may have changed the value since the scope was made
	}
	hadOwner := !scope.ownerLastSeen.IsZero()
	if hadOwner {
		sinceOtherOwner = now.Sub(scope.ownerLastSeen)
	}
	s.metrics.countTakeover(scope.Name, sinceOtherOwner, hadOwner)
	return sinceOtherOwner
}

// Sending is how many requests Enter has admitted that are not written to an engine yet.
func (scope *Scope) Sending() int64 { return scope.sending.Load() }

// waitForWrites waits until all requests that were admitted are written, or writeTimeout is over. A request that is not written by then is
// stopped by CheckOwned, which is called right before a request is written.
func (scope *Scope) waitForWrites(ctx context.Context) {
	end := time.Now().Add(writeTimeout)
	for scope.Sending() > 0 && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

// Enter begins the sending of a request to the scope's engines. ok is false if this proxy does not own the scope. Otherwise the caller must
// call leave when the request is written, or will not be written.
func (scope *Scope) Enter() (leave func(), ok bool) {
	if scope == nil { // this proxy does not share the engines, so it need not own them
		return func() {}, true
	}
	// The request is counted before CheckOwned is asked. If the scope is lost after that, waitForWrites waits until the request is
	// written.
	scope.sending.Add(1)
	leave = sync.OnceFunc(func() { scope.sending.Add(-1) })
	if err := scope.CheckOwned(); err != nil {
		leave()
		return leave, false
	}
	return leave, true
}

// CheckOwned is the last check, right before a request is written. It returns ErrNotOwner if this proxy does not own the scope any more.
// This stops a request if the process was paused after it admitted the request, or if connecting took longer than writeTimeout.
func (scope *Scope) CheckOwned() error {
	if scope == nil { // this proxy does not share the engines, so it need not own them
		return nil
	}
	isStatic := scope.claim == nil // a static order has no lease that could have expired since the view was stored
	if scope.view.Load().Admits && (isStatic || scope.claim.Admits(time.Now())) {
		return nil
	}
	return ErrNotOwner
}

// Epoch is the number of the last acquisition of the scope that this proxy knows of. Each acquisition gets a higher number. 0: none is
// known, or the scope has a static order.
func (scope *Scope) Epoch() int64 { return scope.view.Load().Epoch }

// CheckEpoch is CheckOwned for a request that carries an epoch in its header. It also returns ErrNotOwner if this proxy owns the scope with
// a later epoch by now, which happens when the store has lost a lease and the proxy takes it again. An engine that has seen the later epoch
// would take the request for that of a former owner.
func (scope *Scope) CheckEpoch(epoch int64) error {
	if err := scope.CheckOwned(); err != nil {
		return err
	}
	if scope.Epoch() != epoch {
		return ErrNotOwner
	}
	return nil
}

// Admits says whether new work may be bound to the scope's engines.
func (scope *Scope) Admits() bool { return scope == nil || scope.view.Load().Admits }

// AcceptsNew says whether requests for the scope's engines may begin here: this proxy owns the scope, and the scope is not about to go to
// another proxy.
func (scope *Scope) AcceptsNew() bool {
	if scope == nil { // this proxy does not share the engines
		return true
	}
	return scope.Admits() && scope.handBacksPending.Load() == 0
}

// AppendEpochHeader adds the header with the epoch of the ownership. A guard in front of an engine can use it to refuse or count requests
// with an older epoch.
func (scope *Scope) AppendEpochHeader(h []engine.Header) []engine.Header {
	if scope == nil || scope.claim == nil { // without a lease there is no epoch
		return h
	}
	return append(h, engine.Header{Name: EpochHeader, Value: strconv.FormatInt(scope.Epoch(), 10)})
}

// RecordRefusal records the epoch header of an answer that refuses a request; empty: the answer has none. In this header, a guard that
// refuses an old epoch names the epoch that it has seen. If this is above the epoch of this proxy, the claim is told, and tries to get
// a higher epoch.
func (scope *Scope) RecordRefusal(header string) {
	if scope == nil || scope.claim == nil || header == "" {
		return
	}
	if epoch, err := strconv.ParseInt(header, 10, 64); err == nil && epoch > scope.Epoch() {
		scope.claim.Refused(epoch)
	}
}

// EpochHeader is the header with the epoch of the owner that sends a request. With it, an engine or a guard in front of the engine can
// recognise requests of a former owner.
const EpochHeader = "X-Evenkeel-Epoch"

// ErrNotOwner is the error of a request that must not be sent, because another proxy owns its engines now.
var ErrNotOwner = errors.New("another proxy admits to these engines now")
