package policy

import "math"

// mixed is the ceiling of objective=mix: of each column the largest load and, as
// its share kappa, a mean that heavy ranks dominate. It levels the ranks below
// the fullest too.
type mixed struct {
	kappa   float64
	power   []float64 // of each column, the sum of all loads to the eighth
	ceiling int64
}

func (t *columns) startMix(kappa float64) {
	t.mixed.kappa = kappa
	t.mix = &t.mixed
	t.mix.rebuild(t)
}

func (t *columns) endMix() { t.mix = nil }

// rebuild sums from scratch: differences of eighth powers would drift.
func (m *mixed) rebuild(t *columns) {
	m.power = sized(m.power, t.n)
	clear(m.power)
	for g := range t.ranks {
		for c, x := range t.row(g) {
			m.power[c] += eighth(x)
		}
	}
	var sum float64
	for c, most := range t.first.value {
		sum += m.of(t.ranks, most, m.power[c])
	}
	m.ceiling = int64(math.Round(sum))
}

func (m *mixed) of(ranks int, most int64, power float64) float64 {
	mean := math.Sqrt(math.Sqrt(math.Sqrt(max(0, power) / float64(ranks))))
	return (1-m.kappa)*float64(most) + m.kappa*mean
}

func eighth(x int64) float64 {
	f := float64(x)
	f *= f
	f *= f
	return f * f
}

// with is peakWith for rank g.
func (m *mixed) with(t *columns, g int, most, base, in []int64) int64 {
	var sum float64
	for c, old := range t.row(g) {
		x := base[c] + in[c]
		sum += m.of(t.ranks, max(most[c], x), m.power[c]-eighth(old)+eighth(x))
	}
	return int64(math.Round(sum))
}

// withTwo is peakWithTwo for ranks a and b.
func (m *mixed) withTwo(t *columns, a int, r *rest, base, in []int64, b int, back, out []int64) int64 {
	var sum float64
	old, row := t.row(a), t.row(b)
	for c, most := range r.most {
		if r.owner[c] == int32(b) {
			most = r.next[c]
		}
		x, y := base[c]+in[c], row[c]+back[c]-out[c]
		sum += m.of(t.ranks, max(most, x, y), m.power[c]-eighth(old[c])+eighth(x)-eighth(row[c])+eighth(y))
	}
	return int64(math.Round(sum))
}
