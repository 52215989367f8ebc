package policy

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawColumns makes loads of a few ranks, with ties.
func drawColumns(t *rapid.T) *columns {
	c := &columns{ranks: rapid.IntRange(2, 7).Draw(t, "ranks"), n: rapid.IntRange(1, 9).Draw(t, "columns")}
	c.x = rapid.SliceOfN(rapid.Int64Range(0, 40), c.ranks*c.n, c.ranks*c.n).Draw(t, "loads")
	c.level, c.lead = make([]int64, c.ranks), make([]int64, c.ranks)
	for _, e := range []*ends{&c.first, &c.second, &c.third} {
		e.size(c.n)
	}
	for h := range c.n {
		c.rescan(h)
	}
	c.leads()
	return c
}

func drawRow(t *rapid.T, n int) []int64 {
	return rapid.SliceOfN(rapid.Int64Range(0, 25), n, n).Draw(t, "row")
}

func TestACeilingIsThatOfTheChangedLoads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawColumns(t)
		mixing := rapid.Bool().Draw(t, "mix")
		if mixing {
			c.startMix(0.3)
		}
		a := rapid.IntRange(0, c.ranks-1).Draw(t, "a")
		b := (a + rapid.IntRange(1, c.ranks-1).Draw(t, "b")) % c.ranks
		in, back, zero := drawRow(t, c.n), drawRow(t, c.n), make([]int64, c.n)
		var r rest
		r.size(c.n)
		c.without(a, &r)
		one, two, less := peakWith(r.most, c.row(a), in), peakWithTwo(&r, c.row(a), in, b, c.row(b), back, zero), int64(0)
		if mixing {
			rise := c.mix.smooth + c.mix.rise(c.row(a), c.row(a), in, zero)
			one, two = c.mix.ceiling(one, rise), c.mix.ceiling(two, rise+c.mix.rise(c.row(b), c.row(b), back, zero))
		}

		c.shift(a, in, zero, 0)
		require.InDelta(t, c.ceiling(), one, 1, "one rank")
		require.Equal(t, c.peak, peakOf(c))
		c.shift(b, back, zero, 0)
		require.InDelta(t, c.ceiling(), two, 1, "two ranks")
		require.Equal(t, c.peak, peakOf(c))

		less = c.peakWithout(a, in)
		c.shift(a, zero, in, 0)
		require.Equal(t, c.peak, less, "without an entry")
		require.Equal(t, c.peak, peakOf(c))
		for g := range c.ranks { // by how much the peak falls where a rank is gone
			saved := append([]int64(nil), c.row(g)...)
			before := c.peak - c.lead[g]
			c.shift(g, zero, saved, 0)
			require.Equal(t, before, c.peak)
			c.shift(g, saved, zero, 0)
		}
	})
}

// Where the tangents touch, a small change of a load changes the ceiling as the root would.
func TestTheTangentIsThatOfTheMean(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawColumns(t)
		for i := range c.x {
			c.x[i] = (c.x[i] + 1) << fixedBits
		}
		for h := range c.n {
			c.rescan(h)
		}
		c.leads()
		of := func() (sum float64) {
			for h := range c.n {
				power := 0.0
				for g := range c.ranks {
					power += math.Pow(float64(c.row(g)[h]), 8)
				}
				sum += 0.4*float64(c.first.value[h]) + 0.6*math.Pow(power/float64(c.ranks), 1./8)
			}
			return sum
		}
		c.startMix(0.6)
		require.InDelta(t, of(), c.ceiling(), 1)
		in, zero := make([]int64, c.n), make([]int64, c.n)
		in[rapid.IntRange(0, c.n-1).Draw(t, "column")] = 1 << 8
		before, exact := float64(c.ceiling()), of()
		c.shift(rapid.IntRange(0, c.ranks-1).Draw(t, "rank"), in, zero, 0)
		require.InDelta(t, of()-exact, float64(c.ceiling())-before, 2)
	})
}

func peakOf(c *columns) (peak int64) {
	for h := range c.n {
		var most int64
		for g := range c.ranks {
			most = max(most, c.row(g)[h])
		}
		peak += most
	}
	return peak
}

// BenchmarkEvaluation is one ΔJ at 32 columns.
func BenchmarkEvaluation(b *testing.B) {
	var r rest
	r.size(32)
	x, y, z, w := make([]int64, 32), make([]int64, 32), make([]int64, 32), make([]int64, 32)
	for c := range x {
		r.most[c], r.next[c], x[c], y[c], z[c], w[c] = int64(c*7%11), int64(c*5%7), int64(c*3%13), int64(c), 5, int64(c*c%17)
	}
	var sum int64
	b.Run("replace", func(b *testing.B) {
		for b.Loop() {
			sum += peakWith(r.most, x, y)
		}
	})
	b.Run("swap", func(b *testing.B) {
		for b.Loop() {
			sum += peakWithTwo(&r, x, y, 3, z, w, y)
		}
	})
	require.NotZero(b, sum)
}
