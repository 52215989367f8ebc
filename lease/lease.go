// Package lease decides which dispatcher owns a scope of engines: a region that
// a peer may take over, or a decode group that a standby may take over. The lease itself is
// kept by a store with consensus, as a Kubernetes Lease or an etcd key. This package adds
// the rules that neither store has: an owner that cannot renew stops before another
// starts, a taker waits, a scope is handed back in two steps.
//
// Machine is pure: the time and what was learned go in, the next call comes out.
// Claim runs one against an Engine. Static is ownership without a lease.
package lease

import (
	"context"
	"errors"
	"strings"
	"time"
)

// Record is the state of a lease as an engine reads it.
type Record struct {
	Holder string // identity; empty: never held, or given back
	Epoch  int64  // of the last acquisition, higher with each; 0: never held
	Stamp  string // changes with every write: acquisition, renewal, release
	Term   Term

	Duration time.Duration // for which the holder's lease lasts after a renewal; 0: not known
	Members  []string      // the only dispatchers that may ever take it; empty: any may
}

// Term says whether the engine itself keeps the holder's time, and how it stands.
type Term int

// Terms.
const (
	Unsaid  Term = iota // the engine keeps no time: the holder lives while Stamp changes
	Running             // the engine says that the holder's time runs
	Over                // the holder's time ran out, and no dispatcher has acquired the lease since
)

// Engine is one lease in a store with compare-and-swap. Its calls are made one
// at a time. A call that fails by its context may still take effect, even after
// later calls. That is safe, because a write takes effect only if the lease was not
// written since the engine last read it.
type Engine interface {
	// Look reads the lease.
	Look(context.Context) (Record, error)
	// Acquire takes the lease if it is as Look saw it, with an epoch that is higher
	// than the store's and than above: a store that lost its data must not make
	// epochs go back.
	Acquire(ctx context.Context, above int64) (Record, error)
	// Renew keeps a lease that is held with this epoch, even if its time had run
	// out, as long as no other holder took it. Otherwise it returns ErrLost.
	Renew(ctx context.Context, epoch int64) error
	// Release gives the lease back. It returns ErrLost if the lease was not held with this epoch any more.
	Release(ctx context.Context, epoch int64) error
}

// ErrLost says that the lease has another holder or epoch, or no holder.
var ErrLost = errors.New("the lease is not held with this epoch any more")

// ErrTaken says that the lease was written since it was looked at.
var ErrTaken = errors.New("the lease was written by another meanwhile")

// Identity names one process of a dispatcher. A dispatcher that starts again is
// another holder, because its process before may still live somewhere.
func Identity(id, boot string) string { return id + "_" + boot }

// Dispatcher is the dispatcher's id in a holder's identity.
func Dispatcher(holder string) string {
	if i := strings.LastIndexByte(holder, '_'); i >= 0 {
		return holder[:i]
	}
	return holder
}

// Times are the waits that make two owners impossible. With Duration +
// StartDelay at twice RenewDeadline, clocks may run at rates that differ by up
// to a factor of two.
type Times struct {
	Duration      time.Duration // a lease that was not renewed for so long may be taken
	RenewDeadline time.Duration // an owner that could not renew for so long admits nothing
	Retry         time.Duration // between renewals, and between looks
	StartDelay    time.Duration // from a lease's expiry to its taker's first admission
	RankDelay     time.Duration // a candidate of rank k waits k times as long in addition
	Step          time.Duration // a step of the hand-back that takes longer has failed
}

// Waits are the times in the config file, which must be the same for every dispatcher. The
// other Times are in proportion.
type Waits struct {
	Lease      time.Duration `yaml:"lease"`       // an owner that does not renew for so long may lose what it owns
	StartDelay time.Duration `yaml:"start_delay"` // from the end of the lease until another dispatcher admits
}

// DefaultWaits are the waits in DefaultTimes.
func DefaultWaits() Waits { return Waits{DefaultTimes.Duration, DefaultTimes.StartDelay} }

// Check calls bad for waits that could allow two owners.
func (w Waits) Check(bad func(key, format string, args ...any)) {
	if w.Lease < 3*time.Second || w.Lease%time.Second != 0 {
		bad("lease", "%v; write whole seconds, 3s or more", w.Lease)
	}
	if w.StartDelay < w.Lease/3 {
		bad("start_delay", "%v is too short for clocks that differ; write a third of the lease or more, %v", w.StartDelay, w.Lease/3)
	}
}

// Times are all waits.
func (w Waits) Times() Times {
	t := DefaultTimes
	part := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) / float64(t.Duration) * float64(w.Lease))
	}
	return Times{
		Duration: w.Lease, RenewDeadline: part(t.RenewDeadline), Retry: part(t.Retry), StartDelay: w.StartDelay, RankDelay: part(t.RankDelay),
		Step: part(t.Step),
	}
}

// DefaultTimes are the times that docs/fleet.md describes.
var DefaultTimes = Times{
	Duration: 15 * time.Second, RenewDeadline: 10 * time.Second, Retry: 2 * time.Second,
	StartDelay: 5 * time.Second, RankDelay: 5 * time.Second, Step: 10 * time.Second,
}
