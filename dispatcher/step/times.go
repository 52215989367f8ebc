// Package step learns how long the steps of a barrier group take, from the steps that
// its streams report.
package step

import (
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// When a learned model is used. A model of fewer steps, or of times that hardly follow the load, would be worse
// than no model.
const (
	fitSteps = 200 // least number of steps
	fitR2    = 0.3 // least share of the variance of step times that the model explains
)

// UsualWeight is the weight of a request in KV tokens that is assumed until steps show it: about the middle of the laws of engines
// with accelerators (bench/lab/laws). With loads drawn at random, to begin with weight 0 cost up to a third more.
const UsualWeight = 20_000

// Times has what a group's steps have taught.
type Times struct {
	regression
	Configured Model // see Configure; zero: none
	Law        Model // the model that a Law event has set, so that none is learned; zero: there was none

	lengths      median[time.Duration] // lengths of all steps
	plainLengths median[time.Duration] // lengths of steps without a prefill, once there were steps with one
	base         time.Duration         // assumed length of steps without a prefill, see lowerBase
	requests     requests
	prefills     prefills
	meanMs       float32 // fading mean of the lengths, half-life 32 steps
	meanOff      float64 // fading mean of how many ms steps without a prefill are off the line
	tokens       float64 // fading mean of the tokens that a request gets in a step; 0: not known
	learned      LearnedSteps
	buckets      [len(bounds)]uint64
	sumMs        float64
}

// bounds are the upper bounds of the buckets of evenkeel_step_seconds, in s.
var bounds = [...]float64{.005, .01, .015, .02, .03, .04, .05, .06, .08, .1, .15, .2, .3, .5, 1, 2}

// A step whose length is below or above so many times the typical length teaches the model nothing: an engine stood
// still, or the report of a step was missed.
const (
	tooShort = 0.4
	tooLong  = 2.5
	// severalSteps: if a step brings more than so many times the usual tokens, several steps were reported as one.
	severalSteps = 1.3
	farOff       = 4 // a step counts as at most so many times as far off the line as steps are on average
	// echoed: if a step brings less than so many times the usual tokens, it is not a step: the tokens of a few requests came late.
	echoed = 0.4
	// shortest divides the median of all steps: steps without a prefill are not taken to be shorter than the result.
	shortest = 50
)

// Add takes in the length of a step.
func (s *Times) Add(length time.Duration) {
	if length <= 0 {
		return
	}
	s.lengths.add(length)
	seconds := length.Seconds()
	s.sumMs += seconds * 1000
	if i, _ := slices.BinarySearch(bounds[:], seconds); i < len(bounds) {
		s.buckets[i]++
	}
	if !usual(length, s.lengths.value) {
		return
	}
	ms := seconds * 1000
	if s.meanMs == 0 {
		s.meanMs = float32(ms)
	}
	s.meanMs += (float32(ms) - s.meanMs) / 46 // 1 - 2^(-1/32)
}

// Sample is a step with what the ranks did in it.
type Sample struct {
	Ranks []Rank // all ranks of the group that step
	// Tokens is how many tokens a request got. If tokens come late, several steps are reported as one, with their length and tokens together
	Tokens float64
	Length time.Duration
}

// Teach learns from a step that was measured with what the ranks did in it. A sample with far more tokens than usual covers several steps,
// so that its time bounds the base from above and teaches no more. One with far fewer is no step. A step without a prompt teaches the
// decode model, a step with one what prompts add to it. Teach keeps no reference to the sample.
func (s *Times) Teach(t Sample) {
	weighing := s.lineWeighing()
	most := weighing.fullestOf(t.Ranks)
	prefill := slices.ContainsFunc(t.Ranks, func(r Rank) bool { return r.Prompt > 0 })
	if most.load(weighing.weight) <= 0 && !prefill || t.Length <= 0 || t.Tokens <= 0 {
		return
	}
	if s.tokens == 0 {
		s.tokens = t.Tokens
	}
	several, echo := t.Tokens > severalSteps*s.tokens, t.Tokens < echoed*s.tokens
	s.tokens += (min(t.Tokens, 2*s.tokens) - s.tokens) / 46 // 1 - 2^(-1/32): half of what was is forgotten in 32 steps
	ms := t.Length.Seconds() * 1000
	switch {
	case echo: // it teaches nothing
	case several:
		s.lowerBase()
	case !prefill:
		if s.isPlain(t.Length) {
			s.learn(t.Ranks, &most, weighing, ms)
		}
	default:
		s.lowerBase()
		s.prefills.add(s.decodeModel(), s.ownShare(), t.Ranks, ms)
	}
}

// lowerBase lowers base, the assumed length of a step without a prefill, until such a step is measured. If base is far too large, Least
// is so large that the step detector finds no short steps.
func (s *Times) lowerBase() {
	if s.base == 0 {
		s.base = s.lengths.value
	}
	s.base -= s.base / 32
}

// isPlain says whether a step without a prefill has a usual length for such steps.
func (s *Times) isPlain(length time.Duration) bool {
	if s.prefills.ratio.seen == 0 {
		return usual(length, s.lengths.value)
	}
	s.plainLengths.add(length)
	s.base = min(s.plainLengths.value, 2*length) // follows at once if steps without a prefill have become shorter
	return usual(length, s.plainLengths.value)
}

// learn takes in a step without a prefill. most is what the fullest rank did in it.
func (s *Times) learn(ranks []Rank, most *Rank, weighing weighing, ms float64) {
	if weighing != s.regression.weighing { // Configure has changed the weight
		s.regression = regression{weighing: weighing}
	}
	x := most.load(weighing.weight)
	tame := s.tame(x, ms)
	s.regression.add(x, ms)
	s.learned.add(most, ms)
	if line, changed := s.requests.add(ranks, tame); changed {
		s.regression = line
	}
}

// tame returns the length ms of a step, for the search of the weight of a request; x is the load of the step in KV tokens. The line is the
// step model learned so far: the length that a step with this load should have. If a step is much farther off the line than usual, tame
// brings it nearer: a few such steps, in which a rank had an unusual load, could otherwise lead to a wrong weight.
func (s *Times) tame(x, ms float64) float64 {
	line := s.y / max(1, s.w)
	if m, _ := s.fit(); m.C1Ms > 0 {
		line = m.C0Ms + m.C1Ms*x
	}
	off := ms - line
	if s.meanOff > 0 {
		off = min(farOff*s.meanOff, max(-farOff*s.meanOff, off))
	}
	s.meanOff += (math.Abs(off) - s.meanOff) / 46
	return line + off
}

// Configure sets the model that is in force until steps have taught a better one. If it has no cost of a request, the weight of a request
// begins at UsualWeight.
func (s *Times) Configure(m Model) {
	s.Configured = m
	s.prefills.setShare(s.ownShare())
	s.requests.assumed = UsualWeight
	if m.RequestMs > 0 {
		s.requests.assumed = m.Weight()
	}
}

// Weight returns how many KV tokens a request counts as in a load; 0: it surely costs nothing.
func (s *Times) Weight() float64 {
	if s.Law.C1Ms > 0 { // else the law may have only what prompts cost
		return s.Law.Weight()
	}
	return s.requests.inUse().weight
}

// Known returns the weight of a request as Weight does, but 0 instead of UsualWeight.
func (s *Times) Known() float64 { return s.lineWeighing().weight }

// Told returns the way in which requests cost, if two windows of steps have shown it.
func (s *Times) Told() (way Way) {
	switch q := &s.requests; {
	case s.Law.C1Ms > 0 || !q.isFound || !q.waySure || q.found.weight == 0:
		return Untold
	case q.found.fullest:
		return Fullest
	}
	return TwoRanks
}

// lineWeighing returns what a request counts as in the line of the steps: the learned weight or, without one, that of the config.
func (s *Times) lineWeighing() weighing {
	switch {
	case s.Law.C1Ms > 0:
		return weighing{s.Law.Weight(), true}
	case s.requests.isFound:
		return s.requests.found
	}
	return weighing{s.Configured.Weight(), true}
}

// decodeModel returns the model of steps without a prefill, as well as it is known. A line that is not good enough for policies
// is better than none, and without a line, the mean of steps without a prefill is better than that of all steps.
func (s *Times) decodeModel() (m Model) {
	learned, r2 := s.fit()
	switch {
	case s.Law != (Model{}):
		return s.Law
	case s.n >= fitSteps && learned.C1Ms > 0 && s.sure(r2):
		m = learned
	case s.Configured.C1Ms > 0:
		m = s.Configured
	case s.n >= fitSteps:
		m.C0Ms = s.y / s.w
	}
	m.C0Ms = max(0, m.C0Ms)
	return m
}

// withPrefills returns the model of decodes with the learned cost of a prefill; ok is false if that is not known.
func (s *Times) withPrefills() (m Model, ok bool) {
	m = s.decodeModel()
	ok = s.prefills.fit(&m)
	return m, ok
}

// ownShare returns the share of a prompt token's cost that falls on its own rank.
func (s *Times) ownShare() float64 {
	if c := &s.Configured; c.OwnMs > 0 && c.SharedMs > 0 { // one of the two alone does not give the share
		return c.OwnMs / (c.OwnMs + c.SharedMs)
	}
	return UsualOwnShare
}

// LearnedSteps are the steps that the model was learned from since the start.
type LearnedSteps struct {
	Steps    float64
	Tokens   float64 // sum of the KV tokens of the fullest rank
	Requests float64 // sum of the requests of the fullest rank
	Ms       float64 // sum of the lengths
}

func (t *LearnedSteps) add(most *Rank, ms float64) {
	t.Steps, t.Tokens, t.Requests, t.Ms = t.Steps+1, t.Tokens+most.KV, t.Requests+most.Requests, t.Ms+ms
}

// Line is what the steps have taught of how long they take.
type Line struct {
	Model        // its C1Ms is 0 if the lengths do not show the load
	InForce bool // false: the line is not good enough for policies
	Learned LearnedSteps
	Fixed   float64 // ms of a step with a prefill that do not depend on its load; 0: not known
}

// Line returns what the steps have taught so far.
func (s *Times) Line() Line {
	l := Line{Learned: s.learned}
	l.Model, _, _ = s.Model()
	if base, ok := s.withPrefills(); ok && s.Law == (Model{}) {
		l.Fixed = base.C0Ms + base.PrefillMs
	}
	if l.InForce = l.C1Ms > 0; l.InForce {
		return l
	}
	if learned, r2 := s.fit(); s.n >= fitSteps && learned.C1Ms > 0 && s.sure(r2) {
		l.C1Ms, l.RequestMs = learned.C1Ms, learned.RequestMs
	}
	return l
}

// Known says whether the steps have taught anything of how long they take.
func (l *Line) Known() bool { return l.Learned.Steps > 0 || l.Fixed > 0 }

// Through returns the line with a constant such that it goes through the mean of the steps since an earlier moment. Steps with a prefill
// keep the learned length. If there are few steps without a prefill, some of them had a prefill that was not noticed. So they are taken to
// be no longer than the fixed part of a step with a prefill.
func (l *Line) Through(before LearnedSteps) Model {
	m, t := l.Model, &l.Learned
	if t.Steps == before.Steps && m.C0Ms == 0 { // no steps since then: use all steps, however old, rather than none
		before = LearnedSteps{}
	}
	n := t.Steps - before.Steps
	if n > 0 {
		m.C0Ms = max(0, (t.Ms-before.Ms-m.C1Ms*(t.Tokens-before.Tokens)-m.RequestMs*(t.Requests-before.Requests))/n)
	}
	if l.Fixed > 0 {
		if n == 0 && m.C0Ms == 0 || n < fitSteps && m.C0Ms > l.Fixed {
			m.C0Ms = l.Fixed
		}
		m.PrefillMs = max(0, l.Fixed-m.C0Ms)
	}
	return m
}

// usual says whether the length of a step is near enough to the typical length to teach the model something.
func usual(length, typical time.Duration) bool {
	ratio := length.Seconds() / typical.Seconds()
	return ratio >= tooShort && ratio <= tooLong
}

// The sources of a step model.
const (
	Learned    = "learned"
	Configured = "configured"
	Given      = "told"
)

// Model returns the model in force. source says where C0Ms, C1Ms and RequestMs come from: Given, Learned or Configured; empty: they are not
// known, and m has only what prefills cost. That cost is the configured one until it is learned. r2 is how well the learned model fits,
// whether it is in force or not.
func (s *Times) Model() (m Model, source string, r2 float64) {
	learned, r2 := s.fit()
	switch {
	case s.Law != (Model{}):
		return s.Law, Given, r2 // a Law sets the cost of prefills, too
	case s.n >= fitSteps && learned.C1Ms > 0 && r2 >= fitR2:
		learned.C0Ms = max(0, learned.C0Ms) // a step takes no negative time
		m, source = learned, Learned
	case s.Configured.C1Ms > 0:
		m, source = s.Configured, Configured
	}
	prefills := s.Configured
	if learnedPrefills, ok := s.withPrefills(); ok {
		prefills = learnedPrefills
	}
	m.OwnMs, m.SharedMs, m.PrefillMs = prefills.OwnMs, prefills.SharedMs, prefills.PrefillMs
	return m, source, r2
}

// Unknown says why no model is in force, given how well the learned one fits.
func (s *Times) Unknown(r2 float64) string {
	if s.n < fitSteps {
		return fmt.Sprintf("it is learned from %d steps, and %d were told so far", fitSteps, s.n)
	}
	how := fmt.Sprintf("R2 %.2f of %s steps", r2, stats.Grouped(s.n))
	if r2 >= fitR2 {
		how = fmt.Sprintf("by %s steps, it is shorter where that rank is fuller", stats.Grouped(s.n))
	}
	return fmt.Sprintf("step time does not follow the fullest rank (%s): does its load hardly matter, or are they no barrier group?", how)
}

// Ms returns the mean length of a step in ms or, if none was measured, that by the model at the given load in KV tokens; 0: unknown.
func (s *Times) Ms(m Model, load int64) float32 {
	if s.meanMs > 0 || m.C1Ms == 0 {
		return s.meanMs
	}
	return float32(m.C0Ms + m.C1Ms*float64(load))
}

// Samples returns how many steps the learned model comes from, whether it is in force or not.
func (s *Times) Samples() uint64 { return s.n }

// fewSteps is how many steps must be known before Least has a value. With fewer, one long step, in which an engine stood still,
// could make Least so large that the next steps are taken for parts of a step.
const fewSteps = 8

// Least returns the shortest usual length of a step; 0: not known yet. Once some steps have a prefill, it follows from the steps without
// one: if most steps have a prefill, the others are far shorter than the median of all, and the step detector would never find them.
func (s *Times) Least() time.Duration {
	if s.lengths.seen < fewSteps {
		return 0
	}
	if s.prefills.ratio.seen == 0 || s.base == 0 {
		return time.Duration(tooShort * float64(s.lengths.value))
	}
	return max(time.Duration(tooShort*float64(s.base)), s.lengths.value/shortest)
}

// Histogram is evenkeel_step_seconds.
type Histogram struct {
	Count   uint64
	Seconds float64
	Buckets map[float64]uint64 // cumulative
}

// Histogram returns the histogram of all steps so far.
func (s *Times) Histogram() Histogram {
	h := Histogram{Count: s.lengths.seen, Seconds: s.sumMs / 1000, Buckets: make(map[float64]uint64, len(bounds))}
	var below uint64
	for i, most := range bounds {
		below += s.buckets[i]
		h.Buckets[most] = below
	}
	return h
}
