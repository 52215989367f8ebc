package prefill

import (
	"time"

	"evenkeel/prefill/policy"
)

// kind is what shares a line of prefill times.
type kind struct{ model, hardware string }

// line is how long prefills of the model take on engines of that label. known
// is false while it is only where learning starts from.
func (t *Tier) line(model, hardware string) (line policy.Line, known bool) {
	if fit := t.fits[kind{model, hardware}]; fit != nil {
		line, known = fit.Line()
		return line, known || t.cfg.Calibration.Known
	}
	return t.cfg.Calibration.Line(), t.cfg.Calibration.Known
}

// Line is how long prefills of the model take where they begin soonest, and how
// far away that is; known is false while nothing tells.
func (t *Tier) Line(name string) (line policy.Line, rtt time.Duration, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.models[name]
	if m == nil {
		return line, 0, false
	}
	for _, c := range m.servers {
		next, told := t.line(name, c.Hardware)
		if told && c.Live && next.TPMs > 0 && (!known || next.T0Ms < line.T0Ms) {
			line, rtt, known = next, c.RTT, true
		}
	}
	return line, rtt, known
}

// learn takes what a probe's answer shows about times. Only a probe that had
// the engine to itself from its start tells how long its prefill takes.
func (t *Tier) learn(l *Lease, u Usage) {
	if !l.alone || u.PromptTokens <= 0 {
		return
	}
	hit := l.charge.tokens - l.charge.newTokens // predicted
	if u.CachedTokens >= 0 {
		hit = int64(u.CachedTokens)
	}
	of := kind{l.model, l.c.Hardware}
	fit := t.fits[of]
	if fit == nil {
		fit = NewCalibration(t.cfg.Calibration.Line(), t.cfg.Calibration.HalfLife)
		t.fits[of] = fit
	}
	ms := float64(t.now.Sub(l.sent)) / float64(time.Millisecond)
	fit.Add(float64(int64(u.PromptTokens)-hit), float64(hit), ms)
}

// forgetModels drops what was learned of models that nobody serves any more.
func (t *Tier) forgetModels() {
	gone := func(name string) bool { return t.models[name] == nil }
	for of := range t.fits {
		if gone(of.model) {
			delete(t.fits, of)
		}
	}
	for name := range t.ratios {
		if gone(name) {
			delete(t.ratios, name)
		}
	}
	for name := range t.feedback {
		if gone(name) {
			delete(t.feedback, name)
		}
	}
}
