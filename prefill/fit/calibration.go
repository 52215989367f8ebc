package fit

import (
	"math"

	"evenkeel/prefill/policy"
)

// A new fit is good if it has at least fitSamples samples, an R2 of at least fitR2, and a largest
// prefill of at least fitSpread times the smallest. Otherwise the last good fit stays in use, or
// the configured latency.
const (
	fitSamples = 20
	fitR2      = 0.5
	fitSpread  = 2.0
	fitRestart = 200 // samples without any good fit after which all are dropped

	// A term beyond the plain line is tried from termSamples samples on. It is used if the F statistic
	// of adding it is at least termF.
	termSamples = 100
	termF       = 20.0

	// A sample is dropped as an outlier if its distance from the prediction is more than outlier times
	// the usual distance. After maxOutlierRow of them in a row the model must be wrong, and they are
	// used, too.
	outlier       = 5.0
	maxOutlierRow = 20
	residualEMA   = 0.1 // weight of a new distance in the usual distance

	// residualFloor is the smallest usual distance, as a share of the prediction. Without it, a
	// perfect model would make every further sample an outlier.
	residualFloor = 0.01

	// roundingShare is the share of the sum of squares below which squared errors are only rounding
	// errors.
	roundingShare = 1e-9
)

// Sample is one prefill, without the time that it waited.
type Sample struct {
	New, Hit   float64 // tokens computed, and tokens cached
	Concurrent float64 // other requests that the engine ran meanwhile, such as decodes
	Ms         float64 // measured duration

	Predicted float64 // ms, predicted when the engine was chosen; 0: no prediction
}

// LatencyModel predicts the prefills of one kind of engine. Latency holds without other requests;
// each request that runs beside the prefill adds ConcurrentT0Ms, and ConcurrentTPMs per token.
type LatencyModel struct {
	policy.Latency
	ConcurrentT0Ms, ConcurrentTPMs float64
}

func (l LatencyModel) WithConcurrent(requests float64) policy.Latency {
	l.T0Ms += l.ConcurrentT0Ms * requests
	l.TPMs += l.ConcurrentTPMs * requests
	return l.Latency
}

func (l *LatencyModel) predictMs(s Sample) float64 {
	return l.WithConcurrent(s.Concurrent).Ms(s.New, s.Hit)
}

// Calibration learns the LatencyModel of one kind of engine by least squares. A sample counts half
// after halfLife newer samples. A term that would be negative, or explains almost nothing, is left
// out. A configured attention term is not learned, but subtracted from the times before the fit.
type Calibration struct {
	configured policy.Latency
	decay      float64 // factor of a sample's weight at each later sample
	halfLife   int

	n              int // samples since all were dropped last
	sums           moments
	minNew, maxNew [2]float64   // of the samples: [0] in this half-life, [1] in the one before
	inHalf         int          // samples so far in this half-life
	latency        LatencyModel // the last good fit
	fitted         bool
	r2             float64 // share of the variance that the last good fit explains, 0 to 1
	residual       float64 // the usual distance of a sample from the prediction, in ms
	dropped        int     // outliers in a row
}

func NewCalibration(configured policy.Latency, halfLife int) *Calibration {
	return &Calibration{configured: configured, decay: math.Exp2(-1 / float64(halfLife)), halfLife: halfLife}
}

// Add learns from one prefill. It reports whether the sample was used.
func (c *Calibration) Add(s Sample) bool {
	targetMs := s.Ms - c.configured.Beta2*policy.Attention(s.New, s.Hit) // what the learned terms must explain
	inRange := s.New > 0 && s.Ms > 0 && s.Concurrent >= 0
	if !inRange || math.IsInf(s.New+s.Hit+s.Concurrent+targetMs, 0) { // it would spoil the sums
		return false
	}
	if c.fitted && c.rejectOutlier(s) { // before the first fit, no outlier can be recognised
		return false
	}
	c.n++
	c.sums.add(s, targetMs, c.decay)
	c.updateRange(s.New)
	c.fit()
	return true
}

func (c *Calibration) rejectOutlier(s Sample) (dropped bool) {
	predictedMs := c.latency.predictMs(s)
	distanceMs := math.Abs(s.Ms - predictedMs)
	far := distanceMs > outlier*max(c.residual, residualFloor*predictedMs)
	if far && c.dropped < maxOutlierRow {
		c.dropped++
		return true
	}
	if !far {
		c.dropped = 0
	}
	c.residual += residualEMA * (distanceMs - c.residual)
	return false
}

