package prefill

import (
	"cmp"
	"math"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
)

// defaultBlock is the number of tokens per KV block if it is not known: vLLM's default.
const defaultBlock = 16

// blockTokens is the number of tokens per KV block of the candidate; defaultBlock if it is not known.
func (c *candidate) blockTokens() int {
	return cmp.Or(c.knownBlockTokens(), defaultBlock)
}

// knownBlockTokens is the number of tokens per KV block, as configured or as the engine reports it; 0: not known.
func (c *candidate) knownBlockTokens() int {
	return cmp.Or(c.BlockTokens, c.load.BlockTokens)
}

// rtt is the round trip to the engine: as a scrape has measured it, or else as it is configured.
func (c *candidate) rtt() time.Duration { return cmp.Or(c.load.RTT, c.RTT) }

func (c *candidate) rttMs() float64 { return float64(c.rtt()) / float64(time.Millisecond) }

// concurrentRequests is how many other requests, such as decodes, run on the candidate beside a prefill. An engine that only prefills has
// none, because it computes one prompt after the other.
func (c *candidate) concurrentRequests(now time.Time) float64 {
	if !c.Decodes {
		return 0
	}
	return c.load.ConcurrentRequests(now)
}

// latencyFor predicts how long prefills of the model take on the candidate, with the requests that it runs now. known is false
// while nothing is learned and latency is only the configured one.
func (s *state) latencyFor(model string, c *candidate) (latency policy.Latency, known bool) {
	fitted, known := s.fit.Latency(model, c.Hardware)
	return fitted.WithConcurrent(c.concurrentRequests(s.now)), known
}

// backlogMs is the predicted time, in ms, until the candidate has computed all its prompts; others is the part for prompts of
// other proxies and clients. The recent prediction error of the candidate (residual) is added once for each of this proxy's
// unanswered probes, and for furtherProbes more, because each of them will probably take longer by this error. The error may be
// negative, but at least a quarter of the prediction remains.
func (s *state) backlogMs(c *candidate, latency policy.Latency, furtherProbes int) (ms, others float64) {
	load := &c.load
	others = load.OthersBacklog(latency, s.fit.MeanNewTokens(), c.Decodes, s.now)
	ms = load.Backlog(s.now) + others
	probes := float64(load.Leases[ledger.Probing] + load.Waiting.Leases[ledger.Probing] + furtherProbes)
	return max(ms*minBacklogShare, ms+probes*c.residual.Ms(s.now)), others
}

// minBacklogShare is the smallest share of a predicted time that remains after a negative error is added.
const minBacklogShare = 0.25

// setIndicators sets in v the indicators of a candidate that do not depend on the request; SetPrompt sets the others. Prompts that wait for
// the candidate in this round (load.Waiting) count like prompts that it computes. Active does not mean the same everywhere: ActiveTokens
// and ActiveWork, which the policy least-tokens reads, count only prompts without an answer; ActiveBlocks, which dynamo-sum reads, counts
// all KV that the engine holds for this proxy.
func (d *chooser) setIndicators(v *policy.Engine, c *candidate, latency policy.Latency) {
	load, blockTokens := &c.load, float64(c.blockTokens())
	unansweredTokens, kvTokens := float64(load.Tokens[ledger.Probing]), float64(load.KVTokens())
	v.ID, v.Order, v.Ring = c.ID, c.order, c.ring
	v.QueuedNewTokens = float64(load.NewTokens + load.Waiting.NewTokens + load.ReportedByOthers.NewTokens)
	const thisRequest = 1 // the request for which the candidates are compared will be a further probe
	v.BacklogMs, _ = d.backlogMs(c, latency, thisRequest)
	v.BS = load.BatchSize(d.now) // batch size: unanswered probes, and the requests of others
	v.Waiting, v.Running = load.RequestCounts()
	v.Waiting += float64(load.Waiting.Leases[ledger.Probing])
	v.ActiveTokens, v.KVTokens = unansweredTokens, kvTokens
	v.KVUsage = load.Usage()
	v.HeldTokens = kvTokens - unansweredTokens // of prompts that are prefilled
	v.ActiveBlocks = math.Ceil(kvTokens / blockTokens)
	v.RTTMs = c.rttMs()
	v.TPMs, v.T0Ms, v.Beta2 = latency.TPMs, latency.T0Ms, latency.Beta2
	v.BlockTokens = blockTokens
	// The ledger counts in integers: twice the attention, and work in millionths.
	const unitsPerPair, unitsPerWork = 2, 1e6
	v.QueuedAttention = float64(load.Attention+load.Waiting.Attention) / unitsPerPair
	v.ActiveWork, v.KVWork = float64(load.Work[ledger.Probing])/unitsPerWork, float64(load.KVWork())/unitsPerWork
}
