// Package fit learns how long prefills take on each kind of engine, how many tokens of a prompt an
// engine usually computes, and how fast requests arrive. It has no clock and no lock: its owner
// passes the time of each event.
package fit

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Config is the latency of prefills until one is learned: t0 + tp * new tokens + beta2 * token
// pairs of attention.
type Config struct {
	TPMs  float64 `yaml:"tp_ms"` // per new token; if t0_ms is 0, too, prefill.Default replaces both
	T0Ms  float64 `yaml:"t0_ms"`
	Beta2 float64 `yaml:"beta2_ms"`
	Known bool    `yaml:"-"` // counts as known, although it is not learned
}

func (c Config) InitialLatency() policy.Latency {
	return policy.Latency{TPMs: c.TPMs, T0Ms: c.T0Ms, Beta2: c.Beta2}
}

// halfLife is the number of newer samples after which a sample counts half: enough to separate the
// fixed part from the time per token, and few enough to adapt within minutes when an engine
// changes.
const halfLife = 500

type engineKind struct{ model, hardware string }

// Times holds the learned latencies of all kinds of engines.
type Times struct {
	initial       Config
	calibrations  map[engineKind]*Calibration
	callbacks     map[string]*CallbackLatency // by the name of the engine's profile
	meanNewTokens float64                     // weighted mean per prompt; 0: no prompt yet
}

func New(initial Config) *Times {
	return &Times{initial: initial, calibrations: map[engineKind]*Calibration{}, callbacks: map[string]*CallbackLatency{}}
}

func (t *Times) Configure(initial Config) { t.initial = initial }

// Latency predicts how long prefills take on a kind of engine. known is false while it is only the
// configured one, unless Config.Known is set.
func (t *Times) Latency(model, hardware string) (latency LatencyModel, known bool) {
	if calibration := t.calibrations[engineKind{model, hardware}]; calibration != nil {
		latency, known = calibration.Latency()
		return latency, known || t.initial.Known
	}
	return LatencyModel{Latency: t.initial.InitialLatency()}, t.initial.Known
}

func (t *Times) Learn(model, hardware string, s Sample) {
	k := engineKind{model, hardware}
	calibration := t.calibrations[k]
	if calibration == nil {
		calibration = NewCalibration(t.initial.InitialLatency(), halfLife)
		t.calibrations[k] = calibration
	}
	calibration.Add(s)
}

// Samples is the number of prefills from which the latency was learned.
func (t *Times) Samples(model, hardware string) int {
	if calibration := t.calibrations[engineKind{model, hardware}]; calibration != nil {
		return calibration.Samples()
	}
	return 0
}

type Learned struct {
	Model, Hardware string
	*Calibration
}

// All is ordered by model and hardware.
func (t *Times) All() []Learned {
	all := make([]Learned, 0, len(t.calibrations))
	for k, calibration := range t.calibrations {
		all = append(all, Learned{k.model, k.hardware, calibration})
	}
	slices.SortFunc(all, func(a, b Learned) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Hardware, b.Hardware))
	})
	return all
}

func (t *Times) DropModels(gone func(model string) bool) {
	maps.DeleteFunc(t.calibrations, func(k engineKind, _ *Calibration) bool { return gone(k.model) })
}

// usualWeight is the weight of a new prompt in meanNewTokens.
const usualWeight = 0.05

func (t *Times) LearnNewTokens(newTokens int64) {
	if t.meanNewTokens == 0 {
		t.meanNewTokens = float64(newTokens)
	}
	t.meanNewTokens += usualWeight * (float64(newTokens) - t.meanNewTokens)
}

func (t *Times) MeanNewTokens() float64 { return t.meanNewTokens }

// CallbackLatency learns, for requests whose decode rank is chosen before the prefill, how long the
// decode engine takes to call back. Its callback says where the prefill engine must send the KV.
type CallbackLatency struct {
	meanMs float64 // weighted; 0: no callback has come
}

// callbackWeight is the weight of a new callback in meanMs.
const callbackWeight = 0.05

// CallbackLatencyOf returns the CallbackLatency of a profile, which all callers share.
func (t *Times) CallbackLatencyOf(profile string) *CallbackLatency {
	l := t.callbacks[profile]
	if l == nil {
		l = &CallbackLatency{}
		t.callbacks[profile] = l
	}
	return l
}

// Add learns how long after the choice of the decode rank the callback of its engine came.
func (l *CallbackLatency) Add(took time.Duration) {
	if l.meanMs == 0 {
		l.meanMs = ms(took)
	}
	l.meanMs += callbackWeight * (ms(took) - l.meanMs)
}

// Mean is 0 before the first callback.
func (l *CallbackLatency) Mean() time.Duration {
	return time.Duration(l.meanMs * float64(time.Millisecond))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
