package board

import "cmp"

func (b *board) cachedTokens(g *group) (tokens int) {
	for _, w := range b.waiting {
		most := 0 // an entry goes to one rank
		for _, h := range w.Hits {
			if g.rankWithID(h.Worker) != nil {
				most = max(most, h.Tokens)
			}
		}
		tokens += most
	}
	return tokens
}

// compareTurns lets equal groups take turns, in the order of their lowest rank IDs. Otherwise one
// client that sends one request at a time would always get the first group.
func (b *board) compareTurns(x, y *group) int {
	first, second := x.allRanks[0].ID, y.allRanks[0].ID
	if hadTurn := first <= b.lastGroup; hadTurn != (second <= b.lastGroup) {
		if hadTurn {
			return 1
		}
		return -1
	}
	return cmp.Compare(first, second)
}

// holdsLess compares KV tokens, scaled by Cost. In a tie, the groups take turns; two ranks of a
// group stay equal.
func (b *board) holdsLess(r, other *rank) bool {
	here, there := r.scaleByCost(r.kv), other.scaleByCost(other.kv)
	return here < there || here == there && b.compareTurns(r.group, other.group) < 0
}
