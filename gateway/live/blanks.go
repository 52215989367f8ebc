package live

import (
	"time"

	"evenkeel/gateway/incident"
	"evenkeel/stats"
)

// Lately are the whole answers of a rank in the last minute, or in the last five where those are few.
type Lately struct {
	Answers uint64 `json:"answers"`
	Blank   uint64 `json:"blank_answers"` // those that ended by themselves with their first tokens
}

// blanks count the answers of a rank that end by themselves with their first tokens. No request fails by them, and such a
// rank is the fastest one, so it gets ever more requests.
type blanks struct {
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
	blankShare = 0.8 // of the answers of a rank, at least
	wholeShare = 0.2 // of those of the others, at most
)

// add takes in a document.
func (b *blanks) add(r *Rank, now time.Time) {
	sum := Lately{r.Answers, r.Blank}
	n := len(b.marks)
	if n > 0 && b.marks[n-1].Answers > sum.Answers { // it is another rank of this name
		b.marks, n = b.marks[:0], 0
	}
	if n == 0 || now.Sub(b.marks[n-1].at) >= markEvery {
		if b.marks = append(b.marks, mark{now, sum}); len(b.marks) > marksKept {
			b.marks = append(b.marks[:0], b.marks[1:]...)
		}
	}
	b.lately = sum.since(b.marks[max(0, len(b.marks)-marksLast)].Lately)
	if b.lately.Answers < fewAnswers {
		b.lately = sum.since(b.marks[0].Lately)
	}
}

func (l Lately) since(before Lately) Lately {
	return Lately{l.Answers - before.Answers, l.Blank - before.Blank}
}

// share is that of blank answers, with as many others as prove something.
func (l Lately) share() (share float64, known bool) {
	return float64(l.Blank) / float64(max(1, l.Answers)), l.Answers >= fewAnswers
}

// blankRanks says which ranks of a model end nearly all answers at once, where the others end few so.
func blankRanks(m *Model, say find) {
	bad, rest := []string{}, Lately{}
	var sum Lately
	for i := range m.Groups {
		for j := range m.Groups[i].Ranks {
			r := &m.Groups[i].Ranks[j]
			if share, known := r.Lately.share(); known && share >= blankShare {
				bad = append(bad, r.Name)
				sum.Answers, sum.Blank = sum.Answers+r.Lately.Answers, sum.Blank+r.Lately.Blank
			} else {
				rest.Answers, rest.Blank = rest.Answers+r.Lately.Answers, rest.Blank+r.Lately.Blank
			}
		}
	}
	others, known := rest.share()
	if len(bad) == 0 || !known || others > wholeShare {
		return
	}
	all := sum.Answers + rest.Answers
	if len(bad) == 1 {
		say(incident.RankBlank, Bad, at{"rank", bad[0], "ranks"}, "",
			"Rank %s ends its answers at once: %s of its last %s answers ended by themselves within three tokens, and %.0f %% of those of the other ranks; "+
				"of the last %s answers, %.0f %% were its", bad[0], stats.Grouped(sum.Blank), stats.Grouped(sum.Answers), 100*others, stats.Grouped(all), 100*float64(sum.Answers)/float64(all))
		return
	}
	say(incident.RankBlank, Bad, at{"model", m.Name, "ranks"}, "",
		"%d ranks of model %s end their answers at once: %s of their last %s answers ended by themselves within three tokens, and %.0f %% of those of the other ranks: %s",
		len(bad), m.Name, stats.Grouped(sum.Blank), stats.Grouped(sum.Answers), 100*others, listed(bad))
}
