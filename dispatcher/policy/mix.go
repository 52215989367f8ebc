package policy

import "math"

// mixed is the ceiling of objective=mix: of each column the largest load and, as its share kappa,
// a mean that heavy ranks dominate: the eighth root of the mean eighth power. It levels the ranks
// below the fullest too. The root is replaced by its tangent where the search begins, so that what
// a move changes is a sum over the ranks that it touches.
type mixed struct {
	kappa  float64
	slope  []float64 // of each column: by how much its share of the ceiling rises with the power of a load
	smooth float64   // what the shares make of all columns
}

// startMix lays the tangents at the loads as they are.
func (t *columns) startMix(kappa float64) {
	m := &t.mixed
	m.kappa, m.smooth = kappa, 0
	m.slope = sized(m.slope, t.n)
	clear(m.slope)
	for g := range t.ranks {
		for c, x := range t.row(g) {
			m.slope[c] += eighth(x)
		}
	}
	for c, power := range m.slope {
		if power > 0 {
			mean := kappa * math.Sqrt(math.Sqrt(math.Sqrt(power/float64(t.ranks))))
			m.smooth += mean
			m.slope[c] = mean / (8 * power)
		}
	}
	t.mix = m
}

func (t *columns) endMix() { t.mix = nil }

func (m *mixed) ceiling(peak int64, smooth float64) int64 {
	return int64(math.Round((1-m.kappa)*float64(peak) + smooth))
}

func eighth(x int64) float64 {
	f := float64(x)
	f *= f
	f *= f
	return f * f
}

// rise is by how much the shares rise when the loads of a rank become base + in less out.
func (m *mixed) rise(row, base, in, out []int64) (rise float64) {
	base, in, out, row = base[:len(m.slope)], in[:len(m.slope)], out[:len(m.slope)], row[:len(m.slope)]
	for c, slope := range m.slope {
		rise += slope * (eighth(base[c]+in[c]-out[c]) - eighth(row[c]))
	}
	return rise
}
