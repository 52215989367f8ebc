package survey

import (
	"math"
	"math/rand/v2"

	"evenkeel/bench/trace"
)

// texts draws lengths as the engines' histograms have them.
type texts struct {
	prompts, outputs Histogram
	promptTimes      float64 // what is drawn is taken so many times, so that its mean is right
	outputTimes      float64
}

// newTexts says whether the histograms tell anything.
func newTexts(prompts, outputs Histogram) (t *texts, ok bool) {
	if prompts.total() < leastRequests || outputs.total() < leastRequests {
		return nil, false
	}
	t = &texts{prompts: prompts, outputs: outputs, promptTimes: 1, outputTimes: 1}
	const n = 20_000
	r := rand.New(rand.NewPCG(1, 2))
	var p, o float64
	for range n {
		p, o = p+t.prompts.draw(r)/n, o+t.outputs.draw(r)/n
	}
	t.promptTimes, t.outputTimes = t.prompts.mean()/p, t.outputs.mean()/o
	return t, true
}

// leastRequests must have ended before anything is foretold.
const leastRequests = 50

// next draws a request.
func (t *texts) next(r *rand.Rand) trace.Request {
	whole := func(x float64) int { return max(1, int(math.Round(x))) }
	return trace.Request{Prompt: whole(t.promptTimes * t.prompts.draw(r)), Output: whole(t.outputTimes * t.outputs.draw(r))}
}

// draw draws a value: within a bucket, its logarithm is drawn evenly.
func (h *Histogram) draw(r *rand.Rand) float64 {
	at, below := r.Float64()*h.total(), 0.0
	for i, c := range h.Counts {
		if at >= c {
			below = h.Bounds[i]
			continue
		}
		above := h.Bounds[i]
		if math.IsInf(above, 1) {
			above = 2 * below
		}
		below = max(1, below)
		return below * math.Pow(max(1, above/below), r.Float64())
	}
	return max(1, below)
}
