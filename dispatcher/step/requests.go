package step

import "math"

// weightSearch learns the weight of a request: how many KV tokens make a step as much longer as one
// request does.
//
// Only the slowest rank determines the time of a step, and which rank is the slowest depends on the
// weight. Therefore a simple regression cannot find it, and a number of weights are tried side by
// side, each with its own line through the times of the steps over the loads of its slowest ranks.
// The line with the smallest error wins. Each weight is tried with both bottlenecks (see
// Bottleneck), because an engine may pad all ranks to the rank with most requests, and this rank
// need not be the one with most KV.
//
// All sums are of differences within short blocks of steps. Otherwise slow changes, such as those
// of a GPU's clock rate or of the length of prompts, would seem to depend on the number of
// requests.
type weightSearch struct {
	assumed        float64       // weight in use until the steps have shown one, in KV tokens
	found          requestWeight // weight 0: a request itself surely costs no time
	isFound        bool          // false: assumed is in use
	bottleneckSure bool          // false: only the weight in found is certain
	onTrial        trial         // result of the last window, which the next window confirms or not

	window, block sums
	candidates    [2 * weightCount]candidate // first each weight with the bottleneck OneRank, then each weight with TwoRanks
}

const (
	windowSteps        = 2000 // steps of a window, at whose end the best weight is looked for
	blockSteps         = 100  // steps of a block; only differences within a block count
	weightCount        = 30   // number of weights that are tried, including 0
	weightsPerDoubling = 2    // tried weights per doubling: neighbours differ by a factor of the square root of 2
	smallestWeight     = 64   // smallest weight above 0, in KV tokens; the largest is about a million, as for models with sparse attention
	sureDrop           = 3    // a confirmed weight lowers the squared error per block by more than so many standard errors
	leastChange        = 0.05 // a new weight replaces the weight in use only if it differs by more than about this share
	resolutionMs       = 0.1  // errors of a step's time below so many ms show nothing
)

// triedWeights are in KV tokens, ascending. The first is 0: requests cost nothing beside their KV.
var triedWeights = func() (all [weightCount]float64) {
	for k := 1; k < weightCount; k++ {
		all[k] = smallestWeight * math.Exp2(float64(k-1)/weightsPerDoubling)
	}
	return all
}()

// sums has the number of steps, their times in ms (y) and their squared times. For a window, yy has
// only the variation within blocks.
type sums struct{ n, y, yy float64 }

// zeroWeight is the index of the candidate with the weight 0, with which the others are compared.
const zeroWeight = 0

// Indices of the first candidate with each bottleneck. From there on, the candidates have the
// triedWeights, in their order.
const firstOneRank, firstTwoRanks = 0, weightCount

// candidate has the sums for one of the triedWeights and one of the two bottlenecks. x is the load
// of a step by this explanation and y its time.
type candidate struct {
	blockX, blockXX, blockXY float64 // after centre, blockXX and blockXY have only the variation within the block
	x, xx, xy                float64 // over the blocks of the window; xx and xy add up the variation within each block
}

// trial is the result of a window. The steps of the next window test it, because they were not used
// to find it.
type trial struct {
	candidate        int // index of the best one; 0: no weight explains the times surely better than the weight 0
	best             requestWeight
	bottleneckSure   bool    // the other bottleneck explains the times surely less well
	slope, zeroSlope float64 // slopes of the lines of this candidate and of candidate 0, in ms per KV token

	blocks float64 // blocks of the next window so far
	// How much the found weight lowers the squared error of a block, and the square of this, added up.
	drops, squares float64
}

