package detect

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func down(where, why string) Finding {
	return Finding{Kind: EngineDown, Severity: Bad, Panel: "engines", WhereKind: "decode engine", Where: where,
		What: "Decode engine " + where + " is down: " + why, Reason: why}
}

func failing2() Finding {
	return Finding{Kind: RequestsFail, Severity: Bad, Panel: "traffic", What: "20 of the 300 requests that ended in the last minute failed"}
}

func amiss(where string) Finding {
	return Finding{Kind: EngineAmiss, Severity: Warn, Panel: "engines", WhereKind: "prefill engine", Where: where,
		What: "Prefill engine " + where + " is up, but something is amiss: no answer", Reason: "engine " + where + ": no answer"}
}

const refused = "dial tcp: connection refused"

func TestOneCauseIsOneIncident(t *testing.T) {
	slow := func(where string) Finding {
		return Finding{Kind: MetricsOld, Severity: Warn, Panel: "prefill", WhereKind: "prefill engine", Where: where,
			What: "Prefill engine " + where + " answers too late when it is asked for its metrics"}
	}
	type told struct {
		at    time.Duration
		found []Finding
	}
	for name, tt := range map[string]struct {
		told []told
		want []string // What of each that lasts
	}{
		"nothing":                            {[]told{{0, nil}}, nil},
		"one engine is told as it was found": {[]told{{0, []Finding{down("10.0.0.1:8000", refused)}}}, []string{"Decode engine 10.0.0.1:8000 is down: " + refused}},
		"engines of a host die for different reasons": {
			[]told{{0, []Finding{down("10.0.0.1:8000", refused), down("10.0.0.1:8001", "no answer")}}},
			[]string{"2 decode engines on host 10.0.0.1 are down: " + refused + " (at the first one)"},
		},
		"they are noticed one after the other": {
			[]told{{0, []Finding{down("h1:8000", refused)}}, {9 * time.Second, []Finding{down("h1:8000", refused), down("h1:8001", refused)}}},
			[]string{"2 decode engines on host h1 are down: " + refused},
		},
		"the same reason at one moment on different hosts": {
			[]told{{0, []Finding{down("h1:8000", "dial tcp h1:8000: connection refused"), down("h2:8000", "dial tcp h2:8000: connection refused")}}},
			[]string{"Decode engines h1:8000 and h2:8000 are down: connection refused"},
		},
		"another moment": {
			[]told{{0, []Finding{down("h1:8000", refused)}}, {5 * time.Minute, []Finding{down("h1:8000", refused), down("h1:8001", refused)}}},
			[]string{"Decode engine h1:8000 is down: " + refused, "Decode engine h1:8001 is down: " + refused},
		},
		"two names that cannot be resolved": {
			[]told{{0, []Finding{down("decode-a:80", "lookup decode-a on 10.0.0.1:53: no such host"),
				down("decode-b:80", "lookup decode-b on 10.0.0.1:53: no such host")}}},
			[]string{"Decode engines decode-a:80 and decode-b:80 are down: lookup decode-a on 10.0.0.1:53: no such host"},
		},
		"another reason on another host": {
			[]told{{0, []Finding{down("h1:8000", refused), down("h2:8000", "no such host")}}},
			[]string{"Decode engine h1:8000 is down: " + refused, "Decode engine h2:8000 is down: no such host"},
		},
		"the metrics of many engines are slow": {[]told{{0, []Finding{slow("p1:1/0"), slow("p2:1/0"), slow("p3:1/0")}}}, []string{"3 prefill engines answer too late when they are asked for their metrics"}},
		"what clients see belongs to its cause": {
			[]told{{0, []Finding{failing2(), down("h1:8000", refused)}}}, []string{"Decode engine h1:8000 is down: " + refused},
		},
		"it may follow": {
			[]told{{0, []Finding{down("h1:8000", refused)}}, {time.Minute, []Finding{down("h1:8000", refused), failing2()}}},
			[]string{"Decode engine h1:8000 is down: " + refused},
		},
		"but not an hour later, and then it harms most": {
			[]told{{0, []Finding{down("h1:8000", refused)}}, {time.Hour, []Finding{down("h1:8000", refused), failing2()}}},
			[]string{"20 of the 300 requests that ended in the last minute failed", "Decode engine h1:8000 is down: " + refused},
		},
		"what clients see at one moment is one incident": {
			[]told{{0, []Finding{{Kind: QueueWaits, Severity: Bad, What: "9 requests wait"},
				{Kind: NoPrefill, Severity: Bad, What: "no prefill engine takes prompts"}}}}, []string{"no prefill engine takes prompts"},
		},
		"engines that are full are why the queue is": {
			[]told{{0, []Finding{{Kind: QueueFull, Severity: Bad, What: "the arrival queue is full"},
				{Kind: GateClosed, Severity: Warn, WhereKind: "prefill engine", Where: "p1:1/0"}, {Kind: GateClosed, Severity: Warn, WhereKind: "prefill engine", Where: "p2:1/0"}}}},
			[]string{"Prefill engines p1:1/0 and p2:1/0 take no prompts, because their KV caches are full"},
		},
		"clients see it before the engine counts as down": {
			[]told{{0, []Finding{failing2()}}, {4 * time.Second, []Finding{failing2(), down("h1:1", refused), down("h1:2", refused)}}},
			[]string{"2 decode engines on host h1 are down: " + refused},
		},
		"what they saw once more is of this cause": {
			[]told{{0, []Finding{failing2()}}, {9 * time.Second, nil}, {50 * time.Second, []Finding{failing2()}},
				{55 * time.Second, []Finding{failing2(), down("h1:1", refused)}}}, []string{"Decode engine h1:1 is down: " + refused},
		},
		"engines that answer late now and then": {
			[]told{{0, []Finding{amiss("p1:1")}}, {9 * time.Second, nil}, {40 * time.Second, []Finding{amiss("p2:1")}}, {50 * time.Second, nil},
				{100 * time.Second, []Finding{amiss("p1:1"), amiss("p3:1")}}},
			[]string{"3 prefill engines are up, but something is amiss: no answer"},
		},
		"an engine drains with its ranks": {
			[]told{{0, []Finding{{Kind: EngineDrains, Severity: Warn, Where: "d1:1", What: "decode engine drains"},
				{Kind: RanksDrain, Severity: Warn, Where: "main", What: "1 rank draining: d1:1"}}}},
			[]string{"decode engine drains"},
		},
		"clients see of another cause what they saw of the first": {
			[]told{{0, []Finding{failing2()}}, {20 * time.Second, nil}, {30 * time.Second, []Finding{down("h1:1", refused)}},
				{31 * time.Second, []Finding{down("h1:1", refused), failing2()}}},
			[]string{"Decode engine h1:1 is down: " + refused},
		},
		"what they saw was over": {
			[]told{{0, []Finding{failing2()}}, {9 * time.Second, nil}, {12 * time.Second, []Finding{down("h1:1", refused)}}},
			[]string{"Decode engine h1:1 is down: " + refused},
		},
		"they saw something else": {
			[]told{{0, []Finding{failing2()}}, {time.Minute, []Finding{failing2(), down("h1:1", refused)}}},
			[]string{"20 of the 300 requests that ended in the last minute failed", "Decode engine h1:1 is down: " + refused},
		},
		"of two causes the one that harms more": {
			[]told{{0, []Finding{{Kind: PoolLate, Severity: Bad, Where: "m", What: "one has waited 31 s"},
				{Kind: GateClosed, Severity: Warn, Where: "p1:1/0", What: "full"}, down("d1:1", refused)}}},
			[]string{"Decode engine d1:1 is down: " + refused, "full"},
		},
		"nothing follows from what somebody wants": {
			[]told{{0, []Finding{failing2(), {Kind: RanksDrain, Severity: Warn, Where: "dp", What: "1 rank draining"}}}},
			[]string{"20 of the 300 requests that ended in the last minute failed", "1 rank draining"},
		},
		"it stays with a cause that is gone": {
			[]told{{0, []Finding{down("h1:8000", refused), failing2()}}, {time.Second, []Finding{failing2()}}},
			[]string{"20 of the 300 requests that ended in the last minute failed"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var b Book
			for _, o := range tt.told {
				b.Observe(noon.Add(o.at), o.found)
			}
			var got []string
			for _, in := range b.Incidents() {
				if in.UntilMs == 0 {
					got = append(got, in.What)
				}
			}
			require.Equal(t, tt.want, got)
		})
	}
}

