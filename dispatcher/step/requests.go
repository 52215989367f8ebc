package step

import "math"

// weightSearch learns the weight of a request: how many KV tokens make a step as much longer as one request does.
//
// A simple regression cannot find the weight: only the slowest rank determines the time of a step, and which rank is the slowest depends on
// the weight. Therefore a number of weights are tried side by side. Each weight has its own slowest rank in each step, and its own line
// through the times of the steps over the loads of these ranks. The most likely weight is the one whose line has the smallest error. Each
// weight is tried with both bottlenecks (see Bottleneck), because an engine may pad all ranks to the rank with most requests, and this rank
// need not be the one with most KV. Each pair of a weight and a bottleneck is a candidate.
//
// All sums are of differences within short blocks of steps. Otherwise slow changes, such as those of a GPU's clock rate or of the length of
// prompts, would seem to depend on the number of requests.
type weightSearch struct {
	assumed        float64       // weight in use until the steps have shown one, in KV tokens
	found          requestWeight // weight and bottleneck shown by the steps; weight 0: a request itself surely costs no time
	isFound        bool          // found has been set; false: assumed is in use
	bottleneckSure bool          // the bottleneck in found is certain, too; false: only its weight is
	onTrial        trial         // result of the last window that has ended, which the steps of the next window confirm or not

	window, block sums
	candidates    [2 * weightCount]candidate // first each weight with the bottleneck OneRank, then each weight with TwoRanks
}

const (
	windowSteps        = 2000 // number of steps of a window; the best weight is looked for at its end
	blockSteps         = 100  // number of steps of a block; only differences within a block count
	weightCount        = 30   // number of weights that are tried, including 0
	weightsPerDoubling = 2    // tried weights per doubling: neighbours differ by a factor of the square root of 2
	smallestWeight     = 64   // smallest weight above 0, in KV tokens; the largest is about a million, as for models with sparse attention
	sureDrop           = 3    // a weight is confirmed if it lowers the squared error per block by more than so many standard errors
	leastChange        = 0.05 // a new weight replaces the weight in use only if it differs by more than about this share
	resolutionMs       = 0.1  // errors of a step's time below so many ms show nothing
)

// triedWeights are the weights that are tried, in KV tokens, ascending. The first is 0: requests cost nothing beside their KV.
var triedWeights = func() (all [weightCount]float64) {
	for k := 1; k < weightCount; k++ {
		all[k] = smallestWeight * math.Exp2(float64(k-1)/weightsPerDoubling)
	}
	return all
}()

// sums has the number of steps (n), and the sums of their times in ms (y) and of their squared times (yy). For a window, yy has only the
// variation of the times within blocks.
type sums struct{ n, y, yy float64 }

// zeroWeight is the index of the candidate with the weight 0, with which the others are compared.
const zeroWeight = 0

// Indices of the first candidate with each bottleneck. From there on, the candidates have the triedWeights, in their order.
const firstOneRank, firstTwoRanks = 0, weightCount

// candidate has the sums for one explanation of the step times: one of the triedWeights of a request, and one of the two bottlenecks. In
// the names, x is the load of a step by this explanation and y its time: xx is the sum of the squared loads, and xy the sum of the loads
// times the times.
type candidate struct {
	blockX, blockXX, blockXY float64 // sums over the current block; after centre, blockXX and blockXY have only the variation within the block
	x, xx, xy                float64 // sums over the blocks of the window: xx and xy add up the variation within each block
}

// trial is the result of a window. The steps of the next window test it, because they were not used to find it.
type trial struct {
	candidate        int           // index of the best candidate; 0: no weight explains the times surely better than the weight 0
	best             requestWeight // weight and bottleneck of the best candidate
	bottleneckSure   bool          // the other bottleneck explains the times surely less well
	slope, zeroSlope float64       // slopes of the lines of this candidate and of candidate 0 (weight 0), in ms per KV token

	blocks float64 // number of blocks of the next window so far
	// Sums over these blocks of the drop (by how much the found weight lowers the squared error of a block), and of the squared drop.
	drops, squares float64
}

// add adds a step that took ms to the sums of each candidate. A candidate explains the times of steps by a line over their loads. It says
// how many KV tokens a request adds to a load (the weight), and whether a step waits for one rank or for two (the bottleneck).
//
// The sums are first those of a block of blockSteps steps. At its end, endBlock adds them to the window. After windowSteps steps, endWindow
// looks for the best candidate, and all sums begin anew. If this changes the weight in use, changed is true, and line is the regression of
// the window's steps with the new weight. It must replace the regression with the old weight.
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
	s.endBlock() // also empties the sums of the block
	if s.window.n < windowSteps {
		return line, false
	}
	if changed = s.endWindow(); changed {
		line = s.windowRegression()
	}
	s.window = sums{}
	clear(s.candidates[:]) // sets their sums to 0; weights and bottlenecks follow from the index
	return line, changed
}

