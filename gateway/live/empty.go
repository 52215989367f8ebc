package live

import (
	"slices"
	"time"
)

// empties count the answers of a rank that its engine ends without any text. No request fails by them, and such a rank is the
// fastest one, so it gets ever more requests.
type empties struct {
	marks  []mark // one each markEvery, the oldest first
	lately Lately
}

// mark is what a rank had counted at a time.
type mark struct {
	at time.Time
	Lately
}

const (
	markEvery  = 10 * time.Second
	marksKept  = 31 // five minutes
	marksLast  = 7  // a minute
	fewAnswers = 20
	emptyShare = 0.8 // of the answers of a rank, at least
	wholeShare = 0.2 // of those of the others, at most
)

// add takes in a document.
func (b *empties) add(r *Rank, now time.Time) {
	sum := Lately{r.Answers, r.Empty}
	n := len(b.marks)
	if n > 0 && b.marks[n-1].Answers > sum.Answers { // it is another rank of this name
		b.marks, n = b.marks[:0], 0
	}
	if n == 0 || now.Sub(b.marks[n-1].at) >= markEvery {
		if b.marks = append(b.marks, mark{now, sum}); len(b.marks) > marksKept {
			b.marks = slices.Delete(b.marks, 0, 1)
		}
	}
	b.lately = sum.since(b.marks[max(0, len(b.marks)-marksLast)].Lately)
	if b.lately.Answers < fewAnswers {
		b.lately = sum.since(b.marks[0].Lately)
	}
}

func (l Lately) since(before Lately) Lately {
	return Lately{l.Answers - before.Answers, l.Empty - before.Empty}
}

// share is that of empty answers, with as many others as prove something.
func (l Lately) share() (share float64, known bool) {
	return float64(l.Empty) / float64(max(1, l.Answers)), l.Answers >= fewAnswers
}
