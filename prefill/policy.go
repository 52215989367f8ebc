package prefill

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// policy says which of the eligible candidates takes a request.
type policy uint8

const (
	roundRobin policy = iota
	leastTokens
	leastTokensAscend // least-tokens:work=vllm-ascend
)

var policySpecs = map[string]policy{
	"round-robin":                   roundRobin,
	"least-tokens":                  leastTokens,
	"least-tokens:work=tokens":      leastTokens,
	"least-tokens:work=vllm-ascend": leastTokensAscend,
}

// String is the policy's bounded name, for metrics and headers.
func (p policy) String() string {
	if p == roundRobin {
		return "round-robin"
	}
	return "least-tokens"
}

// PolicyNames lists what Config.Policy and Request.Policy may say.
func PolicyNames() []string {
	names := make([]string, 0, len(policySpecs))
	for name := range policySpecs {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func parsePolicy(spec string) (policy, error) {
	p, ok := policySpecs[spec]
	if !ok {
		return 0, fmt.Errorf("%w %q; known are %s", ErrBadPolicy, spec, strings.Join(PolicyNames(), ", "))
	}
	return p, nil
}

// kvShare is how much of a prompt's weight stays while only its KV blocks are
// there, and no prefill runs: vllm-ascend's factor.
const kvShare = 0.3

// score is what a policy wants least of. The request itself is not in it: it
// would weigh the same everywhere.
func (p policy) score(a *account) float64 {
	if p == leastTokensAscend {
		return (float64(a.work[probing]) + kvShare*float64(a.kvWork())) / 1e6
	}
	return float64(a.tokens[probing]) + kvShare*float64(a.kvTokens())
}

// ascendWork is vllm-ascend's weight of a prompt, 0.0345 for every four bytes
// and 120.0745 a request, in millionths (prefill P17).
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }

// after returns the first candidate past the cursor in configured order, or
// the first of all. Candidates must not be empty.
func after(cursor int, candidates []*candidate) *candidate {
	for _, c := range candidates {
		if c.order > cursor {
			return c
		}
	}
	return candidates[0]
}

// least returns the candidate with the lowest score; among scores within 1e-9
// of it that with the smallest batch, and then the one that the request's id
// hashes to. The lowest index would not do: it collects every tie.
func (t *Tier) least(p policy, requestID string, candidates []*candidate) *candidate {
	lowest := math.Inf(1)
	t.scores = t.scores[:0]
	for _, c := range candidates {
		s := p.score(&c.account)
		t.scores = append(t.scores, s)
		lowest = min(lowest, s)
	}
	var best *candidate
	var bestBatch float64
	var bestHash uint64
	for i, c := range candidates {
		if t.scores[i]-lowest > 1e-9*t.scores[i] {
			continue
		}
		batch := c.batch(t.now, t.cfg.Scrape.Interval)
		if best != nil && batch > bestBatch {
			continue
		}
		hash := t.hash(requestID, c.ID)
		if best == nil || batch < bestBatch || hash < bestHash {
			best, bestBatch, bestHash = c, batch, hash
		}
	}
	return best
}

// hash is the highest-random-weight hash: each request has its own order of
// the candidates, which stays when others come and go.
func (t *Tier) hash(requestID, candidateID string) uint64 {
	t.key = append(append(append(t.key[:0], requestID...), 0), candidateID...)
	return xxhash.Sum64(t.key)
}
