// Package lease decides which dispatcher owns a scope of engines: a region that
// a peer may take over, a decode group that a standby may. The lease itself is
// kept by an engine that has a consensus, a Kubernetes Lease or an etcd key; here
// is what must be true on top of that, which neither gives: an owner that cannot
// renew stops before another starts, a taker waits, a scope is handed back in
// two steps.
//
// Machine is pure: the time and what was learned go in, what to do comes out.
// Claim runs one against an Engine. Static is ownership without a lease.
package lease

import (
	"context"
	"errors"
	"strings"
	"time"
)

// Record is what an engine says of a lease.
type Record struct {
	Holder string // identity; empty: never held, or given back
	Epoch  int64  // of the last acquisition, higher with each; 0: never held
	Stamp  string // another with every write: acquisition, renewal, release
	Term   Term

	Duration time.Duration // after which the holder takes its lease to be over; 0: not known
	Members  []string      // that alone may ever take it; none: anybody
}

// Term is what the engine itself knows of the holder's time.
type Term int

// Terms.
const (
	Unsaid  Term = iota // it keeps no time: the holder lives while Stamp changes
	Running             // it vouches for the holder
	Over                // the holder's time ran out, nobody has acquired since
)

// Engine is one lease in a store that compares and swaps. Its calls are made one
// at a time. One that fails by its context may still come to pass, even after
// others were made: that is safe, for each holds only while nothing was written
// since the engine last read the lease.
type Engine interface {
	// Look reads the lease.
	Look(context.Context) (Record, error)
	// Acquire takes the lease if it is as Look saw it, with an epoch that is higher
	// than the store's and than above: a store that lost its data must not make
	// epochs go back.
	Acquire(ctx context.Context, above int64) (Record, error)
	// Renew keeps a lease that is held with this epoch, even if its time had run
	// out, as long as nobody took it. Else ErrLost.
	Renew(ctx context.Context, epoch int64) error
	// Release gives it back. ErrLost if it was not held with this epoch any more.
	Release(ctx context.Context, epoch int64) error
}

// ErrLost says that the lease is another's, or nobody's.
var ErrLost = errors.New("the lease is not held with this epoch any more")

// ErrTaken says that the lease was written since it was looked at.
var ErrTaken = errors.New("the lease was written by another meanwhile")

// Identity names one process of a dispatcher. A process that starts again is
// another holder: the one before may still live somewhere.
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
	Duration      time.Duration // a lease that nobody renews for so long may be taken
	RenewDeadline time.Duration // an owner that cannot renew for so long admits nothing
	Retry         time.Duration // between renewals, and between looks
	StartDelay    time.Duration // from a lease's expiry to its taker's first admission
	RankDelay     time.Duration // a candidate of rank k waits k of these more
	Step          time.Duration // a step of the hand-back that takes longer has failed
}

// Waits are the times that the config file says, the same for every dispatcher. The
// others are in proportion.
type Waits struct {
	Lease      time.Duration `yaml:"lease"`       // who does not renew for so long may lose what it owns
	StartDelay time.Duration `yaml:"start_delay"` // from then until another admits
}

// DefaultWaits are those of DefaultTimes.
func DefaultWaits() Waits { return Waits{DefaultTimes.Duration, DefaultTimes.StartDelay} }

// Check tells bad of those that could make two owners.
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

// DefaultTimes are those that docs/fleet.md describes.
var DefaultTimes = Times{
	Duration: 15 * time.Second, RenewDeadline: 10 * time.Second, Retry: 2 * time.Second,
	StartDelay: 5 * time.Second, RankDelay: 5 * time.Second, Step: 10 * time.Second,
}
