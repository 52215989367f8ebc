package policy

import (
	"math"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// Indicators are the numbers by which policies compare candidates for a request, without the
// request's own charge. A user's policies use the names in the tags.
type Indicators struct {
	PromptTokens    float64 `expr:"prompt_tokens"`
	HitTokens       float64 `expr:"hit_tokens"`        // that the candidate can take from its prefix cache
	HitRatio        float64 `expr:"hit_ratio"`         // hit_tokens / prompt_tokens
	NewTokens       float64 `expr:"new_tokens"`        // that it would have to compute, at least 1
	QueuedNewTokens float64 `expr:"queued_new_tokens"` // left to compute for this proxy's probes
	PTokens         float64 `expr:"p_tokens"`          // queued_new_tokens + new_tokens
	BacklogMs       float64 `expr:"backlog_ms"`        // predicted until all known unanswered probes are done, those of others included
	BS              float64 `expr:"bs"`                // unanswered probes of this proxy, and the requests of others
	Waiting         float64 `expr:"waiting"`           // in the engine: the last scrape, and the probes sent since
	Running         float64 `expr:"running"`           // in the engine
	ActiveTokens    float64 `expr:"active_tokens"`     // of the prompts in unanswered probes of this proxy
	KVTokens        float64 `expr:"kv_tokens"`         // active_tokens + held_tokens
	KVUsage         float64 `expr:"kv_usage"`          // share of the KV cache in use, 0 to 1
	HeldTokens      float64 `expr:"held_tokens"`       // of prefilled prompts whose KV the engine still holds
	ActiveBlocks    float64 `expr:"active_blocks"`     // kv_tokens as a number of KV blocks
	RTTMs           float64 `expr:"rtt_ms"`
	TPMs            float64 `expr:"tp_ms"` // of prefill per new token, as learned
	T0Ms            float64 `expr:"t0_ms"` // fixed part of the prefill, as learned

	// Over all candidates that may take this request; N is their number.
	MaxBS  float64 `expr:"max_bs"`
	MinBS  float64 `expr:"min_bs"`
	MeanBS float64 `expr:"mean_bs"`
	N      float64 `expr:"n"`
}

// Engine is a candidate for a request: an engine, or one rank of it, as policies see it.
type Engine struct {
	ID    string
	Order int      // position in the configuration, for round-robin
	Ring  []uint64 // points of the candidate on the hash ring, for sticky-ring; see Vnodes

	Indicators

	BlockTokens     float64 // tokens of the engine's KV blocks; 0 counts as 1
	Beta2           float64 // ms per token pair of attention
	QueuedAttention float64 // Σ N·(H + N/2) over unanswered probes with N new and H cached tokens, in tokens²
	ActiveWork      float64 // vllm-ascend's weight of the prompts that ActiveTokens counts
	KVWork          float64 // vllm-ascend's weight of the prompts that KVTokens counts
}

// Query is the request for which a candidate is chosen.
type Query struct {
	ID     string // hashed to decide between candidates with equal scores
	Key    uint64 // hash of the session, for sticky-ring; 0: the ID is hashed instead
	Cursor int    // Order of the candidate that round-robin last chose for the model, -1: none
}

// SetPrompt sets the indicators that depend on the prompt. matched is how many tokens are in the
// candidate's prefix cache. Hits are whole blocks, and an engine always computes at least one
// token.
func (e *Engine) SetPrompt(prompt, matched float64) {
	block := max(1, e.BlockTokens)
	e.PromptTokens = prompt
	e.HitTokens = max(0, min(matched, math.Floor((prompt-1)/block)*block))
	e.HitRatio = 0
	if prompt > 0 {
		e.HitRatio = e.HitTokens / prompt
	}
	e.NewTokens = max(1, prompt-e.HitTokens)
	e.PTokens = e.QueuedNewTokens + e.NewTokens
}

// Aggregate sets the indicators that compare all eligible candidates.
func Aggregate(candidates []Engine) {
	minBS, maxBS, sumBS := math.Inf(1), 0.0, 0.0
	for i := range candidates {
		bs := candidates[i].BS
		minBS, maxBS, sumBS = min(minBS, bs), max(maxBS, bs), sumBS+bs
	}
	n := float64(len(candidates))
	for i := range candidates {
		e := &candidates[i]
		e.MinBS, e.MaxBS, e.MeanBS, e.N = minBS, maxBS, sumBS/n, n
	}
}

// Latency predicts the duration of a prefill in ms: T0Ms + TPMs·N + Beta2·N·(H + N/2), for N new
// tokens after H cached tokens.
type Latency struct{ T0Ms, TPMs, Beta2 float64 }

func (l Latency) Ms(newTokens, hit float64) float64 {
	return l.T0Ms + l.TPMs*newTokens + l.Beta2*Attention(newTokens, hit)
}

// Attention is the number of token pairs that the attention of a prefill computes.
func Attention(newTokens, hit float64) float64 { return newTokens * (hit + newTokens/2) }

// minLeftShare is the smallest share of a running prefill's predicted time that is assumed to be
// left, because the prediction may be wrong, and a candidate that hangs must not look idle.
const minLeftShare = 0.25

// Backlog is the predicted time, in ms, until a candidate has computed all unanswered probes. The
// oldest probe has run for elapsedMs.
func Backlog(totalMs, oldestMs, elapsedMs float64) float64 {
	oldestLeftMs := max(minLeftShare*oldestMs, oldestMs-max(0, elapsedMs))
	return totalMs - oldestMs + oldestLeftMs
}

func (e *Engine) attention() float64 { return Attention(e.NewTokens, e.HitTokens) }

// vnodes is the number of a candidate's points on the ring. With 100 each, the largest share of 64
// candidates is about 30 % above the mean.
const vnodes = 100

// Vnodes returns a candidate's points in ascending order.
func Vnodes(id string) []uint64 {
	ring := make([]uint64, vnodes)
	for i := range ring {
		ring[i] = xxhash.Sum64String(id + "#" + strconv.Itoa(i))
	}
	slices.Sort(ring)
	return ring
}

// ringDistance is the distance from the key to the next point, as a share of the whole ring.
func ringDistance(ring []uint64, key uint64) float64 {
	if len(ring) == 0 {
		return 1
	}
	i, _ := slices.BinarySearch(ring, key)
	next := ring[i%len(ring)]            // behind the last point comes the first one
	return float64(next-key) / (1 << 64) // wraps around like the ring
}

// HRW is rendezvous hashing, the lowest hash first. Each request has its own order, and the order
// of two candidates does not change when others come and go.
func HRW(requestID, candidateID string) uint64 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(requestID)
	_, _ = d.Write([]byte{0}) // separates the IDs
	_, _ = d.WriteString(candidateID)
	return d.Sum64()
}
