package timeline

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

var (
	full   = Outcome{"queue_full", 429}
	broken = Outcome{"upstream_broken", 502}
)

func TestFailuresStay(t *testing.T) {
	var tl Timeline
	require.Empty(t, tl.Failures())
	add := func(at time.Duration, f map[Outcome]uint64) []Failed {
		tl.Add(Now{Failures: f}, noon.Add(at))
		return tl.Failures()
	}
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, SinceStart: 3}}, add(0, map[Outcome]uint64{broken: 3}), "when they failed is not known")
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, Last10S: 2, LastMinute: 2, Last5Min: 2, LastHour: 2, SinceStart: 5}}, add(time.Second, map[Outcome]uint64{broken: 5}))
	require.Equal(t, []Failed{{Outcome: "queue_full", Status: 429, Last10S: 1, LastMinute: 1, Last5Min: 1, LastHour: 1, SinceStart: 1}, {Outcome: "upstream_broken", Status: 502, Last10S: 0, LastMinute: 0, Last5Min: 0, LastHour: 2, SinceStart: 5}}, add(6*time.Minute, map[Outcome]uint64{broken: 5, full: 1}), "the last ones first")
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, SinceStart: 5}, {Outcome: "queue_full", Status: 429, SinceStart: 1}}, add(2*time.Hour, map[Outcome]uint64{broken: 5, full: 1}))
}

func TestTheStripHasAQuarterOfAnHour(t *testing.T) {
	var tl Timeline
	s := tl.Strip()
	require.Empty(t, s.AtMs)
	for i := range 2 * 900 {
		tl.Add(Now{Ended: uint64(10 * i), Lines: []Line{{"m", "dp", int64(1000 + i%5)}}}, noon.Add(time.Duration(i)*time.Second))
	}
	s = tl.Strip()
	require.Len(t, s.AtMs, stripBins)
	require.Equal(t, noon.Add(1795*time.Second).UnixMilli(), s.AtMs[stripBins-1])
	require.Equal(t, int64(50), s.Requests[3])
	require.Equal(t, int64(1004), s.Lines[0].Tokens[3], "the highest of each bin")
	tl.Add(Now{Ended: 20_000, Failures: map[Outcome]uint64{broken: 4}}, noon.Add(1900*time.Second))
	s = tl.Strip()
	require.Len(t, s.AtMs, stripBins-20, "a gap is a gap")
	require.Equal(t, []FailureLine{{"upstream_broken", 502, append(make([]int64, len(s.AtMs)-1), 4)}}, s.Failures)
	require.Equal(t, int64(-1), s.Lines[0].Tokens[len(s.AtMs)-1])
	for i := range tl.bins {
		if b := &tl.bins[i]; b.number <= tl.last()-int64(stripBins) {
			require.Empty(t, b.lines, "nobody will see these")
		}
	}
}

func TestEvents(t *testing.T) {
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	engines := func() map[Engine]string {
		return map[Engine]string{{"decode", "a:1"}: "up", {"decode", "b:1"}: "up", {"decode", "c:1"}: "up", {"prefill", "c:1"}: "up"}
	}
	base := Now{Policy: "evenkeel", Engines: engines()}
	change := func(f func(*Now)) Now {
		n := base
		n.Engines = engines()
		f(&n)
		return n
	}
	for name, tt := range map[string]struct {
		then []Now
		want []string
	}{
		"nothing":              {[]Now{base}, nil},
		"one goes":             {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "b:1"}] = "down" })}, []string{"down: Decode engine b:1 went down"}},
		"a host goes":          {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "b:1"}], n.Engines[Engine{"decode", "c:1"}] = "down", "out" })}, []string{"down: Decode engine b:1 and 1 more went down"}},
		"it comes back":        {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "b:1"}] = "down" }), base}, []string{"down: Decode engine b:1 went down", "up: Decode engine b:1 came back"}},
		"one drains":           {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "a:1"}] = "drain" })}, []string{"drain: Decode engine a:1 began to drain"}},
		"it drains and dies":   {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "a:1"}] = "drain" }), change(func(n *Now) { n.Engines[Engine{"decode", "a:1"}] = "wedged" })}, []string{"drain: Decode engine a:1 began to drain", "down: Decode engine a:1 went down"}},
		"out and down are one": {[]Now{change(func(n *Now) { n.Engines[Engine{"prefill", "c:1"}] = "out" }), change(func(n *Now) { n.Engines[Engine{"prefill", "c:1"}] = "down" })}, []string{"down: Prefill engine c:1 went down"}},
		"a new engine":         {[]Now{change(func(n *Now) { n.Engines[Engine{"decode", "d:1"}] = "down" })}, nil},
		"another policy":       {[]Now{change(func(n *Now) { n.Policy = "br0" })}, []string{"policy: Policy br0 took over from evenkeel"}},
		"another config":       {[]Now{change(func(n *Now) { n.Reload = at(1) })}, []string{"reload: Another config came into force"}},
		"the proxy drains":     {[]Now{change(func(n *Now) { n.Drains = true })}, []string{"drain: The proxy began to drain"}},
		"a burst, told once": {[]Now{
			change(func(n *Now) { n.Ended, n.Failures = 50, map[Outcome]uint64{full: 40} }),
			change(func(n *Now) { n.Ended, n.Failures = 100, map[Outcome]uint64{full: 80} }),
		}, []string{"refused: A burst of requests was refused with a 429"}},
		"a few are no burst": {[]Now{change(func(n *Now) { n.Ended, n.Failures = 1000, map[Outcome]uint64{full: 20} })}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var tl Timeline
			tl.Add(base, noon)
			for i, n := range tt.then {
				tl.Add(n, at(5*(i+1)))
			}
			var got []string
			for _, e := range tl.Strip().Events {
				got = append(got, e.Kind+": "+e.What)
			}
			require.Equal(t, tt.want, got)
			for i := range 200 { // they are forgotten with their bins
				tl.Add(tt.then[len(tt.then)-1], at(20+5*i))
			}
			require.Empty(t, tl.Strip().Events)
		})
	}
}

