package service

import (
	"errors"
	"sync"
)

// Background runs a bounded number of functions that may outlive their requests, and lets a
// shutdown wait for them.
type Background struct {
	mu      sync.Mutex
	running int
	closed  bool
	all     sync.WaitGroup
}

// Run returns ErrCrowded if limit functions run already, and ErrClosed after Close.
func (l *Background) Run(limit int, f func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.running >= limit:
		return ErrCrowded
	}
	l.running++
	l.all.Go(func() {
		f()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.running--
	})
	return nil
}

// Close lets no further function start. done is closed when all have returned.
func (l *Background) Close() (done <-chan struct{}) {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		l.all.Wait()
		close(ended)
	}()
	return ended
}

// The errors with which Run refuses a function.
var (
	ErrClosed  = errors.New("the proxy is shutting down")
	ErrCrowded = errors.New("too many run already")
)
