package policy

import (
	"sort"

	"evenkeel/dispatcher/subset"
)

// The values of Assignment.Stage.
const (
	stageGuard  uint8 = iota // the starvation guard chose the rank
	stageSingle              // the policy chose for this entry alone
	stageSubset              // the policy chose for several entries together
)

// thetaIsRankCount stands for the number of workers in the snapshot.
const thetaIsRankCount = -1

// greedy is the policy of BR-0 and BR-H from the BalanceRoute paper: the rank farthest below the
// fullest rank takes the entries with the best score F on it, then the next such rank. BR-0 scores
// the present step only, and BR-H each step up to a horizon.
type greedy struct {
	name         string
	window       int   // entries that the subset stage chooses from
	theta        int64 // free slots at or below which the subset stage begins; or thetaIsRankCount
	slotsFirst   bool  // queue=capacity: the rank with the most free slots is next, then the one farthest below the fullest
	longestFirst bool  // order=desc
	overdueFirst bool  // starvation guard; false in the paper's form
	maxAgeMs     float32
	watermark    float64
	sendsAhead   bool

	lookahead *lookahead // nil: the policy is BR-0

	ranks     ranks
	envelope  envelope
	line      line
	rankScore subset.Score
	solver    subset.Solver

	overdueEntries []wait
	candidates     [subset.MaxItems]int32 // positions in line, for the subset stage
	tokens         [subset.MaxItems]int64 // prompt tokens of these candidates
}

func (p *greedy) Name() string      { return p.name }
func (p *greedy) Immediate() bool   { return false }
func (p *greedy) MaxAgeMs() float32 { return p.maxAgeMs }

func (p *greedy) Decide(s *Snapshot, dst []Assignment) []Assignment {
	if !p.beginRound(s) {
		return dst
	}
	if p.overdueFirst {
		dst = p.serveOverdue(s, dst)
	}
	return p.placeSubsets(s, p.placeSingles(s, dst))
}

// beginRound returns false if no slot is free or no entry waits.
func (p *greedy) beginRound(s *Snapshot) bool {
	horizon := 0 // only the present step
	if p.lookahead != nil {
		horizon = p.lookahead.resolve(s.MeanOutput)
	}
	p.envelope.build(s, horizon)
	p.ranks.load(s, p.envelope.heldTokens, p.watermark, noExtraSlots)
	if p.ranks.openSlots == 0 || len(s.Pool) == 0 {
		return false
	}
	p.line.build(s.Pool, p.longestFirst)
	return true
}

// placeSingles is stage 1: while more than theta slots are free, each rank takes one entry at a
// time.
func (p *greedy) placeSingles(s *Snapshot, dst []Assignment) []Assignment {
	theta := p.theta
	if theta == thetaIsRankCount {
		theta = int64(len(s.Workers))
	}
	if p.ranks.openSlots > theta && p.line.waiting > 0 {
		p.line.sortByLength(s.Pool)
		for p.ranks.openSlots > theta && p.line.waiting > 0 {
			dst = p.placeSingle(s, dst)
		}
	}
	return dst
}

// placeSubsets is stage 2: while slots are free, one rank after the other takes several entries
// together.
func (p *greedy) placeSubsets(s *Snapshot, dst []Assignment) []Assignment {
	for p.ranks.openSlots > 0 && p.line.waiting > 0 {
		dst = p.placeSubset(s, dst)
	}
	return dst
}

// serveOverdue is stage 0: each overdue entry, the longest wait first, gets the rank on which its
// score is best. For the first entry that fits no rank, reserveOnce closes a rank, so that its KV
// room grows from round to round until the entry fits.
func (p *greedy) serveOverdue(s *Snapshot, dst []Assignment) []Assignment {
	p.overdueEntries = appendOverdue(s, p.overdueEntries[:0])
	for _, w := range p.overdueEntries {
		if p.ranks.openSlots == 0 {
			break
		}
		entry := int(w.entry)
		tokens := int64(s.Pool[entry].Prompt)
		position := p.line.positionOf[entry]
		rank, score := p.bestRankFor(s, tokens)
		if rank == none { // the entry fits no rank, so the later stages need not look at it
			p.line.remove(position)
			p.ranks.reserveOnce(s, entry)
			continue
		}
		dst = p.admit(s, dst, rank, position, score, stageGuard)
	}
	return dst
}

