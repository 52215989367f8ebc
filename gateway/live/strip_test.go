package live

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/detect"
)

const stripBins = int(detect.BinsKeptFor / detect.BinLength)

// seen is a sample of a proxy that was looked at as a whole.
func seen(s detect.Sample, at time.Time) detect.Sample {
	s.At, s.Examined = at, true
	return s
}

func line(model, group string, tokens int64) detect.GroupAt {
	return detect.GroupAt{GroupName: detect.GroupName{Model: model, Group: group}, MostTokens: tokens}
}

func TestTheStripHasAQuarterOfAnHour(t *testing.T) {
	var r detect.Ring
	require.Empty(t, stripOf(r.Bins()).AtMs)
	for i := range 2 * 900 {
		r.Add(seen(detect.Sample{Ended: uint64(10 * i), Groups: []detect.GroupAt{line("m", "dp", int64(1000+i%5))}},
			noon.Add(time.Duration(i)*time.Second)))
	}
	s := stripOf(r.Bins())
	require.Len(t, s.AtMs, stripBins)
	require.Equal(t, noon.Add(1795*time.Second).UnixMilli(), s.AtMs[stripBins-1])
	require.Equal(t, slices.Repeat([]int64{50}, stripBins), s.Requests)
	require.Equal(t, int64(1004), s.Lines[0].Tokens[3], "the highest of each bin")
	r.Add(seen(detect.Sample{Ended: 20_000, Failures: map[detect.Outcome]uint64{broken: 4}}, noon.Add(1900*time.Second)))
	s = stripOf(r.Bins())
	require.Len(t, s.AtMs, stripBins-20, "a gap is a gap")
	require.Equal(t, []FailureLine{{"upstream_broken", 502, append(make([]int64, len(s.AtMs)-1), 4)}}, s.Failures)
	require.Equal(t, int64(-1), s.Lines[0].Tokens[len(s.AtMs)-1])
}

func TestEvents(t *testing.T) {
	type states = map[detect.EngineName]string
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	base := detect.Sample{Policy: "evenkeel", Engines: states{{Role: "decode", Name: "a:1"}: "up", {Role: "decode", Name: "b:1"}: "up",
		{Role: "decode", Name: "c:1"}: "up", {Role: "prefill", Name: "c:1"}: "up"}}
	change := func(f func(*detect.Sample)) detect.Sample {
		n := base
		n.Engines = maps.Clone(base.Engines)
		f(&n)
		return n
	}
	engine := func(role, name, state string) detect.Sample {
		return change(func(n *detect.Sample) { n.Engines[detect.EngineName{Role: role, Name: name}] = state })
	}
	failing := func(ended, count uint64) detect.Sample {
		return change(func(n *detect.Sample) { n.Ended, n.Failures = ended, map[detect.Outcome]uint64{refused: count} })
	}
	for name, tt := range map[string]struct {
		then []detect.Sample
		want []string
	}{
		"nothing":  {[]detect.Sample{base}, nil},
		"one goes": {[]detect.Sample{engine("decode", "b:1", "down")}, []string{"down: Decode engine b:1 went down"}},
		"a host goes": {[]detect.Sample{change(func(n *detect.Sample) {
			n.Engines[detect.EngineName{Role: "decode", Name: "b:1"}], n.Engines[detect.EngineName{Role: "decode", Name: "c:1"}] = "down", "out"
		})}, []string{"down: Decode engine b:1 and 1 more went down"}},
		"it comes back":           {[]detect.Sample{engine("decode", "b:1", "down"), base}, []string{"down: Decode engine b:1 went down", "up: Decode engine b:1 came back"}},
		"its drain is taken back": {[]detect.Sample{engine("decode", "a:1", "drain"), base}, []string{"drain: Decode engine a:1 began to drain", "up: Decode engine a:1 took requests again"}},
		"one drains":              {[]detect.Sample{engine("decode", "a:1", "drain")}, []string{"drain: Decode engine a:1 began to drain"}},
		"it drains and dies":      {[]detect.Sample{engine("decode", "a:1", "drain"), engine("decode", "a:1", "wedged")}, []string{"drain: Decode engine a:1 began to drain", "down: Decode engine a:1 went down"}},
		"out and down are one":    {[]detect.Sample{engine("prefill", "c:1", "out"), engine("prefill", "c:1", "down")}, []string{"down: Prefill engine c:1 went down"}},
		"a new engine":            {[]detect.Sample{engine("decode", "d:1", "down")}, nil},
		"another policy":          {[]detect.Sample{change(func(n *detect.Sample) { n.Policy = "br0" })}, []string{"policy: Policy br0 took over from evenkeel"}},
		"another config":          {[]detect.Sample{change(func(n *detect.Sample) { n.Reload = at(1) })}, []string{"reload: Another config came into force"}},
		"the proxy drains":        {[]detect.Sample{change(func(n *detect.Sample) { n.Drains = true })}, []string{"drain: The proxy began to drain"}},
		"a burst, told once":      {[]detect.Sample{failing(50, 40), failing(100, 80)}, []string{"refused: A burst of requests was refused with a 429"}},
		"a few are no burst":      {[]detect.Sample{failing(1000, 20)}, nil},
		"while nobody could look": {[]detect.Sample{{}, engine("decode", "b:1", "down")}, []string{"down: Decode engine b:1 went down"}},
	} {
		t.Run(name, func(t *testing.T) {
			var r detect.Ring
			r.Add(seen(base, noon))
			for i, n := range tt.then {
				n = seen(n, at(5*(i+1)))
				n.Examined = n.Policy != ""
				r.Add(n)
			}
			var got []string
			for _, e := range stripOf(r.Bins()).Events {
				got = append(got, e.Kind+": "+e.What)
			}
			require.Equal(t, tt.want, got)
			for i := range 200 { // they are forgotten with their bins
				r.Add(seen(tt.then[len(tt.then)-1], at(20+5*i)))
			}
			require.Empty(t, stripOf(r.Bins()).Events)
		})
	}
}

