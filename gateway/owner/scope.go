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

type claimFailure struct {
	why   string
	pause time.Duration
	until time.Time
}

// Scope is a region or a decode group, with this proxy's claim to own it. Requests pass it before
// they are sent (Enter, CheckOwned), so that none is sent after the scope is lost. A nil Scope
// stands for engines that this proxy does not share: it admits everything.
type Scope struct {
	Name       string
	claim      *lease.Claim // nil: the scope has a static order
	stopClaim  context.CancelFunc
	claimEnded chan struct{}
	view       atomic.Pointer[lease.View]
	sending    atomic.Int64 // number of requests that were admitted, but are not written yet
	// Hand-back requests that are being answered: no new request begins meanwhile, because another
	// proxy may get the scope.
	handBacksPending atomic.Int32
	home             bool          // the scope is this proxy's own region
	maxShare         float64       // of a rank's slots, at most 1, while others may run there
	othersMayRunFor  time.Duration // after a takeover; withoutEnd: at any time

	mu             sync.Mutex
	static         *lease.Static           // nil: the scope has a claim instead
	othersLoad     map[string]geo.Resident // other proxies' requests, by rank name, while they may run
	othersReported bool                    // othersLoad is complete, as the previous owner said
	// This proxy has handed the scope back, and its requests may still run there.
	handedBack bool
	// ownedSince equals epochBegan while this proxy owns the scope; zero: it does not own the scope.
	ownedSince     time.Time
	lastOwnedEpoch int64     // the epoch with which this proxy last owned the scope
	epochBegan     time.Time // when this proxy first owned the scope with that epoch
	ownerLastSeen  time.Time // last sign of life of another owner; zero: there was none
}

// withoutEnd as Scope.othersMayRunFor says that requests of other proxies may run at any time.
const withoutEnd = time.Duration(math.MaxInt64)

// NewScope returns a scope that admits nothing until a view admits.
func NewScope(name string) *Scope {
	scope := &Scope{Name: name, maxShare: 1, othersLoad: map[string]geo.Resident{}}
	scope.view.Store(&lease.View{Phase: lease.Watching})
	return scope
}

// Claim gives the scope a claim. Without OnChange, a new view only changes what the scope admits.
func (scope *Scope) Claim(cfg lease.Config, store lease.Engine, hooks lease.Hooks, log *zap.Logger) *lease.Claim {
	if hooks.OnChange == nil {
		hooks.OnChange = func(v lease.View) { scope.view.Store(&v) }
	}
	scope.claim = lease.NewClaim(cfg, store, hooks, log)
	return scope.claim
}

// writeTimeout bounds the wait for requests that were admitted before a scope was lost.
const writeTimeout = time.Second

// applyView puts a new view into force. If it does not admit, then after applyView no new request
// is bound to the scope's engines, and each one bound before is written or will be stopped by
// CheckOwned.
func (s *Set) applyView(scope *Scope, v lease.View) {
	old := scope.view.Load() // applyView is never called twice at the same time for a scope
	log := s.log.With(zap.String(string(s.kind), scope.Name), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder),
		zap.Int64("epoch", v.Epoch))
	if old.Admits == v.Admits {
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
		scope.storeLoss(v)
	}
	log.Warn("ownership of a "+s.kind.text()+" changed", zap.Bool("admits", v.Admits), zap.Duration("after_the_last_owner", sinceOtherOwner))
	if !v.Admits {
		s.announceLoss()
	}
	s.deps.Publish(s.ctx) // after a loss, only bound requests are left to be written from here on
	if !v.Admits {
		scope.waitForWrites(s.ctx)
	}
	s.checkSoon() // Run must find out which requests run on the scope's engines
}

func (s *Set) checkSoon() {
	select {
	case s.checkNow <- struct{}{}:
	default: // Run will check anyway
	}
}

// The view may have a new epoch: this proxy has acquired a lease again that the store had lost. No
// other proxy has owned the scope since, so a later win with this epoch is no takeover.
func (scope *Scope) storeUnchanged(v lease.View) {
	if v.Admits {
		scope.mu.Lock()
		scope.lastOwnedEpoch = v.Epoch
		scope.mu.Unlock()
	}
	scope.view.Store(&v)
}

// For a while after a takeover, the proxy sends little. The fleet reads the view without the lock,
// and then asks RankQuota, so ownedSince is set before the view admits. sinceOtherOwner is as in
// recordTakeover.
func (s *Set) storeWin(scope *Scope, v lease.View) (sinceOtherOwner time.Duration) {
	scope.mu.Lock()
	defer scope.mu.Unlock()
	s.ownersKnown.Store(true) // for UnreadyReason
	sinceOtherOwner = s.recordOwnership(scope, v.Epoch, time.Now())
	scope.view.Store(&v)
	return sinceOtherOwner
}