// updateRange forgets older half-lives, because their weight in the fit is small.
func (c *Calibration) updateRange(newTokens float64) {
	if c.inHalf == c.halfLife {
		c.minNew[1], c.maxNew[1] = c.minNew[0], c.maxNew[0]
		c.inHalf = 0
	}
	if c.inHalf == 0 {
		c.minNew[0], c.maxNew[0] = newTokens, newTokens
	}
	if c.n == 1 {
		c.minNew[1], c.maxNew[1] = newTokens, newTokens
	}
	c.inHalf++
	c.minNew[0], c.maxNew[0] = min(c.minNew[0], newTokens), max(c.maxNew[0], newTokens)
}

func (c *Calibration) fit() {
	smallest, largest := min(c.minNew[0], c.minNew[1]), max(c.maxNew[0], c.maxNew[1])
	if c.n < fitSamples || largest < fitSpread*smallest {
		return
	}
	totalSpread := c.sums.totalSpread()
	best, cost := c.bestFactors(totalSpread) // cost: the sum of the squared errors with a penalty
	if !(cost < (1-fitR2)*totalSpread) {     // negated, so that a NaN cost is refused, too
		if !c.fitted && c.n >= fitRestart { // an outlier, not yet recognisable, may prevent a good fit
			c.sums, c.n, c.inHalf = moments{}, 0, 0
		}
		return
	}
	c.latency = LatencyModel{
		Latency:        policy.Latency{T0Ms: best[fixed], TPMs: best[perNewToken], Beta2: best[perPair]},
		ConcurrentT0Ms: best[perConcurrent], ConcurrentTPMs: best[perConcurrentToken],
	}
	if c.configured.Beta2 > 0 { // Add has subtracted this term from the times
		c.latency.Beta2 = c.configured.Beta2
	}
	c.fitted, c.r2 = true, 1-c.sums.squaredErrors(best)/totalSpread // without the penalty
}

// bestFactors returns the factors of the set of terms with the lowest cost: the sum of the squared
// errors, with a penalty for each term beyond the plain line. More terms cost less than the line
// only if their F statistic is above termF: by how much that sum falls per further term, divided by
// the mean squared error that remains. Errors that are only rounding errors count as equal, so that
// the penalty decides. The cost is infinite if no set can be fitted.
func (c *Calibration) bestFactors(totalSpread float64) (best [terms]float64, cost float64) {
	cost = math.Inf(1)
	for set := plainLine; set < 1<<terms; set++ { // every smaller number lacks a term of the line
		if !c.mayFit(set) {
			continue
		}
		factors, squaredErrors, ok := c.sums.solve(set)
		if !ok || !plausible(set, factors) {
			continue
		}
		roundingErrors := roundingShare * totalSpread
		penalty := 1 + termF*float64(extraTerms(set))/c.sums.weight()
		if costOfSet := max(squaredErrors, roundingErrors) * penalty; costOfSet < cost {
			best, cost = factors, costOfSet
		}
	}
	return best, cost
}

func (c *Calibration) mayFit(set int) bool {
	hasLine := set&plainLine == plainLine
	tooEarly := c.n < termSamples && set != plainLine
	fitsAttention := set&(1<<perPair) != 0
	attentionIsConfigured := c.configured.Beta2 > 0
	return hasLine && !tooEarly && !(fitsAttention && attentionIsConfigured)
}

// plausible is false if a term makes a prefill shorter, or if one but the fixed one takes no time.
func plausible(set int, factors [terms]float64) bool {
	for i, factor := range factors {
		inSet := set&(1<<i) != 0
		if inSet && (factor < 0 || factor == 0 && i != fixed) {
			return false
		}
	}
	return true
}

// Latency is the configured one until the first good fit.
func (c *Calibration) Latency() (latency LatencyModel, fitted bool) {
	if !c.fitted {
		return LatencyModel{Latency: c.configured}, false
	}
	return c.latency, true
}

// R2 is the share of the variance of prefill times that the last good fit explains; 0 without a
// fit.
func (c *Calibration) R2() float64 { return c.r2 }

// Samples is without outliers.
func (c *Calibration) Samples() int { return c.n }
