// Package step learns how long the steps of a barrier group take, and how this depends on the loads of its ranks, from the measured steps.
package step

import (
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// A learned model is used only if it passes both of these limits. A model from fewer steps, or of times that hardly depend on the load,
// would be worse than none.
const (
	fitSteps = 200 // least number of steps that the model was learned from
	fitR2    = 0.3 // least share of the variance of step times that the model explains, 0 to 1
)

// UsualWeight is how many KV tokens a request is assumed to count for until the measured steps show its weight: about the middle of the
// measured engines with accelerators (bench/lab/laws). On randomly drawn loads, imbalance cost up to a third more if the weight was 0 at
// first.
const UsualWeight = 20_000

// Times holds what was learned from the steps of one barrier group: their lengths, and how these depend on the ranks' loads.
type Times struct {
	regression
	Configured Model // model from the config, used until one is learned; zero: none
	GivenModel Model // model that an event of the board has set, as in simulations; it replaces a learned model; zero: none

	medianLength      median[time.Duration] // median length of the last steps
	medianPlainLength median[time.Duration] // the same of steps without a prefill, counted since the first step with a prefill
	assumedPlain      time.Duration         // assumed length of steps without a prefill, from which Least follows; 0: not known
	weights           weightSearch
	prefills          prefillFit
	meanMs            float32 // mean length of a step in ms, in which a step counts half after 32 further steps; 0: no step yet
	meanDeviation     float64 // mean distance of the lengths of steps without a prefill from the line, in ms; older steps count less
	tokensPerStep     float64 // mean number of tokens that a request gets per step; older steps count less; 0: not known
	buckets           [len(bounds)]uint64
	sumMs             float64
}

// bounds are the upper bounds of the buckets of the metric evenkeel_step_seconds, in s. Longer steps are in no bucket but in the count.
var bounds = [...]float64{.005, .01, .015, .02, .03, .04, .05, .06, .08, .1, .15, .2, .3, .5, 1, 2}

const (
	// A step is usual if its length is from leastUsualRatio to mostUsualRatio times the median length. The model learns only from usual
	// steps. Other lengths come from an engine that stood still, or from a step whose report was missed.
	leastUsualRatio = 0.4
	mostUsualRatio  = 2.5
	// If a reported step brings more than severalStepsFrom times the usual tokens, the report covers several steps.
	severalStepsFrom = 1.3
	// In the search for the weight of a request, a step's distance from the line counts as at most so many times the mean distance.
	maxDeviations = 4
	// A reported step that brings less than lateTokensBelow times the usual tokens is no step: the tokens of a few requests came late.
	lateTokensBelow = 0.4
	// A step without a prefill is assumed to take at least the median length of all steps divided by maxMedianToPlain.
	maxMedianToPlain = 50
	// Each step moves a mean by 1/meanSteps of the step's distance from it. This is about 1 - 2^(-1/32), for a half-life of 32 steps.
	meanSteps = 46
)

// Add adds the length of a step to the statistics of step lengths. A length of 0 means unknown, and is ignored. The mean leaves out lengths
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
	if !isUsual(length, s.medianLength.value) { // too far from the median: an engine stood still, or a report was missed
		return
	}
	ms := seconds * 1000
	if s.meanMs == 0 { // the first length becomes the mean
		s.meanMs = float32(ms)
	}
	s.meanMs += (float32(ms) - s.meanMs) / meanSteps
}

// Sample is one reported step: its length, and the work of each rank in it.
type Sample struct {
	Ranks []Rank // work of all ranks of the group that are not down
	// Tokens is how many tokens each request got, usually 1. If tokens come late, several steps are reported as one, with the sum of
	// their lengths and tokens.
	Tokens float64
	Length time.Duration
}

