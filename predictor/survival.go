package predictor

import (
	"slices"
	"sort"
)

// maxArrayLength bounds the array countsAtMost to 256 KB even if an engine reports an absurd
// length. For longer lengths, countAtMost searches the sorted outputs.
const maxArrayLength = 1 << 16

// Survival is the distribution of past output lengths. It does not change after it is built. The
// zero value and nil have no outputs.
type Survival struct {
	history
	countsAtMost []uint32 // [v] is the number of outputs of at most v tokens, for v below the longest output and maxArrayLength
	version      uint64
}

// NewSurvival leaves out lengths below 1, because they show nothing about other requests.
func NewSurvival(outputs []int32) *Survival {
	counts, longer := countLengths(outputs)
	// Counts sort most lengths faster than comparisons would, and a table is built for each 64
	// requests.
	sorted := make([]int32, 0, len(outputs))
	for length, n := range counts {
		for range n {
			sorted = append(sorted, int32(length))
		}
		counts[length] = uint32(len(sorted)) // from here on, the number of outputs of at most this length
	}
	slices.Sort(longer)
	sorted = append(sorted, longer...)
	return &Survival{history: withSums(sorted), countsAtMost: counts, version: fingerprint(sorted)}
}

// countLengths counts the outputs below the longest one and below maxArrayLength; longer has the
// others, in any order. The longest need no count, because no output is longer.
func countLengths(outputs []int32) (counts []uint32, longer []int32) {
	longest := int32(0)
	if len(outputs) > 0 {
		longest = slices.Max(outputs)
	}
	counts = make([]uint32, max(0, min(int(longest), maxArrayLength)))
	for _, o := range outputs {
		switch {
		case o < 1:
		case int(o) < len(counts):
			counts[o]++
		default:
			longer = append(longer, o)
		}
	}
	return counts, longer
}

// countAtMost returns how many outputs are at most v. The table must not be empty.
func (s *Survival) countAtMost(v int) int {
	switch {
	case uint(v) < uint(len(s.countsAtMost)): // uint(v) is very large for v < 0
		return int(s.countsAtMost[v])
	case v < 0:
		return 0
	case v >= int(s.sorted[len(s.sorted)-1]): // at least the longest output
		return len(s.sorted)
	}
	return s.history.countAtMost(v) // v is at least maxArrayLength
}

// Predict ignores the Prompt and Key of queries.
func (s *Survival) Predict(horizon int, queries []Query, out []Prediction) {
	out = out[:len(queries)]
	if s.Len() == 0 {
		None{}.Predict(horizon, queries, out)
		return
	}
	for k := range queries {
		age := int(queries[k].Age)
		out[k] = s.predictFrom(s.countAtMost(age), s.countAtMost(age+horizon), age, horizon)
	}
}

// MeanOutput returns the mean of all outputs; 0: there are none.
func (s *Survival) MeanOutput() float64 {
	n := s.Len()
	if n == 0 {
		return 0
	}
	return float64(s.sums[n]) / float64(n)
}

// Version is the same for tables of the same outputs, and different for others, so that results of
// one table can be reused; 0 for a nil or zero table.
func (s *Survival) Version() uint64 {
	if s == nil {
		return 0
	}
	return s.version
}

// Len returns the number of outputs; 0 for a nil table.
func (s *Survival) Len() int {
	if s == nil {
		return 0
	}
	return len(s.sorted)
}

// Outputs returns a copy, ascending.
func (s *Survival) Outputs() []int32 {
	if s == nil {
		return nil
	}
	return slices.Clone(s.sorted)
}

// history is smaller than a Survival, so that each key can have one.
type history struct {
	sorted []int32
	sums   []int64 // sums[i] is the sum of the i shortest outputs
}

// newHistory leaves out lengths below 1.
func newHistory(outputs []int32) history {
	sorted := make([]int32, 0, len(outputs))
	for _, o := range outputs {
		if o > 0 {
			sorted = append(sorted, o)
		}
	}
	slices.Sort(sorted)
	return withSums(sorted)
}

// withSums does not copy sorted, which may not change afterwards.
func withSums(sorted []int32) history {
	h := history{sorted, make([]int64, len(sorted)+1)}
	for i, o := range sorted {
		h.sums[i+1] = h.sums[i] + int64(o)
	}
	return h
}

func (h *history) countAtMost(v int) int {
	return sort.Search(len(h.sorted), func(i int) bool { return int(h.sorted[i]) > v })
}

func (h *history) predict(age, horizon int) Prediction {
	return h.predictFrom(h.countAtMost(age), h.countAtMost(age+horizon), age, horizon)
}

// predictFrom predicts from the outputs that are longer than the age. untilAge and untilEnd are
// countAtMost of the age, and of the age plus the horizon.
func (h *history) predictFrom(untilAge, untilEnd, age, horizon int) Prediction {
	if untilAge == untilEnd {
		return unknown(horizon)
	}
	ended := float64(untilEnd - untilAge) // number of outputs that are longer than the age and end within the horizon
	return Prediction{
		P:  ended / float64(len(h.sorted)-untilAge),                         // as a share of all that are longer than the age
		Mu: float64(h.sums[untilEnd]-h.sums[untilAge])/ended - float64(age), // their mean length, less the age
	}
}

// fingerprint is FNV-1a, by whole lengths instead of bytes. It is never 0, which stands for a nil
// or zero table.
func fingerprint(sorted []int32) uint64 {
	f := uint64(14695981039346656037)
	for _, o := range sorted {
		f = (f ^ uint64(uint32(o))) * 1099511628211
	}
	return max(f, 1)
}
