package refclient

import (
	"context"
	"sync"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
)

// Oracle is a source that says what a test says.
type Oracle struct {
	mu      sync.Mutex
	list    []discover.Engine
	err     error // instead of the list
	changed chan struct{}
}

// NewOracle knows no engines.
func NewOracle() *Oracle { return &Oracle{changed: make(chan struct{}, 1)} }

// Name is the source's.
func (o *Oracle) Name() string { return "oracle" }

// Run tells what is said, until it ends.
func (o *Oracle) Run(ctx context.Context, tell func([]discover.Engine, error)) {
	for {
		select {
		case <-o.changed:
			o.mu.Lock()
			list, err := append([]discover.Engine{}, o.list...), o.err
			o.mu.Unlock()
			tell(list, err)
		case <-ctx.Done():
			return
		}
	}
}

// Say puts engines into the list, or describes them anew.
func (o *Oracle) Say(engines ...discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range engines {
		o.drop(e)
		o.list = append(o.list, e)
	}
	o.wake()
}

// Gone takes an engine out of the list.
func (o *Oracle) Gone(e discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop(e)
	o.wake()
}

// Fails has the source fail in place of its list.
func (o *Oracle) Fails(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
	o.wake()
}

func (o *Oracle) drop(e discover.Engine) {
	kept := o.list[:0]
	for _, old := range o.list {
		if old.Key() != e.Key() {
			kept = append(kept, old)
		}
	}
	o.list = kept
}

func (o *Oracle) wake() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// Found describes a reference engine as a source would.
func Found(e *refengine.Engine, role, incarnation, away string) discover.Engine {
	f := discover.Engine{Role: role, Address: AddressOf(e), URL: e.URLs()[0], Incarnation: incarnation, Away: away}
	if role == "decode" {
		f.Slots = e.Config().Slots
	}
	return f
}
