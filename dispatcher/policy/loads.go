package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// fixedBits is the number of binary places of loads: they are whole numbers of 2^-20 KV tokens,
// whose sums are exact in whatever order they are added. An int64 has room for 2^31 tokens on each
// rank of a group of 1024 ranks.
const fixedBits = 20

func inTokens(load int64) float64 { return math.Ldexp(float64(load), -fixedBits) }

// Cost returns by how many KV tokens the ranks are below the fullest rank, summed over all ranks (J
// in the BalanceRoute paper).
func Cost(loads []float64) float64 {
	var largest, sum float64
	for _, load := range loads {
		largest = max(largest, load)
		sum += load
	}
	return float64(len(loads))*largest - sum
}

// tokensSaved returns by how many KV tokens the cost falls if a candidate is placed: its load
// brings its rank closer to the fullest rank, but each rise of the largest load (the peak) leaves
// every rank farther below it. candidateLoad is that on a rank of cost 1: otherwise, a candidate
// would score higher the slower its rank is. The arguments are in units of 2^-fixedBits tokens.
func (l *loads) tokensSaved(candidateLoad, peakWith, peakWithout int64) float64 {
	rankCount := int64(len(l.load))
	return inTokens(candidateLoad - rankCount*(peakWith-peakWithout))
}

// growthShare is how far a running request is expected to grow, as a share of the mean answer.
const growthShare = 0.25

// loads has the loads of all ranks in a round, and the three largest ones, because the search often
// asks for the largest load of all ranks but two.
type loads struct {
	load              []int64    // by rank: load with the growth of its requests, scaled by its cost, in units of 2^-fixedBits tokens
	top               [3]topLoad // the three largest loads, the largest first
	cost              []float32  // by rank: step time per KV token, as a multiple of the group's mean
	heldTokens        []int64    // by rank: KV tokens when the round began, not scaled
	initialLoadTokens []int64    // by rank: KV and requests when the round began, in KV tokens scaled by cost, without growth

	// extraPerRequest is requestWeight, and the tokens that a request is expected to add. These count
	// because a rank with many short requests grows faster than a rank with a few long ones.
	extraPerRequest int64
	requestWeight   int64 // KV tokens that each request counts for, because it lengthens each step

	smoothed smoothedPeak
}

type topLoad struct {
	load int64
	rank int32
}

// build computes the loads from a snapshot. It drops the smoothed peak of the last round, which
// startSmoothing sets when a search begins.
func (l *loads) build(s *Snapshot, requestWeight int64) {
	n := len(s.Workers)
	l.load, l.cost = sized(l.load, n), sized(l.cost, n)
	l.heldTokens, l.initialLoadTokens = sized(l.heldTokens, n), sized(l.initialLoadTokens, n)
	expectedGrowth := int64(s.MeanOutput * growthShare)
	l.requestWeight, l.extraPerRequest = requestWeight, expectedGrowth+requestWeight
	l.smoothed = smoothedPeak{}
	for g := range s.Workers {
		w := &s.Workers[g]
		l.cost[g] = w.Cost
		if w.Cost == 0 {
			l.cost[g] = 1
		}
		l.heldTokens[g] = w.KVTokens()
		requests := int64(len(w.Running))
		l.initialLoadTokens[g] = l.scaled(g, l.heldTokens[g]+l.requestWeight*requests)
		l.load[g] = l.scaled(g, (l.heldTokens[g]+l.extraPerRequest*requests)<<fixedBits)
	}
	l.rescan()
}

func (l *loads) scaled(g int, tokens int64) int64 { return subset.Scaled(tokens, float64(l.cost[g])) }

func (l *loads) rescan() {
	l.top = [3]topLoad{{0, none}, {0, none}, {0, none}}
	for g, load := range l.load {
		l.offerToTop(topLoad{load, int32(g)})
	}
}