func TestAnIncidentSaysWhatToDo(t *testing.T) {
	var b Book
	old := down("10.0.0.1:8000/3", refused)
	old.LastedFor = time.Minute
	b.Observe(noon, []Finding{old, failing2()})
	require.Equal(t, []Incident{{
		ID: 1, Kind: EngineDown, State: Lasting, Subject: "10.0.0.1:8000/3", Severity: Bad, Panel: "engines", Headline: "Engine outage",
		What: "Decode engine 10.0.0.1:8000/3 is down: " + refused, Where: []string{"10.0.0.1:8000/3"}, Count: 1,
		SinceMs: noon.Add(-time.Minute).UnixMilli(), Times: 1, FirstMs: noon.Add(-time.Minute).UnixMilli(),
		Clients: kinds[EngineDown].clients + " Also: 20 of the 300 requests that ended in the last minute failed.", Next: kinds[EngineDown].next,
		Command: "curl -sm 3 -i http://10.0.0.1:8000/health", Runbook: "engine_down",
	}}, b.Incidents())
}

// What clients see depends on what the engine does for them.
func TestAPrefillEngineThatIsDownLosesNoAnswer(t *testing.T) {
	p := Finding{Kind: EngineDown, Severity: Bad, WhereKind: "prefill engine", Where: "h1:80", What: "Prefill engine h1:80 is down"}
	clients := func(found ...Finding) string {
		var b Book
		b.Observe(noon, found)
		return b.Incidents()[0].Clients
	}
	require.Equal(t, kinds[EngineDown].clientsOfPrefill, clients(p))
	require.Equal(t, kinds[EngineDown].clients, clients(p, down("h1:81", refused)), "one of them decodes")
}

