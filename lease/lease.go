// Package lease decides which proxy owns a scope of engines: a region that a peer, or a decode
// group that a standby may take over. A store with consensus keeps the lease itself, as a
// Kubernetes Lease or an etcd key. This package adds rules that neither store has: an owner that
// cannot renew stops before another proxy starts, a proxy that takes a scope over waits before it
// admits, and an owner that hands a scope back first stops admission and then releases the lease.
//
// Machine is pure: it receives the time and the outcomes of calls, and returns the next call. Claim
// runs a Machine against an Engine. Static is ownership without a lease.
package lease

import (
	"context"
	"errors"
	"strings"
	"time"
)

// Record is the state of a lease in the store.
type Record struct {
	Holder string // identity; empty: never held, or released
	Epoch  int64  // number of the last acquisition, which always grows; 0: never held
	Stamp  string // opaque version that changes with every acquisition, renewal and release
	Expiry Expiry

	Duration time.Duration // how long the holder's lease lasts; 0: not known
	Members  []string      // the only proxies that may ever take the lease; empty: any proxy may
}

// Expiry says whether the store itself measures how long the holder's lease lasts, and whether the
// lease has expired.
type Expiry int

// Values of Expiry.
const (
	// the store does not measure the time: the holder counts as alive while Stamp changes
	ExpiryUnknown Expiry = iota
	NotExpired           // by the store's clock
	Expired              // by the store's clock, and no proxy has acquired the lease since
)

// Engine is one lease in a store with compare-and-swap. Its methods are called one at a time. A
// call whose context ends may still take effect, even after later calls. This is safe, because a
// write only takes effect if the lease was not written since the engine last read it.
type Engine interface {
	// Look reads the lease. The next Acquire takes the lease only if it is still as Look has read it.
	Look(context.Context) (Record, error)
	// Acquire takes the lease if it was not written since Look. The new epoch is higher than the
	// store's epoch and higher than seenEpoch, so that epochs never decrease, even if the store loses
	// its data.
	Acquire(ctx context.Context, seenEpoch int64) (Record, error)
	// Renew prolongs a lease that is held with this epoch. It may do so even after the lease has
	// expired, as long as no other holder took it. Otherwise it returns ErrLost.
	Renew(ctx context.Context, epoch int64) error
	// Release gives the lease back. It returns ErrLost if the lease is no longer held with this epoch.
	Release(ctx context.Context, epoch int64) error
}

// ErrLost is returned by Renew and Release if the lease has another holder or epoch, or no holder.
var ErrLost = errors.New("the lease is not held with this epoch any more")

// ErrTaken says that another call has written the lease since the last Look. The caller must look
// again.
var ErrTaken = errors.New("the lease was written by another meanwhile")

// Identity names one process of a proxy. A restarted proxy is another holder, because its earlier
// process may still run somewhere.
func Identity(id, boot string) string { return id + "_" + boot }

// Dispatcher returns the proxy's id that a holder's identity contains.
func Dispatcher(holder string) string {
	if i := strings.LastIndexByte(holder, '_'); i >= 0 {
		return holder[:i]
	}
	return holder
}

// Times are the waits that prevent two owners at the same time. Duration + StartDelay is at least
// twice RenewDeadline, so that the clocks of two computers may differ in speed by up to a factor of
// two.
type Times struct {
	Duration      time.Duration // a lease may be taken if it was not renewed for this time
	RenewDeadline time.Duration // an owner that could not renew for this time stops admission
	Retry         time.Duration // interval of renewals, and of another proxy's looks
	StartDelay    time.Duration // from the expiry of a lease to the first admission of its next owner
	RankDelay     time.Duration // extra wait per TakeoverRank before an expired lease is taken
	Step          time.Duration // time limit of each step in which an owner hands the scope back
}

// Waits is the time in the config file, which must be the same for every proxy. All Times are
// scaled in proportion to Lease.
type Waits struct {
	Lease time.Duration `yaml:"lease"` // an owner that does not renew for this time may lose what it owns
}

// DefaultWaits returns the waits that a config file without them gets; they result in DefaultTimes.
func DefaultWaits() Waits { return Waits{DefaultTimes.Duration} }

// Check calls bad for a wait that is too short to rule out two owners, or not in whole seconds.
func (w Waits) Check(bad func(key, format string, args ...any)) {
	if w.Lease < 3*time.Second || w.Lease%time.Second != 0 {
		bad("lease", "%v; write whole seconds, 3s or more", w.Lease)
	}
}

// Times are DefaultTimes, scaled in proportion to Lease.
func (w Waits) Times() Times {
	defaults := DefaultTimes
	scaled := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) / float64(defaults.Duration) * float64(w.Lease))
	}
	return Times{
		Duration: w.Lease, RenewDeadline: scaled(defaults.RenewDeadline), Retry: scaled(defaults.Retry),
		StartDelay: scaled(defaults.StartDelay), RankDelay: scaled(defaults.RankDelay), Step: scaled(defaults.Step),
	}
}

// DefaultTimes are the times that docs/fleet.md describes.
var DefaultTimes = Times{
	Duration: 15 * time.Second, RenewDeadline: 10 * time.Second, Retry: 2 * time.Second,
	StartDelay: 5 * time.Second, RankDelay: 5 * time.Second, Step: 10 * time.Second,
}
