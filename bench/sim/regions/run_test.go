package regions

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/race"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// short is a scenario that takes no time.
func short(t testing.TB, name string) *Scenario {
	t.Helper()
	s, err := Named(name, "l4-llama8b")
	require.NoError(t, err)
	s.WarmS, s.MeasureS = 5, 40
	for i := range s.Faults {
		s.Faults[i].AtS, s.Faults[i].ForS = 15, 12
	}
	return s
}

func compare(t testing.TB, s *Scenario, seeds int, arms ...string) []report.Run {
	t.Helper()
	runs, err := (&Plan{Scenario: s, Arms: arms, Seeds: seeds}).Run(context.Background())
	require.NoError(t, err)
	return runs
}

func TestASeedGivesTheSameRun(t *testing.T) {
	s := short(t, "skew")
	a, b := compare(t, s, 2, "finish", "skylb:push=sp-p"), compare(t, s, 2, "finish", "skylb:push=sp-p")
	require.Equal(t, a, b)
	require.NotEqual(t, a[0].Metrics, a[1].Metrics)
}

func TestTwoSeedsHaveNoUserPromptOrRequestInCommon(t *testing.T) {
	drawn := func(seed uint64) (all []string) {
		a, err := parseArm("finish")
		require.NoError(t, err)
		s, err := newSimulation(short(t, "multi-turn"), a, seed)
		require.NoError(t, err)
		require.True(t, s.next(5000))
		for range 500 {
			s.next(5000)
		}
		for _, d := range s.dispatchers {
			for _, v := range d.live {
				all = append(all, v.r.id, fmt.Sprint(v.r.key))
				for _, k := range v.r.keys {
					all = append(all, fmt.Sprint(k.Hash))
				}
			}
		}
		require.NotEmpty(t, all)
		return all
	}
	first, second := drawn(1), drawn(2)
	for _, x := range first {
		require.NotContains(t, second, x)
	}
}

func TestEveryArmRunsEveryScenarioAndKeepsTheInvariants(t *testing.T) {
	race.Alone(t)
	for _, name := range Names() {
		for _, r := range compare(t, short(t, name), 1, Arms()...) {
			at := fmt.Sprintf("%s on %s", r.Policy, name)
			require.Zero(t, r.Metrics[Violations].Mean, at)
			require.Positive(t, r.Metrics[report.OK].Mean, at)
			require.Positive(t, r.Metrics[report.TTFTMean].Mean, at)
			require.LessOrEqual(t, r.Metrics[report.TTFTP50].Mean, r.Metrics[report.TTFTP99].Mean, at)
			require.InDelta(t, 0.5, r.Metrics[report.HitRatio].Mean, 0.5, at)
		}
	}
}

func TestFaultsBreakWhatTheyMustAndNoMore(t *testing.T) {
	for _, row := range []struct {
		name, policy string
		check        func(s *simulation)
	}{
		{"dies", "finish:load=0", func(s *simulation) {
			require.Positive(t, s.meter.fallbacks, "forwards that had not started streaming run at home")
			require.Positive(t, s.meter.outcomes[failed], "its own clients lose what it had")
		}},
		{"partition", "finish:load=0", func(s *simulation) {
			require.Zero(t, s.meter.outcomes[failed]+s.meter.outcomes[lost], "no request is lost")
		}},
		{"drains", "finish:load=0", func(s *simulation) {
			require.Zero(t, s.meter.outcomes[failed]+s.meter.outcomes[lost])
		}},
		{"version", "finish:load=0", func(s *simulation) {
			require.Zero(t, s.meter.outcomes[failed]+s.meter.outcomes[lost])
		}},
	} {
		a, err := parseArm(row.policy)
		require.NoError(t, err)
		sc := short(t, row.name)
		sc.Faults[0].AtS, sc.Faults[0].ForS = 20, 15
		s, err := newSimulation(sc, a, 3)
		require.NoError(t, err)
		intoBroken := 0
		watch := func() {
			for _, d := range s.dispatchers {
				for _, v := range d.live {
					if v.state == forwarded && s.named(v.forward.PeerID()).region == 1 && d.region == 0 && v.movedAt > 1000*sc.Faults[0].AtS+2500 &&
						s.now < 1000*(sc.Faults[0].AtS+sc.Faults[0].ForS) {
						intoBroken++
					}
				}
			}
		}
		for i := range 300 {
			s.after(float64(i)*150, watch)
		}
		require.NoError(t, s.run(context.Background()))
		require.Zero(t, intoBroken, "%s: nobody forwards there once probes have told", row.name)
		require.Zero(t, s.meter.violations, row.name)
		row.check(s)
	}
}

