package step

import "math"

// requests learns the weight of a request: how many KV tokens make a step as much longer as one request does.
//
// A simple regression cannot find the weight: only the slowest rank determines the time of a step, and which rank is the slowest depends on
// the weight. Therefore a number of weights are tried side by side. Each weight has its own slowest rank in each step, and its own line
// through the times of the steps by the loads of these ranks. The most likely weight is the one whose line has the smallest error. Each
// weight is tried in both ways (see Way), because an engine may pad all ranks to the rank with most requests, and this rank need not be
// the one with most KV.
//
// All sums are of differences within short blocks of steps. Otherwise slow changes, such as those of a GPU's clock rate or of the length of
// prompts, would seem to depend on the number of requests.
type weightSearch struct {
	assumed   float64  // weight in use until one is found
	found     requestWeight // weight and way that the steps have shown; weight 0: a request surely costs nothing
	isFound   bool     // found is set
	bottleneckSure   bool     // not only the weight of found is certain, but also its way
	lastFound trial    // result of the last window

	window, block sums
	candidates          [2 * weightCount]candidate // one for each weight in the way Fullest, then one for each in the way TwoRanks
}

const (
	windowSteps  = 2000 // a weight is looked for after so many steps
	blockSteps   = 100  // steps of a block; only differences within a block count
	weightCount         = 30   // number of weights that are tried
	weightsPerDoubling   = 2    // a weight is twice as large as the one so many places before it
	smallestWeight     = 64   // KV tokens of the smallest weight above 0; the largest is about a million, as for models with sparse attention
	sureDrop     = 3    // the mean fall of the blocks' errors must be larger than so many times its standard error
	leastChange  = 0.05 // a found weight replaces the weight in use only if it differs by more than about this share
	resolutionMs = 0.1  // smaller errors of a step's time, in ms, show nothing
)

// triedWeights are the weights that are tried, in KV tokens. The first is 0, for the case that requests cost nothing.
var triedWeights = func() (all [weightCount]float64) {
	for k := 1; k < weightCount; k++ {
		all[k] = smallestWeight * math.Exp2(float64(k-1)/weightsPerDoubling)
	}
	return all
}()

// sums has the number of steps, and the sums of their times and squared times.
type sums struct{ n, y, yy float64 }

// arm has the sums of one weight in one of the two ways. In the names, x is a load and y a time. The sums that begin with b are of the
// current block; the others add up the variation within the blocks of the window.
type candidate struct{ blockX, blockXX, blockXY, x, xx, xy float64 }

// trial is the result of a window, and a test of the result by the steps of the next window.
type trial struct {
	candidate               int      // index in requests.arms of the best weight; 0: no weight explains the times surely better than 0
	best              requestWeight // the best weight and way
	bottleneckSure              bool     // the other way surely explains the times less well
	slope, zeroSlope float64  // slopes of the lines of the best arm, and of arm 0, whose weight is 0

	blocks         float64 // number of blocks of the next window
	drops, squares float64 // sums over these blocks: how much best lowers the squared error (the fall), and the squares of the falls
}

// add adds a step that took ms to each arm, with the load of the fullest rank by the weight and the way of the arm. A block ends after
// blockSteps steps, and a window after windowSteps steps. If the end of a window changes the weight in use, changed is true, and line is
// the regression of the window's steps with the new weight.
func (q *weightSearch) add(ranks []Rank, ms float64) (line regression, changed bool) {
	loads := loadsByCandidate(ranks)
	for k := range q.candidates {
		a, x := &q.candidates[k], loads[k]
		a.blockX, a.blockXX, a.blockXY = a.blockX+x, a.blockXX+x*x, a.blockXY+x*ms
	}
	q.block = sums{q.block.n + 1, q.block.y + ms, q.block.yy + ms*ms}
	if q.block.n < blockSteps {
		return line, false
	}
	q.endBlock()
	if q.window.n < windowSteps {
		return line, false
	}
	if changed = q.endWindow(); changed {
		line = q.windowRegression()
	}
	q.window = sums{}
	clear(q.candidates[:])
	return line, changed
}

