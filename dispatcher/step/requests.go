package step

import "math"

// requests finds out how many KV tokens a request weighs as much as. A group whose ranks are level in KV tokens hides
// that: the rank that holds the others up is then the one with most requests, and which one that is depends on the answer.
// So a number of weights are tried side by side. With each the fullest rank is another one, and so is the line of the
// steps' times on its load; the weight whose line is off least is the likely one. Where an engine pads its ranks, most KV and
// most requests may be on different ranks, so each weight is tried in both ways. All is seen as differences within short
// blocks of steps, since what changes slowly (the engine's clock, what its prompts are about) moves with the number of
// requests for no reason.
type requests struct {
	start float64  // in use until steps tell
	found weighing // that steps told; weight 0: a request costs nothing surely
	told  bool
	way   bool // the found one's is sure, too
	tried trial

	window, block sums
	arms          [2 * arms]arm // where the fullest rank sets the pace, and where the most KV and the most requests do
}

const (
	windowSteps  = 2000
	blockSteps   = 100
	arms         = 30
	armsPerTwo   = 2    // of which each weighs twice as much as the one so many before it
	lightest     = 64   // KV tokens; the heaviest is a million, where models with sparse attention are
	sureFall     = 3    // times the standard error, of how much the errors of blocks fall
	changes      = 0.05 // of the weight, at least, or it stays
	resolutionMs = 0.1
)

// tries are the weights; the first one is that of requests that cost nothing.
var tries = func() (all [arms]float64) {
	for k := 1; k < arms; k++ {
		all[k] = lightest * math.Exp2(float64(k-1)/armsPerTwo)
	}
	return all
}()

// sums of the times of steps.
type sums struct{ n, y, yy float64 }

// arm is one weight in one of the two ways: sums over the block, and over the window of how they vary within blocks.
type arm struct{ bx, bxx, bxy, x, xx, xy float64 }

// trial is what a window found, and how it does in the next one.
type trial struct {
	arm         int // 0: requests cost nothing surely
	best        weighing
	sure        bool    // of the two ways, the other one surely explains less
	with, plain float64 // slopes

	blocks, falls, squares float64 // by how much the squared error of a block falls with it
}

