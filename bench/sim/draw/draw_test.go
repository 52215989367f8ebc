package draw

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/stats"
)

// Over many loads every property reaches all of its range, whatever the others are.
func TestEveryPropertyIsDrawnFromAllOfItsRange(t *testing.T) {
	const n = 4000
	even := func(what string, share, of float64) {
		require.InDelta(t, of, share, 5*math.Sqrt(of*(1-of)/n), what)
	}
	var kinds [6]float64
	var prompts [4]float64
	var below, open, binding, differ, closedWide float64
	for i := range n {
		l := New(7, i)
		require.Equal(t, l, New(7, i), "the same again")
		kinds[l.answers.kind] += 1. / n
		prompts[l.prompts.kind] += 1. / n
		require.True(t, 4 <= l.Ranks && l.Ranks <= 144 && 8 <= l.Slots && l.Slots <= 256 && l.Groups <= l.Ranks, l)
		require.True(t, 10 <= l.answers.mean && l.answers.mean <= 3000, l)
		require.True(t, c0From <= l.C0 && l.C0 <= c0To && c1From <= l.C1 && l.C1 <= c1To && requestFrom <= l.Request && l.Request <= requestTo, l)
		require.True(t, l.Rho == 0 != (l.pool == 0), "open or closed: %s", l)
		if l.answers.mean < math.Sqrt(10*3000) {
			below += 1. / n
		}
		if l.Rho > 0 {
			open += 1. / n
		}
		if l.full > 0 {
			binding += 1. / n
		}
		if l.uneven != evenRanks {
			differ += 1. / n
		}
		if l.Rho == 0 && l.Ranks > 24 { // the middle of 4 to 144
			closedWide += 1. / n
		}
	}
	for k, share := range kinds {
		even(answerKinds[k], share, 1./6)
	}
	for k, share := range prompts {
		even(promptKinds[k].name, share, 1./4)
	}
	even("short answers", below, 0.5)
	even("open loops", open, 0.5)
	even("KV that binds", binding, 0.5)
	even("ranks that differ", differ, 2./3)
	require.InDelta(t, 0.25, closedWide, 0.03, "closed and wide")
	require.NotEqual(t, New(7, 0).String(), New(8, 0).String())
}

func TestAnswersHaveTheMeanThatWasDrawn(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 60 {
		l := New(3, i)
		if l.answers.kind == recurrent {
			continue // the mean of 100 templates is another one
		}
		sum, n := 0.0, 40_000
		next := l.requests(r, n)
		for k := range n {
			sum += float64(next(k).Output)
		}
		require.InEpsilon(t, l.answers.mean, sum/float64(n), 0.1, l.String())
	}
}

func TestWhatIsUnderWayIsSeenByItsLength(t *testing.T) {
	l := New(5, 0)
	l.answers, l.Rho, l.full = answers{kind: geometric, mean: 400}, 0, 0
	p := l.Plan([]string{"jsq"}, 0)
	d := p.Source.Drawn
	var ages, lengths []float64
	for i, age := range d.Ages {
		require.Less(t, age, d.Requests[i].Output)
		ages, lengths = append(ages, float64(age)), append(lengths, float64(d.Requests[i].Output))
	}
	require.NotEmpty(t, ages)
	require.InEpsilon(t, 800, stats.Mean(lengths), 0.3, "of geometric answers, those that are seen are twice as long")
	require.InEpsilon(t, 400, stats.Mean(ages), 0.3)

	shifted := l.Plan([]string{"jsq"}, 0.5).Source.Drawn
	require.Equal(t, len(d.Requests), len(shifted.Requests))
	require.NotEqual(t, d.Requests, shifted.Requests)
	require.NoError(t, p.Validate())
}

// Classes come in groups: a load is in one of each.
func TestEachLoadIsInOneClassOfEachGroup(t *testing.T) {
	all := Classes()
	groups := [][]Class{all[:2], all[2 : 2+len(promptKinds)]}
	for i := 2 + len(promptKinds); i < len(all); i += 2 {
		groups = append(groups, all[i:i+2])
	}
	loads := map[string]int{}
	const n = 500
	for i := range n {
		l := New(9, i)
		for _, g := range groups {
			in := 0
			for _, c := range g {
				if c.Has(l) {
					in++
					loads[c.Name]++
				}
			}
			require.Equal(t, 1, in, "%s: %v", l, g)
		}
	}
	for _, c := range all {
		require.Greater(t, loads[c.Name], n/8, c.Name)
	}
}

// A run lasts two minutes for the sake of what is learned in it, but not where that is far more
// than the tables need.
func TestALongRunIsBounded(t *testing.T) {
	l := New(5, 0)
	l.answers, l.Rho, l.full, l.Ranks, l.Slots, l.C0 = answers{kind: geometric, mean: 10}, 0, 0, 8, 16, 8
	bounded := len(l.Plan([]string{"jsq"}, 0).Source.Drawn.Requests)
	l.Lasts *= 2
	require.Len(t, l.Plan([]string{"jsq"}, 0).Source.Drawn.Requests, bounded)
	require.Greater(t, bounded, mostRequests)
	require.Less(t, bounded, 2*mostRequests)
}

// Half of the loads that policies are judged by are served by a deployment of the table, under its
// law, and each lasts for 30 stays of a request.
func TestWhatPoliciesAreJudgedBy(t *testing.T) {
	deployed := map[string]bool{}
	for i := range 400 {
		l := Judged(7, i)
		require.Equal(t, l, Judged(7, i), "the same again")
		require.Equal(t, i%2 == 0, l.Of != "", l)
		requests := Stays * float64(l.Ranks*l.Slots)
		require.True(t, requests <= mostRequests && requests*l.answers.mean <= staysTokens || l.Slots == slotsFrom, l)
		if l.Of != "" {
			deployed[l.Of] = true
			require.Equal(t, 1, l.Groups)
			require.True(t, l.Even())
		}
		if i >= 20 {
			continue
		}
		p := l.Plan([]string{"jsq"}, 0)
		require.NoError(t, p.Validate(), l)
		require.Equal(t, l.Of != "", p.Fleet.Groups[0].Law != nil, l)
		outputs := 0
		for _, q := range p.Source.Drawn.Requests {
			outputs += q.Output
		}
		there := float64(len(p.Source.Drawn.Ages)) // requests that run at once
		require.Greater(t, float64(outputs), 0.8*Stays*l.answers.mean*there, "%s: heavy tails and templates have other means", l)
	}
	require.Greater(t, len(deployed), 60)
}