// loadsByArm returns the load of the fullest rank by the weight and the way of each arm, in the order of requests.arms.
func loadsByCandidate(ranks []Rank) (loads [2 * weightCount]float64) {
	mostKV, mostRequests := 0.0, 0.0
	for i := range ranks {
		kv, requests := ranks[i].KV, ranks[i].Requests
		mostKV, mostRequests = max(mostKV, kv), max(mostRequests, requests)
		for k := range triedWeights {
			loads[k] = max(loads[k], kv+triedWeights[k]*requests)
		}
	}
	for k := range triedWeights {
		loads[weightCount+k] = mostKV + triedWeights[k]*mostRequests
	}
	return loads
}

// endBlock adds the variation within the current block to the window, and begins the next block. It also adds up by how much the weight
// that the last window found lowers the error of the block.
func (q *weightSearch) endBlock() {
	b := q.block
	for k := range q.candidates {
		a := &q.candidates[k]
		a.blockXX, a.blockXY = a.blockXX-a.blockX*a.blockX/b.n, a.blockXY-a.blockX*b.y/b.n
		a.x, a.xx, a.xy = a.x+a.blockX, a.xx+a.blockXX, a.xy+a.blockXY
	}
	if t := &q.lastFound; t.candidate > 0 {
		fall := q.candidates[t.candidate].errorDrop(t.slope) - q.candidates[0].errorDrop(t.zeroSlope)
		t.blocks++
		t.drops += fall
		t.squares += fall * fall
	}
	for k := range q.candidates {
		a := &q.candidates[k]
		a.blockX, a.blockXX, a.blockXY = 0, 0, 0
	}
	q.window = sums{q.window.n + b.n, q.window.y + b.y, q.window.yy + b.yy - b.y*b.y/b.n}
	q.block = sums{}
}

// inUse returns the weight and the way that are in use now.
func (q *weightSearch) inUse() requestWeight {
	if q.isFound {
		return q.found
	}
	return requestWeight{tokens: q.assumed}
}

// judge ends a window, and says whether this changed the weight in use. The weight that the last window found comes into use if the steps
// of the present window surely fit it better than the weight 0. If they do not, and surely fit the weight 0 better than the weight in use,
// the weight in use is replaced by the one that the present window has found, which may be 0.
func (q *weightSearch) endWindow() (changed bool) {
	inUseBefore, lastTrial := q.inUse(), q.lastFound
	q.lastFound = q.bestOfWindow()
	if lastTrial.confirmed() {
		q.adopt(&lastTrial)
	} else if inUseBefore.tokens > 0 && q.zeroFitsBetter() {
		q.found, q.isFound, q.bottleneckSure = q.lastFound.best, true, q.lastFound.bottleneckSure
	}
	return q.inUse() != inUseBefore
}

// use brings the weight of lastTrial, the result of the window before this one, into use. If the present window has found the same way, it
// uses the geometric mean of both weights instead. If the way stays, and the new weight differs by no more than leastChange, the old
// weight stays.
func (q *weightSearch) adopt(lastTrial *trial) {
	found := lastTrial.best
	if q.lastFound.candidate > 0 && q.lastFound.best.oneRank == found.oneRank {
		found.tokens = math.Sqrt(found.tokens * q.lastFound.best.tokens)
	}
	inUse := q.inUse()
	differs := inUse.oneRank != found.oneRank || math.Abs(math.Log(found.tokens/inUse.tokens)) > leastChange
	if !q.isFound || differs {
		q.found, q.isFound = found, true
	}
	q.bottleneckSure = lastTrial.bottleneckSure && q.lastFound.bottleneckSure && q.lastFound.best.oneRank == q.found.oneRank
}

// find returns the best weight of the window, or the zero trial if no weight explains the times surely better than the weight 0.
func (q *weightSearch) bestOfWindow() trial {
	best, plainError := 0, q.candidates[0].minSquaredError(&q.window) // the error with the weight 0
	least, leastByWay := plainError, [2]float64{plainError, plainError}
	for k := range q.candidates {
		squaredError := q.candidates[k].minSquaredError(&q.window)
		if k%weightCount == 0 || q.candidates[k].xy <= 0 { // the weight is 0, or steps with larger loads were shorter
			continue
		}
		leastByWay[k/weightCount] = min(leastByWay[k/weightCount], squaredError)
		if squaredError < least {
			best, least = k, squaredError
		}
	}
	if best == 0 || plainError-least <= q.sureDifference(least) {
		return trial{}
	}
	t := trial{candidate: best, best: requestWeight{triedWeights[best%weightCount], best < weightCount}, slope: q.candidates[best].slope(), zeroSlope: q.candidates[0].slope()}
	t.bottleneckSure = math.Abs(leastByWay[0]-leastByWay[1]) > q.sureDifference(least)
	t.best.tokens *= q.refinement(best, least) // between the weights that were tried
	return t
}