// While engines only hang, requests wait for them.
func TestWhatClientsSeeOfAHangOfAllEngines(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{
		{Kind: EngineHangs, Severity: Bad, WhereKind: "decode engine", Where: "h1:80", What: "Decode engine h1:80 hangs"},
		{Kind: NotReady, Severity: Bad, What: "The proxy is not ready: no healthy decode engine"},
	})
	want := "All new requests wait, and get a 503 if it lasts, because decode engine h1:80 hangs"
	require.Equal(t, want, b.Incidents()[0].What)
}

func TestResolvedIncidentsStayForAWhile(t *testing.T) {
	var b Book
	f := []Finding{down("h1:8000", refused)}
	at := func(d time.Duration, found []Finding) []Incident {
		b.Observe(noon.Add(d), found)
		return b.Incidents()
	}
	at(0, f)
	in := at(time.Minute, nil)
	require.Len(t, in, 1)
	require.Equal(t, noon.Add(time.Minute).UnixMilli(), in[0].UntilMs)
	require.Equal(t, "Decode engine h1:8000 is down: "+refused, in[0].What, "it is still told")
	in = at(90*time.Second, f)
	require.Len(t, in, 1)
	require.Zero(t, in[0].UntilMs, "it was back at once: the same one")
	require.Equal(t, noon.UnixMilli(), in[0].SinceMs)
	at(2*time.Minute, nil)
	in = at(5*time.Minute, f)
	require.Len(t, in, 2, "it was away for longer: another one")
	require.Equal(t, []int{2, 1}, []int{in[0].ID, in[1].ID}, "what lasts stands first")
	require.Len(t, at(16*time.Minute, nil), 2)
	require.Len(t, at(17*time.Minute, nil), 1, "the first was resolved 15 minutes ago")
	require.Empty(t, at(31*time.Minute, nil))
}

// What is over is told as it was at its worst.
func TestResolvedIncidentsTellTheirPeak(t *testing.T) {
	var b Book
	for i, found := range [][]Finding{{down("h1:1", refused)}, {down("h1:1", refused), down("h1:2", refused), down("h1:3", refused)},
		{down("h1:3", refused)}, nil} {
		b.Observe(noon.Add(time.Duration(i)*time.Second), found)
		if i == 2 {
			require.Equal(t, "Decode engine h1:3 is down: "+refused, b.Incidents()[0].What, "two are back")
		}
	}
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, "3 decode engines on host h1 are down: "+refused, in[0].What)
	require.Equal(t, "These are the decode engines h1:1, h1:2 and h1:3.", in[0].Named)
	require.Equal(t, 3, in[0].Count)
}

