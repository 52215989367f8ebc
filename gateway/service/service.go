// Package service says whether this proxy is in service. A proxy goes out of service in steps: first /readyz tells the load balancers, then
// new requests are refused, and at last the proxy waits for the work that is left after requests have ended.
package service

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Service says whether the proxy serves, drains or refuses new requests.
type Service struct {
	host Host

	mu       sync.Mutex
	ctx      context.Context // for requests that have no answer yet: ends at the drain's limit
	end      context.CancelFunc
	draining bool      // /readyz is false
	refusing bool      // new requests are refused
	since    time.Time // when the drain began
	limit    time.Time // when the drain ends the requests that still run; zero: never
	timers   []*time.Timer
}

// Host is what Service needs of the proxy.
type Host struct {
	Context context.Context // ends with the proxy
	Log     *zap.Logger
	Grace   func() time.Duration // how long the proxy still takes new requests after a drain has begun
	EndAll  func() (calls int)   // ends all calls to engines, and returns their number
}

// DrainState tells how far the proxy's own drain has got.
type DrainState struct {
	Since    time.Time  `json:"since"`
	Deadline *time.Time `json:"deadline,omitempty"`
	Refusing bool       `json:"refusing"` // new requests are refused; before, only /readyz is false
	Over     bool       `json:"over"`     // the deadline has passed
}

// New returns a proxy that is in service.
func New(h Host) *Service {
	s := &Service{host: h}
	s.ctx, s.end = context.WithCancel(h.Context)
	return s
}

// Drain takes the proxy out of service. /readyz is false at once, and new requests are refused after limits.drain_grace. Requests may run
// until limit is over, counted from this call; those that still run then end with an error event. A limit of 0 means no limit. Drain does
// not wait. It returns for how long new requests are still accepted. A second call sets another limit, but does not restart the grace.
func (s *Service) Drain(limit time.Duration) (accepting time.Duration) {
	grace := s.host.Grace()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopTimers()
	if !s.draining {
		s.draining, s.since = true, time.Now()
		s.host.Log.Info("draining", zap.Duration("refusing_in", grace), zap.Duration("limit", limit))
	}
	if accepting = grace - time.Since(s.since); accepting <= 0 || s.refusing {
		s.refusing, accepting = true, 0
	} else {
		since := s.since
		s.timers = append(s.timers, time.AfterFunc(accepting, func() { s.refuseAfter(since) }))
	}
	s.limit = time.Time{}
	if limit > 0 {
		end := time.Now().Add(limit)
		s.limit = end
		s.timers = append(s.timers, time.AfterFunc(limit, func() {
			if s.isCurrent(end) {
				s.EndAll()
			}
		}))
	}
	return accepting
}

// Undrain takes the proxy back into service.
func (s *Service) Undrain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining || s.host.Context.Err() != nil {
		return
	}
	s.stopTimers()
	s.draining, s.refusing, s.limit = false, false, time.Time{}
	if s.ctx.Err() != nil {
		s.ctx, s.end = context.WithCancel(s.host.Context)
	}
	s.host.Log.Info("the proxy is in service again; it drains no more")
}

// EndAll ends all requests that run; an answer that has begun ends with an error event.
func (s *Service) EndAll() {
	s.Close()
	if n := s.host.EndAll(); n > 0 {
		s.host.Log.Warn("the drain's time is over; requests that still run end with an error", zap.Int("calls", n))
	}
}

// isCurrent reports whether deadline is still the drain's deadline. It may not be when its timer fires, because Undrain ended the drain, or
// another Drain set another deadline.
func (s *Service) isCurrent(deadline time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining && s.limit.Equal(deadline)
}

// refuseAfter refuses new requests at the end of the grace, unless the drain that began at since was undone meanwhile.
func (s *Service) refuseAfter(since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusing = s.refusing || s.draining && s.since.Equal(since)
}

// Refuse has new requests refused from now on.
func (s *Service) Refuse() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining {
		s.since = time.Now()
	}
	s.draining, s.refusing = true, true
	s.stopTimers()
}

// Close ends the requests that have no answer yet.
func (s *Service) Close() {
	s.Refuse()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

func (s *Service) stopTimers() {
	for _, t := range s.timers {
		t.Stop()
	}
	s.timers = nil
}

// Context is for requests that have no answer yet: it ends at the drain's limit, and does not depend on the client.
func (s *Service) Context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctx
}

// Draining says whether load balancers are told to send requests elsewhere.
func (s *Service) Draining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// Refusing says whether new requests are refused.
func (s *Service) Refusing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refusing
}

// State says how far the drain has got; nil: the proxy is in service.
func (s *Service) State() *DrainState {
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
