package subset

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// bruteForce tries every subset, with the same tie rules.
func bruteForce(f *Score, p Problem) (best Set, ok bool) {
	for mask := uint64(1); mask < 1<<len(p.Tokens); mask++ {
		sum, tokens := sumOf(p, mask)
		if bits.OnesCount64(mask) > p.Cap || tokens > p.Limit {
			continue
		}
		x := Set{Mask: mask, Sum: sum, Score: f.F(sum)}
		if !ok || f.Better(x.Score, best.Score) || f.Equal(x.Score, best.Score) &&
			(x.Sum < best.Sum || x.Sum == best.Sum && x.Len() > best.Len()) {
			best, ok = x, true
		}
	}
	return best, ok
}

func sumOf(p Problem, mask uint64) (sum, tokens int64) {
	for i, t := range p.Tokens {
		if mask>>i&1 == 1 {
			sum += Scaled(t, p.Cost)
			tokens += t
		}
	}
	return sum, tokens
}

func drawProblem(t *rapid.T, n int, largest int64) Problem {
	p := Problem{
		Tokens: rapid.SliceOfN(rapid.Int64Range(0, largest), 1, n).Draw(t, "tokens"),
		Cap:    rapid.IntRange(0, n).Draw(t, "cap"),
		Limit:  Unlimited,
	}
	if rapid.Bool().Draw(t, "limited") {
		p.Limit = rapid.Int64Range(0, largest*int64(n)).Draw(t, "limit")
	}
	return p
}

func drawBR0(t *rapid.T, largest int64) *Score {
	var f Score
	f.SetBR0(rapid.Int64Range(0, 5*largest).Draw(t, "margin"), rapid.IntRange(1, 16).Draw(t, "workers"))
	return &f
}

func TestBestIsTheBruteForceChoice(t *testing.T) {
	var s Solver
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t, 9, rapid.SampledFrom([]int64{4, 40, 4000}).Draw(t, "largest"))
		f := drawBR0(t, 40)
		want, wantOK := bruteForce(f, p)
		got, ok := s.Best(f, p)
		require.Equal(t, wantOK, ok)
		require.Equal(t, want, got)
	})
}

func TestBestScoresAsBruteForceOverAHorizon(t *testing.T) {
	var s Solver
	rapid.Check(t, func(t *rapid.T) {
		c := drawScore(t)
		p := drawProblem(t, 9, 200)
		p.Cost = rapid.SampledFrom([]float64{0, 0.5, 1, 1.3}).Draw(t, "cost")
		want, wantOK := bruteForce(&c.score, p)
		got, ok := s.Best(&c.score, p)
		require.Equal(t, wantOK, ok)
		require.True(t, Equal(want.Score, got.Score), "want %v, got %v", want, got)
		checkSet(t, p, got, ok)
	})
}

// checkSet holds what is true of every answer, exact or not.
func checkSet(t require.TestingT, p Problem, got Set, ok bool) {
	if !ok {
		return
	}
	sum, tokens := sumOf(p, got.Mask)
	require.NotZero(t, got.Mask)
	require.Equal(t, sum, got.Sum, "the sum is that of the mask")
	require.LessOrEqual(t, got.Len(), p.Cap)
	require.LessOrEqual(t, tokens, p.Limit)
}

func TestBitsetsAgreeWithEnumeration(t *testing.T) {
	var s, e Solver
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t, 13, rapid.SampledFrom([]int64{3, 70, 900, 5000}).Draw(t, "largest"))
		f := drawBR0(t, 900)
		s.loadCandidates(f, p)
		e.loadCandidates(f, p)
		if s.count == 0 || s.maxCount == 0 {
			return
		}
		s.searchTable(1)
		e.walk(0, choice{}, 0)
		require.Equal(t, e.upToKnee, s.upToKnee, "largest sum up to the knee: sum, cardinality, tie")
		require.Equal(t, e.beyondKnee, s.beyondKnee, "smallest sum past it")
	})
}

func TestBlocksKeepTheLimitsAndBeatSingles(t *testing.T) {
	var s Solver
	var loss, n float64
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t, 14, 120_000)
		p.Cost = rapid.SampledFrom([]float64{0, 1, 1, 0.8, 1.7}).Draw(t, "cost")
		f := drawBR0(t, 120_000)
		s.loadCandidates(f, p)
		if s.count == 0 || s.maxCount == 0 {
			return
		}
		s.searchTable(p.Cost)
		got := s.pickBetter(f)
		checkSet(t, p, got, true)
		for i, tokens := range p.Tokens {
			if tokens <= p.Limit {
				require.GreaterOrEqual(t, got.Score, f.F(Scaled(tokens, p.Cost)), "candidate %d alone", i)
			}
		}
		if best, _ := bruteForce(f, p); best.Score > 0 {
			loss += (best.Score - got.Score) / best.Score
			n++
		}
	})
	require.Less(t, loss/max(n, 1), 0.03, "mean loss of counting in blocks")
}

