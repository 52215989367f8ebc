package prefill

import (
	"time"

	"evenkeel/prefill/policy"
)

// Backlog is what waits in the arrival queue for a model, without batch.
type Backlog struct {
	Requests int
	Seconds  float64 // time for which one engine would prefill these, by the learned line and with the usual share of prefix hits
}

// Backlogs returns what waits, by model; a model for which no request waits is absent.
func (t *Tier) Backlogs() map[string]Backlog {
	t.mu.Lock()
	defer t.mu.Unlock()
	fresh := t.cache.Totals.Fresh()
	all := map[string]Backlog{}
	for name, m := range t.models {
		if len(m.servers) == 0 {
			continue
		}
		requests, prompts := m.line.Backlog()
		if requests == 0 {
			continue
		}
		tokens := float64(prompts)
		line, _ := t.line(name, m.servers[0])
		eachMs := line.Ms(fresh*tokens/float64(requests), (1-fresh)*tokens/float64(requests))
		all[name] = Backlog{Requests: requests, Seconds: float64(requests) * eachMs / 1000}
	}
	return all
}

// Line is the learned line of the live candidate whose prefills of the model have the smallest fixed part, and the
// round trip to it. known is false while no live candidate has a learned line.
func (t *Tier) Line(name string) (line policy.Line, rtt time.Duration, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.models[name]
	if m == nil {
		return line, 0, false
	}
	for _, c := range m.servers {
		next, learned := t.line(name, c)
		if learned && c.Live && next.TPMs > 0 && (!known || next.T0Ms < line.T0Ms) {
			line, rtt, known = next, c.rtt(), true
		}
	}
	return line, rtt, known
}
