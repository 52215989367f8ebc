package predictor

import "math"

// What a policy asks that looks at whole distributions, not at one horizon:
// the chance to be there so many steps ahead, and the end at a quantile.

// Quantiles writes the tokens left, at least 1, at the quantiles phase + k/n (less 1 from 1
// on), k = 0..n-1: Resid for a request's sampled ends in one call. Past all
// history they never end: MaxInt32.
func (s *Survival) Quantiles(age int, phase float64, left []int32) {
	n := s.Len()
	i := n
	if n > 0 {
		i = s.rank(age)
	}
	if i == n {
		for k := range left {
			left[k] = math.MaxInt32
		}
		return
	}
	s.quantiles(i, age, phase, left)
}

// quantiles answers from the rank i of the age; somebody got older.
func (h *history) quantiles(i, age int, phase float64, left []int32) {
	alive := h.sorted[i:]
	each, n := 1/float64(len(left)), float64(len(alive))
	for k := range left {
		u := phase + float64(k)*each
		if u >= 1 {
			u--
		}
		left[k] = alive[min(int(u*n), len(alive)-1)] - int32(age)
	}
}

// Of Exact, without a key: all outputs.

// Ratio is Survival's, of all outputs.
func (e *Exact) Ratio(age, ahead int) float64 { return e.all.Ratio(age, ahead) }

// Resid is Survival's, of all outputs.
func (e *Exact) Resid(age int, u float64) float64 { return e.all.Resid(age, u) }

// MeanOutput is the mean of all outputs.
func (e *Exact) MeanOutput() float64 { return e.all.MeanOutput() }

// Version is that of all outputs: each that enters a bucket enters these too.
func (e *Exact) Version() uint64 { return e.all.Version() }

// RatioOf is Ratio from the narrowest bucket that is believed.
func (e *Exact) RatioOf(prompt int32, key uint64, age, ahead int) float64 {
	if b := e.byKey[key]; key != 0 && b != nil {
		n := len(b.sorted)
		if alive := n - b.rank(age); alive > 0 {
			return float64(n-b.rank(age+ahead)) / float64(alive)
		}
		return 1
	}
	return e.table(prompt).Ratio(age, ahead)
}

// ResidOf is Resid from the narrowest bucket that is believed.
func (e *Exact) ResidOf(prompt int32, key uint64, age int, u float64) float64 {
	if b := e.byKey[key]; key != 0 && b != nil {
		i, n := b.rank(age), len(b.sorted)
		if i == n {
			return math.Inf(1)
		}
		return float64(int(b.sorted[min(i+int(u*float64(n-i)), n-1)]) - age)
	}
	return e.table(prompt).Resid(age, u)
}

// table is the one for prompts of about this length, or that of all.
func (e *Exact) table(prompt int32) *Survival {
	if len(e.byLength) > 0 {
		if b := e.byLength[lengthBucket(e.edges, prompt)]; b.Len() >= MinLengthOutputs {
			return b
		}
	}
	return e.all
}
