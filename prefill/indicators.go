package prefill

import (
	"math"
	"time"

	"evenkeel/prefill/policy"
)

// defaultBlock is the KV block of an engine that does not say: vLLM's.
const defaultBlock = 16

// blockTokens is the size of the candidate's KV blocks.
func (c *candidate) blockTokens() int {
	if said := c.saidBlock(); said > 0 {
		return said
	}
	return defaultBlock
}

// saidBlock is what anybody said of them, 0: nobody did.
func (c *candidate) saidBlock() int {
	if c.BlockTokens > 0 {
		return c.BlockTokens
	}
	return c.block
}

func (c *candidate) rttMs() float64 {
	if c.rtt > 0 {
		return float64(c.rtt) / float64(time.Millisecond)
	}
	return float64(c.RTT) / float64(time.Millisecond)
}

// measure sets all of a candidate's indicators that do not depend on the
// request. What waits for it counts like what it runs.
func (t *Tier) measure(v *policy.Candidate, c *candidate, line policy.Line) {
	a, block := &c.account, float64(c.blockTokens())
	active, kv := float64(a.tokens[probing]), float64(a.kvTokens())
	v.ID, v.Order, v.Ring = c.ID, c.order, c.ring
	v.QueuedNewTokens = float64(a.newTokens + c.held.newTokens + c.shared.NewTokens)
	v.BacklogMs = c.backlog(t.now) + t.othersBacklog(c, line)
	v.BS = c.batch(t.now, t.cfg.Scrape.Interval)
	v.Waiting, v.Running = c.queued+float64(c.held.leases[probing]), c.running
	v.ActiveTokens, v.KVTokens = active, kv
	v.KVUsage = c.kvUsage()
	v.HeldTokens = kv - active
	v.ActiveBlocks = math.Ceil(kv / block)
	v.RTTMs = c.rttMs()
	v.TPMs, v.T0Ms, v.Beta2 = line.TPMs, line.T0Ms, line.Beta2
	v.BlockTokens = block
	v.QueuedAttention = float64(a.attention+c.held.attention) / 2
	v.ActiveWork, v.KVWork = float64(a.work[probing])/1e6, float64(a.kvWork())/1e6
}

// batch is the indicator bs: our unanswered probes and what others sent, as they
// say or a sample shows, while it is current.
func (c *candidate) batch(now time.Time, interval time.Duration) float64 {
	others := float64(c.shared.Unanswered)
	if c.current(now, interval) {
		others = max(others, c.foreign)
	}
	return float64(c.account.leases[probing]+c.held.leases[probing]) + others
}

// backlog is our own part of the indicator backlog_ms.
func (c *candidate) backlog(now time.Time) float64 {
	waiting := float64(c.held.predictedUs) / 1000
	if c.oldest == nil {
		return waiting
	}
	elapsed := float64(now.Sub(c.runningSince())) / float64(time.Millisecond)
	return waiting + policy.Backlog(float64(c.account.predictedUs)/1000, float64(c.oldest.charge.predictedUs)/1000, elapsed)
}

// othersBacklog is the part of backlog_ms that other dispatchers and strangers
// sent. The other dispatchers say how much they have there; requests that a current
// sample shows beyond that count as long as a prompt of ours usually takes. A
// running prompt counts half, because on average half of it is done. On an engine
// that also decodes, running requests do not count, because they may be decodes.
func (t *Tier) othersBacklog(c *candidate, line policy.Line) float64 {
	told := float64(c.shared.Unanswered)
	ms := told*line.T0Ms + line.TPMs*float64(c.shared.NewTokens)
	if !c.current(t.now, t.cfg.Scrape.Interval) {
		return ms
	}
	waits, runs := c.foreignQueue, c.foreign-c.foreignQueue
	if c.Decodes {
		runs = 0
	}
	waits, told = max(0, waits-told), max(0, told-waits)
	return ms + (waits+max(0, runs-told)/2)*line.Ms(t.fit.Usual(), 0)
}

// runningSince is when the engine can have begun with the oldest probe at the
// latest. There must be one.
func (c *candidate) runningSince() time.Time {
	if c.answeredAt.After(c.oldest.sent) {
		return c.answeredAt
	}
	return c.oldest.sent
}

// kvUsage is the larger of what we know and what the engine says, its gauge
// being frozen while we have nothing there.
func (c *candidate) kvUsage() float64 {
	usage := c.own()
	if c.account.live() > 0 && c.usage > usage { // never true of NaN
		usage = c.usage
	}
	return usage
}

// noteSend and noteAnswer keep the scraped queue in step with what we do.
func (c *candidate) noteSend(l *Lease) {
	l.before = c.newest
	if c.newest != nil {
		c.newest.after = l
	} else {
		c.oldest = l
	}
	c.newest = l
	c.sends++
	c.queued++
}

func (c *candidate) noteAnswer(l *Lease, now time.Time) {
	if l.before != nil {
		l.before.after = l.after
	} else {
		c.oldest = l.after
	}
	if l.after != nil {
		l.after.before = l.before
	} else {
		c.newest = l.before
	}
	l.before, l.after = nil, nil
	c.answeredAt = now
	c.answers++
	c.settleOne()
}

// settleOne takes a finished request off the running ones, or off the waiting
// ones where the scrape had not seen it run.
func (c *candidate) settleOne() {
	if c.running >= 1 {
		c.running--
	} else {
		c.queued = max(0, c.queued-1)
	}
}

// noteSample starts from what a scrape said, sends and answers later than its
// start put on top.
func (c *candidate) noteSample(s Sample, sends, answers int) {
	if math.IsNaN(s.Running + s.Waiting) {
		return
	}
	c.queued, c.running = s.Waiting+float64(c.sends-sends), s.Running
	for range c.answers - answers {
		c.settleOne()
	}
}

// chargeOf is what a prompt weighs on a candidate as it was measured.
func chargeOf(v *policy.Candidate, promptBytes int) charge {
	line := policy.Line{T0Ms: v.T0Ms, TPMs: v.TPMs, Beta2: v.Beta2}
	hit, fresh := int64(v.HitTokens), int64(v.NewTokens)
	return charge{
		tokens:      int64(v.PromptTokens),
		work:        ascendWork(promptBytes),
		newTokens:   fresh,
		predictedUs: int64(1000 * line.Ms(float64(fresh), float64(hit))),
		attention:   fresh * (2*hit + fresh),
	}
}

// ascendWork is vllm-ascend's weight of a prompt, 0.0345 for every four bytes
// and 120.0745 a request, in millionths.
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }
