package twin

import (
	"cmp"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// lengths is the distribution of the lengths of answers. It comes from the answers that ended in a window, and from those that were still
// running at its end. Running answers must count, too, because most of them are long: without them, answers would seem too short.
type lengths struct {
	steps []survival // sorted by tokens, ascending; only lengths at which an answer ended
}

// survival says that the given share of all answers is longer than so many tokens.
type survival struct {
	tokens int32
	share  float64
}

// observation says from which length to which length an answer was observed, in tokens. An answer that ran before the window has from > 0.
type observation struct {
	from, to int32
	ended    bool // the answer ended at the length to; false: it went on after it was last seen
}

// estimateLengths returns the product-limit estimate (Kaplan and Meier) from at most n answers. For each length at which answers ended, it
// computes which share of the answers observed at this length ended there. Answers that were running when the window began count only from
// the length that they had then.
func estimateLengths(n int, all iter.Seq[observation]) lengths {
	type change struct { // change of the number of answers under observation, at one length
		tokens   int32
		observed int8 // 1: one more answer is observed from this length on; -1: one fewer
		ended    int8 // 1: an answer ended at this length; 0: none did
	}
	changes := make([]change, 0, 2*n)
	for s := range all {
		if s.to <= s.from {
			continue // no token of this answer was observed
		}
		until := change{tokens: s.to, observed: -1}
		if s.ended {
			until.ended = 1
		}
		changes = append(changes, change{tokens: s.from, observed: 1}, until)
	}
	slices.SortFunc(changes, func(a, b change) int { return cmp.Compare(a.tokens, b.tokens) })
	var l lengths
	longer, observed := 1., 0 // share of all answers that are longer than tokens; number of answers observed at that length
	for i := 0; i < len(changes); {
		// Add up all changes at one length.
		tokens, difference, ended := changes[i].tokens, 0, 0
		for ; i < len(changes) && changes[i].tokens == tokens; i++ {
			difference += int(changes[i].observed)
			ended += int(changes[i].ended)
		}
		if ended > 0 {
			longer *= 1 - float64(ended)/float64(observed) // multiply by the share of the answers of this length that go on
			l.steps = append(l.steps, survival{tokens, longer})
		}
		observed += difference // only now: answers that end at this length are still observed there
	}
	return l
}

// shareLongerThan returns the share of the answers that are longer than so many tokens; below the shortest answer that ended, it is 1.
func (l lengths) shareLongerThan(tokens int32) float64 {
	at, exact := slices.BinarySearchFunc(l.steps, tokens, func(s survival, t int32) int { return cmp.Compare(s.tokens, t) })
	switch {
	case exact:
		return l.steps[at].share
	case at == 0: // no answer ended at so few tokens
		return 1
	}
	return l.steps[at-1].share // no answer ended between that length and this one
}

// draw returns a random length, in tokens, for an answer that is longer than least. l.steps is a survival curve: for each length, the share
// of the answers that are longer. draw inverts this curve. It draws a share between 0 and that of the answers longer than least, and
// returns the first length at which the curve has fallen to this share. If the curve never falls so far, because some answers were not seen
// to end, the result is endless. The ID is the seed, so that an answer has the same length in each replay.
func (l lengths) draw(least int32, id uint64) int32 {
	longer := l.shareLongerThan(least)
	share := longer * rand.New(rand.NewPCG(id, 0)).Float64()
	// The shares in l.steps fall, and a binary search needs values that rise. So the result of the comparison is reversed.
	at, _ := slices.BinarySearchFunc(l.steps, share, func(s survival, want float64) int { return cmp.Compare(want, s.share) })
	if longer == 0 || at == len(l.steps) { // longer 0: no answer was seen to be longer than least
		return endless
	}
	return max(least+1, l.steps[at].tokens)
}

// endless is the length, in tokens, of an answer that does not end within the replay.
const endless = math.MaxInt32 / 2

// ms returns d in milliseconds, the unit of all times in a replay.
func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
