package service

import (
	"errors"
	"sync"
)

// Background runs functions that may outlive their requests. It bounds how many of them run at once,
// and lets a shutdown wait for them. After Close it starts none.
type Background struct {
	mu     sync.Mutex
	open   int
	closed bool
	all    sync.WaitGroup
}

// Run runs f on a goroutine of its own. It returns ErrCrowded if limit functions run already, and ErrClosed after Close.
func (l *Background) Run(limit int, f func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.open >= limit:
		return ErrCrowded
	}
	l.open++
	l.all.Go(func() {
		f()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open--
	})
	return nil
}

// Close lets no further function start. The channel that it returns is closed when all running functions have returned.
func (l *Background) Close() (over <-chan struct{}) {
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

// The errors with which Run refuses a function.
var (
	ErrClosed  = errors.New("the proxy is shutting down")
	ErrCrowded = errors.New("too many run already")
)
