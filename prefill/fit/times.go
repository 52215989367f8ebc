// Package fit learns how long prefills take on each kind of engine, how many tokens of a prompt an engine usually has to
// compute, and how fast requests arrive. It has no clock and no lock: its owner passes the time of each event.
package fit

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/prefill/policy"
)

// Config is the latency that predicts prefill times until one is learned from measured times. By it, a prefill takes
// t0 + tp * new tokens + beta2 * token pairs of attention.
type Config struct {
	TPMs  float64 `yaml:"tp_ms"` // ms per new token; if t0_ms is 0, too, prefill.Default replaces both
	T0Ms  float64 `yaml:"t0_ms"`
	Beta2 float64 `yaml:"beta2_ms"`
	Known bool    `yaml:"-"` // the configured latency counts as known, although it is not learned
}

// InitialLatency returns the configured latency, which holds until one is learned.
func (c Config) InitialLatency() policy.Latency {
	return policy.Latency{TPMs: c.TPMs, T0Ms: c.T0Ms, Beta2: c.Beta2}
}

// halfLife is the number of newer samples after which a sample counts half. It is large enough to separate the fixed part
// of a prefill's time from the time per token, and small enough that a latency adapts within minutes when an engine changes.
const halfLife = 500

// engineKind identifies the engines that share a learned latency.
type engineKind struct{ model, hardware string }

// Times holds the learned latencies of all kinds of engines.
type Times struct {
	initial       Config
	calibrations  map[engineKind]*Calibration
	callbacks     map[string]*CallbackLatency // by the name of the engine's profile
	meanNewTokens float64                     // weighted mean of the new tokens per prompt; 0: no prompt yet
}

// New returns Times that have learned nothing yet.
func New(initial Config) *Times {
	return &Times{initial: initial, calibrations: map[engineKind]*Calibration{}, callbacks: map[string]*CallbackLatency{}}
}

// Configure changes the latency with which new kinds of engines start.
func (t *Times) Configure(initial Config) { t.initial = initial }

// Latency predicts how long prefills of a model take on engines with a hardware label. known is false while nothing is learned
// and latency is only the configured one, unless the config says that this one is reliable (Config.Known).
func (t *Times) Latency(model, hardware string) (latency LatencyModel, known bool) {
	if calibration := t.calibrations[engineKind{model, hardware}]; calibration != nil {
		latency, known = calibration.Latency()
		return latency, known || t.initial.Known
	}
	return LatencyModel{Latency: t.initial.InitialLatency()}, t.initial.Known
}

// Learn adds a prefill to the samples of its model and hardware label.
func (t *Times) Learn(model, hardware string, s Sample) {
	k := engineKind{model, hardware}
	calibration := t.calibrations[k]
	if calibration == nil { // the first prefill on an engine of this kind
		calibration = NewCalibration(t.initial.InitialLatency(), halfLife)
		t.calibrations[k] = calibration
	}
	calibration.Add(s)
}

// Samples is the number of prefills from which the latency of a model and a hardware label was learned.
func (t *Times) Samples(model, hardware string) int {
	if calibration := t.calibrations[engineKind{model, hardware}]; calibration != nil {
		return calibration.Samples()
	}
	return 0
}

// Learned is the learned latency of one kind of engine.
type Learned struct {
	Model, Hardware string
	*Calibration
}

// All returns the learned latencies, ordered by model and hardware.
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

// DropModels drops the learned latencies of models for which gone returns true.
func (t *Times) DropModels(gone func(model string) bool) {
	maps.DeleteFunc(t.calibrations, func(k engineKind, _ *Calibration) bool { return gone(k.model) })
}

// usualWeight is the weight of a new prompt in meanNewTokens.
const usualWeight = 0.05

// LearnNewTokens learns from one prompt how many tokens an engine usually has to compute.
func (t *Times) LearnNewTokens(newTokens int64) {
	if t.meanNewTokens == 0 { // the first prompt: the mean begins with its tokens
		t.meanNewTokens = float64(newTokens)
	}
	t.meanNewTokens += usualWeight * (float64(newTokens) - t.meanNewTokens)
}

// MeanNewTokens is the recent mean number of tokens that an engine has to compute for a prompt.
func (t *Times) MeanNewTokens() float64 { return t.meanNewTokens }

// CallbackLatency learns, for requests whose decode rank is chosen before the prefill, how long the decode engine takes to call back.
// In its callback the decode engine says where the prefill engine must send the KV.
type CallbackLatency struct {
	meanMs float64 // weighted mean of the time until a callback, in ms; 0: none has come
}

// callbackWeight is the weight of a new callback in CallbackLatency.meanMs.
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
	if l.meanMs == 0 { // the first callback: the mean begins with its time
		l.meanMs = ms(took)
	}
	l.meanMs += callbackWeight * (ms(took) - l.meanMs)
}

// Mean is the usual time until a callback; 0: no callback has come.
func (l *CallbackLatency) Mean() time.Duration {
	return time.Duration(l.meanMs * float64(time.Millisecond))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
