package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var start = time.Unix(1e9, 0)

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// step is what happened to a hand-off: it was lost, or it arrived.
type step struct {
	lost      bool
	from, to  string
	sent, now float64 // seconds
}

func lost(from, to string, sent, now float64) step {
	return step{lost: true, from: from, to: to, sent: sent, now: now}
}

func arrived(from, to string, sent, now float64) step {
	return step{from: from, to: to, sent: sent, now: now}
}

func told(steps []step) *Table {
	t := &Table{}
	for _, s := range steps {
		l := Link{s.from, s.to}
		t.Sent(l, 1, at(s.sent))
		if s.lost {
			t.Lost(l, 1, at(s.sent), at(s.now))
		} else {
			t.Arrived(l, at(s.sent), at(s.now))
		}
	}
	return t
}

func TestWhoIsToBlame(t *testing.T) {
	three := []step{lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2)}
	for _, row := range []struct {
		name  string
		steps []step
		want  []Link
	}{
		{"nobody, if nobody works", three, nil},
		{"the only prefill engine of two that fails", append(three, arrived("p1", "d0", 2, 3)), []Link{{Prefiller: "p0"}}},
		{"the only decode engine of two that fails", append(three, arrived("p0", "d1", 2, 3)), []Link{{Engine: "d0"}}},
		{"the connection, if both work with others",
			append([]step{lost("p1", "d1", 0, 0)}, append(three, arrived("p1", "d0", 2, 3), arrived("p0", "d1", 2, 3))...),
			[]Link{{"p0", "d0"}}},
		{"who lost at one engine only may have a broken connection, if others are in use",
			append([]step{lost("p0", "d0", 1, 2), arrived("p1", "d1", 1, 2)}, append(three[1:], arrived("p1", "d0", 2, 3))...),
			[]Link{{"p0", "d0"}}},
		{"what was sent before the loss was known shows nothing: all may have broken since",
			append(three, arrived("p1", "d0", 1.9, 3)), nil},
		{"a loss that is known late says nothing once a later hand-off has arrived",
			[]step{lost("p9", "d9", 0, 1), arrived("p0", "d0", 5, 6), lost("p0", "d0", 2, 62), lost("p0", "d0", 2, 62),
				lost("p0", "d0", 2, 62), arrived("p1", "d0", 63, 63)}, nil},
		{"two losses are not enough", append(three[:2:2], arrived("p1", "d0", 2, 3)), nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			var got []Link
			for _, o := range told(row.steps).Outages() {
				got = append(got, o.Subject)
			}
			require.Equal(t, row.want, got)
		})
	}
}

// What arrives of an engine that is out ends its outage only if it was sent after what was lost.
func TestOnlyALaterHandoffEndsAnOutage(t *testing.T) {
	three := []step{lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2)}
	table := told(append(three, arrived("p1", "d0", 2, 3)))
	require.True(t, table.AnyOut())
	table.Arrived(Link{"p0", "d1"}, at(0.9), at(3.1))
	require.True(t, table.AnyOut())
	table.Arrived(Link{"p0", "d1"}, at(1.1), at(3.1))
	require.False(t, table.AnyOut())
}

func TestWhenAConfirmed500IsTheRequestsFault(t *testing.T) {
	p0d0, p1d1, p0d1 := Link{"p0", "d0"}, Link{"p1", "d1"}, Link{"p0", "d1"}
	for _, row := range []struct {
		name          string
		steps         []step
		first, second Link
		want          bool
	}{
		{"nothing else is known, and the attempts share no engine", []step{lost("p0", "d0", 1, 2)}, p0d0, p1d1, true},
		{"nothing else is known, and the attempts share an engine", []step{lost("p0", "d0", 1, 2)}, p0d0, p0d1, false},
		{"an engine of the first attempt has lost hand-offs of others",
			[]step{lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2)}, p0d0, p1d1, false},
		{"an engine of the second attempt has",
			[]step{lost("p0", "d0", 1, 2), lost("p1", "d7", 1, 2), lost("p1", "d8", 1, 2)}, p0d0, p1d1, false},
		{"all have served others since", []step{lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2),
			arrived("p0", "d2", 3, 4), arrived("p2", "d0", 3, 4), arrived("p2", "d1", 3, 4)}, p0d0, p0d1, true},
		{"one of them has not", []step{lost("p0", "d0", 1, 2), lost("p0", "d0", 1, 2),
			arrived("p0", "d2", 3, 4), arrived("p2", "d1", 3, 4)}, p0d0, p0d1, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			require.Equal(t, row.want, told(row.steps).BlamesRequest(row.first, row.second, at(2)))
		})
	}
}

// Pods come and go with addresses of their own.
func TestEnginesThatHaveLeftAreForgotten(t *testing.T) {
	table := &Table{}
	for day := range 100 {
		l := Link{fmt.Sprint("p", day), fmt.Sprint("d", day)}
		table.Sent(l, 1, at(float64(day)*86_400))
		table.Lost(l, 1, at(float64(day)*86_400), at(float64(day)*86_400+1))
	}
	require.Len(t, table.links, 1)
}

func TestAHandoffCostsNoAllocation(t *testing.T) {
	table := told([]step{lost("p0", "d0", 1, 2)})
	l := Link{"p1", "d1"}
	table.Sent(l, 2, at(3))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		table.Sent(l, 2, at(3))
		table.Arrived(l, at(3), at(4))
		table.Allows(l, at(4))
		table.AllowsEngine("d1", at(4))
	}))
}

func TestATrialIsNoHandoffBetweenTwoThatAreOut(t *testing.T) {
	table := told([]step{
		arrived("p1", "d1", 0, 1),
		lost("p0", "d1", 1, 2), lost("p0", "d1", 1, 2), lost("p0", "d0", 1, 2), lost("p1", "d0", 1, 2), lost("p1", "d0", 1, 2),
		lost("p1", "d0", 1, 2), lost("p0", "d1", 1, 2), arrived("p1", "d1", 3, 4),
	})
	var out []Link
	for _, o := range table.Outages() {
		out = append(out, o.Subject)
	}
	require.Equal(t, []Link{{Engine: "d0"}, {Prefiller: "p0"}}, out)
	require.False(t, table.Allows(Link{"p0", "d0"}, at(6)))
	require.True(t, table.Allows(Link{"p0", "d1"}, at(6)), "a trial of p0")
	require.True(t, table.Allows(Link{"p1", "d0"}, at(6)), "a trial of d0")
}
