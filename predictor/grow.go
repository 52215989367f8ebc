package predictor

import (
	"math"
	"slices"
)

// How the forests are grown.
const (
	forestTrees = 200
	learnRate   = 0.1
	leafRows    = 50
	leafPrior   = 1.0 // added to the hessian: a leaf of few sure rows does not run away
)

// samples are training rows by column, binned.
type samples struct {
	bins  [features][]uint8
	label []float64
}

func (s *samples) len() int { return len(s.label) }

// loss is what boosting descends: gradient and hessian at a score.
type loss func(score, label float64) (gradient, hessian float64)

func logLoss(score, label float64) (gradient, hessian float64) {
	p := 1 / (1 + math.Exp(-score))
	return p - label, p * (1 - p)
}

func squaredLoss(score, label float64) (gradient, hessian float64) { return score - label, 1 }

// edgesOf parts a feature's values in at most 64 bins: equally full ones, or
// equally wide where wide is set.
func edgesOf(values []float32, wide bool) []float32 {
	if len(values) == 0 {
		return []float32{}
	}
	sorted := slices.Sorted(slices.Values(values))
	lo, hi := sorted[0], sorted[len(sorted)-1]
	edges := make([]float32, 0, binsMost-1)
	for k := 1; k < binsMost; k++ {
		e := sorted[len(sorted)*k/binsMost]
		if wide {
			e = lo + (hi-lo)*float32(k)/binsMost
		}
		if e < hi && (len(edges) == 0 || e > edges[len(edges)-1]) { // nothing is above hi
			edges = append(edges, e)
		}
	}
	return edges
}

// grow boosts a forest on the rows.
func grow(s *samples, base float64, l loss) forest {
	f := forest{base: base}
	n := s.len()
	if n < 2*leafRows {
		return f
	}
	g := grower{samples: s, scores: make([]float64, n), slopes: make([]slope, n),
		order: make([]int32, n), spare: make([]int32, n), gathered: make([]slope, n)}
	for i := range g.scores {
		g.scores[i] = base
	}
	for range forestTrees {
		for i := range g.slopes {
			gradient, hessian := l(g.scores[i], s.label[i])
			g.slopes[i] = slope{gradient, hessian}
			g.order[i] = int32(i)
		}
		f.trees = append(f.trees, g.tree())
	}
	return f
}

type slope struct{ gradient, hessian float64 }

func (a slope) add(b slope) slope { return slope{a.gradient + b.gradient, a.hessian + b.hessian} }
func (a slope) sub(b slope) slope { return slope{a.gradient - b.gradient, a.hessian - b.hessian} }

// gain is twice what the best leaf takes off the loss.
func (a slope) gain() float64 { return a.gradient * a.gradient / (a.hessian + leafPrior) }

func (a slope) leaf() float64 { return -learnRate * a.gradient / (a.hessian + leafPrior) }

// bar is one bin of a histogram.
type bar struct {
	slope
	rows int
}

type histogram [features][binsMost]bar

// grower grows one tree after the other on the same rows. A node owns a
// stretch of order; rows in it stay ascending.
type grower struct {
	*samples
	scores       []float64
	slopes       []slope
	order, spare []int32
	gathered     []slope // slopes in the order of a node's rows
	hists        [treeNodes]*histogram
}

func (g *grower) tree() tree {
	var t tree
	for i := range t.feature {
		t.feature[i] = noSplit
	}
	g.split(&t, 0, 0, g.len(), false)
	return t
}

// split grows node at over the rows order[lo:hi]. Its histogram is ready when
// its parent could subtract it.
func (g *grower) split(t *tree, at, lo, hi int, ready bool) {
	if at >= treeNodes || hi-lo < 2*leafRows {
		g.settle(t, at, lo, hi)
		return
	}
	if !ready {
		g.fill(at, lo, hi)
	}
	feature, bin, ok := g.hists[at].best(hi - lo)
	if !ok {
		g.settle(t, at, lo, hi)
		return
	}
	t.feature[at], t.bin[at] = uint8(feature), uint8(bin)
	mid := g.part(g.bins[feature], uint8(bin), lo, hi)
	left, right := 2*at+1, 2*at+2
	if right >= treeNodes { // leaves need no histogram
		g.settle(t, left, lo, mid)
		g.settle(t, right, mid, hi)
		return
	}
	if mid-lo <= hi-mid {
		g.fill(left, lo, mid)
		g.subtract(right, at, left)
	} else {
		g.fill(right, mid, hi)
		g.subtract(left, at, right)
	}
	g.split(t, left, lo, mid, true)
	g.split(t, right, mid, hi, true)
}

// settle ends a branch at node or leaf at: every leaf below it is the same.
func (g *grower) settle(t *tree, at, lo, hi int) {
	var sum slope
	for _, row := range g.order[lo:hi] {
		sum = sum.add(g.slopes[row])
	}
	leaf := float32(sum.leaf())
	for _, row := range g.order[lo:hi] {
		g.scores[row] += float64(leaf)
	}
	first, last := at, at
	for first < treeNodes {
		first, last = 2*first+1, 2*last+2
	}
	for l := first; l <= last; l++ {
		t.leaf[l-treeNodes] = leaf
	}
}

// fill counts the rows of a node.
func (g *grower) fill(at, lo, hi int) {
	if g.hists[at] == nil {
		g.hists[at] = new(histogram)
	}
	h := g.hists[at]
	*h = histogram{}
	rows, slopes := g.order[lo:hi], g.gathered[:hi-lo]
	for i, row := range rows {
		slopes[i] = g.slopes[row]
	}
	for f := range h {
		column, bars := g.bins[f], &h[f]
		for i, row := range rows {
			b := &bars[column[row]%binsMost]
			b.gradient += slopes[i].gradient
			b.hessian += slopes[i].hessian
			b.rows++
		}
	}
}

// subtract makes a child's histogram from its parent's and its sibling's.
func (g *grower) subtract(child, parent, sibling int) {
	if g.hists[child] == nil {
		g.hists[child] = new(histogram)
	}
	c, p, s := g.hists[child], g.hists[parent], g.hists[sibling]
	for f := range c {
		for b := range c[f] {
			c[f][b] = bar{p[f][b].sub(s[f][b].slope), p[f][b].rows - s[f][b].rows}
		}
	}
}

// best returns the split that takes most off the loss; ties go to the lower
// feature, then the lower bin.
func (h *histogram) best(rows int) (feature, bin int, ok bool) {
	var all slope
	for b := range h[0] {
		all = all.add(h[0][b].slope)
	}
	most := all.gain() + 1e-9
	for f := range h {
		var left bar
		for b := range h[f] {
			left = bar{left.add(h[f][b].slope), left.rows + h[f][b].rows}
			if left.rows < leafRows || h[f][b].rows == 0 {
				continue
			}
			if rows-left.rows < leafRows {
				break
			}
			if gain := left.gain() + all.sub(left.slope).gain(); gain > most {
				feature, bin, ok, most = f, b, true, gain
			}
		}
	}
	return feature, bin, ok
}

// part moves the rows at or below the bin to the front of the stretch.
func (g *grower) part(column []uint8, bin uint8, lo, hi int) (mid int) {
	mid = lo
	right := g.spare[:0]
	for _, row := range g.order[lo:hi] {
		if column[row] <= bin {
			g.order[mid] = row
			mid++
		} else {
			right = append(right, row)
		}
	}
	copy(g.order[mid:hi], right)
	return mid
}
