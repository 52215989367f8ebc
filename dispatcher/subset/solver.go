package subset

import (
	"math"
	"math/bits"
)

// MaxItems is the largest number of candidates, because a set of candidates is a 64-bit mask.
const MaxItems = 64

// enumerable is the largest number of subsets for which the solver tries every subset. That gives the exact answer for prompts of any
// length. For more subsets, a table of bitsets is faster (BenchmarkTwoWays).
const enumerable = 4096

// Problem describes the candidates (waiting prompts) for one rank, and what the rank can take.
type Problem struct {
	// Tokens has the prompt tokens of each candidate, in the order of preference for ties; at most MaxItems, and none negative.
	Tokens []int64
	// Cost is the cost of a KV token on the rank, as a multiple of the mean of its group: a candidate adds Scaled(tokens, Cost) to the
	// load of the rank.
	Cost  float64
	Cap   int   // largest number of candidates in the set: the free slots of the rank
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

// Solver finds the best subset of candidates for one rank. It keeps its memory between problems, so it allocates nothing after its largest
// problem. Only one goroutine may use it.
type Solver struct {
	scaledTokens    [MaxItems]int64 // scaled tokens of the candidates that fit within the limit alone
	tokens          [MaxItems]int64 // unscaled tokens of the same candidates, in the same order
	index           [MaxItems]uint8 // index of each of these candidates in Problem.Tokens
	count, maxCount int             // number of these candidates, and how many of them may be taken
	limit           int64           // largest sum of unscaled tokens in a set (Problem.Limit)
	knee            int64           // Score.Knee: up to this sum, a larger sum has a better score

	// upToKnee is the subset with the largest sum <= knee that was found, and beyondKnee the one with the smallest sum > knee.
	upToKnee, beyondKnee choice

	table  sumTable
	blocks [MaxItems]int64 // sizes in blocks of tokens, if the table of sums counts blocks
}

// Best returns the non-empty subset with the largest score among those with at most p.Cap candidates and p.Limit tokens. In a tie, the
// smaller sum wins, then more candidates, then the smaller mask. ok is false if no candidate fits.
//
// The size of a candidate is the load that it adds to this rank: its tokens times p.Cost, the cost of a KV token there. The sum of a subset
// is that of its sizes. The score of a sum rises up to a sum that is called the knee, and does not rise beyond it. Therefore either the
// largest sum up to the knee or the smallest sum beyond it is the best. All searches store these two in s (upToKnee and beyondKnee): they
// try single candidates, or all subsets if there are few, or make a table.
//
// The answer is exact if there are at most 4096 subsets. It is also exact if Cost is 1 and the sums that matter are at most 65,536 tokens:
// those up to min(Limit, knee + largest size). Otherwise it is approximate.
func (s *Solver) Best(f *Score, p Problem) (best Set, ok bool) {
	s.loadCandidates(f, p)
	switch {
	case s.count == 0 || s.maxCount == 0:
		return Set{}, false
	case s.maxCount == 1: // each set is a single candidate
		s.singles()
	case countSubsets(s.count, s.maxCount) <= enumerable:
		var noCandidates choice
		s.walk(0, noCandidates, 0) // from candidate 0 on, beginning with a set of 0 tokens
	default:
		s.searchTable(p.Cost)
	}
	return s.pickBetter(f), true
}

// pickBetter returns, as a Set, the one of s.upToKnee and s.beyondKnee whose sum has the better score; in a tie, s.upToKnee. These are the
// two candidates for the best choice, because the score f.F of a sum rises up to the knee and does not rise beyond it. At least one of the
// two must have been found. The bits of Set.Mask are indices in Problem.Tokens, and those of choice.mask are indices in s.scaledTokens.
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

// loadCandidates prepares s for a problem. It copies into s the candidates that fit within the limit when they are alone, in the order of
// the problem. Each has two numbers. The limit holds for its tokens, because they need KV room. The score and its knee (the sum up to which
// the score rises) are for its scaled tokens: tokens times p.Cost, the load that they add to this rank.
func (s *Solver) loadCandidates(f *Score, p Problem) {
	s.forgetChoices() // those of the last problem
	s.count, s.limit, s.knee = 0, p.Limit, f.Knee()
	for i, tokens := range p.Tokens {
		if tokens <= p.Limit {
			s.tokens[s.count], s.scaledTokens[s.count], s.index[s.count] = tokens, Scaled(tokens, p.Cost), uint8(i)
			s.count++
		}
	}
	s.maxCount = min(p.Cap, s.count)
}

// singles considers each candidate as a set of one.
func (s *Solver) singles() {
	for i := range s.count {
		s.consider(choice{sum: s.scaledTokens[i], count: 1, mask: 1 << i, ok: true})
	}
}

// walk considers each allowed set that consists of the candidates in base and at least one more, with an index not below the parameter
// from. tokens is the number of unscaled tokens in base. It skips sets that cannot be the best: the score does not rise beyond the knee, so
// of the sums beyond it only the smallest one counts (beyondKnee is the best found so far).
func (s *Solver) walk(from int, base choice, tokens int64) {
	for i := from; i < s.count; i++ {
		t := tokens + s.tokens[i]
		if t > s.limit {
			continue // no larger set with this candidate fits either
		}
		next := choice{sum: base.sum + s.scaledTokens[i], count: base.count + 1, mask: base.mask | 1<<i, ok: true}
		if next.sum > s.knee && s.beyondKnee.ok && next.sum > s.beyondKnee.sum {
			continue // a smaller sum beyond the knee was found before, and more candidates would only make next.sum larger
		}
		s.consider(next)
		if next.count < s.maxCount {
			s.walk(i+1, next, t)
		}
	}
}

// consider stores x as s.upToKnee if its sum is at most the knee, or else as s.beyondKnee, if its sum is nearer to the knee than that of
// the stored choice. In a tie of the sums, more candidates win, and then the smaller mask, which has the candidates that come first. So the
// result does not depend on the order of the search.
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

// countSubsets returns the number of subsets of n candidates with at most maxCount elements, the empty set included. It stops counting once
// the number is above enumerable.
func countSubsets(n, maxCount int) int {
	sum, binomial := 1, 1
	for k := 1; k <= maxCount && sum <= enumerable; k++ {
		binomial = binomial * (n - k + 1) / k // number of subsets with k elements
		sum += binomial
	}
	return sum
}

// searchTable finds two choices in a table of the sums that subsets can have: the one with the largest sum up to the knee (s.upToKnee), and
// the one with the smallest sum beyond it (s.beyondKnee). The score rises up to the knee and not beyond it. The sizes that are summed up
// are the tokens of the candidates times scale (Problem.Cost); a scale of 0 means 1.
//
// What it finds is only approximate in two cases. If the sizes are scaled, a limit for unscaled tokens has no exact equivalent. If sums may
// be too large for the table, it counts blocks of several tokens. In these cases, improveApproximate checks both choices against the limit,
// and compares them with others.
func (s *Solver) searchTable(scale float64) {
	limit, limitIsExact := s.limit, true
	if isScaled := scale != 1 && scale != 0; isScaled && limit != Unlimited {
		// Scaling rounds each size by up to half a token. So a sum of scaled sizes within this lower limit is certainly within the
		// limit for unscaled tokens.
		largestRounding := float64(s.maxCount) / 2
		limit, limitIsExact = int64(math.Floor(float64(limit)*scale-largestRounding)), false
	}
	countsTokens := true // false: the table counts blocks of several tokens
	if limit >= 0 {      // a limit below 0 means that no set is certain to be within the limit for unscaled tokens
		countsTokens = s.findInTable(limit)
	}
	if !limitIsExact || !countsTokens {
		s.improveApproximate()
	}
}

// improveApproximate compares the choices that an approximate table found (s.upToKnee and s.beyondKnee) with the single candidates and a
// greedy choice, and stores the best in their place. Of all these, only choices within the limit count, with their exact sums. Each choice
// that is considered replaces s.upToKnee or s.beyondKnee if it is better (see consider).
func (s *Solver) improveApproximate() {
	fromTable := [2]choice{s.upToKnee, s.beyondKnee}
	s.forgetChoices() // those of the table are considered again below, once their sums are exact
	s.singles()       // each candidate alone is within the limit
	s.considerChecked(s.greedy())
	for _, x := range fromTable {
		s.considerChecked(x)
	}
}

// forgetChoices forgets the best choices that were found so far, up to the knee and beyond it.
func (s *Solver) forgetChoices() { s.upToKnee, s.beyondKnee = choice{}, choice{} }

// considerChecked considers a choice that may come from an approximate table: its mask is right, but its sum may be in blocks of several
// tokens, and its candidates may exceed the limit. So considerChecked takes the choice only if its tokens are within the limit, and sets
// its sum to the sum of the scaled tokens. A choice with ok false is ignored.
func (s *Solver) considerChecked(x choice) {
	if !x.ok {
		return
	}
	var scaledTokens, tokens int64
	for m := x.mask; m != 0; m &= m - 1 { // each turn clears the lowest bit of m
		i := bits.TrailingZeros64(m)
		scaledTokens += s.scaledTokens[i]
		tokens += s.tokens[i]
	}
	if tokens <= s.limit {
		x.sum = scaledTokens
		s.consider(x)
	}
}

// findInTable builds a table of the sums that subsets of the candidates can have, each with the sizes (scaled tokens) of its candidates
// added up. It finds in it the largest sum up to the knee and the smallest sum beyond it, both at most limit, and stores the choices with
// these sums in s.upToKnee and s.beyondKnee. The knee is the sum up to which the score rises. countsTokens is false if the table counted
// blocks of tokens, because sums may be too large for single tokens. Then the sums of the two choices are in blocks, and only their masks
// can be used.
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
	if knee < bound { // otherwise no sum in the table is beyond the knee
		if sum, count, ok := s.table.smallestFrom(knee + 1); ok {
			s.beyondKnee = choice{sum: sum, count: count, mask: s.table.trace(sizes, sum, count), ok: true}
		}
	}
	return perBlock <= 1
}

