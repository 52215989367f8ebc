package prefill

import (
	"time"

	"evenkeel/prefill/policy"
)

// Backlog is what waits in the arrival queue for a model, without batch.
type Backlog struct {
	Requests int
	Seconds  float64 // that one engine would prefill for, as learned and less the prefix hits there usually are
}

// Backlogs tells what waits, by model; a model that nobody waits for is absent.
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
		each := line.Ms(fresh*tokens/float64(requests), (1-fresh)*tokens/float64(requests))
		all[name] = Backlog{Requests: requests, Seconds: float64(requests) * each / 1000}
	}
	return all
}

// Line is how long prefills of the model take where they begin soonest, and how
// far away that is; known is false while nothing tells.
func (t *Tier) Line(name string) (line policy.Line, rtt time.Duration, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.models[name]
	if m == nil {
		return line, 0, false
	}
	for _, c := range m.servers {
		next, told := t.line(name, c)
		if told && c.Live && next.TPMs > 0 && (!known || next.T0Ms < line.T0Ms) {
			line, rtt, known = next, c.rtt(), true
		}
	}
	return line, rtt, known
}