// bestRankFor prefers the rank that is farther below the fullest one in a tie.
func (p *greedy) bestRankFor(s *Snapshot, tokens int64) (best int, bestF float64) {
	best = none
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if !p.ranks.fits(g, tokens) {
			continue
		}
		f := p.scoreOf(s, g, tokens)
		if best == none || p.better(f, bestF) || p.equal(f, bestF) && p.envelope.minMargin(g) > p.envelope.minMargin(best) {
			best, bestF = g, f
		}
	}
	return best, bestF
}

// placeSingle lets the next rank take the entry with the best score on it. If none fits, the rank
// gets no entries in this round.
func (p *greedy) placeSingle(s *Snapshot, dst []Assignment) []Assignment {
	g := p.firstRank()
	p.setScore(s, g)
	position, score, ok := p.bestSingle(s, g)
	if !ok {
		p.ranks.closeRank(g)
		return dst
	}
	return p.admit(s, dst, g, position, score, stageSingle)
}

// bestSingle finds the entry that fits rank g and has the best score, and returns its position; in
// a tie, the earliest in line wins. The score rises with the length of the prompt up to the knee,
// and does not rise beyond it. Therefore the best prompt is the longest up to the knee or the
// shortest beyond it.
func (p *greedy) bestSingle(s *Snapshot, g int) (at int32, best float64, ok bool) {
	cost, knee, room := float64(s.Workers[g].Cost), p.rankScore.Knee(), p.ranks.room[g]
	// The prompts that fit the rank come first in sorted; beyondKnee is the place of the first one
	// beyond the knee.
	fitting := sort.Search(len(p.line.sorted), func(place int) bool { return p.line.prompt(place) > room })
	beyondKnee := sort.Search(fitting, func(place int) bool { return subset.Scaled(p.line.prompt(place), cost) > knee })

	// low is below 0 if no prompt up to the knee is in line; from fitting on, high fits no more.
	low, high := p.line.atOrBefore(beyondKnee-1), p.line.atOrAfter(beyondKnee)
	if low >= 0 {
		best, ok = p.scoreAt(low, cost), true
	}
	if high < fitting {
		if f := p.scoreAt(high, cost); !ok || f > best {
			best, ok = f, true
		}
	}
	if !ok {
		return 0, 0, false
	}
	// Several prompts near the knee may share the best score.
	return min(p.earliestUpToKnee(low, cost, best), p.earliestBeyondKnee(high, fitting, cost, best)), best, true
}

func (p *greedy) scoreAt(place int, cost float64) float64 {
	return p.rankScore.F(subset.Scaled(p.line.prompt(place), cost))
}

// earliestUpToKnee returns the lowest position of the entries up to the knee with the best score;
// the sentinel, which is higher than all positions: there is none. Of each length, only the first
// that is still in line counts.
func (p *greedy) earliestUpToKnee(low int, cost, best float64) int32 {
	at := p.line.sentinel()
	for low >= 0 && p.rankScore.Equal(p.scoreAt(low, cost), best) {
		start := int(p.line.firstEqual[low]) // first place of this length; its entry may have left the line
		at = min(at, p.line.position(p.line.atOrAfter(start)))
		low = p.line.atOrBefore(start - 1) // the next shorter length
	}
	return at
}

func (p *greedy) earliestBeyondKnee(high, fitting int, cost, best float64) int32 {
	at := p.line.sentinel()
	for high < fitting && p.rankScore.Equal(p.scoreAt(high, cost), best) {
		at = min(at, p.line.position(high))
		length := p.line.prompt(high)
		equalCount := sort.Search(len(p.line.sorted)-high, func(i int) bool { return p.line.prompt(high+i) > length })
		high = p.line.atOrAfter(high + equalCount) // the next longer length
	}
	return at
}

// placeSubset lets the next rank take the best subset of the first entries that fit it, at most
// window of them. If no score is above 0, it takes the best single entry anyway, so that no slot
// stays empty while an entry fits.
func (p *greedy) placeSubset(s *Snapshot, dst []Assignment) []Assignment {
	g := p.firstRank()
	n := p.findCandidates(s, g)
	if n == 0 {
		p.ranks.closeRank(g)
		return dst
	}
	p.setScore(s, g)
	best, _ := p.solver.Best(&p.rankScore, subset.Problem{
		Tokens: p.tokens[:n],
		Cost:   float64(s.Workers[g].Cost),
		Cap:    int(p.ranks.free[g]),
		Limit:  p.ranks.room[g],
	})
	if !p.rankScore.Better(best.Score, 0) {
		best = p.bestOne(s, g, n)
	}
	for i := range n {
		if isChosen := best.Mask>>i&1 == 1; isChosen {
			dst = p.admit(s, dst, g, p.candidates[i], best.Score, stageSubset)
		}
	}
	return dst
}