// add adds a step that took ms. If this changes the weight in use, line is the regression of the
// window's steps with the new weight, and must replace the regression with the old one.
func (s *weightSearch) add(ranks []Rank, ms float64) (line regression, changed bool) {
	loads := loadsByCandidate(ranks)
	for k := range s.candidates {
		c, x := &s.candidates[k], loads[k]
		c.blockX, c.blockXX, c.blockXY = c.blockX+x, c.blockXX+x*x, c.blockXY+x*ms
	}
	s.block = sums{s.block.n + 1, s.block.y + ms, s.block.yy + ms*ms}
	if s.block.n < blockSteps {
		return line, false
	}
	s.endBlock()
	if s.window.n < windowSteps {
		return line, false
	}
	if changed = s.endWindow(); changed {
		line = s.windowRegression()
	}
	s.window = sums{}
	clear(s.candidates[:])
	return line, changed
}

func loadsByCandidate(ranks []Rank) (loads [2 * weightCount]float64) {
	mostKV, mostRequests := 0.0, 0.0
	for i := range ranks {
		kv, requests := ranks[i].KV, ranks[i].Requests
		mostKV, mostRequests = max(mostKV, kv), max(mostRequests, requests)
		for k := range triedWeights {
			loads[k] = max(loads[k], kv+triedWeights[k]*requests)
		}
	}
	for k := range triedWeights { // TwoRanks: the most KV and the most requests, which may be those of two ranks
		loads[firstTwoRanks+k] = mostKV + triedWeights[k]*mostRequests
	}
	return loads
}

// endBlock adds the current block to the window, and begins the next block. The block also tests
// the weight on trial: its line should explain the times better than the line of the weight 0, both
// with the slopes from the last window.
func (s *weightSearch) endBlock() {
	b := s.block
	for k := range s.candidates {
		c := &s.candidates[k]
		c.centre(&b)
		c.x, c.xx, c.xy = c.x+c.blockX, c.xx+c.blockXX, c.xy+c.blockXY
	}
	if t := &s.onTrial; t.candidate > 0 {
		drop := s.candidates[t.candidate].errorDrop(t.slope) - s.candidates[zeroWeight].errorDrop(t.zeroSlope)
		t.blocks, t.drops, t.squares = t.blocks+1, t.drops+drop, t.squares+drop*drop
	}
	for k := range s.candidates {
		c := &s.candidates[k]
		c.blockX, c.blockXX, c.blockXY = 0, 0, 0
	}
	s.window = sums{s.window.n + b.n, s.window.y + b.y, s.window.yy + b.yy - b.y*b.y/b.n} // with yy centred as by centre
	s.block = sums{}
}

// centre makes blockXX and blockXY sums over the differences from the block's mean load and mean
// time: the sum of x*y, less the sum of x times the sum of y divided by the number of steps.
func (c *candidate) centre(b *sums) {
	c.blockXX, c.blockXY = c.blockXX-c.blockX*c.blockX/b.n, c.blockXY-c.blockX*b.y/b.n
}

func (s *weightSearch) inUse() requestWeight {
	if s.isFound {
		return s.found
	}
	return requestWeight{tokensPerRequest: s.assumed}
}

// endWindow looks for the best weight in the window that ends. One window finds a weight, and the
// steps of the next window, which were not used to find it, must confirm it before it comes into
// use. Only a weight in use that surely fits worse than the weight 0 is replaced without a trial.
func (s *weightSearch) endWindow() (changed bool) {
	inUseBefore, wasOnTrial := s.inUse(), s.onTrial
	foundNow := s.bestOfWindow()
	s.onTrial = foundNow
	switch {
	case wasOnTrial.confirmed(): // by the steps of the window that ends now
		s.adopt(&wasOnTrial, &foundNow)
	case inUseBefore.tokensPerRequest > 0 && s.zeroFitsBetter():
		s.found, s.isFound, s.bottleneckSure = foundNow.best, true, foundNow.bottleneckSure
	}
	return s.inUse() != inUseBefore
}

