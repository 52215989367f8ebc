package predictor

import (
	"slices"
	"sort"
)

// Learned answers from boosted trees, compiled for the moment: recent traffic
// and the survival table are fixed until the next Rebuild, so the forests
// depend on prompt and age alone, and each in steps. All steps are worked out
// beforehand (some milliseconds, off the hot path); a prediction then is a
// look-up instead of 400 trees. It never changes once built.
type Learned struct {
	horizon int
	table   *Survival
	prompts []int32      // first prompt of each cell but the first, ascending
	columns []int32      // by age, the last for all older
	cells   []Prediction // [column*(len(prompts)+1) + cell]
}

// Predict looks the cell up. For another horizon than it was trained for it
// answers from the survival table.
func (l *Learned) Predict(h int, q []Query, out []Prediction) {
	if h != l.horizon {
		l.table.Predict(h, q, out)
		return
	}
	width := len(l.prompts) + 1
	for k := range q {
		age := min(max(int(q[k].Age), 0), len(l.columns)-1)
		out[k] = l.cells[int(l.columns[age])*width+l.cell(q[k].Prompt)]
	}
}

func (l *Learned) cell(prompt int32) int {
	lo, hi := 0, len(l.prompts)
	for lo < hi {
		if mid := (lo + hi) / 2; l.prompts[mid] <= prompt {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// learnedAges bounds the ages told apart, whatever lengths the history holds.
const learnedAges = denseMost

// compile works out the model for one table and one state of the traffic.
func (m *model) compile(h int, table *Survival, outputs, prompts *recent) *Learned {
	l := &Learned{horizon: h, table: table}
	thresholds := [2][]int32{m.firstAbove(fPrompt), m.firstAbove(fLogPrompt)}
	l.prompts = slices.Compact(slices.Sorted(slices.Values(slices.Concat(thresholds[0], thresholds[1]))))
	width := len(l.prompts) + 1

	// A split on the prompt parts a range of cells here.
	var cuts [2][binsMost]int
	for i, above := range thresholds {
		for bin := range cuts[i] {
			cuts[i][bin] = width
			if bin < len(above) {
				cuts[i][bin], _ = slices.BinarySearch(l.prompts, above[bin])
				cuts[i][bin]++
			}
		}
	}

	var v vector
	v.ofTraffic(outputs.features(), prompts.features())
	ages := 1
	for _, f := range []int{fAge, fLogAge} {
		if above := m.firstAbove(f); len(above) > 0 {
			ages = max(ages, int(above[len(above)-1])+1)
		}
	}
	if n := table.Len(); n > 0 {
		ages = max(ages, int(table.sorted[n-1])+1)
	}
	ages = min(ages, learnedAges)

	l.columns = make([]int32, ages)
	known := map[[features]uint8]int32{}
	odds, steps := make([]float64, width+1), make([]float64, width+1)
	var last [features]uint8
	q, out := [1]Query{}, [1]Prediction{}
	for age := range ages {
		q[0].Age = int32(age)
		table.Predict(h, q[:], out[:])
		v.ofRequest(0, int32(age))
		v.ofTable(out[0])
		bins := m.bins(&v)
		if age > 0 && bins == last {
			l.columns[age] = l.columns[age-1]
			continue
		}
		last = bins
		column, ok := known[bins]
		if !ok {
			column = int32(len(known))
			known[bins] = column
			m.classifier.sweep(&bins, &cuts, odds)
			m.regressor.sweep(&bins, &cuts, steps)
			for c := range width {
				l.cells = append(l.cells, link(odds[c], steps[c], h))
			}
		}
		l.columns[age] = column
	}
	return l
}

// firstAbove returns, for each edge of a feature of prompt or age, the
// smallest whole number past it.
func (m *model) firstAbove(f int) []int32 {
	const most = 1<<31 - 1
	first := make([]int32, len(m.edges[f]))
	for i, edge := range m.edges[f] {
		first[i] = int32(sort.Search(most, func(n int) bool {
			var v vector
			v.ofRequest(int32(n), int32(n))
			return v[f] > edge
		}))
	}
	return first
}

// sweep scores every cell of prompts at once: a tree adds a step function of
// the prompt once all else is fixed, so its ends are enough.
func (f *forest) sweep(bins *[features]uint8, cuts *[2][binsMost]int, scores []float64) {
	clear(scores)
	width := len(scores) - 1
	for i := range f.trees {
		f.trees[i].step(0, 0, width, bins, cuts, scores)
	}
	sum := f.base
	for c := range scores {
		sum += scores[c]
		scores[c] = sum
	}
}

// step adds to the ends of each stretch of cells [lo, hi) its leaf.
func (t *tree) step(at, lo, hi int, bins *[features]uint8, cuts *[2][binsMost]int, ends []float64) {
	for at < treeNodes {
		k, bin := t.feature[at], t.bin[at]
		at = 2*at + 1
		switch {
		case k == noSplit:
		case k == fPrompt || k == fLogPrompt:
			cut := cuts[k][min(bin, binsMost-1)]
			if cut >= hi {
				break
			}
			if cut > lo {
				t.step(at, lo, cut, bins, cuts, ends)
				lo = cut
			}
			at++
		case bins[k] > bin:
			at++
		}
	}
	ends[lo] += float64(t.leaf[at-treeNodes])
	ends[hi] -= float64(t.leaf[at-treeNodes])
}