// offerToTop puts a load into top if it is one of the three largest. Its rank must not be in top
// already.
func (l *loads) offerToTop(e topLoad) {
	for i := range l.top {
		if e.load > l.top[i].load {
			l.top[i], e = e, l.top[i] // goes on with the load that was here, because it may belong at the next position
		}
	}
}

func (l *loads) changeLoad(g int, change int64) {
	before := l.load[g]
	l.load[g] += change
	l.smoothed.powerMeanTerm += l.smoothed.powerMeanRise(before, l.load[g])
	e := topLoad{l.load[g], int32(g)}
	for i := range l.top {
		if l.top[i].rank != e.rank {
			continue
		}
		if change < 0 { // the load may now be smaller than one that is not in top
			l.rescan()
			return
		}
		// The load has risen, and offerToTop inserts it at its new position.
		copy(l.top[i:], l.top[i+1:])
		l.top[len(l.top)-1] = topLoad{0, none}
	}
	l.offerToTop(e)
}

// peak includes the expected growth of the requests.
func (l *loads) peak() int64 { return l.top[0].load }

func (l *loads) presentSmoothedPeak() int64 {
	return l.smoothed.value(l.peak(), l.smoothed.powerMeanTerm)
}

// fullest returns the largest load when the round began, in KV tokens, which determines how long a
// step takes now.
func (l *loads) fullest() (largest int64) {
	for _, load := range l.initialLoadTokens {
		largest = max(largest, load)
	}
	return largest
}

// otherLoads has the two largest loads of all ranks except one. If the load of that rank and of one
// more change, the new peak follows without a look at all ranks.
type otherLoads struct {
	largest, second int64
	largestRank     int32
}

// without returns the two largest loads of all ranks but g. Both are in top, because at most one of
// its three loads is that of g.
func (l *loads) without(g int) otherLoads {
	first, second, third := l.top[0], l.top[1], l.top[2]
	switch int32(g) {
	case first.rank:
		return otherLoads{second.load, third.load, second.rank}
	case second.rank:
		return otherLoads{first.load, third.load, first.rank}
	}
	return otherLoads{first.load, second.load, first.rank}
}

func (r *otherLoads) largestWithout(b int) int64 {
	if r.largestRank == int32(b) {
		return r.second
	}
	return r.largest
}

// smoothedPeak is what the search lowers in place of the largest load: a weighted mean of the
// largest load and, with the weight kappa, of the power mean of all loads, (sum of eighth powers /
// n)^(1/8). The fullest ranks dominate the power mean, but it also changes if only others change.
// It is replaced by its tangent at the loads with which the search begins: the effect of a move is
// then a sum over the ranks whose loads it changes.
type smoothedPeak struct {
	kappa         float64
	slope         float64 // rise of powerMeanTerm per rise of an eighth power by 1
	powerMeanTerm float64 // kappa times the power mean, by its tangent
}

// startSmoothing computes the tangent at the present loads. If all loads are 0, slope and
// powerMeanTerm stay 0.
func (l *loads) startSmoothing(kappa float64) {
	l.smoothed = smoothedPeak{kappa: kappa}
	power := 0.0
	for _, load := range l.load {
		power += eighthPower(load)
	}
	if power > 0 {
		mean := power / float64(len(l.load))
		l.smoothed.powerMeanTerm = kappa * math.Sqrt(math.Sqrt(math.Sqrt(mean))) // three square roots make the eighth root
		l.smoothed.slope = l.smoothed.powerMeanTerm / (8 * power)
	}
}

// value is at most 2^52, because its product with 1024 ranks must fit an int64: if the search
// begins with loads of a few tokens, the tangent makes powerMeanTerm huge for large loads.
func (m *smoothedPeak) value(peak int64, powerMeanTerm float64) int64 {
	return int64(math.Round(min((1-m.kappa)*float64(peak)+powerMeanTerm, 1<<52)))
}

func (m *smoothedPeak) powerMeanRise(from, to int64) float64 {
	return m.slope * (eighthPower(to) - eighthPower(from))
}

func eighthPower(x int64) float64 {
	f := float64(x)
	f *= f
	f *= f
	return f * f
}
