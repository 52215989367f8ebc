// Package subset chooses which waiting requests a decode rank takes together:
// the subset whose added KV tokens score best under F of BR-0 or BR-H,
// within the rank's free slots and KV room.
package subset

import (
	"math"
	"slices"
)

// Unlimited stands for a limit or a knee that is never reached.
const Unlimited = math.MaxInt64

// F0 returns the score of BR-0: the w added tokens, less, for each worker of the group, the tokens by which
// they exceed the margin. It is exact.
func F0(w, margin int64, workers int) int64 {
	return w - int64(workers)*max(0, w-margin)
}

// F returns the score of BR-H for w added tokens, over the margins of H+1 steps, weighted by discounts
// (see Discounts). It looks at every step; Score is faster for many values of w on one rank.
func F(w int64, margins []int64, discounts []float64, alpha, beta float64) float64 {
	var sum float64
	for h, m := range margins {
		sum += discounts[h] * (alpha*float64(w) - beta*float64(max(0, w-m)))
	}
	return sum
}

// Discounts returns gamma^h for h = 0..horizon.
func Discounts(horizon int, gamma float64) []float64 {
	d := make([]float64, horizon+1)
	g := 1.0
	for h := range d {
		d[h] = g
		g *= gamma
	}
	return d
}

// Score is F of one rank, prepared for many values of w. Before its use, SetBR0 or SetBRH must
// be called for the rank.
type Score struct {
	exact   bool  // BR-0: scores are whole numbers below 2^53, and so exact in a float64
	workers int   // BR-0: number of workers
	margin  int64 // BR-0: margin of the rank

	gain  float64 // alpha * sum of discounts: slope of F at w = 0
	beta  float64
	knots []knot // margins ascending
	keys  []int64

	knee int64
}

// knot is one margin with sums over this margin and all smaller ones.
type knot struct {
	margin        int64
	discount      float64
	sumD, sumDMul float64 // of discount, of discount * margin
}

// SetBR0 makes s the score of a rank with this margin among so many workers.
func (s *Score) SetBR0(margin int64, workers int) {
	s.exact, s.margin, s.workers, s.knee = true, margin, workers, margin
}

// stepBits is how many low bits of a sort key have the step; the others have its margin.
const stepBits = 10

// SetBRH makes s the score of a rank with these margins, of up to 1024 steps and
// below 2^53. Margins and discounts are read, not kept.
func (s *Score) SetBRH(margins []int64, discounts []float64, alpha, beta float64) {
	s.exact, s.beta, s.gain = false, beta, 0
	s.keys = s.keys[:0]
	for h, m := range margins {
		s.keys = append(s.keys, m<<stepBits|int64(h))
		s.gain += alpha * discounts[h]
	}
	slices.Sort(s.keys) // sorting whole numbers takes a third of the time of sorting knots
	if cap(s.knots) < len(margins) {
		s.knots = make([]knot, len(margins))
	}
	s.knots = s.knots[:len(margins)]
	for i, k := range s.keys {
		s.knots[i] = knot{margin: k >> stepBits, discount: discounts[k&(1<<stepBits-1)]}
	}
	s.knee = Unlimited
	var d, dm float64
	for i := range s.knots {
		k := &s.knots[i]
		d += k.discount
		dm += k.discount * float64(k.margin)
		k.sumD, k.sumDMul = d, dm
		last := i+1 == len(s.knots) || s.knots[i+1].margin > k.margin
		if last && s.knee == Unlimited && s.gain-beta*d <= 1e-12*s.gain {
			s.knee = k.margin
		}
	}
}

// Knee returns the w up to which F rises (w* in the paper); beyond it, F does not rise. It is
// Unlimited if F never stops rising.
func (s *Score) Knee() int64 { return s.knee }

// F returns the score of w added tokens.
func (s *Score) F(w int64) float64 {
	if s.exact {
		return float64(F0(w, s.margin, s.workers))
	}
	lo, hi := 0, len(s.knots) // number of margins below w
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); s.knots[mid].margin < w {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	f := s.gain * float64(w)
	if lo > 0 {
		k := &s.knots[lo-1]
		f -= s.beta * (k.sumD*float64(w) - k.sumDMul)
	}
	return f
}

// Equal reports whether two scores tie: if they are equal in BR-0, or equal to nine digits in BR-H.
func (s *Score) Equal(x, y float64) bool {
	if s.exact {
		return x == y
	}
	return Equal(x, y)
}

// Better reports whether score x is larger than y and does not tie with it.
func (s *Score) Better(x, y float64) bool { return x > y && !s.Equal(x, y) }

// Equal reports whether two scores of BR-H tie. It must not be used for BR-0, where scores beyond 10^9 that
// differ would tie: Score.Equal compares those.
func Equal(x, y float64) bool {
	return math.Abs(x-y) <= 1e-9*max(1, math.Abs(x), math.Abs(y))
}

// Scaled returns tokens times the cost of a KV token on a rank (1 = the
// group's mean, 0 reads as 1), rounded to whole tokens.
func Scaled(tokens int64, cost float64) int64 {
	if cost == 1 || cost == 0 {
		return tokens
	}
	return int64(math.Round(float64(tokens) * cost))
}
