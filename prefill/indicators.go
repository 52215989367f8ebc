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

func (c *candidate) blockTokens() int {
	return cmp.Or(c.knownBlockTokens(), defaultBlock)
}

// knownBlockTokens is as the KV events say, or else as the engine's metrics say, which may mean
// another group of layers; 0: not known.
func (c *candidate) knownBlockTokens() int {
	if events := c.cache.Events(); events != nil {
		return cmp.Or(events.BlockTokens(), c.BlockTokens)
	}
	return c.BlockTokens
}

// rtt is measured by a scrape, or else configured.
func (c *candidate) rtt() time.Duration { return cmp.Or(c.load.RTT, c.RTT) }

func (c *candidate) rttMs() float64 { return float64(c.rtt()) / float64(time.Millisecond) }

// concurrentRequests is how many other requests run beside a prefill. An engine that only prefills
// has none, because it computes one prompt after the other.
func (c *candidate) concurrentRequests(now time.Time) float64 {
	if !c.Decodes {
		return 0
	}
	return c.load.ConcurrentRequests(now)
}

// latencyFor returns known false while the latency is only the configured one.
func (s *state) latencyFor(model string, c *candidate) (latency policy.Latency, known bool) {
	fitted, known := s.fit.Latency(model, c.Hardware)
	return fitted.WithConcurrent(c.concurrentRequests(s.now)), known
}

// backlogMs is the predicted time, in ms, until the candidate has computed all its prompts; others
// is the part of other proxies and clients. The candidate's recent error is added for each of this
// proxy's unanswered probes, and for furtherProbes more, because each will probably take longer by
// it.
func (s *state) backlogMs(c *candidate, latency policy.Latency, furtherProbes int) (ms, others float64) {
	load := &c.load
	others = load.OthersBacklog(latency, s.fit.MeanNewTokens(), c.Decodes, s.now)
	ms = load.Backlog(s.now) + others
	probes := float64(load.Leases[ledger.Probing] + load.Waiting.Leases[ledger.Probing] + furtherProbes)
	return max(ms*minBacklogShare, ms+probes*c.residual.Ms(s.now)), others
}

// minBacklogShare is the smallest share of a predicted time that remains after a negative error is
// added.
const minBacklogShare = 0.25

// setIndicators sets what does not depend on the request; SetPrompt sets the rest. Prompts that
// wait in this round count like those that the candidate computes.
func (d *chooser) setIndicators(v *policy.Engine, c *candidate, latency policy.Latency) {
	load := &c.load
	v.ID, v.Order, v.Ring = c.ID, c.order, c.ring
	v.RTTMs = c.rttMs()
	v.T0Ms, v.TPMs, v.Beta2 = latency.T0Ms, latency.TPMs, latency.Beta2

	v.BacklogMs, _ = d.backlogMs(c, latency, 1) // the request itself is a further probe
	v.QueuedNewTokens = float64(load.NewTokens + load.Waiting.NewTokens + load.ReportedByOthers.NewTokens)
	v.QueuedAttention = float64(load.Attention+load.Waiting.Attention) / 2 // the ledger counts twice the attention, as an integer
	v.BS = load.BatchSize(d.now)
	v.Waiting, v.Running = load.RequestCounts()
	v.Waiting += float64(load.Waiting.Leases[ledger.Probing])
	setKVIndicators(v, c)
}

// setKVIndicators counts only prompts without an answer in ActiveTokens and ActiveWork, for
// least-tokens. ActiveBlocks, for dynamo-sum, also counts those that are prefilled, as KVTokens and
// KVWork do.
func setKVIndicators(v *policy.Engine, c *candidate) {
	load, blockTokens := &c.load, float64(c.blockTokens())
	unansweredTokens, kvTokens := float64(load.Tokens[ledger.Probing]), float64(load.KVTokens())
	v.ActiveTokens, v.KVTokens = unansweredTokens, kvTokens
	v.HeldTokens = kvTokens - unansweredTokens // only of prompts that are prefilled
	v.BlockTokens, v.ActiveBlocks = blockTokens, math.Ceil(kvTokens/blockTokens)
	v.KVUsage = load.Usage()
	// The ledger counts work in millionths.
	v.ActiveWork, v.KVWork = float64(load.Work[ledger.Probing])/1e6, float64(load.KVWork())/1e6
}
