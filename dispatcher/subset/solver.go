package subset

import (
	"math"
	"math/bits"
)

// MaxItems is the largest number of candidates: a set of them is a 64-bit mask.
const MaxItems = 64

// enumerable is the most subsets for which the solver tries every one, which is exact for prompts
// of any length. For more, a table of bitsets is faster (BenchmarkTwoWays).
const enumerable = 4096

// Problem has the candidates (waiting prompts) for one rank, and what the rank can take.
type Problem struct {
	// Tokens has the prompt tokens of each candidate, in the order of preference for ties; at most
	// MaxItems, none negative.
	Tokens []int64
	// Cost is that of a KV token on the rank, as a multiple of the mean of its group: a candidate adds
	// Scaled(tokens, Cost) to the load of the rank.
	Cost  float64
	Cap   int   // most candidates in the set: the free slots of the rank
	Limit int64 // largest sum of Tokens in the set: the KV room of the rank, or Unlimited
}

// Set is a chosen subset of the candidates.
type Set struct {
	Mask  uint64 // bit i is 1 if candidate i is in the set
	Sum   int64  // sum of the scaled tokens: the load that the set adds
	Score float64
}

// Len returns the number of candidates in the set.
func (s Set) Len() int { return bits.OnesCount64(s.Mask) }

// choice is a subset of the candidates during the search.
type choice struct {
	sum   int64 // sum of scaled tokens
	count int
	mask  uint64 // bit i is 1 if candidate i of Solver.scaledTokens is in the subset
	ok    bool   // false: no subset was found yet
}

// Solver finds the best subset of candidates for one rank. It keeps its memory, so it allocates
// nothing after its largest problem. Only one goroutine may use it.
type Solver struct {
	scaledTokens    [MaxItems]int64 // scaled tokens of the candidates that fit within the limit alone
	tokens          [MaxItems]int64 // unscaled tokens of the same candidates
	index           [MaxItems]uint8 // index of each of these candidates in Problem.Tokens
	count, maxCount int             // number of these candidates, and how many of them may be taken
	limit           int64           // largest sum of unscaled tokens (Problem.Limit)
	knee            int64           // Score.Knee

	// The largest sum <= knee that was found, and the smallest sum > knee.
	upToKnee, beyondKnee choice

	table  sumTable
	blocks [MaxItems]int64 // sizes in blocks of tokens, if the table of sums counts blocks
}

// Best returns the non-empty subset with the largest score within p.Cap and p.Limit. In a tie, the
// smaller sum wins, then more candidates, then the smaller mask. ok is false if no candidate fits.
//
// A score rises with the sum up to the knee, and does not rise beyond it. Therefore either the
// largest sum up to the knee or the smallest sum beyond it is the best.
//
// The answer is exact if there are at most 4096 subsets. It is also exact if Cost is 1 and
// min(Limit, knee + largest size) is at most 65,536 tokens. Otherwise it is approximate.
func (s *Solver) Best(f *Score, p Problem) (best Set, ok bool) {
	s.loadCandidates(f, p)
	switch {
	case s.count == 0 || s.maxCount == 0:
		return Set{}, false
	case s.maxCount == 1:
		s.singles()
	case countSubsets(s.count, s.maxCount) <= enumerable:
		var noCandidates choice
		s.walk(0, noCandidates, 0)
	default:
		s.searchTable(p.Cost)
	}
	return s.pickBetter(f), true
}

// pickBetter prefers s.upToKnee in a tie. At least one of the two must have been found.
func (s *Solver) pickBetter(f *Score) Set {
	best := s.upToKnee
	if !best.ok || s.beyondKnee.ok && f.Better(f.F(s.beyondKnee.sum), f.F(best.sum)) {
		best = s.beyondKnee
	}
	set := Set{Sum: best.sum, Score: f.F(best.sum)}
	for m := best.mask; m != 0; m &= m - 1 { // each turn clears the lowest bit of m
		set.Mask |= 1 << s.index[bits.TrailingZeros64(m)]
	}
	return set
}

