package policy

import (
	"math"
	"slices"

	"evenkeel/dispatcher/subset"
)

// A Weigher is a policy that can also score the ranks that it did not choose. Only decision traces
// show these scores, so Decide does not compute them.
type Weigher interface {
	// Weigh writes one score for each rank into dst: that of the entry if it were bound there, while
	// all other assignments of the round stay; NaN for a rank that could not take it. The entry is
	// that of a, the i-th assignment of the last Decide; tokens are its KV tokens, and s is the
	// snapshot of that Decide. ok is false if the policy compares nothing.
	Weigh(s *Snapshot, i int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool)
}

// Weigh writes by how many KV tokens the cost falls (see tokensSaved) if the entry is bound to a
// rank, compared with no rank.
func (p *evenkeel) Weigh(_ *Snapshot, i int, _ Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	if i >= len(p.placed) {
		return false, false
	}
	fillNaN(dst)
	p.fillSearch(i)
	candidate := p.placed[i].candidate
	peakWithoutEntry := peakWithout(p, p.placed[i])
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		if g != p.search.ownRank && !p.ranks.fits(g, tokens) { // the chosen rank has taken the entry already
			continue
		}
		dst[g] = p.loads.tokensSaved(p.candidates.all[candidate].load, peakIfOn(p, candidate, g), peakWithoutEntry)
	}
	return false, true
}

// peakIfOn returns the peak if a placed candidate were on rank g instead of its own rank. p.search
// must be filled for its placement.
func peakIfOn(p *evenkeel, candidate int32, g int) int64 {
	l, search := &p.loads, &p.search
	if g == search.ownRank {
		return l.peak()
	}
	loadWith := l.load[g] + p.candidates.loadOn(l, candidate, g)
	return max(search.otherRanks.largestWithout(g), search.loadWithout, loadWith)
}

// Weigh writes the score F. All other entries of the round count on their ranks.
func (p *greedy) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	chosen, ok := s.index(a.Worker)
	if !ok {
		return false, false
	}
	fillNaN(dst)
	load := p.loadOn(s, chosen, tokens)
	p.envelope.removeLoad(chosen, load) // its own score is computed without it
	for _, rank := range p.ranks.hadSlots {
		if g := int(rank); g == chosen || p.ranks.fits(g, tokens) { // the chosen rank had room, even if the entry has filled it
			dst[g] = p.scoreOf(s, g, tokens)
		}
	}
	p.envelope.addLoad(chosen, load)
	return false, true
}

// Weigh writes the value that the rule compares, without the entry: requests, KV tokens or the
// score F. The rules random and rr compare nothing.
func (p *firstCome) Weigh(s *Snapshot, _ int, a Assignment, tokens int64, dst []float64) (lowerIsBetter, ok bool) {
	chosen, ok := s.index(a.Worker)
	if !ok || p.rule == ruleRandom || p.rule == ruleRR {
		return false, false
	}
	fillNaN(dst)
	// The value of the chosen rank must be the one without the entry. For ruleLeastF, the entry is
	// taken off the loads, because it may be in the largest load, from which the margins of all ranks
	// follow. heldTokens and requests change one rank only, so the loop subtracts the entry there.
	load := subset.Scaled(tokens, float64(s.Workers[chosen].Cost))
	p.rankLoads.removeLoad(chosen, load)
	for g := range s.Workers {
		if g != chosen && !p.ranks.fits(g, tokens) {
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
		default: // p2c and jsq
			dst[g] = float64(p.requests[g])
			if g == chosen {
				dst[g]--
			}
		}
	}
	p.rankLoads.addLoad(chosen, load)
	return p.rule != ruleLeastF, true
}

func fillNaN(dst []float64) {
	for g := range dst {
		dst[g] = math.NaN()
	}
}

func (s *Snapshot) index(worker int32) (g int, ok bool) {
	return slices.BinarySearchFunc(s.Workers, worker, func(w Worker, id int32) int { return int(w.ID) - int(id) })
}

// removeLoad is the reverse of addLoad. The peaks and all margins are computed anew.
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
