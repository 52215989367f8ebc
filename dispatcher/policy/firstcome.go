package policy

import (
	"math/rand/v2"

	"evenkeel/dispatcher/subset"
)

// rule says by what a first-come policy chooses the rank of an entry.
type rule uint8

const (
	ruleRandom rule = iota
	ruleRR          // ranks take turns (round robin)
	ruleP2C         // two random ranks are compared; the one with fewer requests wins
	ruleJSQ         // fewest requests; in a tie, ranks take turns
	ruleJSQKV       // fewest KV tokens; in a tie, the lower ID
	ruleLeastF      // largest score F of BR-0 (see largestF); in a tie, the larger margin, then the lower ID
)

// firstCome takes the entries one by one, oldest first, and chooses a rank for each by its rule. The immediate form sends every entry to a
// rank at once, where the engine queues it. In the pooled form, an entry waits until a rank has a free slot and KV room. The policy
// br0:bypass is immediate, but sends a rank at most extraSlots more entries than it has free slots.
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

	lastRank int32 // ID of the rank that got the last entry; the rules rr, and jsq in a tie, take the first suitable rank after it

	ranks     ranks
	rankLoads envelope // loads of the ranks: ruleJSQKV reads its heldTokens, and ruleLeastF its margins
	requests  []int32  // by rank: number of its requests
	eligible  []int32
}

func (p *firstCome) Name() string      { return p.name }
func (p *firstCome) Immediate() bool   { return p.immediate }
func (p *firstCome) MaxAgeMs() float32 { return p.maxAgeMs }

// Decide places the pool in arrival order. An entry that fits no rank with a free slot is skipped; if it is overdue, a rank is reserved for
// it. If the engine queues entries, each rank that is up takes all entries that fit its whole capacity.
func (p *firstCome) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.beginRound(s)
	for i := range s.Pool {
		if p.ranks.openSlots <= 0 { // no further entry can be placed
			break
		}
		e := &s.Pool[i]
		tokens := int64(e.Prompt)
		g, score := p.choose(s, tokens)
		if g == none {
			// With engineQueues, an entry that does not fit is larger than any rank, so a reservation would not help.
			if !p.engineQueues && isOverdue(s, e) {
				p.ranks.reserveOnce(s, i)
			}
			continue
		}
		if !p.engineQueues { // an engine's queue takes any number of entries
			p.ranks.charge(g, tokens)
		}
		// p.ranks has what is still free on a rank. rankLoads and requests have what the rules compare, and must count the entry
		// for the next choice. heldTokens are KV tokens, and a load is KV tokens times the rank's cost per token.
		p.rankLoads.heldTokens[g] += tokens
		p.rankLoads.addLoad(g, subset.Scaled(tokens, float64(s.Workers[g].Cost)))
		p.requests[g]++
		p.lastRank = s.Workers[g].ID // rules by which ranks take turns go on after this rank
		dst = append(dst, Assignment{Entry: e.ID, Worker: s.Workers[g].ID, Score: score, Stage: stageSingle})
	}
	return dst
}

// beginRound computes what the ranks have before the round: their KV tokens and loads (rankLoads), the number of their requests, and their
// free slots and KV room (ranks). Unless engines queue any number of entries (engineQueues), the share watermark of the KV capacity stays
// empty, and a rank gets at most extraSlots more entries than it has free slots.
func (p *firstCome) beginRound(s *Snapshot) {
	const horizon = 0 // only the present loads count
	p.rankLoads.build(s, horizon)
	if p.engineQueues { // each rank takes any number of entries
		p.ranks.loadForEngineQueues(s)
	} else {
		p.ranks.load(s, p.rankLoads.heldTokens, p.watermark, p.extraSlots)
	}
	p.requests = sized(p.requests, len(s.Workers))
	for g := range s.Workers {
		p.requests[g] = int32(len(s.Workers[g].Running))
	}
}

// choose returns the rank for an entry of so many tokens (none: no rank), and the value by which the rule chose it. The value is the number
// of requests or the KV tokens that the rank has without the entry, or the score F of the entry there. It is 0 if the rule compares
// nothing.
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
	case ruleJSQ: // in a tie, ranks take turns: the first rank after the last chosen one wins
		return rankWithLeast(&p.ranks, p.requests, p.nextRank(s), tokens)
	case ruleJSQKV: // in a tie, the rank with the lower index wins
		const firstRank = 0
		return rankWithLeast(&p.ranks, p.rankLoads.heldTokens, firstRank, tokens)
	default: // ruleLeastF: the largest F wins; F is by how many tokens the entry lowers the cost of the loads (see Cost)
		return p.largestF(s, tokens)
	}
}

// ranksWithRoom returns the indices of the ranks that have a slot and room for so many tokens.
func (p *firstCome) ranksWithRoom(tokens int64) []int32 {
	p.eligible = p.eligible[:0]
	for g := range p.ranks.free {
		if p.ranks.fits(g, tokens) {
			p.eligible = append(p.eligible, int32(g))
		}
	}
	return p.eligible
}

// nextInTurn returns the first rank, after the rank that got the last entry, that has a slot and room for so many tokens; none: there is no
// such rank.
func (p *firstCome) nextInTurn(s *Snapshot, tokens int64) int {
	n, start := len(s.Workers), p.nextRank(s)
	for k := range n {
		if g := (start + k) % n; p.ranks.fits(g, tokens) {
			return g
		}
	}
	return none
}

// nextRank returns the index of the first rank after the rank that got the last entry; after the last rank, it is 0.
func (p *firstCome) nextRank(s *Snapshot) int {
	for g := range s.Workers {
		if s.Workers[g].ID > p.lastRank {
			return g
		}
	}
	return 0
}

// betterOfTwo draws two different ranks that have a slot and room for so many tokens. It returns the rank with fewer requests, and the
// number of its requests; none: no rank has a slot and room.
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

// rankWithLeast returns the rank with the smallest value among the ranks that have a slot and room for so many tokens, and this value;
// none: there is no such rank. values has one value for each rank. In a tie, the first rank from index `from` on wins; after the last rank,
// the search goes on with the first.
func rankWithLeast[N int32 | int64](r *ranks, values []N, from int, tokens int64) (int, float64) {
	best := none
	for k := range values {
		g := from + k
		if g >= len(values) { // the last rank was reached
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

// largestF returns the rank with the largest score F of BR-0 for an entry of so many tokens, and this score; none: no rank has a slot and
// room. F is the load that the entry adds to the rank (its tokens times the rank's cost per token), less the number of ranks times the part
// of this load that is above the margin. The margin is by how much the rank is below the fullest rank: beyond it, all ranks wait for this
// one. In a tie of F, the rank with the larger margin wins.
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