// Learn learns from a sample. From a step without prompts it learns the model of decodes, and from a step with prompts how much longer
// prompts make a step. A sample with far more tokens than usual covers several steps, and a sample with far fewer is no step, so neither
// changes a model. Learn keeps no reference to the sample.
func (s *Times) Learn(t Sample) {
	weight := s.fittedWeight()
	slowest := weight.slowestOf(t.Ranks)
	hasPrefill := slices.ContainsFunc(t.Ranks, func(r Rank) bool { return r.Prompt > 0 })
	noWork := slowest.load(weight.tokensPerRequest) <= 0 && !hasPrefill
	if noWork || t.Length <= 0 || t.Tokens <= 0 { // the sample says nothing about the length of a step
		return
	}
	if s.tokensPerStep == 0 { // the first sample: its number is the mean so far
		s.tokensPerStep = t.Tokens
	}
	isSeveral, isNoStep := t.Tokens > severalStepsFrom*s.tokensPerStep, t.Tokens < lateTokensBelow*s.tokensPerStep
	// In this mean, the newest sample counts 1/meanSteps. The change is bounded, so that one report of very many steps hardly moves it.
	s.tokensPerStep += (min(t.Tokens, 2*s.tokensPerStep) - s.tokensPerStep) / meanSteps
	ms := t.Length.Seconds() * 1000
	switch {
	case isNoStep: // only late tokens: the length is not that of a step
	case isSeveral: // the length of one step is not known
		s.shortenAssumedPlain()
	case !hasPrefill:
		if usualLength := s.learnPlainLength(t.Length); usualLength {
			s.learnDecode(t.Ranks, &slowest, weight, ms)
		}
	default: // with a prefill, which says nothing about the length of steps without one
		s.shortenAssumedPlain()
		s.prefills.add(s.decodeModel(), s.ownShare(), t.Ranks, ms)
	}
}

// shortenAssumedPlain makes the assumed length of a step without a prefill a little shorter. It is called for each sample of several steps
// or with a prefill. If the assumed length stayed far too long, Least, which follows from it, would be too long as well: the step detector
// would then take several short steps for one, so that no length could be learned from them.
func (s *Times) shortenAssumedPlain() {
	if s.assumedPlain == 0 { // no such step was measured so far, so begin with the median of all steps
		s.assumedPlain = s.medianLength.value
	}
	s.assumedPlain -= s.assumedPlain / 32
}

// learnPlainLength says whether the length of a plain step, one without a prefill, is usual for such steps. Once any step had a prefill, it
// also learns the length: the median of plain steps, and assumedPlain, the assumed length of the next ones. From this follows Least, the
// length below which the step detector takes several steps for one.
func (s *Times) learnPlainLength(length time.Duration) (usualLength bool) {
	if !s.prefills.hasSteps() { // all steps so far were plain, so their median is that of all steps (medianLength), which Add learns
		return isUsual(length, s.medianLength.value)
	}
	s.medianPlainLength.add(length)
	// When steps become much shorter, the median follows slowly, and Least would stay too long for the step detector to find them.
	// Therefore a single short step counts at once. With twice its length, Least is at most 0.8 of it (leastUsualRatio), so that the
	// detector finds steps of this length.
	s.assumedPlain = min(s.medianPlainLength.value, 2*length)
	return isUsual(length, s.medianPlainLength.value)
}

// learnDecode adds a step without a prefill that took ms to the two things that are learned from such steps: the line of step time over
// load (regression), and the search for the weight of a request (weights). slowest is
// the work for which the step waited under the given weight. The search tries other weights, under which it may be the work of another
// rank, so it gets all ranks. It also gets a clipped time, because a few outliers could lead it to a wrong weight. If the search changes
// the weight, its regression, with the new weight, replaces the present one.
func (s *Times) learnDecode(ranks []Rank, slowest *Rank, weight requestWeight, ms float64) {
	if weight != s.regression.requestWeight { // Configure has changed the weight
		s.regression = regression{requestWeight: weight}
	}
	load := slowest.load(weight.tokensPerRequest)
	clippedMs := s.clipOutlier(load, ms) // compared with the line from before this step
	s.regression.add(load, ms)
	if line, changed := s.weights.add(ranks, clippedMs); changed {
		s.regression = line
	}
}

// clipOutlier returns the length of a step (ms) as the search for the weight of a request may use it. A length that is much farther than
// usual from the length that the present line gives for the load (KV tokens) is moved nearer to it. Otherwise a few steps in which a rank
// had an unusual load could lead to a wrong weight. clipOutlier also learns the usual distance (meanDeviation).
func (s *Times) clipOutlier(load, ms float64) float64 {
	expected := s.meanTime() // in case there is no line
	if m, _ := s.fit(); m.C1Ms > 0 {
		expected = m.C0Ms + m.C1Ms*load
	}
	deviation := ms - expected
	if s.meanDeviation > 0 { // false for the first step
		deviation = min(maxDeviations*s.meanDeviation, max(-maxDeviations*s.meanDeviation, deviation))
	}
	s.meanDeviation += (math.Abs(deviation) - s.meanDeviation) / meanSteps
	return expected + deviation
}