func TestTheBookIsBounded(t *testing.T) {
	var b Book
	var many []Finding
	for i := range 3 * maxFindings {
		many = append(many, down(fmt.Sprintf("h1:%d", 1000+i), refused))
	}
	b.Observe(noon, many)
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Len(t, in[0].Where, maxNames)
	require.Equal(t, maxFindings, in[0].Count)
	for i := range 500 { // each by itself
		b.Observe(noon.Add(time.Duration(i+1)*time.Second),
			[]Finding{down(fmt.Sprintf("h%c%c:1", 'a'+i%26, 'a'+i/26), "reason "+string(rune('a'+i%26)))})
	}
	require.LessOrEqual(t, len(b.Incidents()), maxIncidents)
}

// Every kind says all that an incident has to, and its entry is in the runbook.
func TestKindsAreWhole(t *testing.T) {
	text, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	for name, k := range kinds {
		for _, text := range []string{k.clients, k.next, cmp.Or(k.clientsOfPrefill, k.clients)} {
			require.Regexp(t, `^[A-Z][^:]+( |,).*\.$`, text, "%s: whole sentences", name)
		}
		require.Contains(t, strings.ToLower(k.clients), "clients", "%s: who it is that sees it", name)
		require.NotEmpty(t, k.headline, name)
		require.NotEmpty(t, k.command, name)
		require.True(t, k.runbook == "" || strings.Contains(string(text), "\n## "+k.runbook+"\n"), "the runbook has no entry %s", k.runbook)
		require.True(t, k.sharesNoCause || k.effect || k.pluralText != "", "%s: several of it have no words", name)
	}
}

func TestHostsAndReasons(t *testing.T) {
	for where, want := range map[string]string{"10.0.0.1:8000/3": "10.0.0.1", "h:1": "h", "[::1]:80": "[::1]", "group": "", "file:a.yaml": "",
		"": "", ":80": "", "h:": ""} {
		require.Equal(t, want, hostOf(where), where)
	}
	require.Equal(t, "dial tcp connection refused", commonReasonOf("dial tcp 10.0.0.1:80: connection refused", "10.0.0.1"))
	require.Equal(t, "engine dial tcp: lookup on no such host",
		commonReasonOf("engine decode-a:80: dial tcp: lookup decode-a.ns.svc on 10.0.0.1:53: no such host", "Decode-A"))
}

// A title has words, whatever there is several of.
func TestTitlesOfTwoOfEachKind(t *testing.T) {
	// of the proxy
	alone := map[Kind]bool{NotReady: true, Drains: true, AuditDrift: true, ConfigRefused: true, RequestsFail: true, NoPrefill: true,
		QueueFull: true, QueueWaits: true, PrefillBusy: true}
	for name, k := range kinds {
		var b Book
		b.Observe(noon, []Finding{{Kind: name, Severity: Warn, WhereKind: "thing", Where: "a:1", What: "x", Reason: "why"},
			{Kind: name, Severity: Bad, WhereKind: "thing", Where: "b:1", What: "y", Reason: "why"},
			{Kind: name, Severity: Bad, WhereKind: "thing", Where: "a:1", What: "z", Reason: "why"}})
		require.Equal(t, alone[name] || k.sharesNoCause, k.pluralText == "", name)
		switch list := b.Incidents(); {
		case k.sharesNoCause:
			require.Len(t, list, 2, name)
			require.Equal(t, []string{"x", "y"}, []string{list[0].What, list[1].What}, "one of them is told twice")
		default:
			require.Len(t, list, 1, name)
			require.NotRegexp(t, `^2 ( |:|$)`, list[0].What, name)
			if k.pluralText != "" {
				require.Contains(t, list[0].What, "Things a:1 and b:1 ")
				require.Empty(t, list[0].Named)
			}
			require.Equal(t, 2, list[0].Count, "one of them is told twice")
			require.Equal(t, Bad, list[0].Severity)
		}
	}
}

