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

// add adds a step that took ms to the sums of each candidate (a weight of a request with a bottleneck). After blockSteps steps, endBlock
// adds the sums of the block to the window. After windowSteps steps, endWindow looks for the best candidate, and all sums begin anew. If
// this changes the weight in use, changed is true, and line is the regression of the window's steps with the new weight. It must replace
// the regression with the old weight.
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

// loadsByCandidate returns for each candidate the load of the step: that of the rank for which the step waits, in KV tokens. Each candidate
// explains step times in its own way, by how many KV tokens a request counts for and by the bottleneck. The first weightCount candidates
// have the triedWeights with the bottleneck OneRank, and the others have the same weights with TwoRanks.
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
		loads[weightCount+k] = mostKV + triedWeights[k]*mostRequests
	}
	return loads
}

// endBlock adds the current block to the window, and begins the next block. Of the products, it adds only the variation within the block,
// which comes from the differences from the block's mean load and mean time: a slow change from block to block must not count. With the
// block, it also tests the weight that the last window found: it compares by how much this weight and the weight 0, with the slopes from
// that window, lower the squared error of the block.
func (s *weightSearch) endBlock() {
	b := s.block
	for k := range s.candidates {
		c := &s.candidates[k]
		c.centre(&b) // from now on, blockXX and blockXY have only the variation within the block
		c.x, c.xx, c.xy = c.x+c.blockX, c.xx+c.blockXX, c.xy+c.blockXY
	}
	if t := &s.onTrial; t.candidate > 0 { // 0: the last window found no weight
		drop := s.candidates[t.candidate].errorDrop(t.slope) - s.candidates[zeroWeight].errorDrop(t.zeroSlope)
		t.addDrop(drop)
	}
	for k := range s.candidates {
		c := &s.candidates[k]
		c.blockX, c.blockXX, c.blockXY = 0, 0, 0
	}
	s.window = sums{s.window.n + b.n, s.window.y + b.y, s.window.yy + b.yy - b.y*b.y/b.n} // with yy centred as by centre
	s.block = sums{}
}

// centre turns blockXX and blockXY into sums of the differences from the block's mean load and mean time: the sum of all products of such
// differences is the sum of x*y, less the sum of x times the sum of y, divided by the number of steps. b has this number and the sum of the
// times.
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

// endWindow finds the best weight of a request in the window that ends, and says whether the weight in use has changed. A weight that was
// found in one window comes into use only when the next window, whose steps were not used to find it, has confirmed it. The exception is a
// weight in use that surely fits worse than the weight 0: the best weight of the present window, which may be 0, replaces it untested.
func (s *weightSearch) endWindow() (changed bool) {
	inUseBefore, previous := s.inUse(), s.onTrial
	present := s.bestOfWindow()
	s.onTrial = present // the next window tests it
	switch {
	case previous.confirmed(): // by the steps of the window that ends now
		s.adopt(&previous, &present)
	case inUseBefore.tokensPerRequest > 0 && s.zeroFitsBetter():
		s.found, s.isFound, s.bottleneckSure = present.best, true, present.bottleneckSure
	}
	return s.inUse() != inUseBefore
}

// adopt brings the weight that the previous window found into use, because the steps of the present window have confirmed it. If the
// present window has found the same bottleneck (which ranks' requests make a step longer), the geometric mean of both windows' weights is
// used. A weight that was found earlier stays if the new one differs by at most leastChange and has the same bottleneck. The bottleneck is
// sure only if both windows were sure of the same one.
func (s *weightSearch) adopt(previous, present *trial) {
	found := previous.best
	presentFound := present.candidate > 0 // 0: no weight was surely better than the weight 0
	if presentFound && present.best.waitsForOneRank == found.waitsForOneRank {
		found.tokensPerRequest = math.Sqrt(found.tokensPerRequest * present.best.tokensPerRequest)
	}
	inUse := s.inUse()
	otherBottleneck := inUse.waitsForOneRank != found.waitsForOneRank
	differs := otherBottleneck || math.Abs(math.Log(found.tokensPerRequest/inUse.tokensPerRequest)) > leastChange
	if !s.isFound || differs {
		s.found, s.isFound = found, true
	}
	bothWindowsSure := previous.bottleneckSure && present.bottleneckSure
	s.bottleneckSure = bothWindowsSure && present.best.waitsForOneRank == s.found.waitsForOneRank
}

