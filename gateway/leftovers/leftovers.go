// Package leftovers runs what is left to do for requests that are over, a bounded number
// at a time, until a shutdown has waited for it.
package leftovers

import (
	"errors"
	"sync"
)

// A Group is what still runs for requests that are over. Nothing begins once it is
// closed.
type Group struct {
	mu     sync.Mutex
	open   int
	closed bool
	all    sync.WaitGroup
}

// Run runs one, unless so many run already.
func (g *Group) Run(most int, one func()) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return ErrClosed
	case g.open >= most:
		return ErrCrowded
	}
	g.open++
	g.all.Go(func() {
		one()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.open--
	})
	return nil
}

// Close has nothing begin any more, and tells when those that run are over.
func (g *Group) Close() (over <-chan struct{}) {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	done := make(chan struct{})
	go func() {
		g.all.Wait()
		close(done)
	}()
	return done
}

// Reasons for which nothing begins.
var (
	ErrClosed  = errors.New("the proxy is shutting down")
	ErrCrowded = errors.New("too many run already")
)