func TestAllThatIsWrongIsTold(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{failing2(), {Kind: QueueFull, Severity: Bad, What: "the arrival queue is full"},
		{Kind: NoPrefill, Severity: Bad, What: "no prefill engine takes prompts"}, {Kind: PoolLate, Severity: Bad, WhereKind: "model", Where: "m",
			What: "one has waited 31 s"}, {Kind: PoolLate, Severity: Bad, WhereKind: "model", Where: "n", What: "one has waited 32 s"}})
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, "the arrival queue is full", in[0].What)
	require.Equal(t, kinds[QueueFull].clients+" Also: no prefill engine takes prompts. 20 of the 300 requests that ended in the last minute "+
		"failed. Models m and n have requests in the pool that wait too long for a rank.", in[0].Clients)
}

func TestEveryNameIsCountedOnce(t *testing.T) {
	var b Book
	var found []Finding
	for i := range 60 {
		where := fmt.Sprintf("h%d:80", i)
		found = append(found, Finding{Kind: MetricsOld, Severity: Warn, WhereKind: "prefill engine", Where: where, What: "old"},
			Finding{Kind: EngineAmiss, Severity: Warn, WhereKind: "prefill engine", Where: where, What: "slow"})
	}
	b.Observe(noon, found)
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, 60, in[0].Count)
	require.Len(t, in[0].Where, maxNames)
	require.Contains(t, in[0].Named, "These are the prefill engines h0:80, h1:80, ")
	require.Contains(t, in[0].Named, ", h47:80, and 12 more.")
	require.Contains(t, in[0].Clients, " Also: 60 prefill engines are up, but something is amiss.")
}

func TestACommandHasOnlyPlainNames(t *testing.T) {
	for where, want := range map[string]string{
		"10.0.0.1:8000/3": "curl -sm 3 -i http://10.0.0.1:8000/health", "[::1]:80": "curl -sm 3 -i http://[::1]:80/health", "$(reboot):80": "", "a b:80": "", "a'b:80": "", "a;b:80": "", "é:80": "", "": "",
	} {
		var b Book
		b.Observe(noon, []Finding{down(where, refused)})
		require.Equal(t, want, b.Incidents()[0].Command, where)
	}
}

// More incidents last than are kept: those that are told stay as they are, and what harms
// most is among them.
func TestAFullBookStaysAsItIs(t *testing.T) {
	var b Book
	found := []Finding{}
	for i := range 70 {
		found = append(found, Finding{Kind: Imbalance, Severity: Warn, Where: fmt.Sprint("g", i), What: fmt.Sprint("x", i)})
	}
	b.Observe(noon, nil)
	b.Observe(noon, []Finding{down("h8:80", refused)}) // it is over soon, and makes room
	ids := func() (all []int) {
		for _, in := range b.Incidents() {
			all = append(all, in.ID)
		}
		return all
	}
	b.Observe(noon.Add(time.Second), found)
	b.Observe(noon.Add(2*time.Second), found)
	before := ids()
	require.Len(t, before, maxIncidents+1)
	rest := b.Incidents()[maxIncidents]
	require.Equal(t, "There are 6 more findings than are told one by one", rest.What)
	require.Equal(t, "The first ones: x64. x65. x66. x67. x68. x69.", rest.Named)
	require.Equal(t, 0, rest.ID)
	for s := range 20 {
		b.Observe(noon.Add(time.Duration(3+s)*time.Second), found)
		require.Equal(t, before, ids())
	}
	found = append(found, down("h9:80", refused))
	for s := range 3 {
		b.Observe(noon.Add(time.Duration(30+s)*time.Second), found)
		in := b.Incidents()
		require.Len(t, in, maxIncidents+1)
		require.Equal(t, "Decode engine h9:80 is down: "+refused, in[0].What)
		require.Equal(t, "There are 7 more findings than are told one by one", in[maxIncidents].What)
	}
	b.Observe(noon.Add(time.Minute), nil)
	for _, in := range b.Incidents() {
		require.NotZero(t, in.ID)
		require.NotZero(t, in.UntilMs)
	}
}

// A subject that was of a later incident, too, stays with the one that lasts.
func TestWhatCameBackToAnIncidentStaysThere(t *testing.T) {
	var b Book
	full := func(where string) Finding {
		return Finding{Kind: GateClosed, Severity: Warn, Where: where, What: "full"}
	}
	for s := range 400 {
		var f []Finding
		if s < 200 || s >= 220 {
			f = append(f, full("h1:8000"))
		}
		if s >= 100 && s < 130 || s >= 221 {
			f = append(f, full("h2:8000"))
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), f)
		if s > 221 {
			lasting := 0
			for _, in := range b.Incidents() {
				if in.UntilMs == 0 {
					lasting++
				}
			}
			require.Equal(t, 1, lasting, s)
		}
	}
}