// bestOfWindow returns the candidate (a weight of a request and a bottleneck) with the smallest error in the window; the zero trial if none
// is surely better than the weight 0. The bottleneck says which ranks' requests make a step longer: those of the rank with the largest load
// (OneRank), or those of the rank with most requests, to which all ranks are padded (TwoRanks). It is sure if the best candidate with the
// other bottleneck has a surely larger error.
func (s *weightSearch) bestOfWindow() trial {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	best, leastOneRank := s.bestCandidate(0, zeroError)
	bestTwoRanks, leastTwoRanks := s.bestCandidate(weightCount, zeroError)
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

// bestCandidate returns the candidate with the smallest error in the window among those of one bottleneck, which begin at the index first,
// and this error. If no weight has a smaller error than the weight 0 (zeroError), it returns zeroWeight and zeroError.
func (s *weightSearch) bestCandidate(first int, zeroError float64) (best int, least float64) {
	best, least = zeroWeight, zeroError
	for k := first + 1; k < first+weightCount; k++ { // the first one has the weight 0
		c := &s.candidates[k]
		largerIsShorter := c.xy <= 0 // steps with larger loads were shorter, so the loads do not explain the times
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
// fits a parabola to the errors of this candidate (least) and its two neighbours, and takes the weight at its lowest point. The factor is 1
// if one of the neighbours is missing or has the weight 0.
func (s *weightSearch) refinement(best int, least float64) float64 {
	k := best % weightCount // index in triedWeights: the candidates have all weights with OneRank, then all with TwoRanks
	if belowIsZero, aboveIsMissing := k <= 1, k == weightCount-1; belowIsZero || aboveIsMissing {
		return 1
	}
	// A neighbour may have a smaller error if bestOfWindow left it out, because with it larger loads would make steps shorter.
	below := max(least, s.candidates[best-1].minSquaredError(&s.window))
	above := max(least, s.candidates[best+1].minSquaredError(&s.window))
	bend := below - 2*least + above
	if bend <= 0 { // the three errors are equal, so the parabola has no lowest point
		return 1
	}
	// The lowest point is (below-above)/(2*bend) tried weights away, and neighbours differ by the factor 2^(1/weightsPerDoubling).
	return math.Exp2((below - above) / (2 * bend) / weightsPerDoubling)
}

// zeroFitsBetter says whether the window's steps surely fit better if a request itself costs no time (the weight 0) than with the weight in
// use, whichever bottleneck this weight is tried with. It returns false if all ranks had equal numbers of requests in all steps, because
// such a window shows nothing about the weight.
func (s *weightSearch) zeroFitsBetter() bool {
	zeroError := s.candidates[zeroWeight].minSquaredError(&s.window)
	k := nearest(s.inUse().tokensPerRequest)
	oneRank, twoRanks := &s.candidates[k], &s.candidates[weightCount+k] // this weight with either bottleneck
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

// addDrop adds to the test by how much the trial's weight lowers the squared error of a block, compared with the weight 0.
func (t *trial) addDrop(drop float64) {
	t.blocks++
	t.drops += drop
	t.squares += drop * drop
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

// windowRegression returns the regression that would result from adding all steps of the window with the weight that is in use now. The
// window's sums of products (xx, xy and yy) have only the variation within blocks, but those of a regression are of the loads and times
// themselves. Therefore it adds to each what the means of the window contribute: the sum of one factor times the sum of the other, divided
// by n.
func (s *weightSearch) windowRegression() regression {
	c, w := s.candidateInUse(), &s.window
	r := regression{
		requestWeight: s.inUse(), n: uint64(w.n), w: w.n, x: c.x, y: w.y,
		xx: c.xx + c.x*c.x/w.n, xy: c.xy + c.x*w.y/w.n, yy: w.yy + w.y*w.y/w.n,
	}
	r.boundWeight()
	return r
}

// candidateInUse returns the candidate with the bottleneck that is in use and, of the tried weights, the one nearest to the weight in use.
func (s *weightSearch) candidateInUse() *candidate {
	inUse := s.inUse()
	k := nearest(inUse.tokensPerRequest)
	if !inUse.waitsForOneRank { // candidates with TwoRanks are stored after those with OneRank
		k += weightCount
	}
	return &s.candidates[k]
}

// boundWeight scales the sums of a regression down if its steps weigh more than is possible after many steps. Older steps count less, by
// the factor fade for each later step, so the weights of all steps add up to at most 1/(1-fade).
func (r *regression) boundWeight() {
	if scale := 1 / (1 - fade) / r.w; scale < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = scale*r.w, scale*r.x, scale*r.y, scale*r.xx, scale*r.xy, scale*r.yy
	}
}