func (p *greedy) findCandidates(s *Snapshot, g int) (n int) {
	for pos := p.line.next[p.line.sentinel()]; pos != p.line.sentinel() && n < p.window; pos = p.line.next[pos] {
		if tokens := int64(s.Pool[p.line.entryAt[pos]].Prompt); tokens <= p.ranks.room[g] {
			p.candidates[n], p.tokens[n] = pos, tokens
			n++
		}
	}
	return n
}

// bestOne takes the earliest candidate in a tie. setScore must have been called for rank g.
func (p *greedy) bestOne(s *Snapshot, g, n int) (best subset.Set) {
	for i := range n {
		f := p.rankScore.F(p.loadOn(s, g, p.tokens[i]))
		if i == 0 || p.rankScore.Better(f, best.Score) {
			best = subset.Set{Mask: 1 << i, Score: f}
		}
	}
	return best
}

type rankInTurn struct {
	rank   int
	free   int32 // free slots
	margin int64 // margin at the step where it is least
}

// firstRank compares all ranks each time, because one admission can change the margins of all
// ranks.
func (p *greedy) firstRank() int {
	first := rankInTurn{rank: none}
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		free := p.ranks.free[g]
		// No slot is left, or free slots decide, so the margin need not be computed.
		if free == 0 || p.slotsFirst && free < first.free {
			continue
		}
		next := rankInTurn{rank: g, free: free, margin: p.envelope.minMargin(g)}
		if first.rank == none || p.isBefore(next, first) {
			first = next
		}
	}
	return first.rank
}

func (p *greedy) isBefore(a, b rankInTurn) bool {
	if p.slotsFirst && a.free != b.free {
		return a.free > b.free
	}
	if a.margin != b.margin {
		return a.margin > b.margin
	}
	return a.free > b.free
}

// setScore sets p.rankScore to the score F on rank g, where the margin m is how far the rank is
// below the fullest rank: of the present step for BR-0, and of each step h up to the horizon for
// BR-H.
//
//	BR-0: F(load) = load - ranks * max(0, load-m)
//	BR-H: F(load) = sum over h of discounts[h] * (alpha*load - beta*max(0, load-m[h]))
//
// To score a single entry, scoreOf is faster, because SetBRH sorts the margins first.
func (p *greedy) setScore(s *Snapshot, g int) {
	if a := p.lookahead; a != nil {
		a.marginsBuffer = p.envelope.margins(g, a.marginsBuffer)
		p.rankScore.SetBRH(a.marginsBuffer, a.discounts, a.alpha, a.beta)
		return
	}
	margin := p.envelope.minMargin(g) // that of the present step, the only one of BR-0
	p.rankScore.SetBR0(margin, len(s.Workers))
}

// scoreOf returns the score F of one entry on rank g, as setScore defines it.
func (p *greedy) scoreOf(s *Snapshot, g int, tokens int64) float64 {
	load := p.loadOn(s, g, tokens)
	if p.lookahead != nil {
		return p.lookahead.score(&p.envelope, g, load)
	}
	margin := p.envelope.minMargin(g)
	return float64(subset.F0(load, margin, len(s.Workers)))
}

// equal says whether two scores count as equal: for BR-H apart from rounding errors, for BR-0
// exactly.
func (p *greedy) equal(x, y float64) bool {
	if p.lookahead != nil {
		return subset.Equal(x, y)
	}
	return x == y
}

func (p *greedy) better(x, y float64) bool { return x > y && !p.equal(x, y) }

func (p *greedy) loadOn(s *Snapshot, g int, tokens int64) int64 {
	return subset.Scaled(tokens, float64(s.Workers[g].Cost))
}

func (p *greedy) admit(s *Snapshot, dst []Assignment, g int, position int32, score float64, stage uint8) []Assignment {
	e := &s.Pool[p.line.entryAt[position]]
	p.line.remove(position)
	p.ranks.charge(g, int64(e.Prompt))
	p.envelope.addLoad(g, p.loadOn(s, g, int64(e.Prompt)))
	return append(dst, Assignment{Entry: e.ID, Worker: s.Workers[g].ID, Score: score, Stage: stage})
}