// An engine that fails requests is often found dead later.
func TestAnEngineThatIsOutAndThenDownIsOneIncident(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{{Kind: PrefillOut, Severity: Bad, Where: "h1:80/0", What: "takes no prompts"}})
	b.Observe(noon.Add(time.Minute), []Finding{{Kind: EngineOut, Severity: Bad, Where: "h1:80", What: "prefill engine is out"},
		{Kind: PrefillOut, Severity: Bad, Where: "h1:80/0", What: "takes no prompts"}})
	b.Observe(noon.Add(3*time.Minute), []Finding{down("h1:80", refused)})
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, noon.UnixMilli(), in[0].SinceMs)
	require.Equal(t, "Decode engine h1:80 is down: "+refused, in[0].What)
}

// A busy engine's pages are slow while it works and quick while it rests.
func TestSlowMetricsAreOneIncidentThatLasts(t *testing.T) {
	var b Book
	slow := func(where string) Finding {
		return Finding{Kind: MetricsOld, Severity: Warn, Panel: "prefill", WhereKind: "prefill engine", Where: where,
			What: "Prefill engine " + where + " answers too late when it is asked for its metrics"}
	}
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	for s := 0; s <= 200; s += 5 {
		var found []Finding
		if s%40 < 15 {
			found = append(found, amiss("p1:1"), slow("p1:1"))
		}
		if s > 70 && s%60 < 10 {
			found = append(found, slow("p2:1"))
		}
		b.Observe(at(s), found)
		in := b.Incidents()
		require.Len(t, in, 1, s)
		require.Zero(t, in[0].UntilMs, s)
		require.Equal(t, noon.UnixMilli(), in[0].SinceMs)
		require.Equal(t, "Slow prefill metrics", in[0].Headline, "what is amiss at large says less")
		switch {
		case s == 35:
			require.Equal(t, "Prefill engine p1:1 answers too late when it is asked for its metrics", in[0].What)
			require.Equal(t, at(10).UnixMilli(), in[0].LastMs)
			require.Contains(t, in[0].Clients, "Prompts of clients are placed")
		case s == 150:
			require.Equal(t, "Prefill engines p1:1 and p2:1 answer too late when they are asked for their metrics", in[0].What)
			require.Equal(t, at(130).UnixMilli(), in[0].LastMs)
		case s == 160:
			require.Zero(t, in[0].LastMs, "it is so now")
		}
	}
	b.Observe(at(330), nil)
	in := b.Incidents()
	require.Equal(t, at(200).UnixMilli(), in[0].UntilMs, "it was over when it was seen last")
}

// What an engine did before it died is no news.
func TestAnEngineThatDiedIsNotLate(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{amiss("p1:1"), amiss("p2:1")})
	b.Observe(noon.Add(5*time.Second), []Finding{down("p1:1", refused)})
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, "Decode engine p1:1 is down: "+refused, in[0].What)
	require.Contains(t, in[0].Clients, " Also: Prefill engine p2:1 is up, but something is amiss: no answer.")
}

