// Package subset chooses which waiting requests a decode rank takes together: the subset with the
// best score that fits the rank's free slots and KV room. A score F(w) says how good it is to add w
// tokens to a rank. It rises with w up to the margin, the number of tokens by which the rank is
// below the fullest rank of its group, because these tokens make no step longer. Beyond it, each
// token makes the steps of all ranks longer, so F rises less or falls. The policy BR-0 looks at the
// present loads, and BR-H also at the loads that are expected in the next steps.
package subset

import (
	"math"
	"slices"
)

// Unlimited is a limit that does not exist, or the knee of a score that never stops rising.
const Unlimited = math.MaxInt64

// F0 returns the score of BR-0. Each token earns 1, and each token above the margin costs the
// number of workers, because all of them wait for this token. The result is exact.
func F0(w, margin int64, workers int) int64 {
	return w - int64(workers)*max(0, w-margin)
}

// F returns the score of BR-H. margins and discounts are those of each of the next steps. In each
// step, a token earns alpha, and a token above the margin costs beta. Score.F is faster for many
// values of w.
func F(w int64, margins []int64, discounts []float64, alpha, beta float64) float64 {
	var sum float64
	for h, margin := range margins {
		sum += discounts[h] * (alpha*float64(w) - beta*float64(max(0, w-margin)))
	}
	return sum
}

// Discounts returns gamma^h for h = 0..horizon. With a gamma below 1, later steps count less,
// because their loads are less certain.
func Discounts(horizon int, gamma float64) []float64 {
	discounts := make([]float64, horizon+1)
	power := 1.0
	for h := range discounts {
		discounts[h] = power
		power *= gamma
	}
	return discounts
}

// Score is the score of one rank, prepared so that it can be computed fast for many values of w.
// SetBR0 or SetBRH must be called first.
type Score struct {
	// True: the score of BR-0, with whole numbers below 2^53, which are exact in a float64. False:
	// that of BR-H.
	isBR0   bool
	workers int   // only for BR-0
	margin  int64 // only for BR-0

	startSlope float64 // only for BR-H: slope of F at w = 0, alpha times the sum of the discounts
	beta       float64 // only for BR-H: cost of a token above the margin of a step
	knots      []knot  // only for BR-H: one per step, by margin, ascending
	keys       []int64 // buffer for sorting the knots

	knee int64 // added tokens up to which F rises
}

// knot is a number of added tokens at which the slope of F changes: the margin of one of the next
// steps.
type knot struct {
	margin                           int64
	discount                         float64
	discountSum, discountedMarginSum float64 // sums of discount, and of discount * margin, up to this knot
}

// SetBR0 makes s the BR-0 score of a rank.
func (s *Score) SetBR0(margin int64, workers int) {
	s.isBR0, s.margin, s.workers, s.knee = true, margin, workers, margin
}

// stepBits is how many low bits of a sort key hold the number of a step; the bits above them hold
// its margin.
const stepBits = 10

// SetBRH makes s the score of BR-H, as the function F defines it, and finds its knee. There may be
// at most 1024 steps, and margins must be below 2^53. s keeps no reference to the slices.
func (s *Score) SetBRH(margins []int64, discounts []float64, alpha, beta float64) {
	s.isBR0, s.beta, s.startSlope = false, beta, 0
	for h := range margins {
		s.startSlope += alpha * discounts[h]
	}
	s.sortKnots(margins, discounts)
	s.knee = Unlimited
	roundingError := 1e-12 * s.startSlope
	var discountSum, discountedMarginSum float64
	for i := range s.knots {
		k := &s.knots[i]
		discountSum += k.discount
		discountedMarginSum += k.discount * float64(k.margin)
		k.discountSum, k.discountedMarginSum = discountSum, discountedMarginSum
		slopeBeyond := s.startSlope - beta*discountSum
		// The slope beyond a knot is known only after the last knot with the same margin.
		lastOfMargin := i+1 == len(s.knots) || s.knots[i+1].margin > k.margin
		if lastOfMargin && slopeBeyond <= roundingError && s.knee == Unlimited {
			s.knee = k.margin
		}
	}
}

// sortKnots does not set the sums in the knots. It sorts numbers that have the margin in their high
// bits and the step in their low bits, which takes a third of the time that sorting the knots would
// take.
func (s *Score) sortKnots(margins []int64, discounts []float64) {
	s.keys = s.keys[:0]
	for step, margin := range margins {
		s.keys = append(s.keys, margin<<stepBits|int64(step))
	}
	slices.Sort(s.keys)
	if cap(s.knots) < len(margins) {
		s.knots = make([]knot, len(margins))
	}
	s.knots = s.knots[:len(margins)]
	for i, key := range s.keys {
		margin, step := key>>stepBits, key&(1<<stepBits-1)
		s.knots[i] = knot{margin: margin, discount: discounts[step]}
	}
}

// Knee returns the number of added tokens beyond which F does not rise (w* in the paper), or
// Unlimited.
func (s *Score) Knee() int64 { return s.knee }

// F returns the score of w added tokens. For BR-H, it is
//
//	startSlope*w - beta * (sum of discount*(w-margin) over the steps with a margin below w)
func (s *Score) F(w int64) float64 {
	if s.isBR0 {
		return float64(F0(w, s.margin, s.workers))
	}
	passed, end := 0, len(s.knots) // passed becomes the number of margins below w
	for passed < end {
		if mid := int(uint(passed+end) >> 1); s.knots[mid].margin < w {
			passed = mid + 1
		} else {
			end = mid
		}
	}
	f := s.startSlope * float64(w)
	if passed > 0 {
		k := &s.knots[passed-1]
		f -= s.beta * (k.discountSum*float64(w) - k.discountedMarginSum)
	}
	return f
}

// Equal reports whether two scores tie. Scores of BR-H tie if they are equal to nine digits,
// because sums over many steps have rounding errors.
func (s *Score) Equal(x, y float64) bool {
	if s.isBR0 {
		return x == y
	}
	return Equal(x, y)
}

// Better reports whether x is larger than y and the two do not tie.
func (s *Score) Better(x, y float64) bool { return x > y && !s.Equal(x, y) }

// Equal compares scores of BR-H to nine digits. It must not be used for BR-0, because different
// scores above 10^9 would tie.
func Equal(x, y float64) bool {
	return math.Abs(x-y) <= 1e-9*max(1, math.Abs(x), math.Abs(y))
}

// Scaled returns tokens times cost, rounded; a cost of 0 means 1.
func Scaled(tokens int64, cost float64) int64 {
	if cost == 1 || cost == 0 {
		return tokens
	}
	return int64(math.Round(float64(tokens) * cost))
}