// Configure sets the model that is used until a better one is learned. If the model has no RequestMs, the weight of a request is
// UsualWeight until it is learned. The model also says which share of a prompt token's cost falls on the rank that computes it. This share
// is never learned. If it changes, the cost of prompts is learned anew.
func (s *Times) Configure(m Model) {
	s.Configured = m
	s.prefills.setOwnShare(s.ownShare())
	s.weights.assumed = UsualWeight
	if m.RequestMs > 0 {
		s.weights.assumed = m.Weight()
	}
}

// Weight returns for how many KV tokens each request counts in a load. It is that of the given model, else the one that measured
// steps have surely shown, else the assumed one. 0: a request itself costs no time.
func (s *Times) Weight() float64 {
	if s.decodesAreGiven() {
		return s.GivenModel.Weight()
	}
	return s.weights.inUse().tokensPerRequest
}

// KnownWeight returns the same as Weight if the weight was learned or configured, and 0 if it is only assumed (UsualWeight).
func (s *Times) KnownWeight() float64 { return s.fittedWeight().tokensPerRequest }

// Bottleneck returns which ranks' requests make steps longer. OneRank: a step waits for the rank with the largest load, so it is this
// rank's requests. TwoRanks: all ranks are padded to the rank with most requests, so it is the requests of that rank, while the step also
// waits for the rank with most KV. UnknownBottleneck: the steps have not surely shown it yet. A given model does not show it, and neither
// do steps in which a request itself takes no time.
func (s *Times) Bottleneck() Bottleneck {
	search := &s.weights // the search for the weight of a request: how many KV tokens take as long as one request
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

// fittedWeight returns the weight of a request in the loads over which the line of step times is fitted: for how many KV tokens it counts.
// It is that of the given model, else the learned weight, else the configured weight (0: none is configured). A model, given or configured,
// adds up the KV and the requests of each rank, and a step waits for the one rank whose sum is largest. The learned weight has a bottleneck
// of its own, because the search tries both.
func (s *Times) fittedWeight() requestWeight {
	switch {
	case s.decodesAreGiven():
		return requestWeight{tokensPerRequest: s.GivenModel.Weight(), waitsForOneRank: true}
	case s.weights.isFound:
		return s.weights.found
	}
	return requestWeight{tokensPerRequest: s.Configured.Weight(), waitsForOneRank: true}
}

// decodesAreGiven says whether the given model has the cost of decodes. A given model may have only the cost of prompts: then C1Ms, the ms
// per KV token, is 0.
func (s *Times) decodesAreGiven() bool { return s.GivenModel.C1Ms > 0 }

// decodeModel returns the best known model of steps without a prefill: the given one, else the learned line of step time over load, even if
// it is not good enough for policies, else the configured model. Without any of these, it is the mean length of steps without a prefill
// (C0Ms), whatever the load; zero: too few steps were measured.
func (s *Times) decodeModel() (m Model) {
	learned, r2 := s.fit()
	switch {
	case s.GivenModel != (Model{}):
		return s.GivenModel
	case s.n >= fitSteps && learned.C1Ms > 0 && s.slopeIsSure(r2): // r2 may be below fitR2, which policies require
		m = learned
	case s.Configured.C1Ms > 0: // the config has a model of decodes
		m = s.Configured
	case s.n >= fitSteps:
		m.C0Ms = s.meanTime()
	}
	m.C0Ms = max(0, m.C0Ms) // a step takes no negative time
	return m
}

// modelWithPrefills returns the model of steps without prefills, with the learned cost of a prefill added; ok is false if this cost is not
// known.
func (s *Times) modelWithPrefills() (m Model, ok bool) {
	m = s.decodeModel()
	ok = s.prefills.setLearnedCosts(&m)
	return m, ok
}

// ownShare returns which share of a prompt token's cost falls on the rank that computes it, 0 to 1; the rest makes all ranks slower.
func (s *Times) ownShare() float64 {
	if c := &s.Configured; c.OwnPromptMs > 0 && c.SharedPromptMs > 0 { // the share needs both costs
		return c.OwnPromptMs / (c.OwnPromptMs + c.SharedPromptMs)
	}
	return UsualOwnShare
}

// isUsual says whether a step is neither too short nor too long, compared with the typical length, to learn from it.
func isUsual(length, typical time.Duration) bool {
	ratio := length.Seconds() / typical.Seconds()
	return ratio >= leastUsualRatio && ratio <= mostUsualRatio
}

// The sources of a step model: learned from steps, from the config, or set by an event of the board.
const (
	Learned    = "learned"
	Configured = "configured"
	Given      = "told"
)

// Model returns the model in force. source says where C0Ms, C1Ms and RequestMs come from: Given (GivenModel), Learned or Configured. If
// source is empty, these are not known, and m only has the cost of prefills. This cost is the configured one until it is learned. r2 is the
// share of the variance that the learned model explains, even if that model is not in force.
func (s *Times) Model() (m Model, source string, r2 float64) {
	learned, r2 := s.fit()
	switch {
	case s.GivenModel != (Model{}):
		return s.GivenModel, Given, r2 // a given model brings its own cost of prefills
	case s.n >= fitSteps && learned.C1Ms > 0 && r2 >= fitR2:
		learned.C0Ms = max(0, learned.C0Ms) // a step takes no negative time
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

// WhyNoModel says for operators why no model is in force: too few steps were measured, the line of step times over the load of the fullest
// rank explains too little of them (r2, the explained share of their variance), or by this line larger loads do not make steps longer.
func (s *Times) WhyNoModel(r2 float64) string {
	if s.n < fitSteps {
		return fmt.Sprintf("it is learned from %d steps, and %d were told so far", fitSteps, s.n)
	}
	how := fmt.Sprintf("R2 %.2f of %s steps", r2, stats.Grouped(s.n))
	if r2 >= fitR2 { // the line explains the times, so it is not in force because its slope is not positive
		how = fmt.Sprintf("by %s steps, it is shorter where that rank is fuller", stats.Grouped(s.n))
	}
	return fmt.Sprintf("step time does not follow the fullest rank (%s): does its load hardly matter, or are they no barrier group?", how)
}

// Ms returns the mean length of a step in ms. If no step was measured, it returns the length by the model m at the given load in KV tokens;
// 0: unknown.
func (s *Times) Ms(m Model, load int64) float32 {
	if s.meanMs > 0 || m.C1Ms == 0 { // measured, or 0 because the model is unknown, too
		return s.meanMs
	}
	return float32(m.C0Ms + m.C1Ms*float64(load))
}

// Samples returns from how many steps the model was learned. They are counted even while the model is not in force.
func (s *Times) Samples() uint64 { return s.n }

// fewSteps is how many steps must be known before Least has a value. With fewer steps, a single long step, in which an engine stood still,
// could make Least so large that normal steps would be taken for parts of one step.
const fewSteps = 8

// Least returns the shortest usual length of a step; 0: not known yet. The step detector takes tokens that come sooner after the start of a
// step for tokens of the same step.
//
// As long as no step had a prefill, Least is leastUsualRatio times the median length. If most steps have a prefill, the others are far
// shorter than the median, and with such a limit the detector would miss them. So once a step had a prefill, Least is leastUsualRatio times
// assumedPlain, the assumed length of a step without one. Learn makes assumedPlain shorter and shorter while no such step is measured, so
// Least is at least the median divided by maxMedianToPlain.
func (s *Times) Least() time.Duration {
	if s.medianLength.count < fewSteps {
		return 0
	}
	if !s.prefills.hasSteps() || s.assumedPlain == 0 { // 0: not known
		return time.Duration(leastUsualRatio * float64(s.medianLength.value))
	}
	leastPlain := time.Duration(leastUsualRatio * float64(s.assumedPlain))
	return max(leastPlain, s.medianLength.value/maxMedianToPlain)
}

// Histogram has the values of the metric evenkeel_step_seconds: number of steps, sum of their lengths, and steps per bucket.
type Histogram struct {
	Count   uint64
	Seconds float64
	Buckets map[float64]uint64 // by upper bound in s: number of steps that took at most so long
}

// Histogram returns the number and the lengths of all steps so far, in the form of the metric evenkeel_step_seconds.
func (s *Times) Histogram() Histogram {
	h := Histogram{Count: s.medianLength.count, Seconds: s.sumMs / 1000, Buckets: make(map[float64]uint64, len(bounds))}
	var cumulative uint64 // buckets has the steps between two bounds, but the metric counts all steps up to a bound
	for i, bound := range bounds {
		cumulative += s.buckets[i]
		h.Buckets[bound] = cumulative
	}
	return h
}
