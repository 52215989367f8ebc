package detect

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// answering plays a fleet for so many seconds: each rank ends so many whole answers in each of
// them, of which so many are empty.
func answering(w *Watch, f *Facts, start time.Time, seconds int, each func(rank int) (answers, empty uint64)) time.Time {
	for range seconds {
		start = start.Add(time.Second)
		for i := range f.Models[0].Groups[0].Ranks {
			r := &f.Models[0].Groups[0].Ranks[i]
			answers, empty := each(i)
			r.Answers, r.Empty = r.Answers+answers, r.Empty+empty
		}
		f.At = start
		w.Update(f, sampleOf(f))
	}
	return start
}

func six() *Facts {
	d := &Facts{Models: []Model{{Name: "m", Groups: []Group{{}}}}}
	for i := range 6 {
		d.Models[0].Groups[0].Ranks = append(d.Models[0].Groups[0].Ranks,
			Rank{ID: int32(i), Output: 1, Name: fmt.Sprintf("h:%d", i), InSteps: true, State: RankUp})
	}
	return d
}

func emptyFound(d *Facts) (said []string) {
	for _, f := range Find(d, Ended{}) {
		if f.Kind == RankEmpty {
			said = append(said, f.What)
		}
	}
	return said
}

func TestARankThatGivesEmptyAnswersIsFound(t *testing.T) {
	p, d, rng := Watch{}, six(), rand.New(rand.NewPCG(1, 2))
	healthy := func(i int) (uint64, uint64) { return 2, uint64(i%2) * uint64(rng.IntN(4)/3) }
	now := answering(&p, d, noon, 120, healthy)
	require.Empty(t, emptyFound(d))
	broken := func(i int) (uint64, uint64) { // its slots are free at once, so it takes nearly all
		if i == 3 {
			return 11, 11
		}
		return 1, 0
	}
	now = answering(&p, d, now, 60, broken)
	require.Equal(t, []string{"Rank h:3 gives empty answers: 660 of its last 660 answers ended without any text, " +
		"and 0 % of those of the other ranks; of the last 960 answers, 69 % were its"}, emptyFound(d))
	answering(&p, d, now, 70, healthy)
	require.Empty(t, emptyFound(d), "it is over a minute after it was mended")
}

func TestEmptyAnswersOfAllRanksAreNoFault(t *testing.T) {
	p, d := Watch{}, six()
	now := answering(&p, d, noon, 120, func(int) (uint64, uint64) { return 5, 5 }) // clients whose prompts are answered by a stop
	require.Empty(t, emptyFound(d))
	answering(&p, d, now, 120, func(i int) (uint64, uint64) { return 5, uint64(i) }) // some more than others
	require.Empty(t, emptyFound(d))
}

func TestFewAnswersProveNothing(t *testing.T) {
	p, d := Watch{}, six()
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
	require.Empty(t, emptyFound(d))
}

func TestSeveralRanksThatGiveEmptyAnswersAreOneFinding(t *testing.T) {
	p, d := Watch{}, six()
	answering(&p, d, noon, 90, func(i int) (uint64, uint64) { return 2, uint64(2 * (i / 4)) })
	require.Equal(t, []string{"2 ranks of model m give empty answers: 240 of their last 240 answers ended without any text, " +
		"and 0 % of those of the other ranks: h:4, h:5"}, emptyFound(d))
}

// Each of two models has an empty rank, and so few answers of its other ranks that both models are
// judged by all other ranks.
func TestEmptyRanksOfAnotherModelAreNoMeasure(t *testing.T) {
	p, d := Watch{}, six()
	other := six().Models[0]
	other.Name, other.Groups[0].Ranks = "n", other.Groups[0].Ranks[:2]
	d.Models[0].Groups[0].Ranks = d.Models[0].Groups[0].Ranks[:2]
	for i := range other.Groups[0].Ranks {
		other.Groups[0].Ranks[i].ID, other.Groups[0].Ranks[i].Name = int32(10+i), fmt.Sprintf("i:%d", i)
	}
	d.Models = append(d.Models, other)
	now := noon
	for second := range uint64(90) {
		now = now.Add(time.Second)
		for m := range d.Models {
			ranks := d.Models[m].Groups[0].Ranks
			ranks[0].Answers, ranks[0].Empty = ranks[0].Answers+5, ranks[0].Empty+5
			ranks[1].Answers += second % 6 / 5
		}
		d.At = now
		p.Update(d, sampleOf(d))
	}
	require.Len(t, emptyFound(d), 2, "%v", emptyFound(d))
}
