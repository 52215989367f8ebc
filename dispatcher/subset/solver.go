package subset

import (
	"math"
	"math/bits"
)

// MaxItems is the largest number of candidates, because a choice is a 64-bit mask.
const MaxItems = 64

// enumerable is the number of subsets up to which all subsets are tried, which is exact for prompts of any size. For more subsets,
// bitsets are faster (BenchmarkTwoWays).
const enumerable = 4096

// Problem is what one rank may choose from.
type Problem struct {
	Tokens []int64 // of each candidate in window order, at most MaxItems, none negative
	Cost   float64 // what a KV token costs on the rank: a candidate adds Scaled(tokens, Cost) to its load
	Cap    int     // most candidates that may be taken: free slots
	Limit  int64   // most tokens that may be taken, unscaled: KV room, or Unlimited
}

// Set is a chosen subset.
type Set struct {
	Mask  uint64 // bit i: candidate i is in
	Sum   int64  // added load, scaled
	Score float64
}

// Len is the number of candidates in the set.
func (s Set) Len() int { return bits.OnesCount64(s.Mask) }

// choice is a subset during the search.
type choice struct {
	sum   int64
	count int
	mask  uint64
	ok    bool
}

// Solver finds the best subset. It owns the scratch that makes it free of
// allocations once it has seen its largest problem; it serves one goroutine.
type Solver struct {
	sizes   [MaxItems]int64 // scaled sizes of the candidates that fit alone
	tokens  [MaxItems]int64
	index   [MaxItems]uint8 // index in the problem: bits of a mask during the search are positions here
	n, most int
	limit   int64 // in tokens
	knee    int64

	low, high choice // largest sum <= knee, smallest sum > knee

	table reach
	units [MaxItems]int64 // sizes in the table's unit
}

// Best returns the non-empty subset with the largest score within p.Cap and p.Limit.
// In a tie, the smaller sum wins, then more candidates, then the smaller mask. It returns false if no candidate fits.
//
// F is concave, so only the largest sum up to its knee and the smallest sum
// beyond it can be best. All searches look for these two.
// The answer is exact while min(Limit, knee + largest size) <= 65,536 tokens or
// there are at most 4096 subsets, and Cost is 1 or the subsets are that few.
func (s *Solver) Best(f *Score, p Problem) (Set, bool) {
	s.loadCandidates(f, p)
	switch {
	case s.n == 0 || s.most == 0:
		return Set{}, false
	case s.most == 1:
		s.singles()
	case countSubsets(s.n, s.most) <= enumerable:
		s.walk(0, choice{}, 0)
	default:
		s.bitsets(f, p.Cost)
	}
	return s.better(f), true
}

// better chooses between the sums on the two sides of the knee, of which at least one was found, and translates the mask
// to the indices of the problem.
func (s *Solver) better(f *Score) Set {
	best := s.low
	if !best.ok || s.high.ok && f.Better(f.F(s.high.sum), f.F(best.sum)) {
		best = s.high
	}
	set := Set{Sum: best.sum, Score: f.F(best.sum)}
	for m := best.mask; m != 0; m &= m - 1 {
		set.Mask |= 1 << s.index[bits.TrailingZeros64(m)]
	}
	return set
}

// loadCandidates takes over the candidates that fit within the limit by themselves, in order.
func (s *Solver) loadCandidates(f *Score, p Problem) {
	s.n, s.limit, s.knee = 0, p.Limit, f.Knee()
	s.low, s.high = choice{}, choice{}
	for i, t := range p.Tokens {
		if t <= p.Limit {
			s.tokens[s.n], s.sizes[s.n], s.index[s.n] = t, Scaled(t, p.Cost), uint8(i)
			s.n++
		}
	}
	s.most = min(p.Cap, s.n)
}

// singles considers every candidate alone.
func (s *Solver) singles() {
	for i := range s.n {
		s.consider(choice{sum: s.sizes[i], count: 1, mask: 1 << i, ok: true})
	}
}

// walk considers every allowed superset of have that adds candidates from on.
func (s *Solver) walk(from int, have choice, tokens int64) {
	for i := from; i < s.n; i++ {
		t := tokens + s.tokens[i]
		if t > s.limit {
			continue
		}
		next := choice{sum: have.sum + s.sizes[i], count: have.count + 1, mask: have.mask | 1<<i, ok: true}
		if next.sum > s.knee && s.high.ok && next.sum > s.high.sum {
			continue // the sum is too large, and more candidates only make it larger
		}
		s.consider(next)
		if next.count < s.most {
			s.walk(i+1, next, t)
		}
	}
}