func TestOverloadIsTheCauseOfWhatClientsSee(t *testing.T) {
	over := Finding{Kind: Overload, Severity: Bad, Panel: "pool", WhereKind: "model", Where: "m",
		What: "All 96 decode slots of model m are taken, and 527 requests wait in the pool"}
	full := Finding{Kind: QueueFull, Severity: Bad, What: "Requests are refused, because a queue is full"}
	late := Finding{Kind: PoolLate, Severity: Bad, WhereKind: "model", Where: "m", What: "A finished prefill has waited 31 s"}
	gate := Finding{Kind: GateClosed, Severity: Warn, WhereKind: "prefill engine", Where: "p1:1", What: "Prefill engine p1:1 takes no prompts"}
	type told struct {
		at    time.Duration
		found []Finding
	}
	for name, tt := range map[string]struct {
		told []told
		want []string // headlines
	}{
		"at once":                                 {[]told{{0, []Finding{over, failing2(), full}}}, []string{"Overload"}},
		"clients see it first":                    {[]told{{0, []Finding{failing2(), full}}, {5 * time.Second, []Finding{over, failing2(), full}}}, []string{"Overload"}},
		"a slot is free now and then":             {[]told{{0, []Finding{over, full}}, {20 * time.Second, []Finding{full}}, {40 * time.Second, []Finding{over, full}}}, []string{"Overload"}},
		"clients see it long before":              {[]told{{0, []Finding{full}}, {time.Minute, []Finding{over, full}}}, []string{"Overload"}},
		"what comes later follows from it":        {[]told{{0, []Finding{over}}, {10 * time.Minute, []Finding{over, late}}}, []string{"Overload"}},
		"prefill engines that are full harm less": {[]told{{0, []Finding{gate, over, full}}}, []string{"Overload", "Full prefill engines"}},
		"too few are left":                        {[]told{{0, []Finding{down("d1:1", refused)}}, {time.Minute, []Finding{down("d1:1", refused), over}}}, []string{"Engine outage"}},
	} {
		t.Run(name, func(t *testing.T) {
			var b Book
			var got []string
			for _, o := range tt.told {
				b.Observe(noon.Add(o.at), o.found)
			}
			for _, in := range b.Incidents() {
				got = append(got, in.Headline)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// Who floods is in what to do, and a command finds the requests.
func TestAnOverloadNamesTheKey(t *testing.T) {
	for key, want := range map[string]string{
		"": kinds[Overload].command, "$(reboot)": kinds[Overload].command, "batch": strings.ReplaceAll(showRequestsOfKey, "{key}", "batch"),
	} {
		var b Book
		b.Observe(noon, []Finding{{Kind: Overload, Severity: Bad, WhereKind: "model", Where: "m", Key: key, What: "All slots are taken"}})
		in := b.Incidents()[0]
		require.Equal(t, want, in.Command)
		require.Equal(t, key != "", strings.Contains(in.Next, "Ask who uses API key "+key), in.Next)
	}
}

func TestAnOverloadSaysToBringBackEnginesWhereSomeAreAway(t *testing.T) {
	for _, kind := range []Kind{Overload, KVFull, PrefillBusy, QueueFull} {
		saysToBringBack(t, kind)
	}
}

func saysToBringBack(t *testing.T, kind Kind) {
	full := Finding{Kind: kind, Severity: Bad, WhereKind: "model", Where: "m", What: "Many wait"}
	var b Book
	b.Observe(noon, []Finding{full})
	require.NotContains(t, b.Incidents()[0].Next, "Bring back")
	b = Book{}
	b.Observe(noon, []Finding{{Kind: EngineDown, Severity: Bad, WhereKind: "decode engine", Where: "h:1", What: "x is down"}})
	b.Observe(noon.Add(time.Hour), []Finding{{Kind: EngineDown, Severity: Bad, WhereKind: "decode engine", Where: "h:1", What: "x is down"},
		full})
	for _, in := range b.Incidents() {
		if in.Headline == kinds[kind].headline {
			require.Contains(t, in.Next, "Bring back the engines that are down. "+kinds[kind].next)
			return
		}
	}
	t.Fatal("it is not told: " + kind)
}

func TestReasonsLeaveTheAddressOut(t *testing.T) {
	require.Equal(t, "connection refused", WithoutAddress("engine d1:80: connect: dial tcp d1:80: connect: connection refused", "d1:80"))
	require.Equal(t, "engine d2:80: no answer", WithoutAddress("engine d2:80: no answer", "d1:80"))
}

// Whoever reads an incident learns that many requests wait from a word of its own, not from what
// people read.
func TestAnIncidentSaysThatManyRequestsWait(t *testing.T) {
	is := func(of ...Kind) bool {
		b := &Book{}
		var found []Finding
		for _, k := range of {
			found = append(found, Finding{Kind: k, Severity: Bad, What: "It is so"})
		}
		b.Observe(noon, found)
		in := b.Incidents()
		require.Len(t, in, 1)
		return in[0].Crowded
	}
	for k := range kinds {
		require.Equal(t, slices.Contains([]Kind{Overload, KVFull, PrefillBusy, QueueFull, PoolLate}, k), is(k), k)
	}
	require.True(t, is(EngineDown, QueueFull), "as an effect, too")
	require.False(t, is(EngineDown, RequestsFail))
}
