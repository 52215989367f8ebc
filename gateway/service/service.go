// Package service knows whether this proxy is in service. It goes out of service in steps: load
// balancers see it before new requests are refused. At last the proxy waits for the work that
// remains after requests have ended (Background).
package service

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Service is the state of the proxy: in service, draining or refusing.
type Service struct {
	deps Deps

	mu       sync.Mutex
	ctx      context.Context // of requests that have no answer yet; it ends at the drain's limit
	end      context.CancelFunc
	draining bool
	refusing bool
	ending   bool // the process ends, so the drain cannot be undone
	since    time.Time
	limit    time.Time // when running requests are ended; zero: never
	timers   []*time.Timer
}

// Deps is the proxy, as far as a Service uses it.
type Deps struct {
	Context context.Context // its end means that the proxy ends
	Log     *zap.Logger
	// limits.drain_grace: how long new requests are accepted after a drain began
	Grace  func() time.Duration
	EndAll func() (calls int) // ends the calls that run on engines
}

// DrainState is how far the drain of the proxy has come.
type DrainState struct {
	Since    time.Time  `json:"since"`
	Deadline *time.Time `json:"deadline,omitempty"`
	Refusing bool       `json:"refusing"` // new requests are refused; before that, only /readyz answers 503
	Over     bool       `json:"over"`     // the deadline has passed, and the requests that still ran were ended
}

// New returns the state of a proxy that is in service.
func New(d Deps) *Service {
	s := &Service{deps: d}
	s.ctx, s.end = context.WithCancel(d.Context)
	return s
}

// Drain takes the proxy out of service: /readyz answers 503 at once, and new requests are refused
// after limits.drain_grace. Requests that run longer than limit (0: none) get an error event. Drain
// does not wait. A second call sets another limit, but does not prolong the grace.
func (s *Service) Drain(limit time.Duration) (accepting time.Duration) {
	grace := s.deps.Grace()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopTimers() // an earlier limit does not count any more
	if !s.draining {
		s.draining, s.since = true, time.Now()
		s.deps.Log.Info("draining", zap.Duration("refusing_in", grace), zap.Duration("limit", limit))
	}
	accepting = grace - time.Since(s.since)
	if accepting <= 0 || s.refusing {
		s.refusing = true
		accepting = 0
	} else {
		since := s.since // by which refuseAfter knows that this drain was undone
		s.timers = append(s.timers, time.AfterFunc(accepting, func() { s.refuseAfter(since) }))
	}
	s.limit = time.Time{}
	if limit > 0 {
		end := time.Now().Add(limit)
		s.limit = end
		s.timers = append(s.timers, time.AfterFunc(limit, func() { s.endAt(end) }))
	}
	return accepting
}

// DrainForExit is Drain without a limit, and cannot be undone.
func (s *Service) DrainForExit() (accepting time.Duration) {
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	return s.Drain(0)
}

// Undrain takes the proxy back into service, unless its process ends.
func (s *Service) Undrain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending {
		s.deps.Log.Warn("the proxy ends, so it cannot be taken back into service")
		return
	}
	if !s.draining {
		return
	}
	s.stopTimers()
	s.draining, s.refusing, s.limit = false, false, time.Time{}
	if s.ctx.Err() != nil { // the drain has ended its requests
		s.ctx, s.end = context.WithCancel(s.deps.Context)
	}
	s.deps.Log.Info("the proxy is in service again; it drains no more")
}

// EndAll ends all running requests with an error event, and refuses new ones.
func (s *Service) EndAll() {
	s.Close()
	s.endCalls()
}

func (s *Service) endCalls() {
	if calls := s.deps.EndAll(); calls > 0 {
		s.deps.Log.Warn("the drain's time is over; requests that still run end with an error", zap.Int("calls", calls))
	}
}

// endAt is EndAll at the limit of a drain, whose timer may fire just after the drain was undone or
// got another limit. The check and Close are one step, so that an Undrain comes before both, or
// after both.
func (s *Service) endAt(limit time.Time) {
	s.mu.Lock()
	isCurrent := s.draining && s.limit.Equal(limit)
	if isCurrent {
		s.close()
	}
	s.mu.Unlock()
	if isCurrent {
		s.endCalls()
	}
}

// refuseAfter does nothing if the drain that began at since was undone.
func (s *Service) refuseAfter(since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining && s.since.Equal(since) {
		s.refusing = true
	}
}

// RefuseForExit is DrainForExit without the grace.
func (s *Service) RefuseForExit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
	s.refuse()
}

// refuse is called with s.mu held.
func (s *Service) refuse() {
	if !s.draining { // else the drain goes on
		s.since = time.Now()
	}
	s.draining, s.refusing = true, true
	s.stopTimers()
}

// Close refuses new requests, and ends the requests that have no answer yet.
func (s *Service) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.close()
}

// close is called with s.mu held.
func (s *Service) close() {
	s.refuse()
	s.end()
}

// stopTimers is called with s.mu held.
func (s *Service) stopTimers() {
	for _, t := range s.timers {
		t.Stop()
	}
	s.timers = nil
}

// Context is that of requests without an answer. It ends at the drain's limit, and does not depend
// on any client.
func (s *Service) Context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctx
}

// Draining says whether /readyz tells load balancers to send requests elsewhere.
func (s *Service) Draining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// Refusing says whether the grace of a drain is over, or the proxy shuts down.
func (s *Service) Refusing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refusing
}

// State returns nil if the proxy is in service.
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
