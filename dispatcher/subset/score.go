// Package subset chooses which waiting requests a decode rank takes together: the subset with the best score that fits the rank's free
// slots and KV room. A score F(w) says how good it is to add w tokens to a rank. It rises with w as long as the rank stays below the
// fullest rank of its group, because its tokens then make no step longer. The margin is the number of tokens by which the rank is below the
// fullest one. Beyond the margin, each token makes the steps of all ranks longer, so F rises less or falls. The policy BR-0 looks at the
// present loads, and BR-H also at the loads that are expected in the next steps.
package subset

import (
	"math"
	"slices"
)

// Unlimited is the value of a limit that does not exist, and of the knee of a score that never stops rising (see Score.Knee).
const Unlimited = math.MaxInt64

// F0 returns the score of the policy BR-0 for w tokens that are added to a rank. margin is how many tokens the rank is below the fullest
// rank. Each token earns 1, and each token above the margin costs the number of workers, because all of them wait for this token. The
// result is exact.
func F0(w, margin int64, workers int) int64 {
	return w - int64(workers)*max(0, w-margin)
}

// F returns the score of the policy BR-H for w tokens that are added to a rank. margins says how many tokens the rank is below the fullest
// rank in each of the next steps, and discounts has the weight of each step. In each step, a token earns alpha, and a token above the
// margin costs beta. F looks at every step, so Score.F is faster for many values of w on one rank.
func F(w int64, margins []int64, discounts []float64, alpha, beta float64) float64 {
	var sum float64
	for h, margin := range margins {
		sum += discounts[h] * (alpha*float64(w) - beta*float64(max(0, w-margin)))
	}
	return sum
}

// Discounts returns the weights gamma^h of the steps h = 0..horizon. With a gamma below 1, later steps count less, because their loads are
// less certain.
func Discounts(horizon int, gamma float64) []float64 {
	discounts := make([]float64, horizon+1)
	power := 1.0
	for h := range discounts {
		discounts[h] = power
		power *= gamma
	}
	return discounts
}

// Score is the score F of one rank, prepared so that it can be computed fast for many values of w. SetBR0 or SetBRH must be called first.
type Score struct {
	// isBR0: the score is that of the policy BR-0, with whole numbers below 2^53, which are exact in a float64. False: it is that of
	// the policy BR-H.
	isBR0   bool
	workers int   // only for BR-0: number of ranks in the group
	margin  int64 // only for BR-0: number of tokens by which the rank is below the fullest rank

	startSlope float64 // only for BR-H: slope of F at w = 0, which is alpha times the sum of the discounts
	beta       float64 // only for BR-H: cost of a token above the margin of a step
	knots      []knot  // only for BR-H: one knot per step, sorted by margin, ascending
	keys       []int64 // buffer for sorting the knots

	knee int64 // number of added tokens up to which F rises
}

// knot is a number of added tokens at which the slope of the score F changes: the margin of the rank in one of the next steps. discountSum
// and discountedMarginSum are sums over this knot and all knots before it.
type knot struct {
	margin                           int64
	discount                         float64 // weight of the step
	discountSum, discountedMarginSum float64 // sum of discount, and sum of discount * margin
}

// SetBR0 makes s the BR-0 score of a rank that is margin tokens below the fullest rank, in a group with this number of workers.
func (s *Score) SetBR0(margin int64, workers int) {
	s.isBR0, s.margin, s.workers, s.knee = true, margin, workers, margin
}

// stepBits is the number of low bits of a sort key that hold the number of a step. The bits above them hold the margin of the step.
const stepBits = 10

// SetBRH makes s the score of the policy BR-H for a rank, and finds its knee: the number of added tokens up to which the score rises.
// margins says how many tokens the rank is below the fullest rank in each of the next steps, and discounts has the weight of each step. In
// each step, an added token earns alpha, and a token above the margin costs beta. So the score of w tokens is the sum over the steps of
// discount * (alpha*w - beta*max(0, w-margin)).
//
// There may be at most 1024 steps, and margins must be below 2^53. s keeps no reference to the slices.
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
		// In each step whose margin is passed, a token costs beta, weighted with the discount of the step. So the slope falls at
		// each knot.
		slopeBeyond := s.startSlope - beta*discountSum
		// The slope beyond a knot is known only after the last of the knots with the same margin.
		lastOfMargin := i+1 == len(s.knots) || s.knots[i+1].margin > k.margin
		if lastOfMargin && slopeBeyond <= roundingError && s.knee == Unlimited {
			s.knee = k.margin // the first knot beyond which the score does not rise
		}
	}
}

// sortKnots sets s.knots to one knot for each of the next decode steps, sorted by margin. A knot is a number of added tokens at which the
// slope of the score falls: the margin of a step, which is how many tokens the rank is below the fullest rank in this step. Beyond it, each
// token makes the step longer. discounts has the weights of the steps. The sums in the knots are not set yet.
//
// sortKnots sorts numbers that have the margin in their high bits and the number of the step in their low bits. That takes a third of the
// time that sorting the knots would take.
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

// Knee returns the number of added tokens up to which F rises (w* in the paper). Beyond the knee, F does not rise. Unlimited: F never stops
// rising.
func (s *Score) Knee() int64 { return s.knee }

// F returns the score of w tokens that are added to the rank. For the policy BR-0, it is the score F0 of the present step. For BR-H, it is
// a sum over the next steps:
//
//	startSlope*w - beta * (sum of discount*(w-margin) over the steps with a margin below w)
//
// There is one knot for each of the next steps, sorted by margin. A knot has the sums of discount, and of discount*margin, over all knots
// up to it.
func (s *Score) F(w int64) float64 {
	if s.isBR0 {
		return float64(F0(w, s.margin, s.workers))
	}
	passed, end := 0, len(s.knots) // a binary search: passed becomes the number of margins below w
	for passed < end {
		if mid := int(uint(passed+end) >> 1); s.knots[mid].margin < w {
			passed = mid + 1
		} else {
			end = mid
		}
	}
	f := s.startSlope * float64(w)
	if passed > 0 { // in the steps of these knots, each token above the margin costs beta
		k := &s.knots[passed-1]
		f -= s.beta * (k.discountSum*float64(w) - k.discountedMarginSum)
	}
	return f
}

// Equal reports whether two scores tie. Scores of BR-0 tie if they are equal. Scores of BR-H tie if they are equal to nine digits, because
// sums over many steps have rounding errors.
func (s *Score) Equal(x, y float64) bool {
	if s.isBR0 {
		return x == y
	}
	return Equal(x, y)
}

// Better reports whether score x is larger than score y and the two do not tie.
func (s *Score) Better(x, y float64) bool { return x > y && !s.Equal(x, y) }

// Equal reports whether two scores of BR-H are equal to nine digits. It must not be used for BR-0, because different scores above 10^9
// would tie. Score.Equal is right for both.
func Equal(x, y float64) bool {
	return math.Abs(x-y) <= 1e-9*max(1, math.Abs(x), math.Abs(y))
}

// Scaled returns tokens times cost, rounded to whole tokens. cost is the cost of a KV token on a rank, as a multiple of the mean of its
// group; 0 means 1.
func Scaled(tokens int64, cost float64) int64 {
	if cost == 1 || cost == 0 {
		return tokens
	}
	return int64(math.Round(float64(tokens) * cost))
}
