package fit

import (
	"math"

	"evenkeel/prefill/policy"
)

// A new fit is good if it has at least fitSamples samples and an R2 of at least fitR2. The largest prefill of its samples must
// also be at least fitSpread times the smallest. Otherwise the last good fit stays in use, or the configured latency.
const (
	fitSamples = 20
	fitR2      = 0.5
	fitSpread  = 2.0
	fitRestart = 200 // after this number of samples without any good fit, all samples are dropped

	// A term that a plain line does not have (attention, concurrent requests) is tried from termSamples samples on. It is used
	// if the F statistic of adding it is at least termF.
	termSamples = 100
	termF       = 20.0

	// A sample is an outlier, and is dropped, if its distance from the prediction is more than outlier times the usual distance.
	// After maxOutlierRow dropped samples in a row the model must be wrong, and such samples are used, too.
	outlier       = 5.0
	maxOutlierRow = 20
	residualEMA   = 0.1 // weight of a new distance in the usual distance

	// residualFloor is the smallest usual distance, as a share of the prediction. Without it, a perfect model would make every
	// further sample an outlier.
	residualFloor = 0.01

	// roundingShare is the share of the sum of squares below which squared errors count as rounding errors.
	roundingShare = 1e-9
)

// Sample is one prefill: its size, and how long the engine took for it, without the time that it waited.
type Sample struct {
	New, Hit   float64 // tokens that were computed, and tokens that were cached
	Concurrent float64 // other requests that the engine ran meanwhile, such as decodes
	Ms         float64 // measured duration of the prefill

	Predicted float64 // duration in ms that was predicted when the engine was chosen; 0: no prediction
}

// LatencyModel predicts how long prefills take on one kind of engine. Its Latency holds for an engine without other requests. Each
// other request that runs beside the prefill adds ConcurrentT0Ms to the fixed part and ConcurrentTPMs to the time per token.
type LatencyModel struct {
	policy.Latency
	ConcurrentT0Ms, ConcurrentTPMs float64
}

// WithConcurrent is the latency of prefills while the engine runs the given number of other requests, such as decodes.
func (l LatencyModel) WithConcurrent(requests float64) policy.Latency {
	l.T0Ms += l.ConcurrentT0Ms * requests
	l.TPMs += l.ConcurrentTPMs * requests
	return l.Latency
}

// predictMs is the predicted duration of a sample in ms, with the requests that ran concurrently.
func (l *LatencyModel) predictMs(s Sample) float64 {
	return l.WithConcurrent(s.Concurrent).Ms(s.New, s.Hit)
}

// Calibration learns the LatencyModel of one kind of engine by least squares. A sample counts half after halfLife newer samples. A
// term that would be negative, or that explains almost nothing, is left out. The attention term is learned only if none
// is configured; a configured one is subtracted from the times before the fit.
type Calibration struct {
	configured policy.Latency
	decay      float64 // a sample's weight is multiplied by this at each later sample
	halfLife   int

	n              int // samples since the start, or since all samples were dropped (fitRestart)
	sums           moments
	minNew, maxNew [2]float64   // new tokens of a sample: [0] in this half-life, [1] in the half-life before
	inHalf         int          // samples so far in the present half-life, which has halfLife samples
	latency        LatencyModel // the last good fit; only used if fitted is true
	fitted         bool
	r2             float64 // share of the variance that the last good fit explains, 0 to 1
	residual       float64 // the usual distance of a sample from the prediction, in ms
	dropped        int     // outliers that were dropped in a row
}

// NewCalibration returns a Calibration without samples. Its Latency is the configured one until the first good fit.
func NewCalibration(configured policy.Latency, halfLife int) *Calibration {
	return &Calibration{configured: configured, decay: math.Exp2(-1 / float64(halfLife)), halfLife: halfLife}
}

// Add learns from one prefill. It reports whether the sample was used.
func (c *Calibration) Add(s Sample) bool {
	targetMs := s.Ms - c.configured.Beta2*policy.Attention(s.New, s.Hit) // the time that the learned terms must explain
	inRange := s.New > 0 && s.Ms > 0 && s.Concurrent >= 0
	if !inRange || math.IsInf(s.New+s.Hit+s.Concurrent+targetMs, 0) { // such a sample would spoil the sums
		return false
	}
	if c.fitted && c.rejectOutlier(s) { // before the first fit, no sample can be recognised as an outlier
		return false
	}
	c.n++
	c.sums.add(s, targetMs, c.decay)
	c.updateRange(s.New)
	c.fit()
	return true
}

// rejectOutlier reports whether a sample is dropped, because its distance from the prediction is too large, and counts it then. After
// maxOutlierRow dropped samples in a row it drops no further one, until a sample is near the prediction again. The samples that are not
// dropped update the usual distance.
func (c *Calibration) rejectOutlier(s Sample) (dropped bool) {
	predictedMs := c.latency.predictMs(s)
	distanceMs := math.Abs(s.Ms - predictedMs)
	far := distanceMs > outlier*max(c.residual, residualFloor*predictedMs)
	if far && c.dropped < maxOutlierRow {
		c.dropped++
		return true
	}
	if !far { // the row of outliers is over
		c.dropped = 0
	}
	c.residual += residualEMA * (distanceMs - c.residual)
	return false
}