// adopt brings a confirmed weight into use. If the next window has found the same bottleneck, it
// takes the geometric mean of both weights, because tried weights differ by factors. The bottleneck
// is sure only if each window for itself was sure of it.
func (s *weightSearch) adopt(confirmed, foundNext *trial) {
	weight := confirmed.best
	nextHasWeight := foundNext.candidate > 0
	if nextHasWeight && foundNext.best.waitsForOneRank == weight.waitsForOneRank {
		weight.tokensPerRequest = math.Sqrt(weight.tokensPerRequest * foundNext.best.tokensPerRequest)
	}
	if !s.isFound || weight.differsFrom(s.found) {
		s.found, s.isFound = weight, true
	}
	bothWindowsSure := confirmed.bottleneckSure && foundNext.bottleneckSure
	s.bottleneckSure = bothWindowsSure && foundNext.best.waitsForOneRank == s.found.waitsForOneRank
}

// differsFrom says whether a weight replaces the one in use. If that one is 0, the ratio is
// infinite, so that any other weight differs.
func (w requestWeight) differsFrom(inUse requestWeight) bool {
	otherBottleneck := inUse.waitsForOneRank != w.waitsForOneRank
	return otherBottleneck || math.Abs(math.Log(w.tokensPerRequest/inUse.tokensPerRequest)) > leastChange
}

// bestOfWindow returns the candidate with the smallest error; the zero trial if none is surely
// better than the weight 0.
func (s *weightSearch) bestOfWindow() trial {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	best, leastOneRank := s.bestCandidate(firstOneRank, zeroError)
	bestTwoRanks, leastTwoRanks := s.bestCandidate(firstTwoRanks, zeroError)
	if leastTwoRanks < leastOneRank {
		best = bestTwoRanks
	}
	least := min(leastOneRank, leastTwoRanks)
	if best == zeroWeight || zeroError-least <= s.sureDifference(least) { // chance may explain the difference
		return trial{}
	}
	t := trial{candidate: best, best: candidateWeight(best), slope: s.candidates[best].slope(), zeroSlope: s.candidates[zeroWeight].slope()}
	t.bottleneckSure = math.Abs(leastOneRank-leastTwoRanks) > s.sureDifference(least)
	t.best.tokensPerRequest *= s.refinement(best, least)
	return t
}

// bestCandidate compares the candidates from the index first on, all with the same bottleneck. It
// returns zeroWeight and zeroError if no weight has a smaller error.
func (s *weightSearch) bestCandidate(first int, zeroError float64) (best int, least float64) {
	best, least = zeroWeight, zeroError
	for k := first + 1; k < first+weightCount; k++ {
		c := &s.candidates[k]
		largerIsShorter := c.xy <= 0 // larger loads do not explain longer times
		if squaredError := c.minSquaredError(&s.window); !largerIsShorter && squaredError < least {
			best, least = k, squaredError
		}
	}
	return best, least
}

func candidateWeight(k int) requestWeight {
	return requestWeight{tokensPerRequest: triedWeights[k%weightCount], waitsForOneRank: k < weightCount}
}

// refinement returns the factor by which to change the weight of the best candidate, because the
// best weight lies between tried weights: the lowest point of a parabola through the errors of this
// candidate and its two neighbours. It is 1 if a neighbour is missing or is the weight 0.
func (s *weightSearch) refinement(best int, least float64) float64 {
	if k := best % weightCount; k <= 1 || k == weightCount-1 {
		return 1
	}
	// bestCandidate leaves out lines with a negative slope, so the error of a neighbour may be below
	// least.
	smaller := max(least, s.candidates[best-1].minSquaredError(&s.window))
	larger := max(least, s.candidates[best+1].minSquaredError(&s.window))
	distance := lowestOfParabola(smaller, least, larger)
	return math.Exp2(distance / weightsPerDoubling)
}

// lowestOfParabola returns the x at which the parabola through (-1, left), (0, middle) and (1,
// right) is lowest, from -0.5 to 0.5. None of the points may be below the middle one.
func lowestOfParabola(left, middle, right float64) (x float64) {
	bend := left - 2*middle + right
	if bend <= 0 {
		return 0
	}
	return (left - right) / (2 * bend)
}

