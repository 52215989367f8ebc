package prefill

import (
	"cmp"
	"math"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
)

// defaultBlock is the KV block of an engine that does not say: vLLM's.
const defaultBlock = 16

// blockTokens is the size of the candidate's KV blocks.
func (c *candidate) blockTokens() int {
	return cmp.Or(c.saidBlock(), defaultBlock)
}

// saidBlock is the size in tokens that the configuration or the engine gives; 0: neither does.
func (c *candidate) saidBlock() int {
	return cmp.Or(c.BlockTokens, c.account.Block)
}

// rtt is the round trip to the engine.
func (c *candidate) rtt() time.Duration { return cmp.Or(c.account.RTT, c.RTT) }

func (c *candidate) rttMs() float64 { return float64(c.rtt()) / float64(time.Millisecond) }

// beside is how many requests of others, such as decodes, run on the candidate beside
// prefills. An engine that only prefills has none: what others sent there waits in turn.
func (c *candidate) beside(now time.Time) float64 {
	if !c.Decodes {
		return 0
	}
	return c.account.Beside(now)
}

// line is how long prefills of the model take on the candidate as it is now. known is false while nothing was
// learned, and the line is only the one that learning starts from.
func (s *state) line(model string, c *candidate) (line policy.Line, known bool) {
	law, known := s.fit.Law(model, c.Hardware)
	return law.Among(c.beside(s.now)), known
}

// backlog is how long, in ms, the candidate is predicted to need for what it has; others is the part of it that
// others sent. What prefills there lately took beyond their prediction is added for each of our probes, and for more
// probes that may come. It may be below 0, but a quarter of the prediction always counts.
func (s *state) backlog(c *candidate, line policy.Line, more int) (ms, others float64) {
	a := &c.account
	others = a.OthersBacklog(line, s.fit.Usual(), c.Decodes, s.now)
	ms = a.Backlog(s.now) + others
	ours := float64(a.Leases[ledger.Probing] + a.Waiting.Leases[ledger.Probing] + more)
	return max(ms*leastOfBacklog, ms+ours*c.residual.Ms(s.now)), others
}

// leastOfBacklog is the share of a predicted backlog that counts however fast an engine lately was.
const leastOfBacklog = 0.25

// measure sets all of a candidate's indicators that do not depend on the request. Prompts that wait for the candidate
// in this round count like those that it runs.
func (d *chooser) measure(v *policy.Candidate, c *candidate, line policy.Line) {
	a, block := &c.account, float64(c.blockTokens())
	active, kv := float64(a.Tokens[ledger.Probing]), float64(a.KVTokens())
	v.ID, v.Order, v.Ring = c.ID, c.order, c.ring
	v.QueuedNewTokens = float64(a.NewTokens + a.Waiting.NewTokens + a.Shared.NewTokens)
	v.BacklogMs, _ = d.backlog(c, line, 1)
	v.BS = a.Batch(d.now)
	v.Waiting, v.Running = a.Queue()
	v.Waiting += float64(a.Waiting.Leases[ledger.Probing])
	v.ActiveTokens, v.KVTokens = active, kv
	v.KVUsage = a.Usage()
	v.HeldTokens = kv - active
	v.ActiveBlocks = math.Ceil(kv / block)
	v.RTTMs = c.rttMs()
	v.TPMs, v.T0Ms, v.Beta2 = line.TPMs, line.T0Ms, line.Beta2
	v.BlockTokens = block
	v.QueuedAttention = float64(a.Attention+a.Waiting.Attention) / 2
	v.ActiveWork, v.KVWork = float64(a.Work[ledger.Probing])/1e6, float64(a.KVWork())/1e6
}
