package step

import "slices"

// Form says which rows of its ranks a step computes. A row is a token that a rank processes in the step. Attention and dense layers compute
// the rank's own rows, and experts the rows of all ranks. How an engine pads rows for graphs changes both numbers.
type Form uint8

// The forms. In vLLM all ranks take the same graph or none (v1/worker/dp_utils.py, 0.32; v1/worker/gpu/dp_utils.py, 0.33). In SGLang
// 0.5.23 with deepep, moe_dense_tp_size 1 and enable_dp_lm_head each rank has a graph of its own.
const (
	Eager      Form = iota // no rank is padded
	Unmasked               // in graphs: each rank runs as many rows as the largest one, and experts compute these, too
	Masked                 // in graphs, but experts skip the rows that pad
	OwnBuckets             // in graphs: each rank is padded to a size of its own, and experts skip the rows that pad
)

// Way returns how the cost of requests enters a step of the form, if padding is left out.
func (f Form) Way() Way {
	if f == Eager || f == OwnBuckets {
		return Fullest
	}
	return TwoRanks
}

// Forms has the names of the forms.
var Forms = [...]string{Eager: "eager", Unmasked: "graphs, unmasked", Masked: "graphs, masked", OwnBuckets: "own buckets"}

func (f Form) String() string { return Forms[f] }

// Law is how long a step takes, with its form. The Model's RequestMs is what each row of a rank costs that rank.
type Law struct {
	Model
	Form   Form
	MostMs float64 // ms for each row of the rank with most rows: the time of sending
	MeanMs float64 // ms for each row that a rank has on average: the time of experts
	Sizes  []int   // numbers of rows for which graphs are captured, ascending; a step with more rows than the last runs without a graph
}

// Captured returns the sizes of graphs that vLLM captures, up to the largest: 1, 2, 4, then in steps of 8 to 256, then in steps of 16
// (config/vllm.py, 0.32).
func Captured(largest int) (sizes []int) {
	for _, n := range []int{1, 2, 4} {
		if n <= largest {
			sizes = append(sizes, n)
		}
	}
	for n := 8; n <= largest; {
		sizes = append(sizes, n)
		if n < 256 {
			n += 8
		} else {
			n += 16
		}
	}
	return sizes
}

// padded returns the number of rows of the smallest graph that has room for so many rows; false: no graph is large enough.
func (l *Law) padded(rows float64) (float64, bool) {
	at, _ := slices.BinarySearchFunc(l.Sizes, rows, func(size int, rows float64) int {
		switch {
		case float64(size) < rows:
			return -1
		case float64(size) > rows:
			return 1
		}
		return 0
	})
	if at == len(l.Sizes) {
		return rows, false
	}
	return float64(l.Sizes[at]), true
}

// Plain says whether the law is just its Model: only the slowest rank sets the length of a step.
func (l *Law) Plain() bool { return l.Form == Eager && l.MostMs == 0 && l.MeanMs == 0 }

// Ms returns how long a step of these ranks takes, in ms.
func (l *Law) Ms(ranks []Rank) float64 {
	if len(ranks) == 0 {
		return l.C0Ms
	}
	if l.Plain() {
		return l.Model.Ms(ranks)
	}
	form, widest, mean := l.stepForm(ranks)
	own := 0.0
	for i := range ranks {
		own = max(own, l.ownMs(&ranks[i], form, widest))
	}
	switch form {
	case Eager:
		return l.C0Ms + own + l.eager(ranks)
	case Unmasked:
		mean = widest
	case Masked, OwnBuckets:
	}
	return l.C0Ms + own + l.MostMs*widest + l.MeanMs*mean
}

// AppendWaits appends how many ms each rank of a step waits for the rank whose own work takes longest.
func (l *Law) AppendWaits(dst []float64, ranks []Rank) []float64 {
	if len(ranks) == 0 {
		return dst
	}
	form, widest, _ := l.stepForm(ranks)
	from, own := len(dst), 0.0
	for i := range ranks {
		dst = append(dst, l.ownMs(&ranks[i], form, widest))
		own = max(own, dst[from+i])
	}
	for i := range dst[from:] {
		dst[from+i] = own - dst[from+i]
	}
	return dst
}

// stepForm returns in which form these ranks step, the rows of the rank with most rows, padded to the size of a graph, and the mean rows
// of a rank.
func (l *Law) stepForm(ranks []Rank) (form Form, widest, mean float64) {
	most, sum := 0.0, 0.0
	for i := range ranks {
		n := ranks[i].rows()
		most, sum = max(most, n), sum+n
	}
	widest, fits := l.padded(most)
	if form = l.Form; !fits {
		form = Eager // if one rank has too many rows for a graph, no rank runs a graph
	}
	return form, widest, sum / float64(len(ranks))
}

// ownMs returns how many ms the rank's own work takes.
func (l *Law) ownMs(r *Rank, form Form, widest float64) float64 {
	return l.C1Ms*r.KV + l.rowsMs(r, form, widest)
}

// rows returns how many rows the rank has: one for each request that decodes, and one for each prompt token.
func (r *Rank) rows() float64 { return r.Requests + r.Prompt }

// rowsMs returns how many ms a rank's own rows take.
func (l *Law) rowsMs(r *Rank, form Form, widest float64) float64 {
	switch form {
	case Unmasked, Masked:
		return l.RequestMs * widest
	case OwnBuckets:
		n, _ := l.padded(r.rows())
		return l.RequestMs * n
	case Eager:
	}
	return l.RequestMs*r.Requests + l.OwnMs*r.Prompt
}

// eager returns how many ms a step without graphs takes in addition to the own work of the slowest rank.
func (l *Law) eager(ranks []Rank) (ms float64) {
	most, sum := 0.0, 0.0
	for i := range ranks {
		most, sum = max(most, ranks[i].Requests), sum+ranks[i].Requests
	}
	ms = l.MostMs*most + l.MeanMs*sum/float64(len(ranks))
	if prompts := meanPrompt(ranks); prompts > 0 {
		ms += l.SharedMs*prompts + l.PrefillMs
	}
	return ms
}

// Assumed returns the law in the form that policies decide by: a model of the ranks' own loads, and what a request weighs in the load of
// its rank and on the rank with most requests. With graphs, a request costs only in the second way, but half of its weight is counted in
// the first, see Halves. Captured sizes are left out, because a rank that is just below a size now is above it a few steps later.
func (l *Law) Assumed() (load Model, weights Weights) {
	load = l.Model
	if l.C1Ms <= 0 {
		return load, weights
	}
	switch l.Form {
	case Unmasked:
		load.RequestMs += l.MostMs + l.MeanMs
		weights = Halves(load.Weight())
	case Masked:
		load.RequestMs += l.MostMs
		weights = Halves(load.Weight())
	case Eager, OwnBuckets:
		weights = Weights{load.Weight(), l.MostMs / l.C1Ms}
	}
	return load, weights
}

// Level returns the law as a Model for ranks with equal loads: for these, all forms cost the same if padding is left out.
func (l *Law) Level() Model {
	m := l.Model
	m.RequestMs += l.MostMs + l.MeanMs
	return m
}
