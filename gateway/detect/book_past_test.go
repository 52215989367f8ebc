package detect

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is over keeps its line, whatever fails next on the same host.
func TestWhatIsOverIsNotRewritten(t *testing.T) {
	type told struct {
		from, to int // s
		found    Finding
	}
	first, second, third := down("h1:18200", "no answer"), down("h1:18201", refused), down("h1:18202", refused)
	for name, tt := range map[string]struct {
		told []told
		want []string // all that was, when all is over
	}{
		"another engine of the host, soon after": {
			[]told{{0, 10, first}, {40, 50, second}}, []string{second.What, first.What},
		},
		"in the moment in which the first is back": {
			[]told{{0, 10, first}, {10, 20, second}}, []string{second.What, first.What},
		},
		"the same engine again": {
			[]told{{0, 10, second}, {40, 50, second}}, []string{second.What},
		},
		"a host is restarted engine by engine, each at once after the other": {
			[]told{{0, 10, first}, {10, 20, second}, {20, 30, third}}, []string{third.What, second.What, first.What},
		},
		"a host is restarted engine by engine, two at a time": {
			[]told{{0, 12, first}, {10, 22, second}, {20, 32, third}},
			[]string{"3 decode engines on host h1 are down: no answer (at the first one)"},
		},
		"clients still see the first": {
			[]told{{0, 10, first}, {5, 25, failing2()}, {12, 20, second}}, []string{first.What, second.What},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var b Book
			for s := range 90 {
				var found []Finding
				for _, f := range tt.told {
					if s >= f.from && s < f.to {
						found = append(found, f.found)
					}
				}
				b.Observe(noon.Add(time.Duration(s)*time.Second), found)
			}
			var got []string
			for _, in := range b.Incidents() {
				require.NotZero(t, in.UntilMs)
				got = append(got, in.What)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// What goes on when its cause is over says how it began, and an overload that comes then is another incident.
func TestWhatFollowsTellsHowItBegan(t *testing.T) {
	dead := down("h1:1", refused)
	observe := func(all ...[]Finding) []Incident {
		var b Book
		for i, found := range all {
			b.Observe(noon.Add(time.Duration(i)*5*time.Second), found)
		}
		return b.Incidents()
	}
	in := observe([]Finding{dead, failing2()}, []Finding{failing2()})
	require.Len(t, in, 1)
	require.Contains(t, in[0].Clients, " It began with what is over now: "+dead.What+".")
	in = observe([]Finding{dead}, []Finding{overloaded("m")})
	require.Len(t, in, 2)
	require.Equal(t, []string{overloaded("m").What, dead.What}, []string{in[0].What, in[1].What})
}

// A hang is an incident of its own at once, however young one about metrics on its host is.
func TestAHangIsItsOwnIncident(t *testing.T) {
	hang := Finding{Kind: EngineHangs, Severity: Bad, Of: "decode engine", Where: "h1:18200", What: "Decode engine h1:18200 hangs"}
	var b Book
	b.Observe(noon, []Finding{amiss("h1:18100")})
	b.Observe(noon.Add(6*time.Second), []Finding{amiss("h1:18100"), hang})
	in := b.Incidents()
	require.Len(t, in, 2)
	require.Equal(t, []string{hang.What, amiss("h1:18100").What}, []string{in[0].What, in[1].What})
	dead := down("h1:18200", refused)
	b.Observe(noon.Add(20*time.Second), []Finding{amiss("h1:18100"), dead})
	b.Observe(noon.Add(30*time.Second), []Finding{amiss("h1:18100")})
	in = b.Incidents()
	require.Len(t, in, 2)
	require.Equal(t, hang.What, in[1].What, "it hung before it was killed")
	require.Contains(t, in[1].Clients, " Also: "+dead.What+".")
	require.NotEqual(t, kinds[EngineDown].next, kinds[EngineHangs].next)
}

// What comes again and again and harms little is one line with a count; outages keep a line each.
func TestEqualLinesAreCounted(t *testing.T) {
	slow := Finding{Kind: PolicySlow, Severity: Warn, Of: "group", Where: "main", What: "The decode policy of group main is too slow at times"}
	other := slow
	other.Where = "other"
	var b Book
	for m := range 5 {
		at := noon.Add(time.Duration(m) * 2 * time.Minute)
		b.Observe(at, []Finding{slow, other, down("h1:1", refused)})
		b.Observe(at.Add(5*time.Second), nil)
	}
	b.Observe(noon.Add(10*time.Minute), []Finding{slow})
	times := map[string][]int{}
	for _, in := range b.Incidents() {
		times[in.Where[0]] = append(times[in.Where[0]], in.Times)
		require.Equal(t, in.Times > 1, in.FirstMs < in.SinceMs)
	}
	require.Equal(t, map[string][]int{"main": {6}, "other": {5}, "h1:1": {1, 1, 1, 1, 1}}, times)
	require.Zero(t, b.Incidents()[0].UntilMs)
	require.Equal(t, noon.UnixMilli(), b.Incidents()[0].FirstMs)
}

// All that an incident was made of is named when it is over.
func TestAnIncidentThatIsOverNamesAll(t *testing.T) {
	var b Book
	first, second := down("h1:1", refused), down("h1:2", refused)
	for s, found := range [][]Finding{{first}, {first, second}, {second, failing2()}, nil} {
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
	}
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, []string{"h1:1", "h1:2"}, in[0].Where)
	require.Contains(t, in[0].Clients, " Also: 20 of the 300 requests that ended in the last minute failed.")
}