// inBlocks returns the numbers that the table needs in blocks of perBlock tokens: the sizes (scaled tokens) of the candidates, the knee,
// and the largest sum that matters (bound). limit is the largest sum allowed, in tokens.
func (s *Solver) inBlocks(perBlock, limit int64) (sizes []int64, knee, bound int64) {
	for i, size := range s.scaledTokens[:s.count] {
		s.blocks[i] = max(1, (size+perBlock/2)/perBlock) // rounded, but a short prompt counts as a block, too
	}
	sizes, knee = s.blocks[:s.count], s.knee
	if knee != Unlimited {
		knee /= perBlock
	}
	return sizes, knee, largestUsefulSum(sizes, s.maxCount, knee, limit/perBlock)
}

// largestUsefulSum returns a bound: no sum of at most maxCount sizes that is larger can be the best choice. A sum is the load that a set of
// candidates adds to the rank. Its score rises with the sum up to the knee, and does not rise beyond it. So of the sums beyond the knee,
// only the smallest can be the best. It exceeds the knee by at most one size: without one of its sizes, it would be a smaller sum, and so
// not beyond the knee. limit is the largest sum allowed.
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

// greedy returns a choice that takes the largest candidates first, as long as they stay within the knee, the limit and the cap. The knee,
// up to which the score rises, is for sizes: the tokens times their cost on the rank, so the load that they add. The limit is for unscaled
// tokens, because it is the KV room of the rank. The ok of the choice is false if no candidate fits.
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
		if pick < 0 { // no further candidate fits
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
