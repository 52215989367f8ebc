// Package step learns how long the steps of a barrier group take, from the steps that
// its streams tell of.
package step

import (
	"math"
	"slices"
	"time"
)

// Model is how long a step of a barrier group takes: c0 + c1 * the KV tokens
// of its fullest rank. C1Ms 0: unknown. The rest is of ranks that prefill, too.
type Model struct {
	C0Ms float64 `yaml:"c0_ms"` // whatever the load
	C1Ms float64 `yaml:"c1_ms"` // per KV token

	RequestMs float64 `yaml:"request_ms"`        // per request of the fullest rank
	OwnMs     float64 `yaml:"own_prefill_ms"`    // per prompt token that a rank computes in the step
	SharedMs  float64 `yaml:"shared_prefill_ms"` // likewise, of what all ranks do together for it
	PrefillMs float64 `yaml:"prefill_step_ms"`   // where there is any prompt
}

// When a model learned on line is used: one of fewer steps, or of times that hardly follow the load,
// says less than none.
const (
	fitSteps = 200 // regressed at least
	fitR2    = 0.3
)

// halfLife of a step in the regression, in steps.
const halfLife = 500

// regression is least squares of step times on the largest load, the past
// fading.
type regression struct {
	n                   uint64 // steps taken in
	w, x, y, xx, xy, yy float64
}

var fade = math.Exp2(-1. / halfLife)

func (r *regression) add(tokens int64, ms float64) {
	x := float64(tokens)
	r.n++
	r.w = r.w*fade + 1
	r.x, r.y = r.x*fade+x, r.y*fade+ms
	r.xx, r.xy, r.yy = r.xx*fade+x*x, r.xy*fade+x*ms, r.yy*fade+ms*ms
}

// fit is the line and the share of the variance it explains; zeros while the
// load never changed.
func (r *regression) fit() (m Model, r2 float64) {
	if r.w == 0 {
		return Model{}, 0
	}
	mx, my := r.x/r.w, r.y/r.w
	vx, vy, cov := r.xx/r.w-mx*mx, r.yy/r.w-my*my, r.xy/r.w-mx*my
	if vx <= 1e-12*mx*mx || vy <= 1e-12*my*my { // rounding is all there is
		return Model{}, 0
	}
	m.C1Ms = cov / vx
	m.C0Ms = my - m.C1Ms*mx
	return m, cov * cov / (vx * vy)
}

// Times are what a group's steps have taught.
type Times struct {
	regression
	Configured Model // in force until one is learned; zero: none
	Law        Model // what is told and never learned; zero: nothing

	recent  [33]time.Duration // lengths, for their median
	at      int
	seen    uint64
	typical time.Duration // their median
	meanMs  float32       // fading mean, half-life 32 steps
	tokens  float64       // of a request in a step, fading mean; 0: not known
	taught  Taught
	buckets [len(bounds)]uint64
	sumMs   float64
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
)

// Add takes in the length of a step.
func (s *Times) Add(length time.Duration) {
	if length <= 0 {
		return
	}
	s.remember(length)
	seconds := length.Seconds()
	s.sumMs += seconds * 1000
	if i, _ := slices.BinarySearch(bounds[:], seconds); i < len(bounds) {
		s.buckets[i]++
	}
	if !s.usual(length) {
		return
	}
	ms := seconds * 1000
	if s.meanMs == 0 {
		s.meanMs = float32(ms)
	}
	s.meanMs += (float32(ms) - s.meanMs) / 46 // 1 - 2^(-1/32)
}

// Teach takes in what the fullest rank held in a step, how many tokens a request
// got in it, and how long it took. Where tokens come late, several steps are told
// as one: it is as long as all of them, and brings as many tokens.
func (s *Times) Teach(load int64, tokens float64, length time.Duration) {
	if load <= 0 || length <= 0 || tokens <= 0 {
		return
	}
	if s.tokens == 0 {
		s.tokens = tokens
	}
	several := tokens > severalSteps*s.tokens
	s.tokens += (min(tokens, 2*s.tokens) - s.tokens) / 46
	if !several && s.usual(length) {
		s.regression.add(load, length.Seconds()*1000)
		s.taught.add(load, length.Seconds()*1000)
	}
}