// refinement returns the factor from the weight of the best arm to the weight at the lowest point of the parabola through the errors of
// this arm (least) and its two neighbours. It is 1 if the arm does not have two neighbours with weights above 0.
func (q *weightSearch) refinement(best int, least float64) float64 {
	if k := best % weightCount; k <= 1 || k == weightCount-1 {
		return 1
	}
	below := max(least, q.candidates[best-1].minSquaredError(&q.window))
	above := max(least, q.candidates[best+1].minSquaredError(&q.window))
	bend := below - 2*least + above
	if bend <= 0 { // the three errors are equal, so there is no lowest point
		return 1
	}
	return math.Exp2((below - above) / (2 * bend) / weightsPerDoubling)
}

// refuted says whether the weight 0 explains the times of the window surely better than the weight in use does in either way. If all ranks
// had equal numbers of requests in all steps of the window, it shows nothing, so the weight stays.
func (q *weightSearch) zeroFitsBetter() bool {
	k, plainError := nearest(q.inUse().tokens), q.candidates[0].minSquaredError(&q.window)
	weightError := min(q.candidates[k].minSquaredError(&q.window), q.candidates[weightCount+k].minSquaredError(&q.window))
	return weightError-plainError > q.sureDifference(plainError)
}

// sureDifference returns by how much the squared error of another line must be larger than least before chance does not explain the
// difference. The estimated variance of a step's time is least divided by the degrees of freedom, but at least the square of resolutionMs.
func (q *weightSearch) sureDifference(least float64) float64 {
	degrees := q.window.n*(1-1./blockSteps) - 2
	return sureSlope * sureSlope * max(least/degrees, resolutionMs*resolutionMs)
}

// errorFall returns by how much the squared error of the current block is lower with the given slope than with the slope 0.
func (a *candidate) errorDrop(slope float64) float64 { return 2*slope*a.blockXY - slope*slope*a.blockXX }

// confirmed says whether the trial's weight surely lowers the errors of the blocks: the mean fall is larger than sureFall times its
// standard error. It counts blocks and not steps, because the errors of successive steps may depend on each other.
func (t *trial) confirmed() bool {
	spread := t.squares - t.drops*t.drops/t.blocks // sum of the squared distances of the falls from their mean
	// The squares of the mean and of its standard error are compared, both times the square of blocks.
	return t.drops > 0 && t.drops*t.drops > sureDrop*sureDrop*spread*t.blocks/(t.blocks-1)
}

// leastError returns the squared error of the window with the best slope.
func (a *candidate) minSquaredError(w *sums) float64 {
	if a.xx <= 0 {
		return w.yy
	}
	return w.yy - a.xy*a.xy/a.xx
}

// slope returns the best slope of the window, in ms per KV token.
func (a *candidate) slope() float64 {
	if a.xx <= 0 {
		return 0
	}
	return a.xy / a.xx
}

// nearest returns the index of the weight in triedWeights that is nearest to the given one by its logarithm.
func nearest(weight float64) int {
	if weight == 0 {
		return 0
	}
	return 1 + int(max(0, min(weightCount-2, math.Round(math.Log2(weight/smallestWeight)*weightsPerDoubling))))
}

// line returns the regression that would result from adding the steps of the window with the weight in use.
func (q *weightSearch) windowRegression() regression {
	inUse, w := q.inUse(), &q.window
	k := nearest(inUse.tokens)
	if !inUse.oneRank {
		k += weightCount
	}
	a := &q.candidates[k]
	// The sums of products in the window have only the variation within blocks. The part of the means is added to them.
	r := regression{
		requestWeight: inUse, n: uint64(w.n), w: w.n, x: a.x, y: w.y, xx: a.xx + a.x*a.x/w.n, xy: a.xy + a.x*w.y/w.n, yy: w.yy + w.y*w.y/w.n,
	}
	// The weights in the sums of a regression add up to at most 1/(1-fade) steps, because older steps count for less.
	if scale := 1 / (1 - fade) / w.n; scale < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = scale*r.w, scale*r.x, scale*r.y, scale*r.xx, scale*r.xy, scale*r.yy
	}
	return r
}