func TestOrShiftedAgreesWithTheNaiveForm(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dst := rapid.SliceOfN(rapid.Uint64(), 0, 9).Draw(t, "dst")
		src := rapid.SliceOfN(rapid.Uint64(), 0, 6).Draw(t, "src")
		shift := rapid.UintRange(0, 400).Draw(t, "shift")
		want := append([]uint64{}, dst...)
		for i := uint(0); i < uint(len(src))*64; i++ {
			if at := i + shift; src[i/64]>>(i%64)&1 == 1 && at < uint(len(want))*64 {
				want[at/64] |= 1 << (at % 64)
			}
		}
		orShifted(dst, src, shift)
		require.Equal(t, want, append([]uint64{}, dst...))
	})
}

func TestTies(t *testing.T) {
	var f Score
	var s Solver
	for _, c := range []struct {
		name   string
		margin int64
		p      Problem
		want   uint64
	}{
		{"equal scores: the smaller sum", 10, Problem{Tokens: []int64{11, 9}, Cap: 1, Limit: Unlimited}, 0b10},
		{"equal sums: more candidates", 6, Problem{Tokens: []int64{6, 2, 4}, Cap: 3, Limit: Unlimited}, 0b110},
		{"equal in both: the smaller mask", 6, Problem{Tokens: []int64{2, 4, 4, 2}, Cap: 2, Limit: Unlimited}, 0b11},
		{"a candidate beyond the limit keeps its place in the mask", 9, Problem{Tokens: []int64{50, 3, 4}, Cap: 3, Limit: 10}, 0b110},
	} {
		f.SetBR0(c.margin, 2)
		got, ok := s.Best(&f, c.p)
		if !ok || got.Mask != c.want {
			t.Errorf("%s: Best(margin %d, %+v) = %b, %v; want %b", c.name, c.margin, c.p, got.Mask, ok, c.want)
		}
	}
}

func TestNothingFits(t *testing.T) {
	var f Score
	f.SetBR0(100, 4)
	for _, p := range []Problem{{Cap: 3, Limit: Unlimited}, {Tokens: []int64{5}, Limit: Unlimited},
		{Tokens: []int64{5, 6}, Cap: 2, Limit: 4}} {
		_, ok := new(Solver).Best(&f, p)
		require.False(t, ok, "%+v", p)
	}
}

// bench returns a problem whose sums reach bound tokens.
func bench(n, c int, bound int64) (*Score, Problem) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := Problem{Cap: c, Limit: Unlimited}
	size := 2 * bound / int64(c+2)
	for range n {
		p.Tokens = append(p.Tokens, size/4+rng.Int64N(size))
	}
	var f Score
	f.SetBR0(bound-2*size, 64)
	p.Limit = bound
	return &f, p
}

func BenchmarkBest(b *testing.B) {
	for _, c := range []struct {
		name  string
		n, c  int
		bound int64
	}{
		{"enumerate8", 8, 8, 16_384},
		{"bitsets16of8in16384", 16, 8, 16_384},
		{"bitsets16of8in65536", 16, 8, 65_536},
		{"blocks16of8in400000", 16, 8, 400_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			var s Solver
			f, p := bench(c.n, c.c, c.bound)
			b.ReportAllocs()
			for b.Loop() {
				s.Best(f, p)
			}
		})
	}
}

// BenchmarkTwoWays has the same problems enumerated and searched by bitsets, on both sides of the
// number of subsets from which on Best takes bitsets. The margin is what as many candidates as may
// be taken fill in the mean.
func BenchmarkTwoWays(b *testing.B) {
	for _, c := range []struct{ n, c int }{{8, 8}, {16, 4}, {64, 2}, {12, 12}, {16, 5}, {13, 13}, {64, 3}, {16, 8}} {
		for _, margin := range []int64{16_384, 32_768} { // both exact
			rng := rand.New(rand.NewPCG(1, 2))
			p := Problem{Cap: c.c, Limit: Unlimited}
			for range c.n {
				p.Tokens = append(p.Tokens, 1+rng.Int64N(2*margin/int64(c.c)))
			}
			var f Score
			f.SetBR0(margin, 64)
			ways := []struct {
				name   string
				search func(s *Solver)
			}{
				{"enumerated", func(s *Solver) { s.walk(0, choice{}, 0) }},
				{"bitsets", func(s *Solver) { s.searchTable(p.Cost) }},
			}
			var found [2]Set
			for i, way := range ways {
				b.Run(fmt.Sprintf("%dof%dto%d/%s", c.c, c.n, margin, way.name), func(b *testing.B) {
					var s Solver
					for b.Loop() {
						s.loadCandidates(&f, p)
						way.search(&s)
						found[i] = s.pickBetter(&f)
					}
				})
			}
			if found[0] != found[1] && found[0].Mask != 0 && found[1].Mask != 0 { // both ran
				b.Errorf("%+v: enumerated %+v, by bitsets %+v", c, found[0], found[1])
			}
		}
	}
}

func TestBestDoesNotAllocate(t *testing.T) {
	var s Solver
	for _, n := range []int{8, 16, 40} {
		f, p := bench(n, 8, 65_536)
		s.Best(f, p)
		require.Zero(t, testing.AllocsPerRun(20, func() { s.Best(f, p) }), fmt.Sprint(n, " candidates"))
	}
}
