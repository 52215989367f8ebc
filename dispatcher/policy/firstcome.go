package policy

import (
	"math/rand/v2"

	"evenkeel/dispatcher/subset"
)

// rule says how a first-come policy chooses a rank.
type rule uint8

const (
	ruleRandom rule = iota
	ruleRR          // ranks take turns (round robin)
	ruleP2C         // of two random ranks, the one with fewer requests
	ruleJSQ         // fewest requests; in a tie, ranks take turns
	ruleJSQKV       // fewest KV tokens; in a tie, the lower ID
	ruleLeastF      // largest score F of BR-0; in a tie, the larger margin, then the lower ID
)

// firstCome takes the entries one by one, oldest first. The immediate form sends every entry to a
// rank at once, where the engine queues it. In the pooled form, an entry waits until a rank has a
// slot and KV room. br0:bypass is immediate, but sends a rank at most extraSlots more entries than
// it has free slots.
type firstCome struct {
	name         string
	rule         rule
	immediate    bool
	engineQueues bool // free slots and KV room are ignored, because the engine queues what it cannot run yet
	extraSlots   int32
	maxAgeMs     float32
	watermark    float64
	sendsAhead   bool
	dice         *rand.PCG // random numbers of the rules random and p2c; nil for br0:bypass

	lastRank int32 // ID of the rank that got the last entry; the rules rr, and jsq in a tie, go on after it

	ranks     ranks
	rankLoads envelope // loads of the ranks: ruleJSQKV reads its heldTokens, and ruleLeastF its margins
	requests  []int32  // number of requests, by rank
	eligible  []int32
}

func (p *firstCome) Name() string      { return p.name }
func (p *firstCome) Immediate() bool   { return p.immediate }
func (p *firstCome) MaxAgeMs() float32 { return p.maxAgeMs }

// Decide places the pool in arrival order. For an overdue entry that fits no rank with a free slot,
// a rank is reserved. If the engine queues entries, each rank that is up takes all entries that fit
// its whole capacity.
func (p *firstCome) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.beginRound(s)
	for i := range s.Pool {
		if p.ranks.openSlots <= 0 {
			break
		}
		e := &s.Pool[i]
		tokens := int64(e.Prompt)
		g, score := p.choose(s, tokens)
		if g == none {
			// With engineQueues, the entry is larger than any rank, so a reservation would not help.
			if !p.engineQueues && isOverdue(s, e) {
				p.ranks.reserveOnce(s, i)
			}
			continue
		}
		if !p.engineQueues {
			p.ranks.charge(g, tokens)
		}
		// The rules compare rankLoads and requests, which must count the entry for the next choice.
		p.rankLoads.heldTokens[g] += tokens
		p.rankLoads.addLoad(g, subset.Scaled(tokens, float64(s.Workers[g].Cost)))
		p.requests[g]++
		p.lastRank = s.Workers[g].ID
		dst = append(dst, Assignment{Entry: e.ID, Worker: s.Workers[g].ID, Score: score, Stage: stageSingle})
	}
	return dst
}

func (p *firstCome) beginRound(s *Snapshot) {
	const horizon = 0 // only the present loads count
	p.rankLoads.build(s, horizon)
	if p.engineQueues {
		p.ranks.loadForEngineQueues(s)
	} else {
		p.ranks.load(s, p.rankLoads.heldTokens, p.watermark, p.extraSlots)
	}
	p.requests = sized(p.requests, len(s.Workers))
	for g := range s.Workers {
		p.requests[g] = int32(len(s.Workers[g].Running))
	}
}

// choose returns the rank, or none, and the value by which the rule chose it; 0 if the rule
// compares nothing.
func (p *firstCome) choose(s *Snapshot, tokens int64) (int, float64) {
	switch p.rule {
	case ruleRandom:
		if eligible := p.ranksWithRoom(tokens); len(eligible) > 0 {
			return int(eligible[rand.New(p.dice).IntN(len(eligible))]), 0
		}
		return none, 0
	case ruleRR:
		return p.nextInTurn(s, tokens), 0
	case ruleP2C:
		return p.betterOfTwo(tokens)
	case ruleJSQ: // in a tie, the first rank after the last chosen one wins
		return rankWithLeast(&p.ranks, p.requests, p.nextRank(s), tokens)
	case ruleJSQKV: // in a tie, the lower index wins
		const firstRank = 0
		return rankWithLeast(&p.ranks, p.rankLoads.heldTokens, firstRank, tokens)
	default: // ruleLeastF
		return p.largestF(s, tokens)
	}
}

func (p *firstCome) ranksWithRoom(tokens int64) []int32 {
	p.eligible = p.eligible[:0]
	for g := range p.ranks.free {
		if p.ranks.fits(g, tokens) {
			p.eligible = append(p.eligible, int32(g))
		}
	}
	return p.eligible
}

func (p *firstCome) nextInTurn(s *Snapshot, tokens int64) int {
	n, start := len(s.Workers), p.nextRank(s)
	for k := range n {
		if g := (start + k) % n; p.ranks.fits(g, tokens) {
			return g
		}
	}
	return none
}

// nextRank returns the first rank after the one that got the last entry; after the last rank, it is
// 0.
func (p *firstCome) nextRank(s *Snapshot) int {
	for g := range s.Workers {
		if s.Workers[g].ID > p.lastRank {
			return g
		}
	}
	return 0
}

// betterOfTwo draws two different ranks with a slot and room.
func (p *firstCome) betterOfTwo(tokens int64) (int, float64) {
	eligible := p.ranksWithRoom(tokens)
	if len(eligible) == 0 {
		return none, 0
	}
	i := rand.New(p.dice).IntN(len(eligible))
	g := eligible[i]
	if len(eligible) > 1 {
		j := rand.New(p.dice).IntN(len(eligible) - 1)
		if j >= i { // skip i, so that both ranks differ
			j++
		}
		if other := eligible[j]; p.requests[other] < p.requests[g] {
			g = other
		}
	}
	return int(g), float64(p.requests[g])
}

// rankWithLeast returns the rank with a slot and room and with the smallest value. In a tie, the
// first rank from index `from` on wins, in a ring.
func rankWithLeast[N int32 | int64](r *ranks, values []N, from int, tokens int64) (int, float64) {
	best := none
	for k := range values {
		g := from + k
		if g >= len(values) {
			g -= len(values)
		}
		if r.fits(g, tokens) && (best == none || values[g] < values[best]) {
			best = g
		}
	}
	if best == none {
		return none, 0
	}
	return best, float64(values[best])
}

// largestF prefers the rank with the larger margin in a tie.
func (p *firstCome) largestF(s *Snapshot, tokens int64) (int, float64) {
	best, bestF := none, int64(0)
	for g := range p.ranks.free {
		if !p.ranks.fits(g, tokens) {
			continue
		}
		margin := p.rankLoads.minMargin(g) // that of the present step, the only one in rankLoads
		added := subset.Scaled(tokens, float64(s.Workers[g].Cost))
		f := subset.F0(added, margin, len(s.Workers))
		if best == none || f > bestF || f == bestF && margin > p.rankLoads.minMargin(best) {
			best, bestF = g, f
		}
	}
	return best, float64(bestF)
}
