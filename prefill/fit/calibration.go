package fit

import (
	"math"

	"evenkeel/prefill/policy"
)

// A fit is used if it has at least fitSamples samples and an R2 of at least fitR2, and if the largest prefill of its samples is at least
// fitSpread times the smallest. Until then the last good fit is used, or the line of the config.
const (
	fitSamples = 20
	fitR2      = 0.5
	fitSpread  = 2.0
	fitRestart = 200 // samples without a first fit after which learning begins anew

	// A term that a plain line does not have (attention, requests beside) is tried from termSamples samples on. It is used if the F
	// statistic of adding it is at least termF.
	termSamples = 100
	termF       = 20.0

	// A sample so many times further from the law than usual is dropped. But if so many samples in a row are dropped,
	// the law is wrong, and they are taken.
	outlier     = 5.0
	outlierRow  = 20
	residualEMA = 0.1

	// residualFloor is the least distance that counts as usual, as a share of the prediction: with a perfect law
	// every sample would be an outlier.
	residualFloor = 0.01

	// exact is the share of the sum of squares below which errors are taken for rounding errors.
	exact = 1e-9
)

// Sample is one prefill: what it was, and how long the engine took once it had begun.
type Sample struct {
	New, Hit float64 // tokens that were computed, and tokens that were in the cache
	Beside   float64 // requests of others that the engine ran meanwhile, such as decodes
	Ms       float64

	Predicted float64 // ms that were predicted when the engine was chosen; 0: no law was known
}

// Law is how long prefills take on one kind of engine: the line without requests beside them, and what each request
// beside adds to the fixed part and to the time for each token.
type Law struct {
	policy.Line
	BesideT0Ms, BesideTPMs float64
}

// Among is the line of a prefill with so many requests of others beside it.
func (l Law) Among(beside float64) policy.Line {
	l.T0Ms += l.BesideT0Ms * beside
	l.TPMs += l.BesideTPMs * beside
	return l.Line
}

// ms is the prediction for a sample.
func (l *Law) ms(s Sample) float64 { return l.Among(s.Beside).Ms(s.New, s.Hit) }

// Calibration learns how long prefills take on one kind of engine: the law with the least squared errors. Older
// samples count less, one half after halfLife newer ones. A term that would be below zero, or that explains next to
// nothing, is left out. The term of attention is learned only if it is not configured; else its part is subtracted
// before the fit.
type Calibration struct {
	configured policy.Line
	keep       float64 // a sample's weight is multiplied by this at each later sample
	halfLife   int

	n                       int
	sums                    moments
	least, most             [2]float64 // of new tokens, in this half-life and in the one before
	inHalf                  int
	law                     Law // the last good fit
	fitted                  bool
	r2                      float64
	residual                float64 // EWMA of |residual|, ms
	dropped, droppedInTotal int     // samples dropped in a row, and ever
}

// NewCalibration starts from the configured line.
func NewCalibration(configured policy.Line, halfLife int) *Calibration {
	return &Calibration{configured: configured, keep: math.Exp2(-1 / float64(halfLife)), halfLife: halfLife}
}

// Add learns from one prefill. It reports whether the sample was taken.
func (c *Calibration) Add(s Sample) bool {
	target := s.Ms - c.configured.Beta2*policy.Attention(s.New, s.Hit) // what the terms that are learned must explain
	if !(s.New > 0) || !(s.Ms > 0) || !(s.Beside >= 0) || math.IsInf(s.New+s.Hit+s.Beside+target, 0) {
		return false
	}
	if c.fitted && c.isOutlier(s) {
		return false
	}
	c.n++
	c.sums.add(s, target, c.keep)
	c.keepSpread(s.New)
	c.fit()
	return true
}

// isOutlier reports whether a sample is too far from the law, and learns which distance is usual.
func (c *Calibration) isOutlier(s Sample) bool {
	predicted := c.law.ms(s)
	distance := math.Abs(s.Ms - predicted)
	if distance > outlier*max(c.residual, residualFloor*predicted) && c.dropped < outlierRow {
		c.dropped++
		c.droppedInTotal++
		return true
	}
	if c.dropped < outlierRow || distance <= outlier*max(c.residual, residualFloor*predicted) {
		c.dropped = 0
	}
	c.residual += residualEMA * (distance - c.residual)
	return false
}

// keepSpread keeps the least and the most new tokens of the last one to two half-lives.
func (c *Calibration) keepSpread(newTokens float64) {
	if c.inHalf == c.halfLife {
		c.least[1], c.most[1] = c.least[0], c.most[0]
		c.inHalf = 0
	}
	if c.inHalf == 0 {
		c.least[0], c.most[0] = newTokens, newTokens
	}
	if c.n == 1 {
		c.least[1], c.most[1] = newTokens, newTokens
	}
	c.inHalf++
	c.least[0], c.most[0] = min(c.least[0], newTokens), max(c.most[0], newTokens)
}

// fit looks for the best of the possible laws: the one with the least squared errors, after a surcharge for each
// further term.
func (c *Calibration) fit() {
	if c.n < fitSamples || max(c.most[0], c.most[1]) < fitSpread*min(c.least[0], c.least[1]) {
		return
	}
	whole := c.sums.spread()
	best, cost := [terms]float64{}, math.Inf(1)
	for set := line; set < 1<<terms; set++ {
		if set&line != line || c.n < termSamples && set != line || c.configured.Beta2 > 0 && set&(1<<pairs) != 0 {
			continue
		}
		beta, rest, ok := c.sums.solve(set)
		if !ok || !possible(set, beta) {
			continue
		}
		rest = max(rest, exact*whole) * (1 + termF*float64(further(set))/c.sums.weight()) // with the surcharge
		if rest < cost {
			best, cost = beta, rest
		}
	}
	if !(cost < (1-fitR2)*whole) {
		if !c.fitted && c.n >= fitRestart { // no outlier is dropped before the first fit, and one could hide the line for long
			c.sums, c.n, c.inHalf = moments{}, 0, 0
		}
		return
	}
	c.law = Law{Line: policy.Line{T0Ms: best[fixed], TPMs: best[fresh], Beta2: best[pairs]}, BesideT0Ms: best[beside],
		BesideTPMs: best[besideFresh]}
	if c.configured.Beta2 > 0 {
		c.law.Beta2 = c.configured.Beta2
	}
	c.fitted, c.r2 = true, 1-c.sums.squaredErrors(best)/whole
}

// possible says whether a law can be true: no term makes a prefill shorter, and each term but the fixed one takes
// some time.
func possible(set int, beta [terms]float64) bool {
	for i, b := range beta {
		if set&(1<<i) != 0 && (b < 0 || b == 0 && i != fixed) {
			return false
		}
	}
	return true
}

// Law is the last good fit, else what is configured; fitted says which.
func (c *Calibration) Law() (law Law, fitted bool) {
	if !c.fitted {
		return Law{Line: c.configured}, false
	}
	return c.law, true
}

// R2 is how much of the times the fit explains, 0 to 1; 0 without one.
func (c *Calibration) R2() float64 { return c.r2 }

// Samples is how many prefills were learned from.
func (c *Calibration) Samples() int { return c.n }
