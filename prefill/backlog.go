package prefill

import (
	"time"

	"evenkeel/prefill/policy"
)

// Backlog sums up the requests that wait in a model's arrival queue, without batch requests.
type Backlog struct {
	Requests int
	// Seconds is the predicted prefill time of them all on one engine, by the learned latency and the
	// usual share of cached tokens.
	Seconds float64
}

// Backlogs returns the backlogs by model; a model without waiting requests is absent. The latency
// is that of the model's first engine, which stands for all of them.
func (s *Scheduler) Backlogs() map[string]Backlog {
	s.mu.Lock()
	defer s.mu.Unlock()
	freshShare := s.cache.Totals.Fresh()
	all := map[string]Backlog{}
	for name, m := range s.models {
		if len(m.candidates) == 0 { // only other regions serve the model
			continue
		}
		requests, promptTokens := m.queue.Backlog()
		if requests == 0 {
			continue
		}
		n, tokens := float64(requests), float64(promptTokens)
		newTokens, cachedTokens := freshShare*tokens/n, (1-freshShare)*tokens/n // of the mean prompt
		latency, _ := s.latencyFor(name, m.candidates[0])
		meanMs := latency.Ms(newTokens, cachedTokens)
		all[name] = Backlog{Requests: requests, Seconds: n * meanMs / 1000}
	}
	return all
}

// LearnedLatency is that of the live candidate for the model with the smallest fixed part, with the
// round trip to it.
func (s *Scheduler) LearnedLatency(name string) (latency policy.Latency, rtt time.Duration, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.models[name]
	if m == nil {
		return latency, 0, false
	}
	for _, c := range m.candidates {
		ofCandidate, learned := s.latencyFor(name, c)
		usable := learned && c.Live && ofCandidate.TPMs > 0 // a caller divides by the time per token
		if usable && (!known || ofCandidate.T0Ms < latency.T0Ms) {
			latency, rtt, known = ofCandidate, c.rtt(), true
		}
	}
	return latency, rtt, known
}