func TestTheStripIsBounded(t *testing.T) {
	var r detect.Ring
	for i := range 3000 {
		s := detect.Sample{Policy: fmt.Sprint(i)}
		for g := range 2 * maxGroupLines {
			s.Groups = append(s.Groups, line("m", fmt.Sprint(g), 1))
		}
		r.Add(seen(s, noon.Add(time.Duration(i)*time.Second)))
	}
	s := stripOf(r.Bins())
	require.Len(t, s.Events, maxEvents)
	require.Len(t, s.Lines, maxGroupLines)
	require.LessOrEqual(t, len(s.AtMs), stripBins)
}

func TestAClockThatWasSetBackBeginsAnew(t *testing.T) {
	var r detect.Ring
	ended := uint64(0)
	add := func(at time.Time, drains bool) {
		ended++
		r.Add(seen(detect.Sample{Ended: ended, Failures: map[detect.Outcome]uint64{broken: ended}, Drains: drains}, at))
	}
	for i := range 60 {
		add(noon.Add(time.Duration(i)*time.Second), false)
	}
	add(noon.Add(58*time.Second), false)
	require.Len(t, stripOf(r.Bins()).AtMs, 12, "a step back within a bin is none")
	back := noon.Add(-time.Hour)
	for i := range 60 {
		add(back.Add(time.Duration(i)*time.Second), i > 50)
	}
	s := stripOf(r.Bins())
	require.Len(t, s.AtMs, 12)
	require.Equal(t, back.UnixMilli(), s.AtMs[0])
	require.Equal(t, append([]int64{0}, slices.Repeat([]int64{5}, 11)...), s.Requests)
	require.Equal(t, []Event{{back.Add(54 * time.Second).UnixMilli(), "drain", "The proxy began to drain"}}, s.Events)
}

// A number that was never known has no line, and every line has a value for every sample: what the
// rank held then, or -1.
func TestHistory(t *testing.T) {
	var r detect.Ring
	require.Empty(t, historyOf(r.Seconds()).Lines)
	for i := range 3 {
		s := detect.Sample{At: noon.Add(time.Duration(i) * time.Second), Pool: 4, Tokens: int64(70 * i), Ended: uint64(2 * i),
			Ranks: []detect.RankAt{{ID: 7, KVTokens: int64(i)}}}
		if i == 1 {
			s.TTFT = detect.Latency{P50Ms: 5, P99Ms: 9, Samples: 1}
			s.Ranks = []detect.RankAt{{ID: 3, KVTokens: 9}}
		}
		r.Add(s)
	}
	h := historyOf(r.Seconds())
	require.Equal(t, []NumbersLine{
		{"pool_entries", []int64{4, 4, 4}}, {"requests_per_ks", []int64{0, 2000, 2000}}, {"tokens_per_s", []int64{0, 70, 70}},
		{"ttft_p50_us", []int64{-1, 5000, -1}}, {"ttft_p99_us", []int64{-1, 9000, -1}},
	}, h.Lines)
	require.Equal(t, []RankLine{{3, []int64{-1, 9, -1}}, {7, []int64{0, -1, 2}}}, h.Ranks)
}
