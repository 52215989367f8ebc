package bind

import (
	"context"
	"errors"
	"sync"
	"time"

	"evenkeel/bench/lab/refengine/pins"
)

// Desk is where a prefill engine's requests meet the decode engines that have registered
// for them, whichever comes first. Requests are known by an id, and an id is good for
// one request: a second one gets what was written under it before, whose prompt that ever was.
type Desk struct {
	mu      sync.Mutex
	asked   map[string]Registration      // their request has not come yet
	waiting map[string]chan Registration // their decode engine has not come yet
	spent   pins.Recent[Push]
}

// ErrLate says that no decode engine came in time.
var ErrLate = errors.New("no decode engine has registered in time")

// NewDesk is a desk at which nobody is.
func NewDesk() *Desk {
	return &Desk{asked: map[string]Registration{}, waiting: map[string]chan Registration{}}
}

// Register has a decode engine wait for a request. again: its id was used before, and
// old is what is written.
func (d *Desk) Register(r Registration) (old Push, again bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if old, again = d.spent.Get(r.ID); again {
		return old, true
	}
	if to := d.waiting[r.ID]; to != nil {
		delete(d.waiting, r.ID)
		to <- r
		return Push{}, false
	}
	d.asked[r.ID] = r
	return Push{}, false
}

// Await returns where the decode engine will be told that registers for a request, or has
// done so. leave ends the wait.
func (d *Desk) Await(id string) (came <-chan Registration, leave func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := make(chan Registration, 1)
	if r, ok := d.asked[id]; ok {
		delete(d.asked, id)
		to <- r
		return to, func() {}
	}
	d.waiting[id] = to
	return to, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.waiting[id] == to {
			delete(d.waiting, id)
		}
	}
}

// Meet waits for the decode engine that registers for a request, and looks for it after a delay
// only. The time it may have runs from the start.
func (d *Desk) Meet(ctx context.Context, id string, limit, delay time.Duration) (Registration, error) {
	late := time.NewTimer(limit)
	defer late.Stop()
	begin := time.NewTimer(delay)
	defer begin.Stop()
	var came <-chan Registration
	for {
		select {
		case <-begin.C:
			to, leave := d.Await(id)
			defer leave()
			came = to
		case r := <-came:
			return r, nil
		case <-late.C:
			return Registration{}, ErrLate
		case <-ctx.Done():
			return Registration{}, ctx.Err()
		}
	}
}

// Spend remembers what was written under an id.
func (d *Desk) Spend(p Push) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.spent.Put(p.ID, p)
}
