package service

import (
	"errors"
	"sync"
)

// Leftovers runs work that is left after requests have ended, such as discards of hand-offs. It bounds how many pieces of work run at once.
// A shutdown closes it, so that no more work begins, and waits for the rest.
type Leftovers struct {
	mu     sync.Mutex
	open   int // pieces of work that run
	closed bool
	all    sync.WaitGroup
}

// Run calls one in a new goroutine, unless most pieces of work, or more, run already.
func (l *Leftovers) Run(most int, one func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.open >= most:
		return ErrCrowded
	}
	l.open++
	l.all.Go(func() {
		one()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open--
	})
	return nil
}

// Close lets no more work begin, and closes over once the running work has ended.
func (l *Leftovers) Close() (over <-chan struct{}) {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	done := make(chan struct{})
	go func() {
		l.all.Wait()
		close(done)
	}()
	return done
}

// Run returns one of these errors if it does not run the function.
var (
	ErrClosed  = errors.New("the proxy is shutting down")
	ErrCrowded = errors.New("too many run already")
)