// loadCandidates copies the candidates that fit within the limit alone. The limit holds for their
// tokens, and the score and its knee for their scaled tokens.
func (s *Solver) loadCandidates(f *Score, p Problem) {
	s.forgetChoices()
	s.count, s.limit, s.knee = 0, p.Limit, f.Knee()
	for i, tokens := range p.Tokens {
		if tokens <= p.Limit {
			s.tokens[s.count], s.scaledTokens[s.count], s.index[s.count] = tokens, Scaled(tokens, p.Cost), uint8(i)
			s.count++
		}
	}
	s.maxCount = min(p.Cap, s.count)
}

func (s *Solver) singles() {
	for i := range s.count {
		s.consider(choice{sum: s.scaledTokens[i], count: 1, mask: 1 << i, ok: true})
	}
}

// walk considers each allowed set of the candidates in base and at least one more, with an index
// not below from. tokens are the unscaled tokens in base.
func (s *Solver) walk(from int, base choice, tokens int64) {
	for i := from; i < s.count; i++ {
		t := tokens + s.tokens[i]
		if t > s.limit {
			continue // no larger set with this candidate fits either
		}
		next := choice{sum: base.sum + s.scaledTokens[i], count: base.count + 1, mask: base.mask | 1<<i, ok: true}
		if next.sum > s.knee && s.beyondKnee.ok && next.sum > s.beyondKnee.sum {
			continue // a smaller sum beyond the knee is known, and more candidates only make the sum larger
		}
		s.consider(next)
		if next.count < s.maxCount {
			s.walk(i+1, next, t)
		}
	}
}

// consider stores x if its sum is nearer to the knee than that of the stored choice on its side. In
// a tie, more candidates win, and then the smaller mask, so that the result does not depend on the
// order of the search.
func (s *Solver) consider(x choice) {
	best, nearer := &s.upToKnee, x.sum > s.upToKnee.sum
	if x.sum > s.knee {
		best, nearer = &s.beyondKnee, x.sum < s.beyondKnee.sum
	}
	winsTie := x.sum == best.sum && (x.count > best.count || x.count == best.count && x.mask < best.mask)
	if !best.ok || nearer || winsTie {
		*best = x
	}
}

// countSubsets counts the empty set, too, and stops above enumerable.
func countSubsets(n, maxCount int) int {
	sum, binomial := 1, 1
	for k := 1; k <= maxCount && sum <= enumerable; k++ {
		binomial = binomial * (n - k + 1) / k // number of subsets with k elements
		sum += binomial
	}
	return sum
}

// searchTable searches a table of the sums that subsets can have. It is only approximate in two
// cases: if the sizes are scaled, a limit for unscaled tokens has no exact equivalent, and if sums
// may be too large for the table, it counts blocks of several tokens. A scale of 0 means 1.
func (s *Solver) searchTable(scale float64) {
	limit, limitIsExact := s.limit, true
	if isScaled := scale != 1 && scale != 0; isScaled && limit != Unlimited {
		// Scaling rounds each size by up to half a token, so a scaled sum within this lower limit is
		// certainly within the limit for unscaled tokens.
		largestRounding := float64(s.maxCount) / 2
		limit, limitIsExact = int64(math.Floor(float64(limit)*scale-largestRounding)), false
	}
	countsTokens := true
	if limit >= 0 { // otherwise no set is certain to be within the limit
		countsTokens = s.findInTable(limit)
	}
	if !limitIsExact || !countsTokens {
		s.improveApproximate()
	}
}

// improveApproximate compares the choices from an approximate table with the single candidates and
// a greedy choice, all within the limit and with their exact sums.
func (s *Solver) improveApproximate() {
	fromTable := [2]choice{s.upToKnee, s.beyondKnee}
	s.forgetChoices()
	s.singles() // each candidate alone is within the limit
	s.considerChecked(s.greedy())
	for _, x := range fromTable {
		s.considerChecked(x)
	}
}