func TestMoreReplicasAreFaster(t *testing.T) {
	runs := compare(t, short(t, "skew"), 2, "finish:replicas=6", "finish:replicas=24")
	require.Greater(t, runs[0].Metrics[report.TTFTMean].Mean, runs[1].Metrics[report.TTFTMean].Mean)
	require.Less(t, runs[0].Metrics[report.TokensPerS].Mean, runs[1].Metrics[report.TokensPerS].Mean)
}

func TestArmsAreRefusedWithAReason(t *testing.T) {
	for _, row := range []struct{ name, text, want string }{
		{"an unknown one", "sky", `unknown policy "sky"`},
		{"a key that is nobody's", "finish:x=1", `unknown key "x"`},
		{"replicas of none", "finish:replicas=0", "replicas=0: want a whole number from 1 to 512"},
		{"a probe without time", "finish:probe_ms=1", "probe_ms=1: want a number from 10 to 100000"},
		{"without what", "finish:without=hope", "without=hope: want wait, rtt, guard"},
	} {
		_, err := parseArm(row.text)
		require.ErrorContains(t, err, row.want, row.name)
	}
	_, err := (&Plan{Scenario: short(t, "skew"), Seeds: 1}).Run(context.Background())
	require.ErrorContains(t, err, "no policy")
	_, err = (&Plan{Scenario: short(t, "skew"), Arms: []string{"finish"}}).Run(context.Background())
	require.ErrorContains(t, err, "0 seeds")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = (&Plan{Scenario: short(t, "skew"), Arms: []string{"finish"}, Seeds: 3}).Run(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestAnArmNamesTheChoiceOfAReplica(t *testing.T) {
	a, err := parseArm("skylb:push=sp-p,prefill=bailian:lambda=1,probe_ms=100")
	require.NoError(t, err)
	require.Equal(t, []string{"skylb:push=sp-p", "bailian:lambda=1"}, []string{a.policy, a.prefill})
	_, err = parseArm("skylb:prefill=nobody")
	require.ErrorContains(t, err, `unknown policy "nobody"`)
}

const example = `
like: skew
preset: a100-mistral7b
regions:
  - {name: us, replicas: 2, clients: 8}
  - {name: eu, replicas: 1, workload: tot, clients: 2, branches: 3, depth: 2}
rtt_ms: [[3, 90], [90, 3]]
engine: {kv_tokens: 40000, one_pass: true, pending_in_prefill: true, log_steps: 40}
warm_s: 2
measure_s: 20
faults: [{kind: partition, region: us, from: eu, at_s: 5, for_s: 5}]
`

func TestAScenarioIsReadFromAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "two.yaml")
	require.NoError(t, os.WriteFile(path, []byte(example), 0o600))
	s, err := Read(path, "")
	require.NoError(t, err)
	require.Equal(t, []Region{
		{Name: "us", Replicas: 2, Load: Load{Clients: 8, Turns: 5, Prompt: 80, Output: 160}},
		{Name: "eu", Replicas: 1, Load: Load{Kind: treeOfThoughts, Clients: 2, Turns: 5, Prompt: 80, Output: 100, Branches: 3, Depth: 2}},
	}, s.Regions)
	want := presets["a100-mistral7b"]
	want.KVTokens, want.OnePass, want.PrefillPends, want.LogSteps = 40_000, true, true, 40
	require.Equal(t, want, s.Engine)
	require.Equal(t, []Fault{{Kind: Partition, Region: 0, Other: 1, AtS: 5, ForS: 5}}, s.Faults)
	runs := compare(t, s, 1, "finish")
	require.Zero(t, runs[0].Metrics[Violations].Mean)
	_, err = Read("no/such/file.yaml", "")
	require.ErrorContains(t, err, "no such file")
}

