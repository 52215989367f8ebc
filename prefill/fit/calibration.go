package fit

import (
	"math"

	"evenkeel/prefill/policy"
)

// A fit is used when it rests on so much; before that, the last one that did,
// or what is configured.
const (
	fitSamples = 20
	fitR2      = 0.5
	fitSpread  = 2.0 // largest prefill over smallest

	// A sample this many times further from the line than usual is dropped;
	// but if so many in a row are, it is the line that is wrong.
	outlier     = 5.0
	outlierRow  = 20
	residualEMA = 0.1

	// residualFloor is the least that counts as the usual distance, as a share
	// of the prediction: a perfect line would call everything an outlier.
	residualFloor = 0.01
)

// Calibration learns how long prefills take on one kind of engine: the line of
// policy.Line, from prefills that had the engine to themselves. Older samples
// count less, half after halfLife more. What attention adds is configured, not
// learned: its share is taken off before the fit.
type Calibration struct {
	configured policy.Line
	keep       float64 // what a sample's weight is multiplied with at each later one
	halfLife   int

	n                       int
	s, sx, sy, sxx, sxy     float64
	syy                     float64
	least, most             [2]float64 // new tokens, of this half-life and the last
	inHalf                  int
	line                    policy.Line // the last good fit
	fitted                  bool
	r2                      float64
	residual                float64 // EWMA of |residual|, ms
	dropped, droppedInTotal int     // in a row; ever
}

// NewCalibration starts from the configured line.
func NewCalibration(configured policy.Line, halfLife int) *Calibration {
	return &Calibration{configured: configured, keep: math.Exp2(-1 / float64(halfLife)), halfLife: halfLife}
}

// Add learns from one prefill: new tokens behind hit ones took ms, with nothing
// else on the engine. It reports whether the sample was taken.
func (c *Calibration) Add(newTokens, hit, ms float64) bool {
	x, y := newTokens, ms-c.configured.Beta2*policy.Attention(newTokens, hit)
	if !(x > 0) || !(ms > 0) || math.IsInf(x+y, 0) {
		return false
	}
	if c.fitted && c.isOutlier(x, y) {
		return false
	}
	for _, sum := range []*float64{&c.s, &c.sx, &c.sy, &c.sxx, &c.sxy, &c.syy} {
		*sum *= c.keep
	}
	c.n++
	c.s++
	c.sx += x
	c.sy += y
	c.sxx += x * x
	c.sxy += x * y
	c.syy += y * y
	c.keepSpread(x)
	c.fit()
	return true
}

// isOutlier looks how far off the line a sample is, and learns how far is usual.
func (c *Calibration) isOutlier(x, y float64) bool {
	predicted := c.line.T0Ms + c.line.TPMs*x
	off := math.Abs(y - predicted)
	if off > outlier*max(c.residual, residualFloor*predicted) && c.dropped < outlierRow {
		c.dropped++
		c.droppedInTotal++
		return true
	}
	if c.dropped < outlierRow || off <= outlier*max(c.residual, residualFloor*predicted) {
		c.dropped = 0
	}
	c.residual += residualEMA * (off - c.residual)
	return false
}

// keepSpread keeps the spread of the last one to two half-lives.
func (c *Calibration) keepSpread(x float64) {
	if c.inHalf == c.halfLife {
		c.least[1], c.most[1] = c.least[0], c.most[0]
		c.inHalf = 0
	}
	if c.inHalf == 0 {
		c.least[0], c.most[0] = x, x
	}
	if c.n == 1 {
		c.least[1], c.most[1] = x, x
	}
	c.inHalf++
	c.least[0], c.most[0] = min(c.least[0], x), max(c.most[0], x)
}

func (c *Calibration) fit() {
	dx := c.s*c.sxx - c.sx*c.sx
	dy := c.s*c.syy - c.sy*c.sy
	if c.n < fitSamples || dx <= 0 || dy <= 0 || max(c.most[0], c.most[1]) < fitSpread*min(c.least[0], c.least[1]) {
		return
	}
	dxy := c.s*c.sxy - c.sx*c.sy
	tp := dxy / dx
	t0 := (c.sy - tp*c.sx) / c.s
	r2 := dxy * dxy / (dx * dy)
	if tp > 0 && t0 >= 0 && r2 >= fitR2 {
		c.line = policy.Line{TPMs: tp, T0Ms: t0, Beta2: c.configured.Beta2}
		c.fitted, c.r2 = true, r2
	}
}

// Line is the last good fit, else what is configured; fitted says which.
func (c *Calibration) Line() (line policy.Line, fitted bool) {
	if !c.fitted {
		return c.configured, false
	}
	return c.line, true
}

// R2 is how much of the times the fit explains, 0 to 1; 0 without one.
func (c *Calibration) R2() float64 { return c.r2 }

// Samples is how many prefills were learned from.
func (c *Calibration) Samples() int { return c.n }
