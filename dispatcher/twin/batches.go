package twin

import "math"

// Batches are the steps of a replay by when they began, in parts of the same length.
type Batches [batches]struct {
	steps int
	ms    float64
}

// batches are enough to see how unsteady a mean is, and so few that each is much longer than a request.
const batches = 8

// add takes in a step that begins after such a share of the time.
func (b *Batches) add(after, length float64) {
	at := &b[min(batches-1, int(batches*after))]
	at.steps++
	at.ms += length
}

// Mean is the mean step; 0: there was none.
func (b *Batches) Mean() float64 {
	steps, ms := 0, 0.0
	for _, part := range b {
		steps, ms = steps+part.steps, ms+part.ms
	}
	if steps == 0 {
		return 0
	}
	return ms / float64(steps)
}

// apart is the standard error of the difference of two means, in ms: how unsteady it is from part to part.
func (b *Batches) apart(other *Batches) float64 {
	n, sum, squares := 0., 0., 0.
	for i := range b {
		if b[i].steps > 0 && other[i].steps > 0 {
			d := b[i].ms/float64(b[i].steps) - other[i].ms/float64(other[i].steps)
			n, sum, squares = n+1, sum+d, squares+d*d
		}
	}
	if n < 2 {
		return 0
	}
	return math.Sqrt(max(0, squares-sum*sum/n) / (n - 1) / n)
}
