package gateway

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/fleet"
)

// service is whether this proxy is in service: it leaves in steps, so that load
// balancers are told before clients are.
type service struct {
	mu       sync.Mutex
	ctx      context.Context // of requests that have no answer yet: ends at the drain's limit
	end      context.CancelFunc
	draining bool // /readyz is false
	refusing bool // new requests are refused
	since    time.Time
	limit    time.Time // zero: none
	timers   []*time.Timer
}

// DrainState is how far the proxy's own drain is.
type DrainState struct {
	Since    time.Time  `json:"since"`
	Deadline *time.Time `json:"deadline,omitempty"`
	Refusing bool       `json:"refusing"` // new requests, not only /readyz
	Over     bool       `json:"over"`     // the deadline has passed
}

func newService(parent context.Context) *service {
	s := &service{}
	s.ctx, s.end = context.WithCancel(parent)
	return s
}

// Drain takes the proxy out of service: /readyz is false at once, new requests
// are refused after limits.drain_grace, and what runs may finish within the
// limit, 0 for any time. Then it ends with an error event. It returns at once
// for how long requests are still taken; a second call sets another limit.
func (g *Gateway) Drain(limit time.Duration) (taken time.Duration) {
	grace := g.conf().Limits.DrainGrace
	s := g.service
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopTimers()
	if !s.draining {
		s.draining, s.since = true, time.Now()
		g.log.Info("draining", zap.Duration("refusing_in", grace), zap.Duration("limit", limit))
	}
	if taken = grace - time.Since(s.since); taken <= 0 || s.refusing {
		s.refusing, taken = true, 0
	} else {
		since := s.since
		s.timers = append(s.timers, time.AfterFunc(taken, func() { s.refuse(since) }))
	}
	s.limit = time.Time{}
	if limit > 0 {
		end := time.Now().Add(limit)
		s.limit = end
		s.timers = append(s.timers, time.AfterFunc(limit, func() {
			if s.ends(end) {
				g.endService()
			}
		}))
	}
	return taken
}

// Undrain takes the proxy back into service.
func (g *Gateway) Undrain() {
	s := g.service
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining || g.ctx.Err() != nil {
		return
	}
	s.stopTimers()
	s.draining, s.refusing, s.limit = false, false, time.Time{}
	if s.ctx.Err() != nil {
		s.ctx, s.end = context.WithCancel(g.ctx)
	}
	g.log.Info("in service again")
}

// endService ends what runs, each answer with an error event.
func (g *Gateway) endService() {
	g.service.close()
	if n := g.requests.Move(func(fleet.Place) bool { return true }); n > 0 {
		g.log.Warn("the drain's time is over; what still runs ends with an error", zap.Int("calls", n))
	}
}

// ends says whether a deadline still is the drain's: it may have been taken back
// or got another when its timer had gone off already.
func (s *service) ends(at time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining && s.limit.Equal(at)
}

// refuse turns new requests away, unless that drain was taken back meanwhile.
func (s *service) refuse(since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusing = s.refusing || s.draining && s.since.Equal(since)
}

// leave refuses new requests from now on.
func (s *service) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining {
		s.since = time.Now()
	}
	s.draining, s.refusing = true, true
	s.stopTimers()
}

// close ends the requests that have no answer yet.
func (s *service) close() {
	s.leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

func (s *service) stopTimers() {
	for _, t := range s.timers {
		t.Stop()
	}
	s.timers = nil
}

// context ends when the request's time does, whatever its client does.
func (s *service) context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctx
}

func (s *service) over() bool { return s.context().Err() != nil }

// leaving says whether load balancers are told to go elsewhere, and clients too.
func (s *service) leaving() (draining, refusing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining, s.refusing
}

// state is nil while the proxy is in service.
func (s *service) state() *DrainState {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining {
		return nil
	}
	d := &DrainState{Since: s.since, Refusing: s.refusing, Over: s.ctx.Err() != nil}
	if !s.limit.IsZero() {
		d.Deadline = new(s.limit)
	}
	return d
}