// updateRange updates the smallest and the largest number of new tokens of a sample, in this half-life (index 0 of minNew and maxNew) and
// in the one before (index 1). Older samples do not count, because their weight in the fit is small.
func (c *Calibration) updateRange(newTokens float64) {
	if c.inHalf == c.halfLife { // this half-life is over
		c.minNew[1], c.maxNew[1] = c.minNew[0], c.maxNew[0]
		c.inHalf = 0
	}
	if c.inHalf == 0 { // the first sample of a half-life
		c.minNew[0], c.maxNew[0] = newTokens, newTokens
	}
	if c.n == 1 { // the first sample of all: there is no half-life before
		c.minNew[1], c.maxNew[1] = newTokens, newTokens
	}
	c.inHalf++
	c.minNew[0], c.maxNew[0] = min(c.minNew[0], newTokens), max(c.maxNew[0], newTokens)
}

// fit replaces the latency in use by the best fit of all samples if this is good: if there are enough samples, their sizes differ enough,
// and the fit explains enough. The sizes are those of the present half-life (index 0 of minNew and maxNew) and of the one before (index 1),
// because older samples weigh little. If there was no good fit at all after fitRestart samples, all samples are dropped.
func (c *Calibration) fit() {
	smallest, largest := min(c.minNew[0], c.minNew[1]), max(c.maxNew[0], c.maxNew[1])
	if c.n < fitSamples || largest < fitSpread*smallest {
		return
	}
	totalSpread := c.sums.totalSpread()
	best, cost := c.bestFactors(totalSpread) // cost is the sum of the squared errors, made larger by a penalty
	if !(cost < (1-fitR2)*totalSpread) {     // negated, so that a NaN cost is refused, too
		if !c.fitted && c.n >= fitRestart { // before the first fit outliers are not dropped, and one of them may prevent a good fit
			c.sums, c.n, c.inHalf = moments{}, 0, 0 // updateRange takes the next sample as the first one of all
		}
		return
	}
	c.latency = LatencyModel{
		Latency:        policy.Latency{T0Ms: best[fixed], TPMs: best[perNewToken], Beta2: best[perPair]},
		ConcurrentT0Ms: best[perConcurrent], ConcurrentTPMs: best[perConcurrentToken],
	}
	if c.configured.Beta2 > 0 { // bestFactors has not fitted this term (mayFit), because Add has subtracted its part from the times
		c.latency.Beta2 = c.configured.Beta2
	}
	c.fitted, c.r2 = true, 1-c.sums.squaredErrors(best)/totalSpread // without the penalty
}

// bestFactors fits every set of terms that mayFit allows (a bit for each term), and returns the factors of the set with the lowest cost.
// The cost is the sum of the squared errors with a penalty for each term beyond the plain line. With the penalty, more terms cost less than
// the line only if their F statistic is above termF. This is by how much the sum of the squared errors falls per further term, divided by
// the mean squared error that remains. Errors so small that they are only rounding errors count as equal, so that the penalty alone decides
// between them. The cost is infinite if no set can be fitted. totalSpread is the result of moments.totalSpread.
func (c *Calibration) bestFactors(totalSpread float64) (best [terms]float64, cost float64) {
	cost = math.Inf(1)
	for set := plainLine; set < 1<<terms; set++ { // every smaller number lacks one of the two lowest bits, which are those of the line
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

// mayFit reports whether a set of terms may be fitted now. Each set has the terms of a plain line. The other terms need more samples. The
// attention term (perPair) is not fitted if it is configured, because Add has subtracted its part from the times already.
func (c *Calibration) mayFit(set int) bool {
	hasLine := set&plainLine == plainLine
	tooEarly := c.n < termSamples && set != plainLine
	fitsAttention := set&(1<<perPair) != 0
	attentionIsConfigured := c.configured.Beta2 > 0
	return hasLine && !tooEarly && !(fitsAttention && attentionIsConfigured)
}

// plausible reports whether a fit of a set of terms makes sense: no term may make a prefill shorter, and each term but the fixed one must
// take some time.
func plausible(set int, factors [terms]float64) bool {
	for i, factor := range factors {
		inSet := set&(1<<i) != 0
		if inSet && (factor < 0 || factor == 0 && i != fixed) {
			return false
		}
	}
	return true
}

// Latency is the last good fit, with fitted true, else the configured latency.
func (c *Calibration) Latency() (latency LatencyModel, fitted bool) {
	if !c.fitted {
		return LatencyModel{Latency: c.configured}, false
	}
	return c.latency, true
}

// R2 is the share of the variance of prefill times that the last good fit explains, 0 to 1; 0 without a fit.
func (c *Calibration) R2() float64 { return c.r2 }

// Samples is the number of prefills that were learned, without outliers.
func (c *Calibration) Samples() int { return c.n }
