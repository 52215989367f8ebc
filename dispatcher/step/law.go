package step

import "slices"

// Form is which rows of its ranks a step takes its time for. Attention and dense layers are a rank's own work, and experts see the
// rows of all ranks; in between stands the padding of the engine.
type Form uint8

// The forms. In vLLM all ranks take the same graph or none (v1/worker/dp_utils.py, 0.32; v1/worker/gpu/dp_utils.py, 0.33). In SGLang
// 0.5.23 with deepep, moe_dense_tp_size 1 and enable_dp_lm_head each rank has a graph of its own.
const (
	Eager      Form = iota // no rank is padded
	Unmasked               // in graphs: each rank runs as many rows as the largest one, and experts compute these, too
	Masked                 // in graphs, but experts skip the rows that pad
	OwnBuckets             // in graphs: each rank is padded to a size of its own, and experts skip the rows that pad
)

// Way is how steps of the form take what requests cost, but for padding.
func (f Form) Way() Way {
	if f == Eager || f == OwnBuckets {
		return Fullest
	}
	return TwoRanks
}

// Forms are all of them, by name.
var Forms = [...]string{Eager: "eager", Unmasked: "graphs, unmasked", Masked: "graphs, masked", OwnBuckets: "own buckets"}

func (f Form) String() string { return Forms[f] }

// Law is a step with its form. The Model's RequestMs is what a row of a rank's own costs it.
type Law struct {
	Model
	Form   Form
	MostMs float64 // more, for each row of the rank that has most: sending
	MeanMs float64 // more, for each row of all ranks, divided by how many there are: experts
	Sizes  []int   // captured, ascending; more rows than the last one are run without a graph
}

// Captured are the sizes of graphs that vLLM captures, up to the largest: 1, 2, 4, then by 8 to 256, then by 16
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

// padded is how many rows a graph runs for so many; false: none is large enough.
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

// Plain says whether the Model is all there is of the law: the slowest rank sets the pace, and nothing else does.
func (l *Law) Plain() bool { return l.Form == Eager && l.MostMs == 0 && l.MeanMs == 0 }

// Ms is how long a step of these ranks takes.
func (l *Law) Ms(ranks []Rank) float64 {
	if len(ranks) == 0 {
		return l.C0Ms
	}
	if l.Plain() {
		return l.Model.Ms(ranks)
	}
	form, widest, mean := l.runs(ranks)
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

// AppendWaits appends how long each rank of a step waits for the one whose own work takes longest.
func (l *Law) AppendWaits(dst []float64, ranks []Rank) []float64 {
	if len(ranks) == 0 {
		return dst
	}
	form, widest, _ := l.runs(ranks)
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

// runs says in which form these ranks step, how many rows the widest of them runs, padded, and how many they have in the mean.
func (l *Law) runs(ranks []Rank) (form Form, widest, mean float64) {
	most, sum := 0.0, 0.0
	for i := range ranks {
		n := ranks[i].rows()
		most, sum = max(most, n), sum+n
	}
	widest, fits := l.padded(most)
	if form = l.Form; !fits {
		form = Eager // one rank that has too many rows for a graph ends those of all
	}
	return form, widest, sum / float64(len(ranks))
}

// ownMs is what a rank takes by itself.
func (l *Law) ownMs(r *Rank, form Form, widest float64) float64 {
	return l.C1Ms*r.KV + l.rowsMs(r, form, widest)
}

// rows are those that the rank runs: one for each request that decodes, and one for each token of a prompt.
func (r *Rank) rows() float64 { return r.Requests + r.Prompt }

// rowsMs is what a rank's own rows take.
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

// eager is what all ranks together take in a step without graphs, besides what the slowest takes by itself.
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

// Assumed is the law as policies decide by it: a load that is the largest of the ranks' own loads, and what a request counts as in it and
// beside it. In graphs all of a request is of the second kind, and half of it is counted as the first. Captured sizes are left out: a
// rank that is just below one now is above it a few steps later.
func (l *Law) Assumed() (load Model, use Weights) {
	load = l.Model
	if l.C1Ms <= 0 {
		return load, use
	}
	switch l.Form {
	case Unmasked:
		load.RequestMs += l.MostMs + l.MeanMs
		use = Halves(load.Weight())
	case Masked:
		load.RequestMs += l.MostMs
		use = Halves(load.Weight())
	case Eager, OwnBuckets:
		use = Weights{load.Weight(), l.MostMs / l.C1Ms}
	}
	return load, use
}

// Level is the law of ranks that all have as much, as a Model: there every form costs the same but for padding.
func (l *Law) Level() Model {
	m := l.Model
	m.RequestMs += l.MostMs + l.MeanMs
	return m
}
