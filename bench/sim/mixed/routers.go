package mixed

import (
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
)

// Router chooses the rank of a request when it comes. There is always one that can have it.
type Router func(s *Run, ranks []policy.Worker, e *policy.Entry, hits []policy.Hit) int

// routed is a router as a policy of the board.
type routed struct{ s *Run }

func (routed) Name() string      { return "routed" }
func (routed) Immediate() bool   { return true }
func (routed) MaxAgeMs() float32 { return 0 }

func (r routed) Decide(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
	e := &s.Pool[0] // there is one
	return append(dst, policy.Assignment{Entry: e.ID, Worker: s.Workers[r.s.Route(r.s, s.Workers, e, s.Waits[0].Hits)].ID})
}

// parse makes the policy of a run that routes.
func (s *Run) parse(spec string) (policy.Policy, error) {
	if spec == board.DefaultPolicy {
		return routed{s}, nil
	}
	return policy.Parse(spec)
}

// VLLM balances as vLLM 0.32 does among its own ranks: by counts of requests that are up to 100 ms
// old, with what it has sent since.
func VLLM(s *Run, _ []policy.Worker, _ *policy.Entry, _ []policy.Hit) int {
	if s.Now >= s.seenAt+100 {
		s.seenAt = s.Now
		for i := range s.seen {
			s.seen[i] = asked{len(s.group.Ranks[i].Running), len(s.group.Ranks[i].Waiting)}
		}
	}
	s.turn++
	best, least := 0, 0.0
	for i := range s.seen {
		r := (s.turn + i) % len(s.seen)
		score := float64(s.seen[r].running + s.seen[r].waiting)
		if s.Room > 0 {
			kv := float64(s.group.Ranks[r].KV) / float64(s.Room)
			score += 6 * float64(s.seen[r].waiting) * max(0, kv-0.5)
		}
		if i == 0 || score < least {
			best, least = r, score
		}
	}
	s.seen[best].waiting++
	return best
}

// Own is how an engine, vllm or sglang, balances its ranks by itself, for requests to one address.
func Own(engine string) Contender {
	if engine == "sglang" {
		return Contender{Name: "SGLang's own", Spec: "rr"} // it takes the ranks in turn
	}
	return Contender{Name: "vLLM's own", Route: VLLM}
}

// LeastTokens sends a request to the rank that would have the fewest tokens to read and to compute.
func LeastTokens(_ *Run, ranks []policy.Worker, e *policy.Entry, hits []policy.Hit) int {
	best, least := 0, int64(0)
	for i := range ranks {
		w := &ranks[i]
		score := w.KVTokens() + w.Backlog + int64(e.Prompt)
		for _, h := range hits {
			if h.Worker == w.ID {
				score -= min(int64(h.Tokens), int64(e.Prompt)-1)
			}
		}
		if i == 0 || score < least {
			best, least = i, score
		}
	}
	return best
}
