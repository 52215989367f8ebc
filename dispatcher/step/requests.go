package step

import "math"

// requests learns the weight of a request in KV tokens. It is hard to see in a group whose ranks are level in KV tokens: the
// slowest rank is then the one with most requests, but which rank is the slowest depends on the weight that is looked for.
// So a number of weights are tried side by side. Each has its own fullest ranks, and its own line of the
// steps' times by their loads. The weight whose line has the smallest error is the likely one. If an engine pads its ranks, most KV and
// most requests may be on different ranks, so each weight is tried in both ways. All sums are of differences within short
// blocks of steps, because slow changes (of the engine's clock, or of the prompts) would otherwise seem to depend on the
// number of requests.
type requests struct {
	assumed   float64  // weight in use until one is found
	found     weighing // weight and way that steps have shown; weight 0: a request surely costs nothing
	isFound   bool     // found is set
	waySure   bool     // the way of found is certain, too, and not only its weight
	lastFound trial    // result of the last window

	window, block sums
	arms          [2 * arms]arm // one for each weight in the way Fullest, then one for each in the way TwoRanks
}

const (
	windowSteps  = 2000 // steps after which a weight is looked for
	blockSteps   = 100  // steps within which differences are looked at
	arms         = 30   // weights that are tried
	armsPerTwo   = 2    // each weight is twice the weight that is so many before it
	lightest     = 64   // KV tokens of the second weight; the last is about a million, as for models with sparse attention
	sureFall     = 3    // how many times its standard error the mean fall of the blocks' errors must be
	leastChange  = 0.05 // a found weight replaces the one in use if it differs by more than about this share
	resolutionMs = 0.1  // errors of a step's time that are smaller than this, in ms, show nothing
)

// triedWeights are the weights that are tried, in KV tokens. The first is 0: requests cost nothing.
var triedWeights = func() (all [arms]float64) {
	for k := 1; k < arms; k++ {
		all[k] = lightest * math.Exp2(float64(k-1)/armsPerTwo)
	}
	return all
}()

// sums has the number of steps, and the sums of their times and squared times.
type sums struct{ n, y, yy float64 }

// arm has the sums of one weight in one of the two ways. x are loads and y times: those with b are of the current block, the others sum
// up the variation within the blocks of the window.
type arm struct{ bx, bxx, bxy, x, xx, xy float64 }

// trial is what a window found, and how well it fits the next window.
type trial struct {
	arm               int // index in requests.arms of the best weight; 0: no weight is surely better than requests that cost nothing
	best              weighing
	sure              bool    // the other way surely explains less
	slope, plainSlope float64 // slopes of the lines of the best arm, and of arm 0

	blocks, falls, squares float64 // blocks of the next window, and the sums of how much their squared errors fall by it, and of the squares
}

// add takes in a step that took ms: in each arm, the load of the fullest rank by the weight and the way of the arm. After blockSteps
// steps a block ends, and after windowSteps steps a window. If that changes the weight in use, line is the regression of the window with
// the new weight.
func (q *requests) add(ranks []Rank, ms float64) (line regression, changed bool) {
	var loads [2 * arms]float64
	mostKV, mostRequests := 0.0, 0.0
	for i := range ranks {
		kv, n := ranks[i].KV, ranks[i].Requests
		mostKV, mostRequests = max(mostKV, kv), max(mostRequests, n)
		for k := range triedWeights {
			loads[k] = max(loads[k], kv+triedWeights[k]*n)
		}
	}
	for k := range triedWeights {
		loads[arms+k] = mostKV + triedWeights[k]*mostRequests
	}
	for k := range q.arms {
		a, x := &q.arms[k], loads[k]
		a.bx, a.bxx, a.bxy = a.bx+x, a.bxx+x*x, a.bxy+x*ms
	}
	q.block = sums{q.block.n + 1, q.block.y + ms, q.block.yy + ms*ms}
	if q.block.n < blockSteps {
		return line, false
	}
	q.endBlock()
	if q.window.n < windowSteps {
		return line, false
	}
	if changed = q.judge(); changed {
		line = q.line()
	}
	q.window = sums{}
	clear(q.arms[:])
	return line, changed
}

// endBlock adds the variation within the current block to the window, and begins the next block. For the weight that the window before
// has found, it also notes by how much the error of the block falls with it.
func (q *requests) endBlock() {
	b := q.block
	for k := range q.arms {
		a := &q.arms[k]
		a.bxx, a.bxy = a.bxx-a.bx*a.bx/b.n, a.bxy-a.bx*b.y/b.n
		a.x, a.xx, a.xy = a.x+a.bx, a.xx+a.bxx, a.xy+a.bxy
	}
	if t := &q.lastFound; t.arm > 0 {
		fall := q.arms[t.arm].errorFall(t.slope) - q.arms[0].errorFall(t.plainSlope)
		t.blocks, t.falls, t.squares = t.blocks+1, t.falls+fall, t.squares+fall*fall
	}
	for k := range q.arms {
		a := &q.arms[k]
		a.bx, a.bxx, a.bxy = 0, 0, 0
	}
	q.window = sums{q.window.n + b.n, q.window.y + b.y, q.window.yy + b.yy - b.y*b.y/b.n}
	q.block = sums{}
}

// inUse returns what a request counts as now.
func (q *requests) inUse() weighing {
	if q.isFound {
		return q.found
	}
	return weighing{weight: q.assumed}
}

