package policy

import (
	"math"
	"slices"

	"evenkeel/dispatcher/subset"
)

// A Weigher is a policy that can also score the ranks that it did not choose. Only decision traces show these scores, so they are not
// computed in Decide but afterwards, and only for traces.
type Weigher interface {
	// Weigh writes one score for each rank into dst: the score of the entry if it were bound there, while all other assignments of the
	// round stay as they are; NaN for a rank that could not take the entry. The entry is that of a, the i-th assignment of the last
	// Decide; tokens are its KV tokens, and s is the snapshot of that Decide. lowerIsBetter says that smaller scores are better; ok is
	// false if the policy compares nothing.
	Weigh(s *Snapshot, i int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool)
}

// Weigh writes, for each rank, by how many KV tokens the cost falls if the entry is bound there, compared with no rank. The cost is by how
// many tokens the ranks are below the fullest rank, summed over all ranks (see Cost and tokensSaved). A rank that could not take the entry
// gets NaN. A larger value is better, so lowerIsBetter is false. ok is false if the last round made no i-th placement. Weigh changes no
// loads.
func (p *evenkeel) Weigh(_ *Snapshot, i int, _ Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	if i >= len(p.placed) {
		return false, false
	}
	fillNaN(dst)
	p.fillSearch(i) // fills p.search with the chosen rank (ownRank), its load without the entry, and the loads of the other ranks
	candidate := p.placed[i].candidate
	peakWithoutEntry := peakWithout(p, p.placed[i]) // largest load of a rank if the entry is on no rank
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if g != p.search.ownRank && !p.ranks.fits(g, tokens) { // the score stays NaN; the chosen rank has taken the entry already
			continue
		}
		dst[g] = p.loads.tokensSaved(p.candidates.all[candidate].load, peakIfOn(p, candidate, g), peakWithoutEntry)
	}
	return false, true
}

// peakIfOn returns the largest load of a rank if a placed candidate were on rank g, and not on its own rank. p.search must be filled for
// its placement.
func peakIfOn(p *evenkeel, candidate int32, g int) int64 {
	l, search := &p.loads, &p.search
	if g == search.ownRank { // the candidate is there already
		return l.peak()
	}
	loadWith := l.load[g] + p.candidates.loadOn(l, candidate, g)
	return max(search.otherRanks.largestWithout(g), search.loadWithout, loadWith)
}

// Weigh writes for each rank the score F (see scoreOf) that the entry of assignment a would have there; NaN for a rank that could not take
// it. All other entries of the round count on their ranks. A larger score is better, so lowerIsBetter is false. ok is false if the
// assigned rank is not in the snapshot.
func (p *greedy) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	chosen, ok := s.index(a.Worker)
	if !ok {
		return false, false
	}
	fillNaN(dst)
	load := p.loadOn(s, chosen, tokens)
	p.envelope.removeLoad(chosen, load) // the projected loads must not have the entry while its own score is computed
	for _, rank := range p.ranks.hadSlots {
		if g := int(rank); g == chosen || p.ranks.fits(g, tokens) { // the chosen rank had room, even if the entry has filled it
			dst[g] = p.scoreOf(s, g, tokens)
		}
	}
	p.envelope.addLoad(chosen, load)
	return false, true
}

// Weigh writes for each rank the value that the rule compares, without the entry of assignment a; NaN for a rank that could not take it.
// The value is the rank's number of requests or its KV tokens, for which smaller is better, or the score F of the policy BR-0 (see
// largestF), for which larger is better. ok is false for the rules random and rr, which compare nothing, and if the assigned rank is not in
// the snapshot.
func (p *firstCome) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	chosen, ok := s.index(a.Worker)
	if !ok || p.rule == ruleRandom || p.rule == ruleRR {
		return false, false
	}
	fillNaN(dst)
	// The chosen rank counts the entry already, but its value must be the one without it. For ruleLeastF, the entry is taken off the
	// loads, because it may be in the largest load, from which the margins of all ranks follow. heldTokens and requests change one rank
	// only, so the loop subtracts the entry there.
	load := subset.Scaled(tokens, float64(s.Workers[chosen].Cost))
	p.rankLoads.removeLoad(chosen, load)
	for g := range s.Workers {
		if g != chosen && !p.ranks.fits(g, tokens) { // the score stays NaN
			continue
		}
		switch p.rule {
		case ruleJSQKV:
			dst[g] = float64(p.rankLoads.heldTokens[g])
			if g == chosen {
				dst[g] -= float64(tokens)
			}
		case ruleLeastF:
			loadOnG := subset.Scaled(tokens, float64(s.Workers[g].Cost))
			dst[g] = float64(subset.F0(loadOnG, p.rankLoads.minMargin(g), len(s.Workers)))
		default: // p2c and jsq compare numbers of requests
			dst[g] = float64(p.requests[g])
			if g == chosen {
				dst[g]--
			}
		}
	}
	p.rankLoads.addLoad(chosen, load)
	return p.rule != ruleLeastF, true
}

// fillNaN sets all scores to NaN, which stands for a rank that could not take the entry.
func fillNaN(dst []float64) {
	for g := range dst {
		dst[g] = math.NaN()
	}
}

// index returns the index of the worker with this ID; ok is false if the snapshot has no such worker.
func (s *Snapshot) index(worker int32) (g int, ok bool) {
	return slices.BinarySearchFunc(s.Workers, worker, func(w Worker, id int32) int { return int(w.ID) - int(id) })
}

// removeLoad subtracts size (KV tokens times the rank's cost) from the projected load of rank g at every step. Then it computes the peak of
// each step, the largest load of any rank, anew. The margins (a peak less the load of a rank) may all have changed, so minMargin must
// compute them when it is asked next. A call of addLoad with the same size restores the loads and the peaks.
func (e *envelope) removeLoad(g int, size int64) {
	loads := e.loadsOf(g)
	for step := range loads {
		loads[step] -= size
	}
	clear(e.peaks)
	for rank := range e.leastMarginStep {
		for step, load := range e.loadsOf(rank) {
			e.peaks[step] = max(e.peaks[step], load)
		}
		e.leastMarginStep[rank] = notComputed
	}
}