// loadsByCandidate returns for each candidate, a pair of a weight and a bottleneck, the load for which the step waits, in KV tokens.
func loadsByCandidate(ranks []Rank) (loads [2 * weightCount]float64) {
	mostKV, mostRequests := 0.0, 0.0
	for i := range ranks {
		kv, requests := ranks[i].KV, ranks[i].Requests
		mostKV, mostRequests = max(mostKV, kv), max(mostRequests, requests)
		for k := range triedWeights { // OneRank: the rank with the largest sum of KV and requests
			loads[k] = max(loads[k], kv+triedWeights[k]*requests)
		}
	}
	for k := range triedWeights { // TwoRanks: the most KV and the most requests, which may be those of two ranks
		loads[firstTwoRanks+k] = mostKV + triedWeights[k]*mostRequests
	}
	return loads
}

// endBlock adds the current block of steps to the window, and begins the next block. Of the sums of products, it adds only what comes from
// differences within the block.
//
// If the last window has found a weight of a request (onTrial), the block also tests it: its steps were not used to find it. The line of
// this weight should explain their times better than the line of the weight 0, both with the slopes from the last window. So endBlock notes
// by how much more this weight lowers the squared error of the block.
func (s *weightSearch) endBlock() {
	b := s.block
	for k := range s.candidates {
		c := &s.candidates[k]
		c.centre(&b) // from now on, blockXX and blockXY have only the variation within the block
		c.x, c.xx, c.xy = c.x+c.blockX, c.xx+c.blockXX, c.xy+c.blockXY
	}
	if t := &s.onTrial; t.candidate > 0 { // 0: the last window found no weight
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

// centre makes blockXX and blockXY sums over the differences from the block's mean load and mean time. The sum of products of such
// differences is the sum of x*y, less the sum of x times the sum of y divided by the number of steps. b has the sum of y and this number.
func (c *candidate) centre(b *sums) {
	c.blockXX, c.blockXY = c.blockXX-c.blockX*c.blockX/b.n, c.blockXY-c.blockX*b.y/b.n
}

// inUse returns the weight and bottleneck with which loads are computed now: those that were found, else the assumed weight.
func (s *weightSearch) inUse() requestWeight {
	if s.isFound {
		return s.found
	}
	return requestWeight{tokensPerRequest: s.assumed}
}

// endWindow looks for the best weight of a request in the window that ends, and says whether the weight in use has changed. A weight goes
// through three states. One window finds it. Then it is on trial: the steps of the next window, which were not used to find it, confirm it
// or not. If they confirm it, it comes into use, until another one replaces it. The exception is a weight in use that surely fits worse
// than the weight 0: the best weight of the window that ends, which may be 0, replaces it without a trial.
func (s *weightSearch) endWindow() (changed bool) {
	inUseBefore, wasOnTrial := s.inUse(), s.onTrial
	foundNow := s.bestOfWindow()
	s.onTrial = foundNow // the next window tests it
	switch {
	case wasOnTrial.confirmed(): // by the steps of the window that ends now
		s.adopt(&wasOnTrial, &foundNow)
	case inUseBefore.tokensPerRequest > 0 && s.zeroFitsBetter():
		s.found, s.isFound, s.bottleneckSure = foundNow.best, true, foundNow.bottleneckSure
	}
	return s.inUse() != inUseBefore
}

// adopt brings a weight of a request into use that one window has found and the steps of the next window have confirmed. foundNext is what
// the next window has found. If it has the same bottleneck (which ranks' requests make a step longer), the geometric mean of both weights
// is used, because tried weights differ by factors. A weight that was in use already stays if the new one is about the same. The bottleneck
// counts as sure only if each window for itself was sure of the one that is in use.
func (s *weightSearch) adopt(confirmed, foundNext *trial) {
	weight := confirmed.best
	nextHasWeight := foundNext.candidate > 0 // 0: no weight was surely better than the weight 0
	if nextHasWeight && foundNext.best.waitsForOneRank == weight.waitsForOneRank {
		weight.tokensPerRequest = math.Sqrt(weight.tokensPerRequest * foundNext.best.tokensPerRequest)
	}
	if !s.isFound || weight.differsFrom(s.found) {
		s.found, s.isFound = weight, true
	}
	bothWindowsSure := confirmed.bottleneckSure && foundNext.bottleneckSure
	s.bottleneckSure = bothWindowsSure && foundNext.best.waitsForOneRank == s.found.waitsForOneRank
}

// differsFrom says whether a weight is so different from the one in use that it replaces it: it has the other bottleneck, or it is larger
// or smaller by more than about the share leastChange. The logarithm of their ratio is the same for both directions, apart from its sign.
// If the weight in use is 0, the ratio is infinite, so that any other weight differs.
func (w requestWeight) differsFrom(inUse requestWeight) bool {
	otherBottleneck := inUse.waitsForOneRank != w.waitsForOneRank
	return otherBottleneck || math.Abs(math.Log(w.tokensPerRequest/inUse.tokensPerRequest)) > leastChange
}

// bestOfWindow returns the candidate (a weight of a request and a bottleneck) with the smallest error in the window; the zero trial if none
// is surely better than the weight 0. The bottleneck says which ranks' requests make a step longer: those of the rank with the largest load
// (OneRank), or those of the rank with most requests, to which all ranks are padded (TwoRanks). Each weight is tried with both. The
// bottleneck is sure if the best candidate with the other one has a surely larger error.
func (s *weightSearch) bestOfWindow() trial {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	best, leastOneRank := s.bestCandidate(firstOneRank, zeroError)
	bestTwoRanks, leastTwoRanks := s.bestCandidate(firstTwoRanks, zeroError)
	if leastTwoRanks < leastOneRank {
		best = bestTwoRanks
	}
	least := min(leastOneRank, leastTwoRanks)
	if best == zeroWeight || zeroError-least <= s.sureDifference(least) { // chance may explain that the best is better than the weight 0
		return trial{}
	}
	t := trial{candidate: best, best: candidateWeight(best), slope: s.candidates[best].slope(), zeroSlope: s.candidates[zeroWeight].slope()}
	t.bottleneckSure = math.Abs(leastOneRank-leastTwoRanks) > s.sureDifference(least)
	t.best.tokensPerRequest *= s.refinement(best, least) // a factor near 1: the best weight usually lies between two tried weights
	return t
}

// bestCandidate compares the candidates that begin at the index first: one for each tried weight of a request, all with the same
// bottleneck. Each explains the times of the window's steps by its own line over their loads. bestCandidate returns the index of the
// candidate whose line has the smallest squared error, and this error. If no weight has a smaller error than the weight 0 (zeroError), it
// returns zeroWeight and zeroError.
func (s *weightSearch) bestCandidate(first int, zeroError float64) (best int, least float64) {
	best, least = zeroWeight, zeroError
	for k := first + 1; k < first+weightCount; k++ { // the first one has the weight 0, whose error is zeroError
		c := &s.candidates[k]
		largerIsShorter := c.xy <= 0 // the slope of the line is not positive, so larger loads do not explain longer times
		if squaredError := c.minSquaredError(&s.window); !largerIsShorter && squaredError < least {
			best, least = k, squaredError
		}
	}
	return best, least
}

// candidateWeight returns the weight and the bottleneck of candidate k. The first weightCount candidates have the bottleneck OneRank, and
// the others have the same weights with TwoRanks.
func candidateWeight(k int) requestWeight {
	return requestWeight{tokensPerRequest: triedWeights[k%weightCount], waitsForOneRank: k < weightCount}
}

// refinement returns the factor by which to change the weight of the best candidate, because the best weight lies between tried weights: it
// fits a parabola to the errors of this candidate (least) and its two neighbours, and takes the weight at its lowest point. The neighbours
// are the next smaller and the next larger tried weight. The factor is 1 if one of them is missing or is the weight 0.
func (s *weightSearch) refinement(best int, least float64) float64 {
	if k := best % weightCount; k <= 1 || k == weightCount-1 { // k is the index in triedWeights
		return 1
	}
	// bestCandidate leaves out candidates by which larger loads make steps shorter. The error of such a neighbour may be below least.
	smaller := max(least, s.candidates[best-1].minSquaredError(&s.window))
	larger := max(least, s.candidates[best+1].minSquaredError(&s.window))
	distance := lowestOfParabola(smaller, least, larger) // in tried weights: neighbours differ by the factor 2^(1/weightsPerDoubling)
	return math.Exp2(distance / weightsPerDoubling)
}

// lowestOfParabola returns at which x the parabola through three points is lowest. The points are (-1, left), (0, middle) and (1, right).
// None is below the middle one, so x is between -0.5 and 0.5. If all are equal, it returns 0.
func lowestOfParabola(left, middle, right float64) (x float64) {
	bend := left - 2*middle + right
	if bend <= 0 {
		return 0
	}
	return (left - right) / (2 * bend)
}

// zeroFitsBetter says whether the window's steps surely fit better if a request itself costs no time (the weight 0) than with the weight in
// use, whichever bottleneck this weight is tried with. It returns false if all ranks had equal numbers of requests in all steps, because
// such a window shows nothing about the weight.
func (s *weightSearch) zeroFitsBetter() bool {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	k := nearest(s.inUse().tokensPerRequest)
	oneRank, twoRanks := &s.candidates[k], &s.candidates[firstTwoRanks+k] // this weight with either bottleneck
	weightError := min(oneRank.minSquaredError(&s.window), twoRanks.minSquaredError(&s.window))
	return weightError-zeroError > s.sureDifference(zeroError)
}

// sureDifference returns how much larger than least the squared error of another line must be before chance does not explain the
// difference: the estimated variance of a step's time, times the square of sureStandardErrors. The estimated variance is least divided by
// the degrees of freedom, but at least the square of resolutionMs. Each block costs one degree of freedom for its mean, and the line costs
// two.
func (s *weightSearch) sureDifference(least float64) float64 {
	degrees := s.window.n*(1-1./blockSteps) - 2
	return sureStandardErrors * sureStandardErrors * max(least/degrees, resolutionMs*resolutionMs)
}

// errorDrop returns by how much the squared error of the current block is lower with the given slope than with the slope 0: the sum of
// y^2 - (y-slope*x)^2 over its steps, where x is a load and y a time. The block's sums must be centred.
func (c *candidate) errorDrop(slope float64) float64 {
	return 2*slope*c.blockXY - slope*slope*c.blockXX
}

// confirmed says whether the trial's weight surely lowers the errors of the blocks: the mean drop is larger than sureDrop times its
// standard error. It returns false for the zero trial, whose drops are 0. The error is taken over blocks and not over steps, because the
// errors of successive steps may depend on each other.
func (t *trial) confirmed() bool {
	spread := t.squares - t.drops*t.drops/t.blocks // sum of the squared distances of the drops from their mean
	// Compare the squares of the mean drop and of its standard error, both multiplied by the square of the number of blocks.
	return t.drops > 0 && t.drops*t.drops > sureDrop*sureDrop*spread*t.blocks/(t.blocks-1)
}

// minSquaredError returns the sum of the squared errors of the window's step times, with the slope that makes it smallest. If all loads of
// the window are equal (xx is 0), every slope has the same errors.
func (c *candidate) minSquaredError(w *sums) float64 {
	if c.xx <= 0 {
		return w.yy
	}
	return w.yy - c.xy*c.xy/c.xx
}

// slope returns the slope with the smallest error in the window, in ms per KV token; 0: all loads were equal.
func (c *candidate) slope() float64 {
	if c.xx <= 0 {
		return 0
	}
	return c.xy / c.xx
}

// nearest returns the index in triedWeights of the weight nearest to the given one (by ratio). Only the weight 0 has index 0.
func nearest(weight float64) int {
	if weight == 0 {
		return 0
	}
	aboveSmallest := math.Round(math.Log2(weight/smallestWeight) * weightsPerDoubling) // how many tried weights above the smallest
	return 1 + int(max(0, min(weightCount-2, aboveSmallest)))
}

// windowRegression returns a regression of the step times of the window over their loads, with the weight of a request that is in use now.
// The candidate nearest to it has the sums over the window. Its sums of products (xx and xy, and yy of the window) are of the differences
// from the means of short blocks of steps, but a regression needs them for the loads and times themselves. Therefore windowRegression adds
// what the means of the whole window contribute: the sum of one factor times the sum of the other, divided by n. What changed from block to
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

// candidateInUse returns the candidate with the bottleneck in use whose weight comes nearest to the weight in use.
func (s *weightSearch) candidateInUse() *candidate {
	inUse := s.inUse()
	first := firstOneRank
	if !inUse.waitsForOneRank {
		first = firstTwoRanks
	}
	return &s.candidates[first+nearest(inUse.tokensPerRequest)]
}

// boundWeight scales the sums of a regression down if its steps weigh more than is possible after many steps. Older steps count less, by
// the factor fade for each later step, so the weights of all steps add up to at most 1/(1-fade).
func (r *regression) boundWeight() {
	if scale := 1 / (1 - fade) / r.w; scale < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = scale*r.w, scale*r.x, scale*r.y, scale*r.xx, scale*r.xy, scale*r.yy
	}
}
