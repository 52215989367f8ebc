package step

import "slices"

// Form says how many rows the ranks compute in a step. A row is a token that a rank processes.
// Attention and dense layers compute the rank's own rows, and expert layers the rows of all ranks.
// An engine that runs CUDA graphs pads the rows to the size of a captured graph.
type Form uint8

// The forms. In vLLM, all ranks run the same graph or none (v1/worker/dp_utils.py, 0.32;
// v1/worker/gpu/dp_utils.py, 0.33). In SGLang 0.5.23 with deepep, moe_dense_tp_size 1 and
// enable_dp_lm_head, each rank runs a graph of its own.
const (
	Eager      Form = iota // without CUDA graphs: no rank is padded
	Unmasked               // with graphs: each rank computes as many rows as the rank with most, and experts compute the padding, too
	Masked                 // with graphs: the same rows, but experts skip the padding
	OwnBuckets             // with graphs: each rank is padded to a graph size of its own, and experts skip the padding
)

// Bottleneck returns which ranks' requests make a step longer, apart from rounding up to graph
// sizes.
func (f Form) Bottleneck() Bottleneck {
	if f == Eager || f == OwnBuckets { // no rank is padded to another rank's rows
		return OneRank
	}
	return TwoRanks // the requests of the rank with most rows also slow the rank with most KV
}

// Forms has the names of the forms, as reports print them.
var Forms = [...]string{Eager: "eager", Unmasked: "graphs, unmasked", Masked: "graphs, masked", OwnBuckets: "own buckets"}

// String panics for an unknown form.
func (f Form) String() string { return Forms[f] }

// Law computes how long a step takes. The simulated engines follow it. A step takes the sum of
// C0Ms, the own work of the slowest rank (Model.RequestMs per row), MostRowsMs per row of the rank
// with most rows, and MeanRowsMs per row of the mean over all ranks.
type Law struct {
	Model
	Form       Form
	MostRowsMs float64 // ms per row of the rank with most rows, for the communication between ranks
	MeanRowsMs float64 // ms per row of the mean over all ranks, for the expert layers
	Sizes      []int   // numbers of rows with a captured graph, ascending; a step with more rows runs without a graph
}

// Captured returns the graph sizes of vLLM: 1, 2, 4, then multiples of 8 up to 256, then multiples
// of 16 (config/vllm.py, 0.32).
func Captured(largest int) (sizes []int) {
	for _, size := range []int{1, 2, 4} {
		if size <= largest {
			sizes = append(sizes, size)
		}
	}
	for size := 8; size <= largest; {
		sizes = append(sizes, size)
		if size < 256 {
			size += 8
		} else {
			size += 16
		}
	}
	return sizes
}