// add takes in a step. Where the weight in use is another one after it, line is the regression with that weight.
func (q *requests) add(ranks []Rank, ms float64) (line regression, changed bool) {
	var most [2 * arms]float64
	mostKV, mostRequests := 0.0, 0.0
	for i := range ranks {
		kv, n := ranks[i].KV, ranks[i].Requests
		mostKV, mostRequests = max(mostKV, kv), max(mostRequests, n)
		for k := range tries {
			most[k] = max(most[k], kv+tries[k]*n)
		}
	}
	for k := range tries {
		most[arms+k] = mostKV + tries[k]*mostRequests
	}
	for k := range q.arms {
		a, x := &q.arms[k], most[k]
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

func (q *requests) endBlock() {
	b := q.block
	for k := range q.arms {
		a := &q.arms[k]
		a.bxx, a.bxy = a.bxx-a.bx*a.bx/b.n, a.bxy-a.bx*b.y/b.n
		a.x, a.xx, a.xy = a.x+a.bx, a.xx+a.bxx, a.xy+a.bxy
	}
	if t := &q.tried; t.arm > 0 {
		fall := q.arms[t.arm].gain(t.with) - q.arms[0].gain(t.plain)
		t.blocks, t.falls, t.squares = t.blocks+1, t.falls+fall, t.squares+fall*fall
	}
	for k := range q.arms {
		a := &q.arms[k]
		a.bx, a.bxx, a.bxy = 0, 0, 0
	}
	q.window = sums{q.window.n + b.n, q.window.y + b.y, q.window.yy + b.yy - b.y*b.y/b.n}
	q.block = sums{}
}

// inUse is what requests are counted as.
func (q *requests) inUse() weighing {
	if q.told {
		return q.found
	}
	return weighing{weight: q.start}
}

// judge ends a window: what the one before it found is in use from now on if the steps of this one were surely off less with it.
func (q *requests) judge() (changed bool) {
	was, before := q.inUse(), q.tried
	q.tried = q.find()
	if before.holds() {
		q.use(&before)
	} else if was.weight > 0 && q.refuted() {
		q.found, q.told, q.way = q.tried.best, true, q.tried.sure
	}
	return q.inUse() != was
}

// use changes the weight to what two windows found.
func (q *requests) use(before *trial) {
	found := before.best
	if q.tried.arm > 0 && q.tried.best.fullest == found.fullest {
		found.weight = math.Sqrt(found.weight * q.tried.best.weight)
	}
	if was := q.inUse(); !q.told || was.fullest != found.fullest || math.Abs(math.Log(found.weight/was.weight)) > changes {
		q.found, q.told = found, true
	}
	q.way = before.sure && q.tried.sure && q.tried.best.fullest == q.found.fullest
}

// find is the best weight of the window, if it is surely better than none.
func (q *requests) find() trial {
	best, plain := 0, q.arms[0].least(&q.window)
	least, of := plain, [2]float64{plain, plain}
	for k := range q.arms {
		x := q.arms[k].least(&q.window)
		if k%arms == 0 || q.arms[k].xy <= 0 {
			continue
		}
		of[k/arms] = min(of[k/arms], x)
		if x < least {
			best, least = k, x
		}
	}
	if best == 0 || plain-least <= q.sure(least) {
		return trial{}
	}
	t := trial{arm: best, best: weighing{tries[best%arms], best < arms}, with: q.arms[best].slope(), plain: q.arms[0].slope()}
	t.sure = math.Abs(of[0]-of[1]) > q.sure(least)
	if k := best % arms; k > 1 && k < arms-1 { // the lowest point of the parabola through three, which is nearest to the one in the middle
		below, above := max(least, q.arms[best-1].least(&q.window)), max(least, q.arms[best+1].least(&q.window))
		if bend := below - 2*least + above; bend > 0 {
			t.best.weight *= math.Exp2((below - above) / (2 * bend) / armsPerTwo)
		}
	}
	return t
}

// refuted says whether requests that cost nothing explain the window surely better than the weight in use, in whichever of the two
// ways. A window in which all ranks have as many requests all the time says nothing, and the weight stays.
func (q *requests) refuted() bool {
	at, plain := nearest(q.inUse().weight), q.arms[0].least(&q.window)
	with := min(q.arms[at].least(&q.window), q.arms[arms+at].least(&q.window))
	return with-plain > q.sure(plain)
}

// sure is by how much the squared error of another line must be above this one, so that chance does not explain it.
// What is not spent on blocks and the line is free; and no stream tells a step so well that less than the resolution counts.
func (q *requests) sure(least float64) float64 {
	free := q.window.n*(1-1./blockSteps) - 2
	return sureSlope * sureSlope * max(least/free, resolutionMs*resolutionMs)
}

// gain is by how much the squared error of the block is lower with that slope than with none.
func (a *arm) gain(slope float64) float64 { return 2*slope*a.bxy - slope*slope*a.bxx }

// holds says whether the errors of blocks surely fall. Blocks are told apart, since steps that follow each other may be off
// together.
func (t *trial) holds() bool {
	return t.falls > 0 && t.falls*t.falls > sureFall*sureFall*(t.squares-t.falls*t.falls/t.blocks)*t.blocks/(t.blocks-1)
}

// least is the squared error with the best slope.
func (a *arm) least(w *sums) float64 {
	if a.xx <= 0 {
		return w.yy
	}
	return w.yy - a.xy*a.xy/a.xx
}

func (a *arm) slope() float64 {
	if a.xx <= 0 {
		return 0
	}
	return a.xy / a.xx
}

// nearest is the arm whose weight is like that.
func nearest(weight float64) int {
	if weight == 0 {
		return 0
	}
	return 1 + int(max(0, min(arms-2, math.Round(math.Log2(weight/lightest)*armsPerTwo))))
}

// line is what a regression with the weight in use would be by now.
func (q *requests) line() regression {
	use, w := q.inUse(), &q.window
	at := nearest(use.weight)
	if !use.fullest {
		at += arms
	}
	a := &q.arms[at]
	r := regression{
		weighing: use, n: uint64(w.n), w: w.n, x: a.x, y: w.y, xx: a.xx + a.x*a.x/w.n, xy: a.xy + a.x*w.y/w.n, yy: w.yy + w.y*w.y/w.n,
	}
	if s := 1 / (1 - fade) / w.n; s < 1 {
		r.w, r.x, r.y, r.xx, r.xy, r.yy = s*r.w, s*r.x, s*r.y, s*r.xx, s*r.xy, s*r.yy
	}
	return r
}
