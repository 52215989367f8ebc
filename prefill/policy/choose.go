package policy

import (
	"cmp"
	"math"
	"slices"
)

// Name has no parameters, so that the number of names in metrics and headers is bounded.
func (p *Policy) Name() string { return p.name }

// String is the policy in the form that Parse reads.
func (p *Policy) String() string { return p.spec }

// TakesTurns reports whether the policy chooses candidates in turn. Its caller must then pass the
// Order of the chosen candidate as the Cursor of the next Query.
func (p *Policy) TakesTurns() bool { return p.takesTurns }

// LoadBlind reports whether the policy ignores load: it continues to choose an overloaded
// candidate.
func (p *Policy) LoadBlind() bool { return p.loadBlind }

type Choice struct {
	Index         int  // in the slice of candidates
	Bad           int  // candidates whose score was not a finite number
	Fallback      bool // no score was finite, so that lmetric chose
	FilterSkipped bool // the policy's filter was ignored, because no candidate passed it
}

// equalScores is the relative difference below which two scores count as equal.
const equalScores = 1e-9

// Choose returns the candidate with the lowest score. Among equal scores the policy's tie-break
// decides, then the hash of request and candidate. A score that is not finite ranks last; if there
// is no other, lmetric decides, with its own tie-break. There must be at least one candidate.
func (p *Policy) Choose(q *Query, candidates []Engine) Choice {
	choice := Choice{FilterSkipped: p.applyFilter(candidates)}
	p.query = *q
	if q.Key == 0 { // then sticky-ring uses a hash of the request's ID
		const noCandidate = ""
		p.query.Key = HRW(q.ID, noCandidate)
	}
	anyFinite := false
	p.scores = p.scores[:0]
	for i := range candidates {
		s := math.NaN() // ranks last
		if p.passes(i) {
			if s = p.evaluate(&candidates[i]); finite(s) {
				anyFinite = true
			} else {
				s = math.NaN()
				choice.Bad++
			}
		}
		p.scores = append(p.scores, s)
	}
	ties := p.ties
	if !anyFinite {
		choice.Fallback, ties = true, cacheAwareTies // those of lmetric
		const noParameter = 0
		for i := range candidates {
			if p.passes(i) {
				p.scores[i] = lmetric(noParameter, q, &candidates[i])
			}
		}
	}
	choice.Index = p.indexOfLowest(q, candidates, ties)
	return choice
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// evaluate shows a user's policy only the indicators.
func (p *Policy) evaluate(e *Engine) float64 {
	if p.user != nil {
		return p.user.evaluate(&e.Indicators)
	}
	return p.score(p.param, &p.query, e)
}

func (p *Policy) indexOfLowest(q *Query, candidates []Engine, ties []tieKey) int {
	least := math.Inf(1)
	for _, s := range p.scores {
		if s < least { // false if s is NaN
			least = s
		}
	}
	best, bestHash := -1, uint64(0)
	for i := range candidates {
		s := p.scores[i]
		lowest := s-least <= equalScores*max(math.Abs(s), math.Abs(least)) // false if s is NaN
		if !lowest {
			continue
		}
		order := -1 // negative: candidate i is better
		if best >= 0 {
			order = compare(ties, &candidates[i], &candidates[best])
		}
		if order > 0 {
			continue
		}
		hash := HRW(q.ID, candidates[i].ID)
		if order < 0 || hash < bestHash { // with order 0, the hash decides
			best, bestHash = i, hash
		}
	}
	return best
}

func compare(ties []tieKey, a, b *Engine) int {
	for _, k := range ties {
		if order := cmp.Compare(k(a), k(b)); order != 0 {
			return order
		}
	}
	return 0
}

// Row is one candidate in the table that explains a choice.
type Row struct {
	Candidate string   `json:"candidate"`
	Score     *float64 `json:"score"` // null: not a finite number, or the candidate was filtered out
	Chosen    bool     `json:"chosen,omitempty"`
}

// Explain returns a table of the last choice: the chosen candidate first, the others by score.
// candidates must be the same as in that choice.
func (p *Policy) Explain(candidates []Engine, chosen, rows int) []Row {
	rank := func(i int) float64 { // the candidates are listed by rising rank
		switch {
		case i == chosen:
			return math.Inf(-1)
		case finite(p.scores[i]):
			return p.scores[i]
		default:
			return math.Inf(1)
		}
	}
	maxRows := min(rows, len(candidates))
	order := make([]int, 0, maxRows) // best first
	for i := range candidates {
		position := len(order)
		for position > 0 && rank(i) < rank(order[position-1]) {
			position--
		}
		if position == maxRows {
			continue
		}
		if len(order) == maxRows { // the last row makes room
			order = order[:len(order)-1]
		}
		order = slices.Insert(order, position, i)
	}
	table := make([]Row, 0, len(order))
	for _, i := range order {
		row := Row{Candidate: candidates[i].ID, Chosen: i == chosen}
		if s := p.scores[i]; finite(s) {
			row.Score = &s
		}
		table = append(table, row)
	}
	return table
}

// ScoreOf is the score of candidate i in the last choice; not finite if it had none.
func (p *Policy) ScoreOf(i int) float64 { return p.scores[i] }