func TestTheTimelineIsBounded(t *testing.T) {
	var tl Timeline
	for i := range 3000 {
		lines := []Line{}
		for g := range 2 * mostLines {
			lines = append(lines, Line{"m", fmt.Sprint(g), 1})
		}
		tl.Add(Now{Policy: fmt.Sprint(i), Lines: lines}, noon.Add(time.Duration(i)*10*time.Millisecond))
	}
	s := tl.Strip()
	require.Len(t, s.Events, mostFlags)
	require.Len(t, s.Lines, mostLines)
	require.LessOrEqual(t, len(s.AtMs), stripBins)
}

func TestAClockThatWasSetBackBeginsAnew(t *testing.T) {
	var tl Timeline
	ended := uint64(0)
	add := func(at time.Time, drains bool) {
		ended++
		tl.Add(Now{Ended: ended, Failures: map[Outcome]uint64{broken: ended}, Drains: drains}, at)
	}
	for i := range 60 {
		add(noon.Add(time.Duration(i)*time.Second), false)
	}
	add(noon.Add(58*time.Second), false)
	require.Len(t, tl.Strip().AtMs, 12, "a step back within a bin is none")
	back := noon.Add(-time.Hour)
	for i := range 60 {
		add(back.Add(time.Duration(i)*time.Second), i > 50)
	}
	s := tl.Strip()
	require.Len(t, s.AtMs, 12)
	require.Equal(t, back.UnixMilli(), s.AtMs[0])
	require.Equal(t, slices.Repeat([]int64{5}, 12), s.Requests)
	require.Equal(t, []Event{{back.Add(51 * time.Second).UnixMilli(), "drain", "The proxy began to drain"}}, s.Events)
	require.Equal(t, []Failed{{Outcome: "upstream_broken", Status: 502, Last10S: 10, LastMinute: 60, Last5Min: 60, LastHour: 60, SinceStart: 121}}, tl.Failures())
}

// The last minute and the table of failures count by the same bins as the strip.
func TestAllCountsAgree(t *testing.T) {
	var tl Timeline
	for i := range 200 {
		n := uint64(i)
		if i > 150 { // what failed goes on no longer
			n = 150
		}
		tl.Add(Now{Ended: uint64(3 * i), Failures: map[Outcome]uint64{full: 2 * n, broken: n / 2}, Whys: map[Outcome]Why{full: {Text: "the queue takes 40", Own: true}}}, noon.Add(time.Duration(i)*time.Second))
	}
	list, s, sums := tl.Failures(), tl.Strip(), map[string]uint64{}
	for _, f := range s.Failures {
		for _, n := range f.Counts {
			sums[f.Outcome] += uint64(n)
		}
	}
	require.Equal(t, "queue_full", list[0].Outcome)
	require.Equal(t, "the queue takes 40", list[0].Why)
	require.True(t, list[0].Own)
	require.Zero(t, list[0].Last10S, "none fails now")
	last := tl.LastMinute()
	require.Equal(t, list[0].LastMinute+list[1].LastMinute, last.Failed)
	require.Equal(t, uint64(3*60), last.All)
	for _, f := range list {
		require.Equal(t, sums[f.Outcome], f.Last5Min)
		require.Equal(t, sums[f.Outcome], f.LastHour)
	}
}