// padded returns the size of the smallest graph with room for so many rows. If none has room, it
// returns rows itself, and the step runs without a graph.
func (l *Law) padded(rows float64) (size float64, fits bool) {
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

// Plain says whether the Model alone gives the length of a step.
func (l *Law) Plain() bool { return l.Form == Eager && l.MostRowsMs == 0 && l.MeanRowsMs == 0 }

// Ms returns how long a step takes in which the ranks do this work; C0Ms if there are no ranks.
func (l *Law) Ms(ranks []Rank) float64 {
	if len(ranks) == 0 {
		return l.C0Ms
	}
	if l.Plain() {
		return l.Model.Ms(ranks)
	}
	form, mostPadded, meanRows := l.stepForm(ranks)
	slowest := 0.0
	for i := range ranks {
		slowest = max(slowest, l.ownMs(&ranks[i], form, mostPadded))
	}
	if form == Eager {
		return l.C0Ms + slowest + l.sharedEagerMs(ranks)
	}
	expertRows := meanRows // rows that the expert layers compute, per rank
	if form == Unmasked {
		expertRows = mostPadded
	}
	return l.C0Ms + slowest + l.MostRowsMs*mostPadded + l.MeanRowsMs*expertRows
}

// AppendWaits appends, for each rank, how many ms it waits for the rank whose own work takes
// longest.
func (l *Law) AppendWaits(dst []float64, ranks []Rank) []float64 {
	if len(ranks) == 0 {
		return dst
	}
	form, mostRows, _ := l.stepForm(ranks)
	from, slowest := len(dst), 0.0
	for i := range ranks {
		dst = append(dst, l.ownMs(&ranks[i], form, mostRows))
		slowest = max(slowest, dst[from+i])
	}
	for i := range dst[from:] {
		dst[from+i] = slowest - dst[from+i]
	}
	return dst
}

// stepForm returns the form in which these ranks run the step. mostRows is padded, meanRows is not.
func (l *Law) stepForm(ranks []Rank) (form Form, mostRows, meanRows float64) {
	most, sum := 0.0, 0.0
	for i := range ranks {
		rows := ranks[i].rows()
		most, sum = max(most, rows), sum+rows
	}
	mostRows, fits := l.padded(most)
	if form = l.Form; !fits {
		form = Eager // one rank has too many rows, so no rank runs a graph
	}
	return form, mostRows, sum / float64(len(ranks))
}

func (l *Law) ownMs(r *Rank, form Form, mostRows float64) float64 {
	return l.C1Ms*r.KV + l.rowsMs(r, form, mostRows)
}

func (r *Rank) rows() float64 { return r.Requests + r.Prompt }

// rowsMs is the time of the attention and dense layers of a rank. Without graphs, a prompt token
// has a time of its own.
func (l *Law) rowsMs(r *Rank, form Form, mostRows float64) float64 {
	switch form {
	case Eager:
		return l.RequestMs*r.Requests + l.OwnPromptMs*r.Prompt
	case OwnBuckets:
		rows, _ := l.padded(r.rows())
		return l.RequestMs * rows
	case Unmasked, Masked: // they differ only in the expert layers, whose work is not the rank's own
	}
	return l.RequestMs * mostRows // each rank is padded to the rank with most rows
}

// sharedEagerMs returns what a step without graphs takes in addition to C0Ms and the slowest rank's
// own work:
//
//	MostRowsMs*most requests of a rank + MeanRowsMs*mean requests + SharedPromptMs*mean prompt tokens
//
// and PrefillMs more if any rank computes a prompt. Here MostRowsMs and MeanRowsMs are the costs of
// requests only, because prompt tokens have costs of their own.
func (l *Law) sharedEagerMs(ranks []Rank) (ms float64) {
	most, sum := 0.0, 0.0
	for i := range ranks {
		most, sum = max(most, ranks[i].Requests), sum+ranks[i].Requests
	}
	ms = l.MostRowsMs*most + l.MeanRowsMs*sum/float64(len(ranks))
	if prompts := meanPrompt(ranks); prompts > 0 {
		ms += l.SharedPromptMs*prompts + l.PrefillMs
	}
	return ms
}

// Assumed returns the law as policies use it. One more request counts, in ms:
//
//	Unmasked           RequestMs + MostRowsMs + MeanRowsMs, on the rank with most requests
//	Masked             RequestMs + MostRowsMs, on the rank with most requests
//	Eager, OwnBuckets  RequestMs on its own rank, and MostRowsMs on the rank with most requests
//
// In the first two forms, the whole weight would belong to the rank with most requests. SplitWeight
// still counts half of it on the request's own rank, because a search that moves single requests
// finds better moves then. The sizes of graphs are left out, because a rank that is just below a
// size now is above it a few steps later.
func (l *Law) Assumed() (load Model, weights RequestCost) {
	load = l.Model
	if l.C1Ms <= 0 { // a request's cost cannot be expressed in KV tokens
		return load, weights
	}
	switch l.Form {
	case Unmasked: // the mean number of rows is that of the rank with most requests
		load.RequestMs += l.MostRowsMs + l.MeanRowsMs
		weights = SplitWeight(load.Weight())
	case Masked: // MeanRowsMs is left out, because a request costs it on whichever rank it runs
		load.RequestMs += l.MostRowsMs
		weights = SplitWeight(load.Weight())
	case Eager, OwnBuckets: // MeanRowsMs is left out as for Masked
		weights = RequestCost{Request: load.Weight(), Row: l.MostRowsMs / l.C1Ms}
	}
	return load, weights
}

// Level returns the law as a Model for ranks with equal loads: no rank is padded to another one, so
// one more request on each rank costs the same in all forms, apart from rounding up to graph sizes.
func (l *Law) Level() Model {
	m := l.Model
	m.RequestMs += l.MostRowsMs + l.MeanRowsMs
	return m
}
