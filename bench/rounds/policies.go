package main

import "evenkeel/dispatcher/rounds"

const ours = "rounds"

// policies are the ones that are compared, first those of which the best is taken.
func policies() []policy {
	held := func(name string, patience, most float64, exact bool) policy {
		return policy{name: name, rule: rounds.Rule{Patience: patience, MaxHold: most}, exact: exact}
	}
	d := rounds.Default
	return []policy{
		{name: "round robin", route: inTurn},
		{name: "vLLM's own", route: vllm},
		{name: "least tokens", route: leastTokens},
		{name: "delayer in the engines, 30 passes", route: leastTokens, delay: 30},
		held(ours, d.Patience, d.MaxHold, false),
		held("rounds, lengths known", d.Patience, d.MaxHold, true),
		held("rounds, patience 0", 0, d.MaxHold, false),
		held("rounds, patience 0.5", 0.5, d.MaxHold, false),
		held("rounds, patience 1", 1, d.MaxHold, false),
		held("rounds, max_hold 2 s", d.Patience, 2, false),
		held("rounds, max_hold 10 s", d.Patience, 10, false),
		{name: "least tokens, interval 2 in the engines", route: leastTokens, every: 2},
		{name: "rounds, interval 2 in the engines", rule: d, every: 2},
	}
}

// set is how many of them the best is taken of.
const set = 5

// base is what the others are held against.
const base = 2

func inTurn(s *run, _ *request) int {
	s.turn++
	return s.turn % len(s.accounts)
}

// vllm balances as vLLM 0.32 does among its own ranks: by counts of requests that are up to 100 ms old, with what it
// has sent since.
func vllm(s *run, _ *request) int {
	if s.now >= s.seenAt+100 {
		s.seenAt = s.now
		for i := range s.seen {
			s.seen[i] = asked{len(s.group.Ranks[i].Running), len(s.group.Ranks[i].Waiting)}
		}
	}
	s.turn++
	best, least := 0, 0.0
	for i := range s.seen {
		r := (s.turn + i) % len(s.seen)
		score := float64(s.seen[r].running + s.seen[r].waiting)
		if s.room > 0 {
			kv := float64(s.group.Ranks[r].KV) / float64(s.room)
			score += 6 * float64(s.seen[r].waiting) * max(0, kv-0.5)
		}
		if i == 0 || score < least {
			best, least = r, score
		}
	}
	s.seen[best].waiting++
	return best
}

// leastTokens sends a request to the rank that would have the fewest tokens to read and to compute.
func leastTokens(s *run, q *request) int {
	best, least := 0, int64(0)
	for i := range s.accounts {
		a := &s.accounts[i]
		if score := a.kv + a.backlog + int64(s.uncached(q, i)); i == 0 || score < least {
			best, least = i, score
		}
	}
	return best
}