// judge ends a window, and says whether that changed the weight in use. What the window before has found comes into use if the steps of
// this window surely fit better with it. If they do not, and surely fit better with requests that cost nothing than with the weight in
// use, that weight is replaced by what this window has found: another weight, or 0.
func (q *requests) judge() (changed bool) {
	inUseBefore, lastTrial := q.inUse(), q.lastFound
	q.lastFound = q.find()
	if lastTrial.confirmed() {
		q.use(&lastTrial)
	} else if inUseBefore.weight > 0 && q.refuted() {
		q.found, q.isFound, q.waySure = q.lastFound.best, true, q.lastFound.sure
	}
	return q.inUse() != inUseBefore
}

// use changes the weight to what the window before has found (lastTrial) or, if the last window agrees on the way, to the geometric mean
// of what both have found. If the new weight differs by no more than leastChange, and the way is the same, the old weight stays.
func (q *requests) use(lastTrial *trial) {
	found := lastTrial.best
	if q.lastFound.arm > 0 && q.lastFound.best.fullest == found.fullest {
		found.weight = math.Sqrt(found.weight * q.lastFound.best.weight)
	}
	if inUse := q.inUse(); !q.isFound || inUse.fullest != found.fullest || math.Abs(math.Log(found.weight/inUse.weight)) > leastChange {
		q.found, q.isFound = found, true
	}
	q.waySure = lastTrial.sure && q.lastFound.sure && q.lastFound.best.fullest == q.found.fullest
}

// find returns the best weight of the window, or the zero trial if it is not surely better than requests that cost nothing.
func (q *requests) find() trial {
	best, plain := 0, q.arms[0].leastError(&q.window)
	least, leastByWay := plain, [2]float64{plain, plain}
	for k := range q.arms {
		squaredError := q.arms[k].leastError(&q.window)
		if k%arms == 0 || q.arms[k].xy <= 0 {
			continue
		}
		leastByWay[k/arms] = min(leastByWay[k/arms], squaredError)
		if squaredError < least {
			best, least = k, squaredError
		}
	}
	if best == 0 || plain-least <= q.sureDifference(least) {
		return trial{}
	}
	t := trial{arm: best, best: weighing{triedWeights[best%arms], best < arms}, slope: q.arms[best].slope(), plainSlope: q.arms[0].slope()}
	t.sure = math.Abs(leastByWay[0]-leastByWay[1]) > q.sureDifference(least)
	if k := best % arms; k > 1 && k < arms-1 { // the lowest point of the parabola through three weights
		below, above := max(least, q.arms[best-1].leastError(&q.window)), max(least, q.arms[best+1].leastError(&q.window))
		if bend := below - 2*least + above; bend > 0 {
			t.best.weight *= math.Exp2((below - above) / (2 * bend) / armsPerTwo)
		}
	}
	return t
}

// refuted says whether the window is surely explained better if requests cost nothing than by the weight in use in either way. A window in
// which all ranks always have equal numbers of requests shows nothing, so the weight stays.
func (q *requests) refuted() bool {
	at, plainError := nearest(q.inUse().weight), q.arms[0].leastError(&q.window)
	weightError := min(q.arms[at].leastError(&q.window), q.arms[arms+at].leastError(&q.window))
	return weightError-plainError > q.sureDifference(plainError)
}

// sureDifference returns by how much the squared error of another line must be larger than least, so that chance does not explain it.
// The variance of a step's time is estimated by least, divided by the degrees of freedom, and is at least the square of resolutionMs.
func (q *requests) sureDifference(least float64) float64 {
	degrees := q.window.n*(1-1./blockSteps) - 2
	return sureSlope * sureSlope * max(least/degrees, resolutionMs*resolutionMs)
}

// errorFall returns by how much the squared error of the current block is lower with a slope than without.
func (a *arm) errorFall(slope float64) float64 { return 2*slope*a.bxy - slope*slope*a.bxx }

// confirmed says whether the errors of blocks surely fall with the trial's weight. It counts blocks and not steps, because the errors of
// successive steps may depend on each other.
func (t *trial) confirmed() bool {
	return t.falls > 0 && t.falls*t.falls > sureFall*sureFall*(t.squares-t.falls*t.falls/t.blocks)*t.blocks/(t.blocks-1)
}

// leastError returns the squared error of the window with the best slope.
func (a *arm) leastError(w *sums) float64 {
	if a.xx <= 0 {
		return w.yy
	}
	return w.yy - a.xy*a.xy/a.xx
}

// slope returns the best slope of the window, in ms per KV token.
func (a *arm) slope() float64 {
	if a.xx <= 0 {
		return 0
	}
	return a.xy / a.xx
}

// nearest returns the index in triedWeights of the weight that is nearest.
func nearest(weight float64) int {
	if weight == 0 {
		return 0
	}
	return 1 + int(max(0, min(arms-2, math.Round(math.Log2(weight/lightest)*armsPerTwo))))
}

// line returns a regression with the weight in use, as if it had taken in the steps of the window.
func (q *requests) line() regression {
	inUse, w := q.inUse(), &q.window
	at := nearest(inUse.weight)
	if !inUse.fullest {
		at += arms
	}
	a := &q.arms[at]
	r := regression{
		weighing: inUse, n: uint64(w.n), w: w.n, x: a.x, y: w.y, xx: a.xx + a.x*a.x/w.n, xy: a.xy + a.x*w.y/w.n, yy: w.yy + w.y*w.y/w.n,
	}
	// With many steps, the sums of a regression weigh as much as 1/(1-fade) steps, because the past fades in it.
	if scale := 1 / (1 - fade) / w.n; scale < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = scale*r.w, scale*r.x, scale*r.y, scale*r.xx, scale*r.xy, scale*r.yy
	}
	return r
}
