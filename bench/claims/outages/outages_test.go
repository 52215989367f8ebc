package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOutagesAreChosenByTheirNumbers(t *testing.T) {
	all, err := choose("")
	require.NoError(t, err)
	require.Len(t, all, len(outages))
	two, err := choose("3,1")
	require.NoError(t, err)
	require.Equal(t, []int{3, 1}, []int{two[0].number, two[1].number})
	for _, wrong := range []string{"0", "99", "a", "1,"} {
		_, err := choose(wrong)
		require.ErrorContains(t, err, "outages have the numbers 1 to", wrong)
	}
}

func TestWhatThePageSaidIsToldWithTheTimeItWasFirstSaid(t *testing.T) {
	o := &outage{number: 7, title: "It breaks", staged: "Something is broken.", look: time.Minute}
	e := &ear{outage: o}
	e.hear(-3*time.Second, []incident{{ID: 1, Headline: "Slow policy", What: "The policy is slow"}})
	e.hear(6*time.Second, []incident{{ID: 2, Headline: "Outage", What: "One is down", Clients: "They wait.", Next: "Restart it."}})
	e.hear(9*time.Second,
		[]incident{{ID: 2, Headline: "Outage", What: "Two|three are down", Clients: "They wait.", Next: "Restart them."}, {ID: 1, UntilMs: 5}})
	require.False(t, e.isCalm())
	e.frozen = true
	e.hear(70*time.Second, []incident{{ID: 3, Headline: "Later", What: "It was mended"}, {ID: 2, UntilMs: 1}})
	e.hear(80*time.Second, nil)
	require.True(t, e.isCalm())
	o.calm, o.heard = 20*time.Second, sorted(o.heard)
	require.Equal(t, `### 7. It breaks

Something is broken.

| after | the page says |
|---|---|
| -3 s | **Slow policy.** The policy is slow.   |
| 6 s | **Outage.** Two\|three are down. *They wait.* Restart them. |

The page said that it was over 20 s after it was mended.

![The page 1m0s after the outage begins](../img/outages/07.png)

`, tell([]*outage{o}, "docs/img/outages"))
	o.heard, o.calm = nil, -1
	require.Contains(t, tell([]*outage{o}, "docs/img/outages"), "Nothing is wrong.")
	require.Contains(t, tell([]*outage{o}, "docs/img/outages"), "still said that something was wrong 4m0s after")
}
