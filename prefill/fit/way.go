package fit

import (
	"time"

	"evenkeel/prefill/policy"
)

// Way is what is learned of how the two engines of a request meet whose decode rank is bound before its prefill.
type Way struct {
	transfer *Calibration
	callback float64 // ms, lately; 0: none came
}

// callbackWeight is what one more callback counts for in the usual time.
const callbackWeight = 0.05

// Way is that of a profile, and whoever has it may teach it.
func (t *Times) Way(profile string) *Way {
	w := t.ways[profile]
	if w == nil {
		w = &Way{transfer: NewCalibration(policy.Line{}, t.start.HalfLife)}
		t.ways[profile] = w
	}
	return w
}

// Moved learns from one request how long it took from the end of its prefill to the decode engine's first event.
func (w *Way) Moved(tokens int, took time.Duration) {
	w.transfer.Add(Sample{New: float64(tokens), Ms: ms(max(took, time.Microsecond))})
}

// Transfer is how long that is predicted to take: by a line in the prompt's tokens, or in the mean while none
// explains the times, 0 at first.
func (w *Way) Transfer(tokens int) time.Duration {
	predicted := w.transfer.Mean()
	if law, fitted := w.transfer.Law(); fitted {
		predicted = law.Ms(float64(tokens), 0)
	}
	return time.Duration(predicted * float64(time.Millisecond))
}

// CalledBack learns how long after its bind a request's decode engine said where the KV goes.
func (w *Way) CalledBack(took time.Duration) {
	if w.callback == 0 {
		w.callback = ms(took)
	}
	w.callback += callbackWeight * (ms(took) - w.callback)
}

// Callback is how long that usually takes, 0 where no engine calls back.
func (w *Way) Callback() time.Duration { return time.Duration(w.callback * float64(time.Millisecond)) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
