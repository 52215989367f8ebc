package prefill

// Backlog is what waits in the arrival queue for a model.
type Backlog struct {
	Requests int
	Seconds  float64 // that one engine would prefill for, as learned and less the prefix hits there usually are
}

// Backlogs tells what waits, by model; a model that nobody waits for is absent.
func (t *Tier) Backlogs() map[string]Backlog {
	t.mu.Lock()
	defer t.mu.Unlock()
	fresh := 1.0
	if t.prefixes.prompt > 0 {
		fresh = max(0, 1-float64(t.prefixes.predicted)/float64(t.prefixes.prompt))
	}
	all := map[string]Backlog{}
	for name, m := range t.models {
		if m.queue.empty() || len(m.servers) == 0 {
			continue
		}
		requests, tokens := m.queue.fresh+m.queue.retries.Len(), float64(m.queue.tokens)
		for _, w := range m.queue.retries.members {
			tokens += float64(w.PromptTokens)
		}
		line, _ := t.line(name, m.servers[0].Hardware)
		each := line.Ms(fresh*tokens/float64(requests), (1-fresh)*tokens/float64(requests))
		all[name] = Backlog{Requests: requests, Seconds: float64(requests) * each / 1000}
	}
	return all
}
