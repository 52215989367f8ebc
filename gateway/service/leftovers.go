package service

import (
	"errors"
	"sync"
)

// Leftovers are what is left to do for requests that are over, a bounded number at a time,
// until a shutdown has waited for it. Nothing begins once they are closed.
type Leftovers struct {
	mu     sync.Mutex
	open   int
	closed bool
	all    sync.WaitGroup
}

// Run runs one, unless so many run already.
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

// Close has nothing begin any more, and tells when those that run are over.
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