// ownedSince is cleared only after the view no longer admits (see storeWin).
func (scope *Scope) storeLoss(v lease.View) {
	scope.mu.Lock()
	defer scope.mu.Unlock()
	scope.view.Store(&v)
	scope.ownedSince = time.Time{}
	clear(scope.othersLoad)
	scope.othersReported = false
}

func (s *Set) announceLoss() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.lost)
	s.lost = make(chan struct{})
}

// It is a takeover if the epoch is new, or if the scope has no claim and so no epochs: with the old
// epoch, no other proxy has owned the scope in between. The caller holds the scope's mu.
func (s *Set) recordOwnership(scope *Scope, epoch int64, now time.Time) (sinceOtherOwner time.Duration) {
	scope.handedBack = false
	if isTakeover := scope.claim == nil || epoch != scope.lastOwnedEpoch; isTakeover {
		sinceOtherOwner = s.recordTakeover(scope, epoch, now)
	}
	// A scope that was lost only for a moment still counts from its takeover.
	scope.ownedSince = scope.epochBegan
	return sinceOtherOwner
}

// sinceOtherOwner is the time since the last sign of life of another owner; 0: there was none. The
// caller holds the scope's mu.
func (s *Set) recordTakeover(scope *Scope, epoch int64, now time.Time) (sinceOtherOwner time.Duration) {
	scope.lastOwnedEpoch, scope.epochBegan = epoch, now
	if scope.othersMayRunFor != withoutEnd {
		scope.othersMayRunFor = s.deps.KVHoldTimeout() // a reload may have changed it
	}
	hadOwner := !scope.ownerLastSeen.IsZero()
	if hadOwner {
		sinceOtherOwner = now.Sub(scope.ownerLastSeen)
	}
	s.metrics.countTakeover(scope.Name, sinceOtherOwner, hadOwner)
	return sinceOtherOwner
}

// Sending counts requests that are admitted and not written yet.
func (scope *Scope) Sending() int64 { return scope.sending.Load() }

// CheckOwned stops a request that is not written by then.
func (scope *Scope) waitForWrites(ctx context.Context) {
	end := time.Now().Add(writeTimeout)
	for scope.Sending() > 0 && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

// Enter begins the sending of a request. ok is false if this proxy does not own the scope.
// Otherwise the caller must call leave when the request is written, or will not be written.
func (scope *Scope) Enter() (leave func(), ok bool) {
	if scope == nil { // not shared
		return func() {}, true
	}
	// The request is counted before CheckOwned, so that waitForWrites waits for it after a loss.
	scope.sending.Add(1)
	leave = sync.OnceFunc(func() { scope.sending.Add(-1) })
	if err := scope.CheckOwned(); err != nil {
		leave()
		return leave, false
	}
	return leave, true
}

// CheckOwned is the last check, right before a request is written. It stops one if the process was
// paused after it admitted the request, or if connecting took longer than writeTimeout.
func (scope *Scope) CheckOwned() error {
	if scope == nil { // not shared
		return nil
	}
	isStatic := scope.claim == nil // there is no lease that could have expired
	if scope.view.Load().Admits && (isStatic || scope.claim.Admits(time.Now())) {
		return nil
	}
	return ErrNotOwner
}

// Epoch is the number of the last acquisition that this proxy knows of, each higher than the one
// before. 0: none is known, or a static order.
func (scope *Scope) Epoch() int64 { return scope.view.Load().Epoch }

// CheckEpoch is CheckOwned for a request with an epoch in its header. This proxy may own the scope
// with a later epoch by now, if the store had lost a lease: an engine that has seen it would take
// the request for that of a former owner.
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

// AcceptsNew says whether requests may begin here: the scope is not about to go to another proxy.
func (scope *Scope) AcceptsNew() bool {
	if scope == nil { // not shared
		return true
	}
	return scope.Admits() && scope.handBacksPending.Load() == 0
}

// AppendEpochHeader adds the epoch, by which a guard in front of an engine can refuse or count
// requests of a former owner.
func (scope *Scope) AppendEpochHeader(h []engine.Header) []engine.Header {
	if scope == nil || scope.claim == nil { // no lease, no epoch
		return h
	}
	return append(h, engine.Header{Name: EpochHeader, Value: strconv.FormatInt(scope.Epoch(), 10)})
}

// RecordRefusal takes the epoch header of a refusal, in which a guard names the epoch that it has
// seen; empty: none. If it is above this proxy's, the claim tries to get a higher one.
func (scope *Scope) RecordRefusal(header string) {
	if scope == nil || scope.claim == nil || header == "" {
		return
	}
	if epoch, err := strconv.ParseInt(header, 10, 64); err == nil && epoch > scope.Epoch() {
		scope.claim.Refused(epoch)
	}
}

// EpochHeader has the epoch of the owner that sends a request.
const EpochHeader = "X-Evenkeel-Epoch"

// ErrNotOwner means that a request must not be sent, because another proxy owns its engines now.
var ErrNotOwner = errors.New("another proxy admits to these engines now")