// zeroFitsBetter says whether the weight 0 surely fits the window better than the weight in use
// with either bottleneck. It returns false if all ranks had equal numbers of requests in all steps,
// because such a window shows nothing about the weight.
func (s *weightSearch) zeroFitsBetter() bool {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	k := nearest(s.inUse().tokensPerRequest)
	oneRank, twoRanks := &s.candidates[k], &s.candidates[firstTwoRanks+k]
	weightError := min(oneRank.minSquaredError(&s.window), twoRanks.minSquaredError(&s.window))
	return weightError-zeroError > s.sureDifference(zeroError)
}

// sureDifference returns how much larger than least the squared error of another line must be so
// that chance does not explain it. Each block costs one degree of freedom for its mean, and the
// line costs two.
func (s *weightSearch) sureDifference(least float64) float64 {
	degrees := s.window.n*(1-1./blockSteps) - 2
	return sureStandardErrors * sureStandardErrors * max(least/degrees, resolutionMs*resolutionMs)
}

// errorDrop returns by how much the slope lowers the squared error of the current block: the sum of
// y^2 - (y-slope*x)^2 over its steps. The block's sums must be centred.
func (c *candidate) errorDrop(slope float64) float64 {
	return 2*slope*c.blockXY - slope*slope*c.blockXX
}

// confirmed says whether the mean drop is larger than sureDrop times its standard error. The error
// is taken over blocks and not over steps, because the errors of successive steps may depend on
// each other. It is false for the zero trial.
func (t *trial) confirmed() bool {
	spread := t.squares - t.drops*t.drops/t.blocks
	// These are the squares of the mean drop and of its standard error, times the squared number of
	// blocks.
	return t.drops > 0 && t.drops*t.drops > sureDrop*sureDrop*spread*t.blocks/(t.blocks-1)
}

// If all loads of the window are equal (xx is 0), every slope has the same errors.
func (c *candidate) minSquaredError(w *sums) float64 {
	if c.xx <= 0 {
		return w.yy
	}
	return w.yy - c.xy*c.xy/c.xx
}

// slope is in ms per KV token; 0: all loads were equal.
func (c *candidate) slope() float64 {
	if c.xx <= 0 {
		return 0
	}
	return c.xy / c.xx
}

// nearest compares by ratio. Only the weight 0 has index 0.
func nearest(weight float64) int {
	if weight == 0 {
		return 0
	}
	aboveSmallest := math.Round(math.Log2(weight/smallestWeight) * weightsPerDoubling)
	return 1 + int(max(0, min(weightCount-2, aboveSmallest)))
}

// windowRegression returns the regression with the weight in use. The candidate's sums of products
// are of differences from the means of blocks, but a regression needs them for the loads and times
// themselves, so what the means of the whole window contribute is added. What changed from block to
// block stays out, because such slow changes must not count.
func (s *weightSearch) windowRegression() regression {
	c, w := s.candidateInUse(), &s.window
	r := regression{
		requestWeight: s.inUse(), n: uint64(w.n), w: w.n, x: c.x, y: w.y,
		xx: c.xx + c.x*c.x/w.n, xy: c.xy + c.x*w.y/w.n, yy: w.yy + w.y*w.y/w.n,
	}
	r.boundWeight()
	return r
}

func (s *weightSearch) candidateInUse() *candidate {
	inUse := s.inUse()
	first := firstOneRank
	if !inUse.waitsForOneRank {
		first = firstTwoRanks
	}
	return &s.candidates[first+nearest(inUse.tokensPerRequest)]
}

// boundWeight bounds the weights of all steps to their sum after many steps, 1/(1-fade).
func (r *regression) boundWeight() {
	if scale := 1 / (1 - fade) / r.w; scale < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = scale*r.w, scale*r.x, scale*r.y, scale*r.xx, scale*r.xy, scale*r.yy
	}
}