func TestAWrongScenarioSaysWhere(t *testing.T) {
	for _, row := range []struct{ name, text, want string }{
		{"an unknown key, with line and column", "like: skew\nregoins: []\n", "[2:1]"},
		{"a wrong kind of value", "warm_s: soon\n", "[1:9]"},
		{"an unknown scenario", "like: sky\n", `unknown scenario "sky"`},
		{"an unknown preset", "preset: h100\n", `unknown preset "h100"`},
		{"a matrix of another size", "rtt_ms: [[1]]\n", "rtt_ms has 1 rows; want one for each of 3 regions"},
		{"a round trip with two lengths", "rtt_ms: [[3, 1, 2], [9, 3, 3], [2, 3, 3]]\n", "a round trip has one length"},
		{"an unknown workload", "regions: [{workload: chess}]\n", `regions[0]: workload "chess"`},
		{"two regions of a name", "regions: [{name: a}, {name: a}]\nrtt_ms: [[3, 9], [9, 3]]\n", `regions[1]: there are two "a"`},
		{"a fault nowhere", "faults: [{kind: dies, region: x}]\n", `faults[0]: region "x": no such region`},
		{"an unknown fault", "faults: [{kind: burns, region: a}]\n", `faults[0]: kind "burns"`},
		{"a partition from nobody", "faults: [{kind: partition, region: a}]\n", `faults[0]: from "": no such region`},
		{"no KV", "engine: {kv_tokens: 100}\n", "kv_tokens 100"},
		{"metrics that are never told", "engine: {log_steps: -1}\n", "log_steps -1: from 0"},
		{"no step", "engine: {step_ms: 0}\n", "step_ms 0: above 0"},
		{"no time", "measure_s: 0\n", "measure_s 0"},
		{"a probe all the time", "probe_ms: 0\n", "probe_ms 0"},
		{"a probe never", "probe_ms: .inf\n", "probe_ms +Inf"},
		{"a scrape never", "scrape_ms: 1e30\n", "scrape_ms 1e+30"},
		{"a price that is no number", "usd_per_gb: .nan\n", "usd_per_gb NaN"},
		{"no replica anywhere", "regions: [{replicas: 0}]\nrtt_ms: [[3]]\n", "no region has a replica"},
		{"turns without end", "regions: [{turns: 100}]\nrtt_ms: [[3]]\n", "turns 100"},
	} {
		_, err := ParseScenario([]byte(row.text), "")
		require.ErrorContains(t, err, row.want, row.name)
	}
}

func FuzzScenario(f *testing.F) {
	for _, text := range []string{example, "like: tot\n", "regions: [{peak: 3}]\nrtt_ms: [[1]]\n", "faults: [{kind: dies, region: a}]\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseScenario([]byte(text), ""); err == nil {
			require.NoError(t, s.Validate())
		}
	})
}

func TestTheDayOfThreeRegionsIsLevelInSum(t *testing.T) {
	s, err := Named("diurnal", "l4-llama8b")
	require.NoError(t, err)
	most, least := 0, 1<<30
	var top, bottom [3]int
	for i := range bottom {
		bottom[i] = 1 << 30
	}
	for at := range 200 {
		sum := 0
		for i := range s.Regions {
			n := s.Regions[i].Load.active(s.warmMs()+float64(at)*1000, s)
			top[i], bottom[i], sum = max(top[i], n), min(bottom[i], n), sum+n
		}
		most, least = max(most, sum), min(least, sum)
	}
	require.InDelta(t, 1.3, float64(most)/float64(least), 0.05)
	require.InDelta(t, 2.9, float64(top[0])/float64(bottom[0]), 0.2)
	require.InDelta(t, 8, float64(top[1])/float64(bottom[1]), 1)
	require.Greater(t, float64(top[2])/float64(bottom[2]), 20.0)
}

func BenchmarkSkew(b *testing.B) {
	s := short(b, "skew")
	for b.Loop() {
		compare(b, s, 1, "finish")
	}
}

func TestNamesAreNames(t *testing.T) {
	_, err := Named("nowhere", "l4-llama8b")
	require.ErrorContains(t, err, strings.Join(Names(), ", "))
	_, err = Named("skew", "h100")
	require.ErrorContains(t, err, strings.Join(Presets(), ", "))
}
