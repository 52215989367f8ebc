package policy

import (
	"math"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// Indicators are what is known of one candidate when a request is decided, before the request is charged there. The
// names in the tags are those that a user's policies use.
type Indicators struct {
	PromptTokens    float64 `expr:"prompt_tokens"`
	HitTokens       float64 `expr:"hit_tokens"`        // of prompt_tokens, those in the candidate's prefix cache that can be used
	HitRatio        float64 `expr:"hit_ratio"`         // hit_tokens / prompt_tokens
	NewTokens       float64 `expr:"new_tokens"`        // tokens to be computed there, at least 1
	QueuedNewTokens float64 `expr:"queued_new_tokens"` // tokens to be computed for our unanswered probes
	PTokens         float64 `expr:"p_tokens"`          // queued_new_tokens + new_tokens
	BacklogMs       float64 `expr:"backlog_ms"`        // predicted time left for unanswered probes: ours, and the known ones of others
	BS              float64 `expr:"bs"`                // our unanswered probes and the requests of others
	Waiting         float64 `expr:"waiting"`           // requests in the engine's queue, ours since the scrape included
	Running         float64 `expr:"running"`
	ActiveTokens    float64 `expr:"active_tokens"` // prompt tokens of our unanswered probes
	KVTokens        float64 `expr:"kv_tokens"`     // active_tokens and held_tokens
	KVUsage         float64 `expr:"kv_usage"`      // share of the KV cache in use, 0 to 1
	HeldTokens      float64 `expr:"held_tokens"`   // tokens of hand-offs that still hold KV
	ActiveBlocks    float64 `expr:"active_blocks"` // kv_tokens in blocks of the engine
	RTTMs           float64 `expr:"rtt_ms"`
	TPMs            float64 `expr:"tp_ms"` // time for each new token, by the fitted line
	T0Ms            float64 `expr:"t0_ms"` // time of a prefill without any new token

	// These are over the candidates that this request may go to.
	MaxBS  float64 `expr:"max_bs"`
	MinBS  float64 `expr:"min_bs"`
	MeanBS float64 `expr:"mean_bs"`
	N      float64 `expr:"n"`
}

// Candidate is one place a request may go to.
type Candidate struct {
	ID    string
	Order int      // in the configuration, for round-robin
	Ring  []uint64 // Vnodes(ID), for sticky-ring

	Indicators

	BlockTokens     float64 // tokens of the engine's KV blocks; 0 counts as 1
	Beta2           float64 // ms a token pair: the time that attention over the prompt adds
	QueuedAttention float64 // Σ N·(H + N/2) over our unanswered probes, tokens²
	ActiveWork      float64 // active_tokens and kv_tokens as vllm-ascend's example proxy weighs prompts
	KVWork          float64
}

// Query is the request that is decided.
type Query struct {
	ID     string // breaks ties
	Key    uint64 // hash of the session, for sticky-ring; 0: none, the ID stands in
	Cursor int    // Order of the candidate that round-robin chose last for the model, -1: none
}

// Fit sets what a prompt of so many tokens would find and cost at the candidate, if matched of them are in its prefix
// cache. An engine computes at least one token again, and hits are whole blocks.
func (c *Candidate) Fit(prompt, matched float64) {
	block := max(1, c.BlockTokens)
	c.PromptTokens = prompt
	c.HitTokens = max(0, min(matched, math.Floor((prompt-1)/block)*block))
	c.HitRatio = 0
	if prompt > 0 {
		c.HitRatio = c.HitTokens / prompt
	}
	c.NewTokens = max(1, prompt-c.HitTokens)
	c.PTokens = c.QueuedNewTokens + c.NewTokens
}

// Aggregate sets the indicators that depend on which candidates are eligible.
func Aggregate(candidates []Candidate) {
	least, most, sum := math.Inf(1), 0.0, 0.0
	for i := range candidates {
		bs := candidates[i].BS
		least, most, sum = min(least, bs), max(most, bs), sum+bs
	}
	n := float64(len(candidates))
	for i := range candidates {
		c := &candidates[i]
		c.MinBS, c.MaxBS, c.MeanBS, c.N = least, most, sum/n, n
	}
}

// Line predicts how long a prefill takes in ms: T0Ms + TPMs·N + Beta2·N·(H + N/2), for N new tokens after H tokens
// that are in the cache.
type Line struct{ T0Ms, TPMs, Beta2 float64 }

// Ms is how long a prefill is predicted to take.
func (l Line) Ms(newTokens, hit float64) float64 {
	return l.T0Ms + l.TPMs*newTokens + l.Beta2*Attention(newTokens, hit)
}

// Attention is the number of token pairs a prefill looks at.
func Attention(newTokens, hit float64) float64 { return newTokens * (hit + newTokens/2) }

// creditFloor is the share of the running prefill's prediction that still counts however long it runs: the line may
// be wrong, and a candidate that never ends its prefill must not look free.
const creditFloor = 0.25

// Backlog is the time left for a candidate's unanswered probes: their predicted total less the time for which the
// oldest, which runs, has run alone.
func Backlog(totalMs, oldestMs, elapsedMs float64) float64 {
	return totalMs - oldestMs + max(creditFloor*oldestMs, oldestMs-max(0, elapsedMs))
}

// attention is the number of token pairs of the new prefill, which Beta2 weighs.
func (c *Candidate) attention() float64 { return Attention(c.NewTokens, c.HitTokens) }

// vnodes is how many points a candidate has on the ring: with 100 points the largest share of 64 candidates is some
// 30 % above the mean.
const vnodes = 100

// Vnodes are a candidate's points on the ring, in order.
func Vnodes(id string) []uint64 {
	ring := make([]uint64, vnodes)
	for i := range ring {
		ring[i] = xxhash.Sum64String(id + "#" + strconv.Itoa(i))
	}
	slices.Sort(ring)
	return ring
}

// ahead is the distance, clockwise from the key, to the nearest of the points, as a share of the ring.
func ahead(ring []uint64, key uint64) float64 {
	if len(ring) == 0 {
		return 1
	}
	i, _ := slices.BinarySearch(ring, key)
	return float64(ring[i%len(ring)]-key) / (1 << 64) // the subtraction wraps around like the ring
}

// HRW orders candidates for a request by highest random weight: each request has its own order, which does not change
// when other candidates come and go. The lowest hash is first.
func HRW(requestID, candidateID string) uint64 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(requestID)
	_, _ = d.Write([]byte{0})
	_, _ = d.WriteString(candidateID)
	return d.Sum64()
}
