// Package step learns how long the steps of a barrier group take, from the steps that
// its streams tell of.
package step

import (
	"fmt"
	"math"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// When a model learned on line is used: one of fewer steps, or of times that hardly follow the load,
// says less than none.
const (
	fitSteps = 200 // regressed at least
	fitR2    = 0.3
)

// UsualWeight is how many KV tokens a request weighs as much as, until something is known of that: about the middle of what engines
// with accelerators take (bench/lab/laws). Loads that were drawn cost a third more at worst where a request began at nothing.
const UsualWeight = 20_000

// Times are what a group's steps have taught.
type Times struct {
	regression
	Configured Model // see Configure; zero: none
	Law        Model // what is told and never learned; zero: nothing

	all      median[time.Duration] // lengths
	plain    median[time.Duration] // of steps without a prefill, where there are some with one
	base     time.Duration         // about what steps without a prefill take, as long as some are heard
	requests requests
	prefills prefills
	meanMs   float32 // fading mean, half-life 32 steps
	off      float64 // ms that steps without a prefill are off the line, fading mean
	tokens   float64 // of a request in a step, fading mean; 0: not known
	learned  LearnedSteps
	buckets  [len(bounds)]uint64
	sumMs    float64
}

// bounds are upper bounds of evenkeel_step_seconds.
var bounds = [...]float64{.005, .01, .015, .02, .03, .04, .05, .06, .08, .1, .15, .2, .3, .5, 1, 2}

// A step so far from the typical one is no sample of the model: an engine stood
// still, or a told step was missed.
const (
	tooShort = 0.4
	tooLong  = 2.5
	// severalSteps is how many times the usual tokens tell that steps were told as one.
	severalSteps = 1.3
	farOff       = 4 // times as far off as steps are in the mean
	// echoed is how many times the usual tokens a step brings at most that is none: few requests spoke late, after the others.
	echoed = 0.4
	// shortest is what part of all steps those without a prefill take at least, about.
	shortest = 50
)

// Add takes in the length of a step.
func (s *Times) Add(length time.Duration) {
	if length <= 0 {
		return
	}
	s.all.add(length)
	seconds := length.Seconds()
	s.sumMs += seconds * 1000
	if i, _ := slices.BinarySearch(bounds[:], seconds); i < len(bounds) {
		s.buckets[i]++
	}
	if !usual(length, s.all.of) {
		return
	}
	ms := seconds * 1000
	if s.meanMs == 0 {
		s.meanMs = float32(ms)
	}
	s.meanMs += (float32(ms) - s.meanMs) / 46 // 1 - 2^(-1/32)
}

// Sample is a step, and what was done in it.
type Sample struct {
	Ranks []Rank // of the group, all that step
	// that a request got. Where tokens come late, several steps are told as one: it is as long as all of them, and brings as many tokens
	Tokens float64
	Length time.Duration
}

// Teach takes in a step. It keeps nothing of the sample.
func (s *Times) Teach(t Sample) {
	use := s.ofLine()
	most := use.fullestOf(t.Ranks)
	prefill := slices.ContainsFunc(t.Ranks, func(r Rank) bool { return r.Prompt > 0 })
	if most.load(use.weight) <= 0 && !prefill || t.Length <= 0 || t.Tokens <= 0 {
		return
	}
	if s.tokens == 0 {
		s.tokens = t.Tokens
	}
	several, echo := t.Tokens > severalSteps*s.tokens, t.Tokens < echoed*s.tokens
	s.tokens += (min(t.Tokens, 2*s.tokens) - s.tokens) / 46
	ms := t.Length.Seconds() * 1000
	switch {
	case echo:
	case several:
		s.listen()
	case !prefill:
		if s.isPlain(t.Length) {
			s.learn(t.Ranks, &most, use, ms)
		}
	default:
		s.listen()
		s.prefills.add(s.decodes(), s.ownShare(), t.Ranks, ms)
	}
}

// listen lowers what a step without a prefill is taken to last, until one is heard: those that are far shorter than was thought, nobody
// hears.
func (s *Times) listen() {
	if s.base == 0 {
		s.base = s.all.of
	}
	s.base -= s.base / 32
}

// isPlain says whether a step without a prefill is as long as such steps are.
func (s *Times) isPlain(length time.Duration) bool {
	if s.prefills.ratio.seen == 0 {
		return usual(length, s.all.of)
	}
	s.plain.add(length)
	s.base = min(s.plain.of, 2*length) // the others may have become shorter, too
	return usual(length, s.plain.of)
}

// learn takes in a step without a prefill, and what the fullest rank had in it.
func (s *Times) learn(ranks []Rank, most *Rank, use weighing, ms float64) {
	if use != s.regression.weighing { // the config says another
		s.regression = regression{weighing: use}
	}
	x := most.load(use.weight)
	tame := s.tame(x, ms)
	s.regression.add(x, ms)
	s.learned.add(most, ms)
	if line, changed := s.requests.add(ranks, tame); changed {
		s.regression = line
	}
}

// tame is the length of a step, brought nearer to the line where it is much farther off than steps are: a few of these, when
// a rank held what it seldom holds, would say of a request whatever chance wants.
func (s *Times) tame(x, ms float64) float64 {
	line := s.y / max(1, s.w)
	if m, _ := s.fit(); m.C1Ms > 0 {
		line = m.C0Ms + m.C1Ms*x
	}
	off := ms - line
	if s.off > 0 {
		off = min(farOff*s.off, max(-farOff*s.off, off))
	}
	s.off += (math.Abs(off) - s.off) / 46
	return line + off
}

// Configure sets what is in force until steps have taught more. A config that does not say what a request costs has it begin at
// UsualWeight.
func (s *Times) Configure(m Model) {
	s.Configured = m
	s.prefills.divide(s.ownShare())
	s.requests.start = UsualWeight
	if m.RequestMs > 0 {
		s.requests.start = m.Weight()
	}
}

// Weight is how many KV tokens a request counts as in a load; 0 where it costs nothing surely.
func (s *Times) Weight() float64 {
	if s.Law.C1Ms > 0 { // else it may know of prompts only
		return s.Law.Weight()
	}
	return s.requests.inUse().weight
}

// Known is Weight without what is only assumed.
func (s *Times) Known() float64 { return s.ofLine().weight }

// Told is which way steps take what requests cost, where they tell it in two windows.
func (s *Times) Told() (way Way) {
	switch q := &s.requests; {
	case s.Law.C1Ms > 0 || !q.told || !q.way || q.found.weight == 0:
		return Untold
	case q.found.fullest:
		return Fullest
	}
	return TwoRanks
}

// ofLine is what requests are counted as in the line of the steps: where steps do not tell it, only what the config says.
func (s *Times) ofLine() weighing {
	switch {
	case s.Law.C1Ms > 0:
		return weighing{s.Law.Weight(), true}
	case s.requests.told:
		return s.requests.found
	}
	return weighing{s.Configured.Weight(), true}
}

// decodes is the law of steps without a prefill, as well as it is known: a line that is not good enough for policies
// is better than none, and their mean is better than that of all steps.
func (s *Times) decodes() (m Model) {
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

// withPrefills is that law with what a prefill costs; not ok: that is not known.
func (s *Times) withPrefills() (m Model, ok bool) {
	m = s.decodes()
	ok = s.prefills.fit(&m)
	return m, ok
}

// ownShare is the rank's own part of what a prompt costs.
func (s *Times) ownShare() float64 {
	if c := &s.Configured; c.OwnMs > 0 && c.SharedMs > 0 { // one alone says nothing of the share
		return c.OwnMs / (c.OwnMs + c.SharedMs)
	}
	return UsualOwnShare
}

// LearnedSteps are the steps that the model was learned from since the start.
type LearnedSteps struct {
	Steps    float64
	Tokens   float64 // of the fullest rank, over all of them
	Requests float64 // likewise
	Ms       float64
}

func (t *LearnedSteps) add(most *Rank, ms float64) {
	t.Steps, t.Tokens, t.Requests, t.Ms = t.Steps+1, t.Tokens+most.KV, t.Requests+most.Requests, t.Ms+ms
}

// Line is what the steps tell of how long they take.
type Line struct {
	Model        // its slope is 0 where the load is not seen in them
	InForce bool // else it is not good enough for policies
	Learned LearnedSteps
	Fixed   float64 // ms of a step with a prefill that do not depend on what it computes; 0: not known
}

// Line so far.
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

// Known says whether steps have taught how long they take.
func (l *Line) Known() bool { return l.Learned.Steps > 0 || l.Fixed > 0 }

// Through is the line through the mean of the steps from an earlier moment on. Steps with a prefill take as long as they were
// learned to take. If there are few others, some of these had a prefill that nobody saw. So they are taken to be no longer than
// the fixed part of a step with one.
func (l *Line) Through(before LearnedSteps) Model {
	m, t := l.Model, &l.Learned
	if t.Steps == before.Steps && m.C0Ms == 0 { // else nothing would be known, though steps before have told: all of them, however long ago
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

func usual(length, typical time.Duration) bool {
	x := length.Seconds() / typical.Seconds()
	return x >= tooShort && x <= tooLong
}

// Where a step model comes from.
const (
	Learned    = "learned"
	Configured = "configured"
	Given      = "told"
)

// Model is the one in force and where its decodes come from, empty when there is none,
// and how well the learned one fits, in force or not. What a prefill costs is as configured until it is learned.
func (s *Times) Model() (m Model, source string, r2 float64) {
	learned, r2 := s.fit()
	switch {
	case s.Law != (Model{}):
		return s.Law, Given, r2
	case s.n >= fitSteps && learned.C1Ms > 0 && r2 >= fitR2:
		learned.C0Ms = max(0, learned.C0Ms) // no step is free
		m, source = learned, Learned
	case s.Configured.C1Ms > 0:
		m, source = s.Configured, Configured
	}
	prefills := s.Configured
	if base, ok := s.withPrefills(); ok {
		prefills = base
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

// Ms is the mean step; by the model where nobody measured one, at that load in KV tokens; 0: unknown.
func (s *Times) Ms(m Model, load int64) float32 {
	if s.meanMs > 0 || m.C1Ms == 0 {
		return s.meanMs
	}
	return float32(m.C0Ms + m.C1Ms*float64(load))
}

// Samples is how many steps the model was learned from, in force or not.
func (s *Times) Samples() uint64 { return s.n }

// fewSteps are too few to say what is usual: one long step among them, because an engine stood still, would have
// the next ones taken for parts of a step.
const fewSteps = 8

// Least is the shortest time that would be usual; 0: nobody knows yet. Where some steps have a prefill, those without one tell it:
// if most have one, the others are far shorter than is usual of all, and nobody would ever hear them.
func (s *Times) Least() time.Duration {
	if s.all.seen < fewSteps {
		return 0
	}
	if s.prefills.ratio.seen == 0 || s.base == 0 {
		return time.Duration(tooShort * float64(s.all.of))
	}
	return max(time.Duration(tooShort*float64(s.base)), s.all.of/shortest)
}

// Histogram is evenkeel_step_seconds.
type Histogram struct {
	Count   uint64
	Seconds float64
	Buckets map[float64]uint64 // cumulative
}

// Histogram of all steps so far.
func (s *Times) Histogram() Histogram {
	h := Histogram{Count: s.all.seen, Seconds: s.sumMs / 1000, Buckets: make(map[float64]uint64, len(bounds))}
	var below uint64
	for i, most := range bounds {
		below += s.buckets[i]
		h.Buckets[most] = below
	}
	return h
}