// consider keeps x if it is nearer to the knee than the choice kept on its side of the knee,
// or ties with that and has more candidates or a smaller mask.
func (s *Solver) consider(x choice) {
	side, nearer := &s.low, x.sum > s.low.sum
	if x.sum > s.knee {
		side, nearer = &s.high, x.sum < s.high.sum
	}
	tie := x.sum == side.sum && (x.count > side.count || x.count == side.count && x.mask < side.mask)
	if !side.ok || nearer || tie {
		*side = x
	}
}

// countSubsets returns the number of subsets of n candidates with at most `most` elements, the empty one included. It stops counting
// once there are more than enumerable.
func countSubsets(n, most int) int {
	sum, binomial := 1, 1
	for k := 1; k <= most && sum <= enumerable; k++ {
		binomial = binomial * (n - k + 1) / k
		sum += binomial
	}
	return sum
}

// bitsets searches in the table of reachable sums. If the table counts blocks of
// tokens, or if the sums are scaled and the limit is not, its choices are only approximate: they are checked,
// and compared with the best single and the greedy fill.
func (s *Solver) bitsets(f *Score, cost float64) {
	limit, exact := s.limit, true
	if cost != 1 && cost != 0 && limit != Unlimited {
		// Rounding moves each size by up to half a token, so a sum of sizes within this limit is within the true one.
		limit, exact = int64(math.Floor(float64(limit)*cost-float64(s.most)/2)), false
	}
	if limit >= 0 {
		exact = s.probe(limit) && exact
	}
	if exact {
		return
	}
	table := [2]choice{s.low, s.high}
	s.low, s.high = choice{}, choice{}
	s.singles()
	s.considerChecked(s.greedy())
	for _, x := range table {
		s.considerChecked(x)
	}
}

// considerChecked considers x if it was found, and if its tokens are within the limit.
func (s *Solver) considerChecked(x choice) {
	if !x.ok {
		return
	}
	var sum, tokens int64
	for m := x.mask; m != 0; m &= m - 1 {
		i := bits.TrailingZeros64(m)
		sum += s.sizes[i]
		tokens += s.tokens[i]
	}
	if tokens <= s.limit {
		x.sum = sum
		s.consider(x)
	}
}

// probe sets low and high from the table of reachable sums, and reports whether
// the table counted single tokens. If it counted blocks, only the masks can be used: their sums are in blocks, and the
// caller recomputes them.
func (s *Solver) probe(limit int64) bool {
	sizes, knee := s.sizes[:s.n], s.knee
	bound := boundOf(sizes, s.most, knee, limit)
	unit := (bound + maxBits - 1) / maxBits
	if unit > 1 {
		for i, w := range sizes {
			s.units[i] = max(1, (w+unit/2)/unit)
		}
		sizes = s.units[:s.n]
		limit /= unit
		if knee != Unlimited {
			knee /= unit
		}
		bound = boundOf(sizes, s.most, knee, limit)
	}
	s.table.fill(sizes, s.most, bound)
	if sum, count, ok := s.table.largestUpTo(min(knee, bound)); ok {
		s.low = choice{sum: sum, count: count, mask: s.table.trace(sizes, sum, count), ok: true}
	}
	if knee < bound {
		if sum, count, ok := s.table.smallestFrom(knee + 1); ok {
			s.high = choice{sum: sum, count: count, mask: s.table.trace(sizes, sum, count), ok: true}
		}
	}
	return unit <= 1
}

// boundOf returns the largest sum that the table needs: the smallest sum beyond the knee is at
// most one size larger than the knee.
func boundOf(sizes []int64, most int, knee, limit int64) int64 {
	var largest, sum int64
	for _, w := range sizes {
		largest = max(largest, w)
		sum += w
	}
	sum = min(sum, largest*int64(most), limit)
	if knee == Unlimited {
		return sum
	}
	return min(sum, knee+largest)
}

// greedy returns the choice that takes the longest candidates first, as long as it stays within the knee,
// the limit and the cap.
func (s *Solver) greedy() choice {
	var taken choice
	var tokens int64
	for taken.count < s.most {
		pick := -1
		for i := range s.n {
			if taken.mask>>i&1 == 0 && taken.sum+s.sizes[i] <= s.knee && tokens+s.tokens[i] <= s.limit &&
				(pick < 0 || s.sizes[i] > s.sizes[pick]) {
				pick = i
			}
		}
		if pick < 0 {
			break
		}
		taken.mask |= 1 << pick
		taken.sum += s.sizes[pick]
		tokens += s.tokens[pick]
		taken.count++
		taken.ok = true
	}
	return taken
}
