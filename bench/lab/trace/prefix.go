package trace

import (
	"container/heap"
	"math"
	"math/rand/v2"
)

// The drawn trace with prefixes is fitted to Mooncake's published conversation trace, an hour of
// 12,031 requests: how long prompts and answers are, how often and when talks go on, what caches of
// several sizes find. Of the trace's blocks one without a limit finds 37 %; Mooncake's paper (FAST
// 2025) says 40 %. TestPrefixesAreThoseOfMooncake compares the two. Requests come about as they do
// there: every prompt begins with the same block, a system prompt; a third of the requests go on with a
// talk, minutes later; some talks begin with a part of an earlier prompt.

// quantiles draw a number: of each pair the share below it, and it. Between them
// its logarithm is a line.
type quantiles [][2]float64

var (
	firstPrompts = quantiles{{0, 890}, {0.1, 907}, {0.25, 1460}, {0.5, 5930}, {0.75, 14_300}, {0.9, 26_300}, {0.95, 38_200}, {0.99, 87_200},
		{1, 123_000}}
	// tokens from turn to turn
	growths = quantiles{{0, 10}, {0.05, 25}, {0.1, 72}, {0.25, 270}, {0.5, 474}, {0.75, 875}, {0.9, 4700}, {0.95, 7610}, {1, 10_000}}
	// mean gaps from turn to turn
	thoughts = quantiles{{0, 25}, {0.05, 102}, {0.1, 143}, {0.25, 224}, {0.5, 428}, {0.75, 928}, {0.9, 1632}, {0.95, 2080}, {1, 8000}}
	depths   = quantiles{{0, 2}, {0.25, 2.5}, {0.5, 5}, {0.88, 21}, {1, 150}} // blocks of an earlier prompt
	answers  = quantiles{{0, 1}, {0.05, 10}, {0.1, 24}, {0.25, 156}, {0.5, 350}, {0.75, 472}, {0.9, 597}, {0.95, 698}, {0.99, 1115}, {1, 2000}}
)

// goesOn is how likely a talk has a further turn after the first, the second and so on; the
// last holds for all that follow.
var goesOn = []float64{0.28, 0.41, 0.51, 0.57, 0.61}

// A talk begins with a part of an earlier prompt, of the last so many, this likely.
const (
	forked     = 0.13
	remembered = 3000
)

func (q quantiles) draw(r *rand.Rand) float64 {
	u := r.Float64()
	for i := 1; ; i++ {
		if a, b := q[i-1], q[i]; u <= b[0] {
			share := (u - a[0]) / (b[0] - a[0])
			return math.Exp(math.Log(a[1]) + share*math.Log(b[1]/a[1]))
		}
	}
}

// talk is one whose next turn is due.
type talk struct {
	due    float64 // in mean gaps
	turns  int
	prompt int
	blocks []uint64 // whole ones of its last prompt
}

// talks is a heap by when they are due.
type talks []*talk

// Len and the others are for container/heap.
func (t talks) Len() int           { return len(t) }
func (t talks) Less(i, j int) bool { return t[i].due < t[j].due }
func (t talks) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *talks) Push(x any)        { *t = append(*t, x.(*talk)) }
func (t *talks) Pop() any {
	last := len(*t) - 1
	x := (*t)[last]
	*t = (*t)[:last]
	return x
}

// talking draws requests of talks: the one that is due longest goes on, else a new one begins.
func talking(r *rand.Rand) drawer {
	const longest = 123_000 // tokens, as in Mooncake's trace
	now, blocks := 0.0, uint64(0)
	var open talks
	var earlier [][]uint64
	return func() (Request, float64) {
		gap := r.ExpFloat64()
		now += gap
		var t *talk
		if len(open) > 0 && open[0].due <= now {
			t = heap.Pop(&open).(*talk)
			t.prompt = min(longest, t.prompt+int(growths.draw(r)))
		} else {
			t = &talk{prompt: int(firstPrompts.draw(r)), blocks: []uint64{0}}
			if len(earlier) > 0 && r.Float64() < forked {
				of := earlier[r.IntN(len(earlier))]
				t.blocks = append([]uint64(nil), of[:min(len(of), int(depths.draw(r)))]...)
				t.prompt = max(t.prompt, len(t.blocks)*BlockTokens+1)
			}
		}
		t.turns++
		ids := append([]uint64(nil), t.blocks...)
		for len(ids)*BlockTokens < t.prompt {
			blocks++
			ids = append(ids, blocks)
		}
		t.blocks = ids[:max(1, t.prompt/BlockTokens)]
		if earlier = append(earlier, t.blocks); len(earlier) > remembered {
			earlier = earlier[1:]
		}
		if r.Float64() < goesOn[min(t.turns, len(goesOn))-1] {
			t.due = now + thoughts.draw(r)
			heap.Push(&open, t)
		}
		return Request{Prompt: t.prompt, Output: max(1, int(answers.draw(r))), HashIDs: ids}, gap
	}
}
