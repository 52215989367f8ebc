// Package step learns how long the steps of a barrier group take, and how this depends on the loads
// of its ranks, from the measured steps.
package step

import (
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// A learned model is used only if it passes both of these limits. Otherwise it would be worse than
// none.
const (
	fitSteps = 200 // least number of steps that the model was learned from
	fitR2    = 0.3 // least share of the variance of step times that the model explains, 0 to 1
)

// UsualWeight is how many KV tokens a request is assumed to count for until the measured steps show
// it: about the middle of the measured engines with accelerators (bench/lab/laws). With 0 instead,
// imbalance cost up to a third more on randomly drawn loads.
const UsualWeight = 20_000

// Times holds what was learned from the steps of one barrier group.
type Times struct {
	regression
	Configured Model // model from the config, used until one is learned; zero: none
	GivenModel Model // set by an event of the board, as in simulations; it replaces a learned model; zero: none

	medianLength      median[time.Duration] // median length of the last steps
	medianPlainLength median[time.Duration] // the same of steps without a prefill, counted since the first step with one
	assumedPlain      time.Duration         // assumed length of steps without a prefill, from which Least follows; 0: not known
	weights           weightSearch
	prefills          prefillFit
	meanMs            float32 // mean length of a step, which counts half after 32 further steps; 0: no step yet
	meanDeviation     float64 // mean distance of steps without a prefill from the line, in ms; older steps count less
	tokensPerStep     float64 // mean number of tokens that a request gets per step; older steps count less; 0: not known
	buckets           [len(bounds)]uint64
	sumMs             float64
}

// bounds are the upper bounds of the buckets of the metric evenkeel_step_seconds, in s. Longer
// steps are in no bucket but in the count.
var bounds = [...]float64{.005, .01, .015, .02, .03, .04, .05, .06, .08, .1, .15, .2, .3, .5, 1, 2}

const (
	// A step is usual if its length divided by the median is between these. Other lengths come from an
	// engine that stood still, or from a step whose report was missed.
	leastUsualRatio = 0.4
	mostUsualRatio  = 2.5
	// A report with more than so many times the usual tokens covers several steps.
	severalStepsFrom = 1.3
	// In the search for the weight of a request, a step's distance from the line counts as at most so
	// many times the mean distance.
	maxDeviations = 4
	// A report with less than so many times the usual tokens is no step: the tokens of a few requests
	// came late.
	lateTokensBelow = 0.4
	// A step without a prefill is assumed to take at least the median of all steps divided by this.
	maxMedianToPlain = 50
	// Each step moves a mean by 1/meanSteps of its distance: about 1 - 2^(-1/32), a half-life of 32
	// steps.
	meanSteps = 46
)

// Add adds the length of a step to the statistics; 0 means unknown. The mean leaves out lengths
// that are far from the median.
func (s *Times) Add(length time.Duration) {
	if length <= 0 {
		return
	}
	s.medianLength.add(length)
	seconds := length.Seconds()
	s.sumMs += seconds * 1000
	if i, _ := slices.BinarySearch(bounds[:], seconds); i < len(bounds) {
		s.buckets[i]++
	}
	if !isUsual(length, s.medianLength.value) {
		return
	}
	ms := seconds * 1000
	if s.meanMs == 0 {
		s.meanMs = float32(ms)
	}
	s.meanMs += (float32(ms) - s.meanMs) / meanSteps
}

// Sample is one reported step.
type Sample struct {
	Ranks []Rank // work of all ranks of the group that are not down
	// Tokens is how many tokens each request got, usually 1. If tokens come late, several steps are
	// reported as one, with the sum of their lengths and tokens.
	Tokens float64
	Length time.Duration
}

// Learn learns the model of decodes from steps without prompts, and how much longer prompts make a
// step from the others. It keeps no reference to the sample.
func (s *Times) Learn(t Sample) {
	weight := s.fittedWeight()
	slowest := weight.slowestOf(t.Ranks)
	hasPrefill := slices.ContainsFunc(t.Ranks, func(r Rank) bool { return r.Prompt > 0 })
	noWork := slowest.load(weight.tokensPerRequest) <= 0 && !hasPrefill
	if noWork || t.Length <= 0 || t.Tokens <= 0 {
		return
	}
	if s.tokensPerStep == 0 {
		s.tokensPerStep = t.Tokens
	}
	isSeveral, isNoStep := t.Tokens > severalStepsFrom*s.tokensPerStep, t.Tokens < lateTokensBelow*s.tokensPerStep
	// The change is bounded, so that one report of very many steps hardly moves the mean.
	s.tokensPerStep += (min(t.Tokens, 2*s.tokensPerStep) - s.tokensPerStep) / meanSteps
	ms := t.Length.Seconds() * 1000
	switch {
	case isNoStep:
	case isSeveral: // the length of one step is not known
		s.shortenAssumedPlain()
	case !hasPrefill:
		if usualLength := s.learnPlainLength(t.Length); usualLength {
			s.learnDecode(t.Ranks, &slowest, weight, ms)
		}
	default:
		s.shortenAssumedPlain()
		s.prefills.add(s.decodeModel(), s.ownShare(), t.Ranks, ms)
	}
}

// shortenAssumedPlain is called for each sample that does not show the length of a step without a
// prefill. If the assumed length stayed far too long, so would Least, and the step detector would
// take several short steps for one, so that no length could be learned from them.
func (s *Times) shortenAssumedPlain() {
	if s.assumedPlain == 0 {
		s.assumedPlain = s.medianLength.value
	}
	s.assumedPlain -= s.assumedPlain / 32
}

// learnPlainLength says whether the length of a step without a prefill is usual for such steps.
// Once any step had a prefill, it also learns the length.
func (s *Times) learnPlainLength(length time.Duration) (usualLength bool) {
	if !s.prefills.hasSteps() { // all steps so far were plain, so medianLength, which Add learns, is their median
		return isUsual(length, s.medianLength.value)
	}
	s.medianPlainLength.add(length)
	// When steps become much shorter, the median follows slowly, and Least would stay too long for the
	// step detector to find them. Therefore a single short step counts at once. With twice its length,
	// Least is at most 0.8 of it (leastUsualRatio).
	s.assumedPlain = min(s.medianPlainLength.value, 2*length)
	return isUsual(length, s.medianPlainLength.value)
}

// learnDecode learns from a step without a prefill. slowest is the work for which the step waited
// under the given weight; the search for the weight tries others, so it gets all ranks. It gets a
// clipped time, because a few outliers could lead it to a wrong weight.
func (s *Times) learnDecode(ranks []Rank, slowest *Rank, weight requestWeight, ms float64) {
	if weight != s.regression.requestWeight {
		s.regression = regression{requestWeight: weight}
	}
	load := slowest.load(weight.tokensPerRequest)
	clippedMs := s.clipOutlier(load, ms) // compared with the line from before this step
	s.regression.add(load, ms)
	if line, changed := s.weights.add(ranks, clippedMs); changed {
		s.regression = line
	}
}

// clipOutlier moves a length that is unusually far from the present line nearer to it.
func (s *Times) clipOutlier(load, ms float64) float64 {
	expected := s.meanTime() // in case there is no line
	if m, _ := s.fit(); m.C1Ms > 0 {
		expected = m.C0Ms + m.C1Ms*load
	}
	deviation := ms - expected
	if s.meanDeviation > 0 {
		deviation = min(maxDeviations*s.meanDeviation, max(-maxDeviations*s.meanDeviation, deviation))
	}
	s.meanDeviation += (math.Abs(deviation) - s.meanDeviation) / meanSteps
	return expected + deviation
}

// Configure sets the model that is used until a better one is learned. If it has no RequestMs, the
// weight of a request is UsualWeight until it is learned. The share of a prompt token's cost that
// falls on its own rank comes only from this model; if it changes, the cost of prompts is learned
// anew.
func (s *Times) Configure(m Model) {
	s.Configured = m
	s.prefills.setOwnShare(s.ownShare())
	s.weights.assumed = UsualWeight
	if m.RequestMs > 0 {
		s.weights.assumed = m.Weight()
	}
}

// Weight returns for how many KV tokens each request counts in a load: by the given model, else as
// learned, else as assumed. 0: a request itself costs no time.
func (s *Times) Weight() float64 {
	if s.decodesAreGiven() {
		return s.GivenModel.Weight()
	}
	return s.weights.inUse().tokensPerRequest
}

// KnownWeight is Weight, but 0 if it is only assumed (UsualWeight).
func (s *Times) KnownWeight() float64 { return s.fittedWeight().tokensPerRequest }

// Bottleneck returns which ranks' requests make steps longer. It is UnknownBottleneck until the
// steps have surely shown it. A given model does not show it, and neither do steps in which a
// request itself takes no time.
func (s *Times) Bottleneck() Bottleneck {
	search := &s.weights
	requestTakesTime := search.found.tokensPerRequest != 0
	sure := search.isFound && search.bottleneckSure && requestTakesTime
	switch {
	case s.decodesAreGiven() || !sure:
		return UnknownBottleneck
	case search.found.waitsForOneRank:
		return OneRank
	}
	return TwoRanks
}

// fittedWeight returns the weight with which the line of step times is fitted. A given or
// configured model waits for one rank by its definition; the learned weight has a bottleneck of its
// own.
func (s *Times) fittedWeight() requestWeight {
	switch {
	case s.decodesAreGiven():
		return requestWeight{tokensPerRequest: s.GivenModel.Weight(), waitsForOneRank: true}
	case s.weights.isFound:
		return s.weights.found
	}
	return requestWeight{tokensPerRequest: s.Configured.Weight(), waitsForOneRank: true}
}

// decodesAreGiven says whether the given model has the cost of decodes. It may have only the cost
// of prompts: then C1Ms is 0.
func (s *Times) decodesAreGiven() bool { return s.GivenModel.C1Ms > 0 }

// decodeModel returns the best known model of steps without a prefill, even if it is not good
// enough for policies. Without any, it is the mean length of such steps whatever the load; zero:
// too few steps were measured.
func (s *Times) decodeModel() (m Model) {
	learned, r2 := s.fit()
	switch {
	case s.GivenModel != (Model{}):
		return s.GivenModel
	case s.n >= fitSteps && learned.C1Ms > 0 && s.slopeIsSure(r2):
		m = learned
	case s.Configured.C1Ms > 0:
		m = s.Configured
	case s.n >= fitSteps:
		m.C0Ms = s.meanTime()
	}
	m.C0Ms = max(0, m.C0Ms)
	return m
}

// modelWithPrefills adds the learned cost of a prefill to decodeModel; ok is false if this cost is
// not known.
func (s *Times) modelWithPrefills() (m Model, ok bool) {
	m = s.decodeModel()
	ok = s.prefills.setLearnedCosts(&m)
	return m, ok
}

// ownShare is the share of a prompt token's cost on the rank that computes it; the rest slows all
// ranks.
func (s *Times) ownShare() float64 {
	if c := &s.Configured; c.OwnPromptMs > 0 && c.SharedPromptMs > 0 {
		return c.OwnPromptMs / (c.OwnPromptMs + c.SharedPromptMs)
	}
	return UsualOwnShare
}

func isUsual(length, typical time.Duration) bool {
	ratio := length.Seconds() / typical.Seconds()
	return ratio >= leastUsualRatio && ratio <= mostUsualRatio
}

// The sources of a step model: learned from steps, from the config, or set by an event of the
// board.
const (
	Learned    = "learned"
	Configured = "configured"
	Given      = "told"
)

// Model returns the model in force. source says where C0Ms, C1Ms and RequestMs come from; empty:
// they are not known, and m only has the cost of prefills, which is the configured one until it is
// learned. r2 is that of the learned model, even if it is not in force.
func (s *Times) Model() (m Model, source string, r2 float64) {
	learned, r2 := s.fit()
	switch {
	case s.GivenModel != (Model{}):
		return s.GivenModel, Given, r2 // it brings its own cost of prefills
	case s.n >= fitSteps && learned.C1Ms > 0 && r2 >= fitR2:
		learned.C0Ms = max(0, learned.C0Ms)
		m, source = learned, Learned
	case s.Configured.C1Ms > 0:
		m, source = s.Configured, Configured
	}
	prefills := s.Configured
	if learnedPrefills, ok := s.modelWithPrefills(); ok {
		prefills = learnedPrefills
	}
	m.OwnPromptMs, m.SharedPromptMs, m.PrefillMs = prefills.OwnPromptMs, prefills.SharedPromptMs, prefills.PrefillMs
	return m, source, r2
}

// WhyNoModel says for operators why no model is in force.
func (s *Times) WhyNoModel(r2 float64) string {
	if s.n < fitSteps {
		return fmt.Sprintf("it is learned from %d steps, and %d were told so far", fitSteps, s.n)
	}
	how := fmt.Sprintf("R2 %.2f of %s steps", r2, stats.Grouped(s.n))
	if r2 >= fitR2 { // the line explains the times, so its slope is not positive
		how = fmt.Sprintf("by %s steps, it is shorter where that rank is fuller", stats.Grouped(s.n))
	}
	return fmt.Sprintf("step time does not follow the fullest rank (%s): does its load hardly matter, or are they no barrier group?", how)
}

// Ms returns the mean length of a step in ms. If no step was measured, it is that of m at the load;
// 0: unknown.
func (s *Times) Ms(m Model, load int64) float32 {
	if s.meanMs > 0 || m.C1Ms == 0 {
		return s.meanMs
	}
	return float32(m.C0Ms + m.C1Ms*float64(load))
}

// Samples is counted even while the learned model is not in force.
func (s *Times) Samples() uint64 { return s.n }

// fewSteps is how many steps must be known before Least has a value. With fewer, a single long
// step, in which an engine stood still, could make Least so large that normal steps would be taken
// for parts of one step.
const fewSteps = 8

// Least returns the shortest usual length of a step; 0: not known yet. The step detector takes
// tokens that come sooner after the start of a step for tokens of the same step.
//
// If most steps have a prefill, the others are far shorter than the median, and the detector would
// miss them with a limit from it. So once a step had a prefill, Least follows from assumedPlain,
// which becomes shorter while no step without a prefill is measured.
func (s *Times) Least() time.Duration {
	if s.medianLength.count < fewSteps {
		return 0
	}
	if !s.prefills.hasSteps() || s.assumedPlain == 0 {
		return time.Duration(leastUsualRatio * float64(s.medianLength.value))
	}
	leastPlain := time.Duration(leastUsualRatio * float64(s.assumedPlain))
	return max(leastPlain, s.medianLength.value/maxMedianToPlain)
}

// Histogram has the values of the metric evenkeel_step_seconds.
type Histogram struct {
	Count   uint64
	Seconds float64
	Buckets map[float64]uint64 // by upper bound in s: number of steps that took at most so long
}

// Histogram returns the number and the lengths of all steps so far.
func (s *Times) Histogram() Histogram {
	h := Histogram{Count: s.medianLength.count, Seconds: s.sumMs / 1000, Buckets: make(map[float64]uint64, len(bounds))}
	var cumulative uint64 // buckets has the steps between two bounds, the metric all steps up to a bound
	for i, bound := range bounds {
		cumulative += s.buckets[i]
		h.Buckets[bound] = cumulative
	}
	return h
}
