package pool

import "sync/atomic"

// Semaphore bounds how many finished prefills may wait in the pool. A place is reserved before the
// prefill begins, so that no finished prefill is thrown away. All methods may be called from any
// goroutine.
type Semaphore struct {
	size   atomic.Int64
	used   atomic.Int64
	onFree atomic.Pointer[func()]
}

// NewSemaphore returns a semaphore with size places.
func NewSemaphore(size int) *Semaphore {
	p := &Semaphore{}
	p.size.Store(int64(size))
	return p
}

// Resize takes no reserved place away: TryAcquire returns false until enough are released.
func (p *Semaphore) Resize(size int) {
	p.size.Store(int64(size))
	p.callOnFree()
}

// TryAcquire takes a place for a prefill that is about to begin; false: no place is free.
func (p *Semaphore) TryAcquire() bool {
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

// Reserve takes a place even if none is free. It is for a hand-off that comes back because its rank
// refused it: it must not wait behind prefills that have not begun.
func (p *Semaphore) Reserve() { p.used.Add(1) }

// Release does nothing if no place is reserved, because one release too many must not let the pool
// grow beyond its size.
func (p *Semaphore) Release() {
	for {
		used := p.used.Load()
		if used == 0 {
			return
		}
		if p.used.CompareAndSwap(used, used-1) {
			break
		}
	}
	p.callOnFree()
}

func (p *Semaphore) callOnFree() {
	if f := p.onFree.Load(); f != nil {
		(*f)()
	}
}

// OnFree sets the function that each Release and Resize calls, on the caller's goroutine. It must
// not block.
func (p *Semaphore) OnFree(f func()) { p.onFree.Store(&f) }

// Room says whether a place is free. Another goroutine may take it before the caller does.
func (p *Semaphore) Room() bool { return p.used.Load() < p.size.Load() }

// Used can be above Size after Reserve or Resize.
func (p *Semaphore) Used() int { return int(p.used.Load()) }

// Size returns the number of all places, free or reserved.
func (p *Semaphore) Size() int { return int(p.size.Load()) }