// Taught are the steps that taught something since the start.
type Taught struct {
	Steps  float64
	Tokens float64 // of the fullest rank, over all of them
	Ms     float64
}

func (t *Taught) add(tokens int64, ms float64) {
	t.Steps, t.Tokens, t.Ms = t.Steps+1, t.Tokens+float64(tokens), t.Ms+ms
}

// Line is what the steps tell of how long they take.
type Line struct {
	Model        // its slope is 0 where the load is not seen in them
	InForce bool // else it is not good enough for policies
	Taught  Taught
}

// Line so far.
func (s *Times) Line() Line {
	l := Line{Taught: s.taught}
	l.Model, _, _ = s.Model()
	if l.InForce = l.C1Ms > 0; l.InForce {
		return l
	}
	if learned, r2 := s.fit(); s.n >= fitSteps && learned.C1Ms > 0 && r2*s.w > sureSlope*sureSlope*(1-r2) {
		l.C1Ms = learned.C1Ms
	}
	return l
}

// sureSlope is how many times its standard error a slope is at least.
const sureSlope = 4

// Through is the line with the slope of m through the mean of the steps from an earlier moment until t.
func (t Taught) Through(m Model, before Taught) Model {
	if n := t.Steps - before.Steps; n > 0 {
		m.C0Ms = max(0, (t.Ms-before.Ms-m.C1Ms*(t.Tokens-before.Tokens))/n)
	}
	return m
}

func (s *Times) usual(length time.Duration) bool {
	x := length.Seconds() / s.typical.Seconds()
	return x >= tooShort && x <= tooLong
}

func (s *Times) remember(length time.Duration) {
	s.recent[s.at] = length
	s.at = (s.at + 1) % len(s.recent)
	s.seen++
	sorted := s.recent
	all := sorted[:min(s.seen, uint64(len(sorted)))]
	slices.Sort(all)
	s.typical = all[len(all)/2]
}

// Where a step model comes from.
const (
	Learned    = "learned"
	Configured = "configured"
	Told       = "told"
)

// Model is the one in force and where it comes from, empty when there is none,
// and how well the learned one fits, in force or not.
func (s *Times) Model() (m Model, source string, r2 float64) {
	learned, r2 := s.fit()
	switch {
	case s.Law != (Model{}):
		return s.Law, Told, r2
	case s.n >= fitSteps && learned.C1Ms > 0 && r2 >= fitR2:
		learned.C0Ms = max(0, learned.C0Ms) // no step is free
		return learned, Learned, r2
	case s.Configured.C1Ms > 0:
		return s.Configured, Configured, r2
	}
	return Model{}, "", r2
}

// Ms is the mean step; by the model where nobody measured one; 0: unknown.
func (s *Times) Ms(m Model, load int64) float32 {
	if s.meanMs > 0 || m.C1Ms == 0 {
		return s.meanMs
	}
	return float32(m.C0Ms + m.C1Ms*float64(load))
}

// Samples is how many steps the model was learned from, in force or not.
func (s *Times) Samples() uint64 { return s.n }

// Least is the shortest time that would be usual.
func (s *Times) Least() time.Duration { return time.Duration(tooShort * float64(s.typical)) }

// Histogram is evenkeel_step_seconds.
type Histogram struct {
	Count   uint64
	Seconds float64
	Buckets map[float64]uint64 // cumulative
}

// Histogram of all steps so far.
func (s *Times) Histogram() Histogram {
	h := Histogram{Count: s.seen, Seconds: s.sumMs / 1000, Buckets: make(map[float64]uint64, len(bounds))}
	var below uint64
	for i, most := range bounds {
		below += s.buckets[i]
		h.Buckets[most] = below
	}
	return h
}
