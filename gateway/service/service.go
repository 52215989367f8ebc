// Package service knows whether this proxy is in service. The proxy goes out of service in
// steps: load balancers see it before new requests are refused. At last the proxy waits for the work
// that remains after requests have ended (Background).
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
	ctx      context.Context // context of requests that have no answer yet; it ends at the drain's limit
	end      context.CancelFunc
	draining bool      // /readyz answers 503
	refusing bool      // new requests are refused
	ending   bool      // the process ends, so the drain cannot be undone
	since    time.Time // when the drain began
	limit    time.Time // when requests that still run are ended; zero: never
	timers   []*time.Timer
}

// Deps is the proxy, as far as a Service uses it.
type Deps struct {
	Context context.Context // its end means that the proxy ends
	Log     *zap.Logger
	Grace   func() time.Duration // how long the proxy accepts new requests after a drain began (limits.drain_grace)
	EndAll  func() (calls int)   // ends the calls that run on engines, and returns their number
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

// Drain takes the proxy out of service. /readyz answers 503 at once, and new requests are refused after limits.drain_grace. Running
// requests may finish within limit, which begins now. Requests that run longer get an error event. A limit of 0 means no limit. Drain does
// not wait. It returns for how long new requests are still accepted. A second call sets another limit, but does not prolong the grace.
func (s *Service) Drain(limit time.Duration) (accepting time.Duration) {
	grace := s.deps.Grace()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopTimers() // those of an earlier call, whose limit does not count any more
	if !s.draining {
		s.draining, s.since = true, time.Now()
		s.deps.Log.Info("draining", zap.Duration("refusing_in", grace), zap.Duration("limit", limit))
	}
	accepting = grace - time.Since(s.since)
	if accepting <= 0 || s.refusing { // the grace of the first call is over
		s.refusing = true
		accepting = 0
	} else {
		since := s.since // a later drain has another start, by which refuseAfter knows that this one was undone
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

// DrainForExit is Drain without a limit, for a proxy whose process ends. It cannot be undone. accepting is how long the proxy still accepts
// new requests, so that load balancers have time to notice the drain.
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
	if !s.draining { // the proxy is in service already
		return
	}
	s.stopTimers()
	s.draining, s.refusing, s.limit = false, false, time.Time{}
	if s.ctx.Err() != nil { // the drain has ended the requests of this context, so later requests need a new one
		s.ctx, s.end = context.WithCancel(s.deps.Context)
	}
	s.deps.Log.Info("the proxy is in service again; it drains no more")
}

// EndAll ends all running requests, and refuses new ones. Each running answer ends with an error event.
func (s *Service) EndAll() {
	s.Close()
	s.endCalls()
}

// endCalls ends the calls that run on engines.
func (s *Service) endCalls() {
	if calls := s.deps.EndAll(); calls > 0 {
		s.deps.Log.Warn("the drain's time is over; requests that still run end with an error", zap.Int("calls", calls))
	}
}

// endAt is EndAll at the limit of a drain. It does nothing if the drain does not end at limit any more: its timer may fire
// just after the drain was undone or got another limit. The check and Close are one step, so that an Undrain comes either
// before both, or after both and then takes the proxy back into service.
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

// refuseAfter refuses new requests from now on, at the end of the grace. It does nothing if the drain that
// began at since was undone meanwhile.
func (s *Service) refuseAfter(since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining && s.since.Equal(since) {
		s.refusing = true
	}
}

// RefuseForExit is DrainForExit without the grace: new requests are refused from now on.
func (s *Service) RefuseForExit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
	s.refuse()
}

// refuse refuses new requests from now on, and stops the timers of the drain. The caller holds s.mu.
func (s *Service) refuse() {
	if !s.draining { // otherwise the drain goes on, and keeps the time of its beginning
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

// close is Close for a caller that holds s.mu.
func (s *Service) close() {
	s.refuse()
	s.end()
}

// stopTimers stops the timers of the drain. The caller holds s.mu.
func (s *Service) stopTimers() {
	for _, t := range s.timers {
		t.Stop()
	}
	s.timers = nil
}

// Context returns the context of requests that have no answer yet. It ends at the drain's limit, and does not depend on any client.
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

// Refusing says whether new requests are refused: the grace of a drain is over, or the proxy shuts down.
func (s *Service) Refusing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refusing
}

// State says how far the drain of the proxy has come; nil: the proxy is in service.
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
