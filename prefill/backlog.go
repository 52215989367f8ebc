package prefill

import (
	"time"

	"evenkeel/prefill/policy"
)

// Backlog sums up the requests that wait in the arrival queue for a model, without batch requests.
type Backlog struct {
	Requests int
	// Seconds is the predicted prefill time of all these requests on one engine. The prediction uses the learned latency and the
	// usual share of cached tokens.
	Seconds float64
}

// Backlogs returns the backlogs by model. A model without waiting requests is absent. Seconds is the work in all, as if one engine did it,
// however many engines serve the model. The latency is that of the model's first engine, which stands for all of them.
func (s *Scheduler) Backlogs() map[string]Backlog {
	s.mu.Lock()
	defer s.mu.Unlock()
	freshShare := s.cache.Totals.Fresh() // the usual share of a prompt that is not cached
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

// LearnedLatency is the learned latency of prefills on a live candidate for the model, and the round trip to this candidate. Of several
// candidates, the one with the smallest fixed part counts. known is false while nothing is learned for any of them.
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
