package detect

import (
	"cmp"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
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
			for s := range 150 {
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

// What goes on when its cause is over says how it began, and an overload that comes then is another
// incident.
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
	hang := Finding{Kind: EngineHangs, Severity: Bad, WhereKind: "decode engine", Where: "h1:18200", What: "Decode engine h1:18200 hangs"}
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
	slow := Finding{Kind: PolicySlow, Severity: Warn, WhereKind: "group", Where: "main",
		What: "The decode policy of group main is too slow at times"}
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

func hangs(where string) Finding {
	return Finding{Kind: EngineHangs, Severity: Bad, WhereKind: "decode engine", Where: where, What: "Decode engine " + where + " hangs"}
}

// played observes what is found in each second, and returns the incidents in the end, the first one
// first.
func played(b *Book, seconds int, found func(s int) []Finding) []Incident {
	for s := range seconds {
		b.Observe(noon.Add(time.Duration(s)*time.Second), found(s))
	}
	list := b.Incidents()
	slices.SortFunc(list, func(x, y Incident) int { return cmp.Compare(x.SinceMs, y.SinceMs) })
	return list
}

// Two outages of a host with a time between in which all was well are two, and one engine that
// comes and goes is one.
func TestOutagesWithAHealthyGap(t *testing.T) {
	during := func(s, from, to int) bool { return s >= from && s < to }
	for _, tt := range []struct {
		name  string
		found func(s int) []Finding
		want  [][]string // names of each incident
	}{
		{"an engine hangs, and later another one of its host", func(s int) (f []Finding) {
			if during(s, 0, 20) {
				f = append(f, hangs("h:1"))
			}
			if during(s, 50, 70) {
				f = append(f, hangs("h:2"))
			}
			return f
		}, [][]string{{"h:1"}, {"h:2"}}},
		{"an engine hangs, and later it does so together with another one", func(s int) (f []Finding) {
			if during(s, 0, 20) {
				f = append(f, hangs("h:1"))
			}
			if during(s, 50, 70) {
				f = append(f, hangs("h:1"), hangs("h:2"))
			}
			return f
		}, [][]string{{"h:1"}, {"h:1", "h:2"}}},
		{"the same, and the second one is found a moment later", func(s int) (f []Finding) {
			if during(s, 0, 20) || during(s, 50, 70) {
				f = append(f, hangs("h:1"))
			}
			if during(s, 53, 70) {
				f = append(f, hangs("h:2"))
			}
			return f
		}, [][]string{{"h:1"}, {"h:1", "h:2"}}},
		{"two engines hang, and later one after the other with two more", func(s int) (f []Finding) {
			for i, from := range []int{60, 61, 61, 62} {
				if during(s, from, 300) || i < 2 && during(s, i, 20) {
					f = append(f, hangs("h:"+string(rune('1'+i))))
				}
			}
			return f
		}, [][]string{{"h:1", "h:2"}, {"h:1", "h:2", "h:3", "h:4"}}},
		{"two engines of a process come and go for five minutes, never both in the same moment", func(s int) (f []Finding) {
			if s/20%2 == 0 && s%20 < 18 {
				f = append(f, down("h:1", refused))
			}
			if s/20%2 == 0 && s%20 > 1 {
				f = append(f, down("h:2", refused))
			}
			return f
		}, [][]string{{"h:1", "h:2"}}},
		{"an engine comes and goes for five minutes", func(s int) (f []Finding) {
			if s/20%2 == 0 {
				f = append(f, down("h:1", refused))
			}
			return f
		}, [][]string{{"h:1"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b Book
			var where [][]string
			for _, in := range played(&b, 300, tt.found) {
				where = append(where, in.Where)
			}
			require.Equal(t, tt.want, where)
		})
	}
}

func TestStatesOfAnIncident(t *testing.T) {
	var b Book
	states := map[int]State{}
	for s := range 300 {
		var f []Finding
		if s < 40 || s >= 60 && s < 80 {
			f = append(f, down("h:1", refused))
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), f)
		states[s] = b.Incidents()[0].State
	}
	for s, want := range map[int]State{0: New, 30: New, 31: Lasting, 39: Lasting, 40: Paused, 59: Paused, 60: New, 80: Paused, 170: Paused,
		171: Over, 299: Over} {
		require.Equal(t, want, states[s], "after %d s", s)
	}
}

// A fault in each of two groups at once is two incidents, each with its own words.
func TestTwoFaultsAtOnce(t *testing.T) {
	var b Book
	slow := Finding{Kind: StepsSlow, Severity: Warn, WhereKind: "group", Where: "b", What: "Steps of group b take 215 ms"}
	for _, in := range played(&b, 60, func(int) []Finding { return []Finding{down("h:1", refused), slow} }) {
		require.Len(t, in.Where, 1)
		require.Equal(t, in.Kind == StepsSlow, in.Where[0] == "b")
	}
	require.Len(t, b.Incidents(), 2)
}

// Whatever is found: what nothing feeds ends, equal sequences give equal books, and an incident has
// one state.
func TestBooksOfAnySequence(t *testing.T) {
	kindsThere := slices.Sorted(maps.Keys(kinds))
	rapid.Check(t, func(t *rapid.T) {
		var sequence [][]Finding
		for range rapid.IntRange(1, 40).Draw(t, "looks") {
			var found []Finding
			for range rapid.IntRange(0, 5).Draw(t, "findings") {
				kind := rapid.SampledFrom(kindsThere).Draw(t, "kind")
				found = append(found, Finding{
					Kind: kind, Severity: kinds[kind].severity(), WhereKind: "decode engine",
					Where: rapid.SampledFrom([]string{"h:1", "h:2", "g:1", ""}).Draw(t, "where"), What: "It is wrong",
				})
			}
			sequence = append(sequence, found)
		}
		step := time.Duration(rapid.SampledFrom([]int{1, 5, 20, 70}).Draw(t, "seconds")) * time.Second
		var one, two Book
		at := noon
		for _, found := range sequence {
			at = at.Add(step)
			one.Observe(at, found)
			two.Observe(at, found)
			require.Equal(t, one.Incidents(), two.Incidents())
			for _, in := range one.Incidents() {
				require.Equal(t, in.UntilMs > 0, in.State == Over || in.State == Paused && in.LastMs == 0, in)
				require.Contains(t, []State{New, Lasting, Paused, Over}, in.State)
			}
		}
		for range 4 {
			at = at.Add(slowEngineAbsence)
			one.Observe(at, nil)
		}
		for _, in := range one.Incidents() {
			require.Equal(t, Over, in.State)
		}
	})
}

// Gates open and close as one key's long prompts come and go: that is one incident, which names the
// key.
func TestAKeyThatFillsPrefillEnginesIsOneIncident(t *testing.T) {
	var b Book
	list := played(&b, 120, func(s int) (found []Finding) {
		f := Facts{Proxy: Proxy{Ready: true}, Prefill: Prefill{Waiting: 9, Heaviest: &Heaviest{Key: "batch", Share: 0.9, Mean: 100_000}}}
		for i := range 2 {
			e := PrefillEngine{ID: "p:" + string(rune('1'+i)) + "/0", State: "open", KVShare: 0.9}
			if s/(3+2*i)%2 == 0 {
				e.State = "closed"
			}
			f.Prefill.Engines = append(f.Prefill.Engines, e)
		}
		return Find(&f, Ended{})
	})
	require.Len(t, list, 1)
	require.Equal(t, GateClosed, list[0].Kind)
	require.Contains(t, list[0].What,
		"90 % of the prompt tokens that prefill engines hold are of API key batch, whose prompts have 100,000 tokens in the mean")
	require.Equal(t, "Ask who uses API key batch, and lower its max_concurrent or rpm in the key file. Else add prefill engines.",
		list[0].Next)
}

// A name that leads to a dead host: health checks, requests and prompts fail in turns, and it stays
// one incident with one cause.
func TestAMovedNameIsOneIncident(t *testing.T) {
	var b Book
	list := played(&b, 60, func(s int) []Finding {
		e := Engine{ID: "p.svc:1", Role: "prefill", State: "up", Why: "i/o timeout", Ranks: 1}
		candidate := PrefillEngine{ID: "p.svc:1/0", State: "open"}
		switch {
		case s < 8: // the first requests fail
			e.State = "out"
		case s%7 < 3:
			e.State, e.Hangs = "down", s%2 == 0
		default:
			e.State, candidate.State = "out", "out"
		}
		if s >= 10 {
			e.Moved = &Moved{From: "10.0.0.1", To: "10.0.0.2", AgoS: float64(s)}
		}
		f := Facts{Proxy: Proxy{Ready: true}, Engines: []Engine{e, {ID: "q:1", Role: "prefill", State: "up", Ranks: 1}},
			Prefill: Prefill{Engines: []PrefillEngine{candidate, {ID: "q:1/0", State: "open"}}}}
		return Find(&f, Ended{})
	})
	require.Len(t, list, 1)
	require.Equal(t, EngineMoved, list[0].Kind)
	require.Contains(t, list[0].What, "its name leads to 10.0.0.2 since")
	require.Contains(t, list[0].Next, "do not restart it")
}

func TestHarmInNumbers(t *testing.T) {
	var w Watch
	sample := func(s int, ended, failed uint64, ttft float64) Sample {
		return Sample{At: noon.Add(time.Duration(s) * time.Second), Ended: ended, Failed: failed, TTFT: Latency{P50Ms: ttft, Samples: 9},
			TPOT: Latency{P50Ms: 30, Samples: 9}}
	}
	look := func(s Sample, state string) []Incident {
		w.Update(&Facts{At: s.At, Proxy: Proxy{Ready: true}, Engines: []Engine{{ID: "d:1", Role: "decode", State: state}}}, s)
		return w.Incidents()
	}
	for s := range 30 {
		require.Empty(t, look(sample(s, uint64(10*s), 0, 300), "up"))
	}
	require.Equal(t, "Since then no request failed", look(sample(30, 300, 0, 310), "down")[0].Harm)
	require.Equal(t, "Since then 12 of 50 requests failed; and the median time to the first token is 4.2 s, and was 300 ms",
		look(sample(35, 350, 12, 4200), "down")[0].Harm)
	require.Equal(t, "Since then 12 of 50 requests failed; and the median time to the first token is 4.2 s, and was 300 ms",
		look(sample(60, 900, 12, 300), "up")[0].Harm, "as it was when it ended")
}
