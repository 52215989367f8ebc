package predictor

import (
	"slices"
	"sort"
)

// denseMost is the longest output whose rank is read from an array; beyond it
// we search. 256 KB a table at most, and an engine that reports an absurd
// length cannot make us allocate for it.
const denseMost = 1 << 16

// Survival is the empirical distribution of past output lengths. It never
// changes once built. The zero value, and nil, know no history.
type Survival struct {
	history
	atMost  []uint32 // [v] = outputs <= v, for v below the longest output and denseMost
	version uint64
}

// NewSurvival builds the table of finished outputs, in any order. Lengths
// below 1 are left out: nothing was generated, so nothing was learned.
func NewSurvival(outputs []int32) *Survival {
	longest := int32(0)
	if len(outputs) > 0 {
		longest = slices.Max(outputs)
	}
	s := &Survival{atMost: make([]uint32, max(0, min(int(longest), denseMost)))}
	var longer []int32 // than the array reaches
	for _, o := range outputs {
		switch {
		case o < 1:
		case int(o) < len(s.atMost):
			s.atMost[o]++
		default:
			longer = append(longer, o)
		}
	}
	// Counting sorts the lengths that the array reaches: a table is built for every
	// 64 requests that finish.
	sorted := make([]int32, 0, len(outputs))
	for v, n := range s.atMost {
		for range n {
			sorted = append(sorted, int32(v))
		}
		s.atMost[v] = uint32(len(sorted))
	}
	slices.Sort(longer)
	s.history = sumUp(append(sorted, longer...))
	s.version = fingerprint(s.sorted)
	return s
}

// rank returns how many outputs were at most v. The table is not empty.
func (s *Survival) rank(v int) int {
	switch {
	case uint(v) < uint(len(s.atMost)):
		return int(s.atMost[v])
	case v < 0:
		return 0
	case v >= int(s.sorted[len(s.sorted)-1]):
		return len(s.sorted)
	}
	return s.history.rank(v)
}

// Predict answers every query from the same table: prompt and key tell it nothing.
func (s *Survival) Predict(horizon int, queries []Query, out []Prediction) {
	out = out[:len(queries)]
	if s.Len() == 0 {
		None{}.Predict(horizon, queries, out)
		return
	}
	for k := range queries {
		a := int(queries[k].Age)
		out[k] = s.between(s.rank(a), s.rank(a+horizon), a, horizon)
	}
}

// MeanOutput is the mean of all outputs, 0 without any.
func (s *Survival) MeanOutput() float64 {
	n := s.Len()
	if n == 0 {
		return 0
	}
	return float64(s.sums[n]) / float64(n)
}

// Version differs between tables that differ, and is the same for tables of
// the same outputs: what was computed from the one holds for the other.
func (s *Survival) Version() uint64 {
	if s == nil {
		return 0
	}
	return s.version
}

// Len is how many outputs the table was built from.
func (s *Survival) Len() int {
	if s == nil {
		return 0
	}
	return len(s.sorted)
}

// Outputs returns a copy of the table's outputs, ascending.
func (s *Survival) Outputs() []int32 {
	if s == nil {
		return nil
	}
	return slices.Clone(s.sorted)
}

// history is sorted output lengths with their running sums: enough to answer
// by binary search, small enough for one a bucket.
type history struct {
	sorted []int32
	sums   []int64 // sums[i] = the i shortest together
}

// newHistory sorts output lengths and sums them up. Lengths below 1 are left out.
func newHistory(outputs []int32) history {
	sorted := make([]int32, 0, len(outputs))
	for _, o := range outputs {
		if o > 0 {
			sorted = append(sorted, o)
		}
	}
	slices.Sort(sorted)
	return sumUp(sorted)
}

func sumUp(sorted []int32) history {
	h := history{sorted, make([]int64, len(sorted)+1)}
	for i, o := range sorted {
		h.sums[i+1] = h.sums[i] + int64(o)
	}
	return h
}

// rank returns how many outputs were at most v.
func (h *history) rank(v int) int {
	return sort.Search(len(h.sorted), func(i int) bool { return int(h.sorted[i]) > v })
}

// predict answers for one age.
func (h *history) predict(age, horizon int) Prediction {
	return h.between(h.rank(age), h.rank(age+horizon), age, horizon)
}

// between predicts from two numbers of outputs: untilAge that were no longer than the age of the request, and untilEnd that were no
// longer than the age plus the horizon.
func (h *history) between(untilAge, untilEnd, age, horizon int) Prediction {
	if untilAge == untilEnd { // no output was that long, or none ended in the window
		return unknown(horizon)
	}
	ended := float64(untilEnd - untilAge)
	return Prediction{
		P:  ended / float64(len(h.sorted)-untilAge),
		Mu: float64(h.sums[untilEnd]-h.sums[untilAge])/ended - float64(age),
	}
}

// fingerprint is FNV-1a over whole lengths, never 0.
func fingerprint(sorted []int32) uint64 {
	f := uint64(14695981039346656037)
	for _, o := range sorted {
		f = (f ^ uint64(uint32(o))) * 1099511628211
	}
	return max(f, 1)
}
