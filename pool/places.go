package pool

import "sync/atomic"

// Places bounds how many finished prefills may wait. A place is reserved
// before the probe is sent, so a full pool holds probes back and never throws
// a prefill away. All methods may be called from any goroutine.
type Places struct {
	size   atomic.Int64
	used   atomic.Int64
	onFree atomic.Pointer[func()]
}

// NewPlaces returns size free places.
func NewPlaces(size int) *Places {
	p := &Places{}
	p.size.Store(int64(size))
	return p
}

// Resize changes how many places there are. Places that are reserved above a smaller
// size stay reserved; TryReserve gives none until enough were released.
func (p *Places) Resize(size int) {
	p.size.Store(int64(size))
	p.freed()
}

// TryReserve takes a place, or says that none is free.
func (p *Places) TryReserve() bool {
	for {
		used := p.used.Load()
		if used >= p.size.Load() {
			return false
		}
		if p.used.CompareAndSwap(used, used+1) {
			return true
		}
	}
}

// Reserve takes a place even above the size: for a hand-off that was in the
// pool before and comes back because its rank refused the connection. It must
// not wait behind prefills that have not begun.
func (p *Places) Reserve() { p.used.Add(1) }

// Release gives a place back and then calls the function that OnFree has set.
// With nothing reserved it changes nothing: one release too many must not let
// the pool grow beyond its size.
func (p *Places) Release() {
	for {
		used := p.used.Load()
		if used == 0 {
			return
		}
		if p.used.CompareAndSwap(used, used-1) {
			break
		}
	}
	p.freed()
}

// freed calls the function that OnFree has set, if there is one.
func (p *Places) freed() {
	if f := p.onFree.Load(); f != nil {
		(*f)()
	}
}

// OnFree sets the function that every Release and Resize calls, on the caller's goroutine. It
// must not block.
func (p *Places) OnFree(f func()) { p.onFree.Store(&f) }

// Room says whether a place is free.
func (p *Places) Room() bool { return p.used.Load() < p.size.Load() }

// Used is the number of places reserved now.
func (p *Places) Used() int { return int(p.used.Load()) }

// Size is the number of places in all.
func (p *Places) Size() int { return int(p.size.Load()) }
