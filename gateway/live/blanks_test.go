package live

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/incident"
	"evenkeel/gateway/timeline"
)

// answering plays a fleet for so many seconds: each rank ends so many whole answers in each of them, of which so many are blank.
func answering(p *paces, d *Document, start time.Time, seconds int, each func(rank int) (answers, blank uint64)) time.Time {
	for range seconds {
		start = start.Add(time.Second)
		for i := range d.Models[0].Groups[0].Ranks {
			r := &d.Models[0].Groups[0].Ranks[i]
			answers, blank := each(i)
			r.Answers, r.Blank = r.Answers+answers, r.Blank+blank
		}
		p.add(d, start)
	}
	p.tell(d)
	return start
}

func six() *Document {
	d := &Document{Models: []Model{{Name: "m", Groups: []Group{{}}}}}
	for i := range 6 {
		d.Models[0].Groups[0].Ranks = append(d.Models[0].Groups[0].Ranks, Rank{ID: int32(i), Name: fmt.Sprintf("h:%d", i), Steps: true, State: RankUp})
	}
	return d
}

func blanksFound(d *Document) (said []string) {
	for _, f := range findingsOf(d, timeline.Ended{}) {
		if f.Kind == incident.RankBlank {
			said = append(said, f.What)
		}
	}
	return said
}

func TestARankThatEndsItsAnswersAtOnceIsFound(t *testing.T) {
	p, d := paces{}, six()
	healthy := func(i int) (uint64, uint64) { return 2, uint64(i%2) / 2 }
	now := answering(&p, d, noon, 120, healthy)
	require.Empty(t, blanksFound(d))
	broken := func(i int) (uint64, uint64) { // its slots are free at once, so it takes nearly all
		if i == 3 {
			return 11, 11
		}
		return 1, 0
	}
	now = answering(&p, d, now, 60, broken)
	require.Equal(t, []string{"Rank h:3 ends its answers at once: 660 of its last 678 answers ended by themselves within three tokens, " +
		"and 0 % of those of the other ranks; of the last 1,068 answers, 63 % were its"}, blanksFound(d))
	answering(&p, d, now, 70, healthy)
	require.Empty(t, blanksFound(d), "it is over a minute after it was mended")
}

func TestShortAnswersOfAllRanksAreNoFault(t *testing.T) {
	p, d := paces{}, six()
	now := answering(&p, d, noon, 120, func(int) (uint64, uint64) { return 5, 5 }) // clients that ask for yes or no
	require.Empty(t, blanksFound(d))
	answering(&p, d, now, 120, func(i int) (uint64, uint64) { return 5, uint64(i) }) // some more than others
	require.Empty(t, blanksFound(d))
}

func TestFewAnswersProveNothing(t *testing.T) {
	p, d := paces{}, six()
	n := 0
	answering(&p, d, noon, 240, func(i int) (uint64, uint64) { // an answer in 20 seconds
		if n++; n/6%20 != 0 {
			return 0, 0
		}
		if i == 0 {
			return 1, 1
		}
		return 1, 0
	})
	require.Empty(t, blanksFound(d))
}

func TestSeveralRanksThatEndTheirAnswersAtOnceAreOneFinding(t *testing.T) {
	p, d := paces{}, six()
	answering(&p, d, noon, 90, func(i int) (uint64, uint64) { return 2, uint64(2 * (i / 4)) })
	require.Equal(t, []string{"2 ranks of model m end their answers at once: 276 of their last 276 answers ended by themselves within three tokens, " +
		"and 0 % of those of the other ranks: h:4, h:5"}, blanksFound(d))
}
