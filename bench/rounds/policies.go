package main

import (
	"fmt"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/rounds"
)

const ours = "rounds"

// policies are the ones that are compared, first those of which the best is taken.
func policies() []contender {
	held := func(name string, patience, most float64, exact bool) contender {
		return contender{name: name, spec: fmt.Sprintf("evenkeel:patience=%g,max_hold=%g", patience, most), exact: exact}
	}
	d := rounds.Default
	every := held("rounds, interval 2 in the engines", d.Patience, d.MaxHold, false)
	every.every = 2
	learned := held("rounds, the law of a step learned", d.Patience, d.MaxHold, false)
	learned.learn = true
	return []contender{
		{name: "round robin", spec: "rr"},
		{name: "vLLM's own", route: vllm},
		{name: "least tokens", route: leastTokens},
		{name: "delayer in the engines, 30 passes", route: leastTokens, delay: 30},
		held(ours, d.Patience, d.MaxHold, false),
		held("rounds, lengths known", d.Patience, d.MaxHold, true),
		learned,
		held("rounds, patience 0", 0, d.MaxHold, false),
		held("rounds, patience 0.5", 0.5, d.MaxHold, false),
		held("rounds, patience 1", 1, d.MaxHold, false),
		held("rounds, max_hold 2 s", d.Patience, 2, false),
		held("rounds, max_hold 10 s", d.Patience, 10, false),
		{name: "least tokens, interval 2 in the engines", route: leastTokens, every: 2},
		every,
	}
}

// set is how many of them the best is taken of.
const set = 5

// base is what the others are held against.
const base = 2

// router chooses the rank of a request when it comes. There is always one that can have it.
type router func(s *run, ranks []policy.Worker, e *policy.Entry) int

// routed is a router as a policy of the board.
type routed struct{ s *run }

func (routed) Name() string      { return "routed" }
func (routed) Immediate() bool   { return true }
func (routed) MaxAgeMs() float32 { return 0 }

func (r routed) Decide(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
	e := &s.Pool[0] // there is one
	return append(dst, policy.Assignment{Entry: e.ID, Worker: s.Workers[r.s.route(r.s, s.Workers, e)].ID})
}

// parse makes the policy of a run that routes.
func (s *run) parse(spec string) (policy.Policy, error) {
	if spec == board.DefaultPolicy {
		return routed{s}, nil
	}
	return policy.Parse(spec)
}

// vllm balances as vLLM 0.32 does among its own ranks: by counts of requests that are up to 100 ms old, with what it
// has sent since.
func vllm(s *run, _ []policy.Worker, _ *policy.Entry) int {
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
func leastTokens(_ *run, ranks []policy.Worker, e *policy.Entry) int {
	best, least := 0, int64(0)
	for i := range ranks {
		w := &ranks[i]
		score := w.KVTokens() + w.Backlog + int64(e.Prompt)
		for _, h := range e.Hits {
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