func (s *Solver) forgetChoices() { s.upToKnee, s.beyondKnee = choice{}, choice{} }

// considerChecked takes a choice from an approximate table only if its tokens are within the limit,
// with its exact sum: only its mask can be trusted.
func (s *Solver) considerChecked(x choice) {
	if !x.ok {
		return
	}
	var scaledTokens, tokens int64
	for m := x.mask; m != 0; m &= m - 1 {
		i := bits.TrailingZeros64(m)
		scaledTokens += s.scaledTokens[i]
		tokens += s.tokens[i]
	}
	if tokens <= s.limit {
		x.sum = scaledTokens
		s.consider(x)
	}
}

// findInTable stores the choices with the largest sum up to the knee and with the smallest sum
// beyond it, both at most limit. countsTokens is false if the table counted blocks of tokens. Then
// only the masks of the two choices can be used.
func (s *Solver) findInTable(limit int64) (countsTokens bool) {
	sizes, knee := s.scaledTokens[:s.count], s.knee
	bound := largestUsefulSum(sizes, s.maxCount, knee, limit)
	perBlock := (bound + maxBits - 1) / maxBits // tokens per block, so that bound is at most maxBits blocks; 0 or 1: single tokens
	if perBlock > 1 {
		sizes, knee, bound = s.inBlocks(perBlock, limit)
	}
	s.table.fill(sizes, s.maxCount, bound)
	if sum, count, ok := s.table.largestUpTo(min(knee, bound)); ok {
		s.upToKnee = choice{sum: sum, count: count, mask: s.table.trace(sizes, sum, count), ok: true}
	}
	if knee < bound {
		if sum, count, ok := s.table.smallestFrom(knee + 1); ok {
			s.beyondKnee = choice{sum: sum, count: count, mask: s.table.trace(sizes, sum, count), ok: true}
		}
	}
	return perBlock <= 1
}

// inBlocks returns the same numbers in blocks of perBlock tokens.
func (s *Solver) inBlocks(perBlock, limit int64) (sizes []int64, knee, bound int64) {
	for i, size := range s.scaledTokens[:s.count] {
		s.blocks[i] = max(1, (size+perBlock/2)/perBlock) // a short prompt counts as a block, too
	}
	sizes, knee = s.blocks[:s.count], s.knee
	if knee != Unlimited {
		knee /= perBlock
	}
	return sizes, knee, largestUsefulSum(sizes, s.maxCount, knee, limit/perBlock)
}

// largestUsefulSum returns a bound: no larger sum of at most maxCount sizes can be the best choice.
// The smallest sum beyond the knee exceeds it by at most one size, because without one of its sizes
// it would not be beyond.
func largestUsefulSum(sizes []int64, maxCount int, knee, limit int64) int64 {
	var largest, sum int64
	for _, size := range sizes {
		largest = max(largest, size)
		sum += size
	}
	sum = min(sum, largest*int64(maxCount), limit)
	if knee == Unlimited {
		return sum
	}
	return min(sum, knee+largest)
}

// greedy takes the largest candidates first, as long as they stay within the knee, the limit and
// the cap.
func (s *Solver) greedy() choice {
	var taken choice
	var tokens int64
	for taken.count < s.maxCount {
		pick := -1
		for i := range s.count {
			free := taken.mask>>i&1 == 0
			fits := taken.sum+s.scaledTokens[i] <= s.knee && tokens+s.tokens[i] <= s.limit
			if free && fits && (pick < 0 || s.scaledTokens[i] > s.scaledTokens[pick]) {
				pick = i
			}
		}
		if pick < 0 {
			break
		}
		taken.mask |= 1 << pick
		taken.sum += s.scaledTokens[pick]
		tokens += s.tokens[pick]
		taken.count++
		taken.ok = true
	}
	return taken
}
