// Package fit learns how long prefills take on each kind of engine, how much a
// prompt of ours usually has to compute, and how fast requests arrive. It has no
// clock and no lock: its owner gives it the time of each event.
package fit

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Config is where the lines of prefill times start from: t0 + tp * new tokens +
// beta2 * the token pairs that are looked at.
type Config struct {
	TPMs  float64 `yaml:"tp_ms"` // 0, with t0_ms 0 too: nothing is known before it was learned
	T0Ms  float64 `yaml:"t0_ms"`
	Beta2 float64 `yaml:"beta2_ms"`
	Known bool    `yaml:"-"` // the line is used as it is; else only once it was learned
}

// Line is the line that learning starts from.
func (c Config) Line() policy.Line {
	return policy.Line{TPMs: c.TPMs, T0Ms: c.T0Ms, Beta2: c.Beta2}
}

// halfLife is the number of newer samples after which a sample counts half: enough samples to tell the fixed part of
// a prefill from its slope, and few enough that a line follows, within minutes, an engine whose load or batch has
// changed.
const halfLife = 500

// kind identifies the engines that share a line of prefill times.
type kind struct{ model, hardware string }

// Times has the lines of all kinds.
type Times struct {
	start Config
	lines map[kind]*Calibration
	ways  map[string]*Way // by profile
	usual float64         // new tokens of a prompt of ours, lately
}

// New returns times of which nothing is learned yet.
func New(start Config) *Times {
	return &Times{start: start, lines: map[kind]*Calibration{}, ways: map[string]*Way{}}
}

// Configure changes where lines start of which nothing is learned yet.
func (t *Times) Configure(start Config) { t.start = start }

// Law is how long prefills of the model take on engines with that label. known is false while it is only the line
// that learning starts from.
func (t *Times) Law(model, hardware string) (law Law, known bool) {
	if calibration := t.lines[kind{model, hardware}]; calibration != nil {
		law, known = calibration.Law()
		return law, known || t.start.Known
	}
	return Law{Line: t.start.Line()}, t.start.Known
}

// Learn learns from one prefill.
func (t *Times) Learn(model, hardware string, s Sample) {
	k := kind{model, hardware}
	calibration := t.lines[k]
	if calibration == nil {
		calibration = NewCalibration(t.start.Line(), halfLife)
		t.lines[k] = calibration
	}
	calibration.Add(s)
}

// Samples is how many prefills the line of a model and a label was learned from.
func (t *Times) Samples(model, hardware string) int {
	if calibration := t.lines[kind{model, hardware}]; calibration != nil {
		return calibration.Samples()
	}
	return 0
}

// Learned is what was learned of one kind.
type Learned struct {
	Model, Hardware string
	*Calibration
}

// All is what was learned of each kind, by model and hardware.
func (t *Times) All() []Learned {
	all := make([]Learned, 0, len(t.lines))
	for k, calibration := range t.lines {
		all = append(all, Learned{k.model, k.hardware, calibration})
	}
	slices.SortFunc(all, func(a, b Learned) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Hardware, b.Hardware))
	})
	return all
}

// Forget drops the lines of the models that are gone.
func (t *Times) Forget(gone func(model string) bool) {
	maps.DeleteFunc(t.lines, func(k kind, _ *Calibration) bool { return gone(k.model) })
}

// usualWeight is the weight of one more prompt in the mean.
const usualWeight = 0.05

// Computes learns how many tokens of one of our prompts an engine has to compute.
func (t *Times) Computes(newTokens int64) {
	if t.usual == 0 {
		t.usual = float64(newTokens)
	}
	t.usual += usualWeight * (float64(newTokens) - t.usual)
}

// Usual is how many tokens a prompt of ours has to compute, lately.
func (t *Times) Usual() float64 { return t.usual }

// Way is what is learned of how the two engines of a request meet, if the decode rank is bound before the prefill.
type Way struct {
	callback float64 // ms that a callback takes, lately; 0: none has come
}

// callbackWeight is the weight of one more callback in the mean.
const callbackWeight = 0.05

// Way returns the Way of a profile. All who ask share it, and may teach it.
func (t *Times) Way(profile string) *Way {
	w := t.ways[profile]
	if w == nil {
		w = &Way{}
		t.ways[profile] = w
	}
	return w
}

// CalledBack learns how long after its bind a request's decode engine said where the KV goes.
func (w *Way) CalledBack(took time.Duration) {
	if w.callback == 0 {
		w.callback = ms(took)
	}
	w.callback += callbackWeight * (ms(took) - w.callback)
}

// Callback is how long a callback usually takes; 0: no engine calls back.
func (w *Way) Callback() time.Duration { return time.Duration(w.callback * float64(time.Millisecond)) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
