package survey

import (
	"math"
	"math/rand/v2"
	"slices"

	"evenkeel/bench/lab/trace"
	"evenkeel/engine"
)

// texts draws lengths as the engines' histograms have them.
type texts struct{ prompts, outputs fine }

// newTexts says whether the histograms tell anything.
func newTexts(prompts, outputs Histogram) (t *texts, ok bool) {
	if prompts.total() < leastRequests || outputs.total() < leastRequests {
		return nil, false
	}
	return &texts{prompts: prompts.fine(), outputs: outputs.fine()}, true
}

// leastRequests must have ended before anything is foretold.
const leastRequests = 50

// next draws a request.
func (t *texts) next(r *rand.Rand) trace.Request {
	whole := func(x float64) int { return max(1, int(math.Round(x))) }
	return trace.Request{Prompt: whole(t.prompts.draw(r)), Output: whole(t.outputs.draw(r))}
}

// fine is a histogram whose lengths lie in cells that are narrower than its buckets were.
type fine struct {
	from  []float64 // of each cell, and the end of the last one
	below []float64 // how many lengths lie in the cells up to here
}

// Buckets are cut into so many cells.
const cells = 24

// fine puts lengths into their buckets as the histogram counts them. Where in a bucket, it does not
// tell: their logarithms have a density there which goes from the mean of this bucket's and the one
// before to that of this one's and the next, and then all are drawn up or down until their mean is
// the one that was seen. Of all ways to reach it this adds the least: long ones move the most.
func (h *Histogram) fine() fine {
	var l fine
	var weights []float64
	for i := range h.Counts {
		from, to := h.edges(i)
		here := h.density(i)
		a, b := (h.density(i-1)+here)/2, (here+h.density(i+1))/2
		for k := range cells {
			l.from = append(l.from, from*math.Pow(to/from, float64(k)/cells))
			weights = append(weights, a+(b-a)*(float64(k)+0.5)/cells)
		}
		if i == len(h.Counts)-1 {
			l.from = append(l.from, to)
		}
	}
	mean, least, most := h.mean(), -64.0, 64.0 // how strongly they are drawn up, for each mean length
	if !(mean > 0) {                           // the page has no sum
		mean, least, most = 1, 0, 0
	}
	for range 40 {
		pull := (least + most) / 2
		if l.fill(h.Counts, weights, pull/mean) < mean {
			least = pull
		} else {
			most = pull
		}
	}
	return l
}

// fill puts the lengths into the cells, and returns their mean.
func (l *fine) fill(counts, weights []float64, pull float64) (mean float64) {
	l.below = l.below[:0]
	below, before := 0.0, 0.0
	for i, count := range counts {
		var in [cells]float64
		sum := 0.0
		strongest := l.middle((i+1)*cells - 1)
		if pull < 0 {
			strongest = l.middle(i * cells)
		}
		for k := range cells {
			in[k] = weights[i*cells+k] * math.Exp(pull*(l.middle(i*cells+k)-strongest))
			sum += in[k]
		}
		for k := range cells {
			if sum > 0 {
				n := (count - before) * in[k] / sum
				below, mean = below+n, mean+n*l.middle(i*cells+k)
			}
			l.below = append(l.below, below)
		}
		before = count
	}
	return mean / below
}

func (l *fine) middle(cell int) float64 { return (l.from[cell] + l.from[cell+1]) / 2 }

// draw draws a length.
func (l *fine) draw(r *rand.Rand) float64 {
	at := r.Float64() * l.below[len(l.below)-1]
	cell, _ := slices.BinarySearch(l.below, at)
	cell = min(cell, len(l.below)-1)
	return l.from[cell] + (l.from[cell+1]-l.from[cell])*r.Float64()
}

// density of a bucket's logarithm; there is none beside the first and the last.
func (h *Histogram) density(i int) float64 {
	if i < 0 || i >= len(h.Counts) {
		return 0
	}
	n := h.Counts[i]
	if i > 0 {
		n -= h.Counts[i-1]
	}
	from, to := h.edges(i)
	return n / math.Log(to/from)
}

// edges of a bucket, which are at least 1 and differ. The last one may reach twice as far as the
// mean of its lengths can lie.
func (h *Histogram) edges(i int) (from, to float64) {
	from, to = 1, h.Bounds[i]
	if i > 0 {
		from = max(1, h.Bounds[i-1])
	}
	if math.IsInf(to, 1) {
		to = 2 * from
		if n := h.Counts[i]; i == 0 && n > 0 {
			to = max(to, 2*h.Sum/n)
		} else if i > 0 && n > h.Counts[i-1] {
			to = max(to, 2*h.Sum/(n-h.Counts[i-1]))
		}
	}
	return from, max(min(to, engine.MostContext), 1.01*from)
}
