package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/gateway/certs/certtest"
)

// measured are not there before something was measured. No rule asks how much
// they rose.
var measured = []string{
	"evenkeel_kv_events_lag_seconds", // of the last batch
	"evenkeel_incident",              // of what is wrong
}

// fresh are the series that built proxies export before their first request:
// one that has everything on which a proxy of a region may have, and one of
// several that share their decode groups.
func fresh(t *testing.T) (all []labels.Labels) {
	t.Helper()
	dir := t.TempDir()
	w, err := testbed.New(t.Context(), "dashboards", testbed.Options{Keep: dir})
	require.NoError(t, err)
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	engines := "engines:\n"
	for _, role := range []refengine.Role{refengine.Prefill, refengine.Decode} {
		engines += fmt.Sprintf("  %s:\n", role)
		for profile, connector := range map[string]refengine.Connector{"late": "", "early": refengine.AscendLayerwise} {
			e, err := refengine.Start(refengine.Config{Role: role, Model: refengine.Model{Name: profile}, Connector: connector, Slots: 16, DPSize: 1,
				Steps: refengine.Steps{C0: time.Millisecond, C1: time.Nanosecond}})
			require.NoError(t, err)
			t.Cleanup(e.Close)
			engines += fmt.Sprintf("    - {url: %q, profile: %s}\n", e.URLs()[0], profile)
		}
	}
	both, err := refengine.Start(refengine.Config{Role: refengine.Aggregated, Model: refengine.Model{Name: "both"}, Slots: 16,
		Prompts: refengine.Prompts{MaxBatchedTokens: 64}, DPSize: 1,
		Steps: refengine.Steps{C0: time.Millisecond, C1: time.Nanosecond}})
	require.NoError(t, err)
	t.Cleanup(both.Close)
	engines += fmt.Sprintf("  aggregated: [{url: %q}]\n", both.URLs()[0])
	engines += "profiles: {late: {}, early: {connector: ascend-layerwise}}\nbind: {listen: \"127.0.0.1:0\"}\n"
	cert, key := certtest.New(t).Issue(t, "localhost", time.Now().Add(time.Hour))
	peers := "geo: {mode: distributed, self: {id: us-1, region: us}, listen: \"127.0.0.1:0\", hmac: {keys_file: " +
		write("peers.key", "a 0123456789abcdef0123456789abcdef\n") + "}, "
	for name, text := range map[string]string{
		"alone": peers + `peers: [{id: eu-1, region: eu, url: "http://127.0.0.1:9"}], ownership: {engine: static}}
tls: {cert_file: ` + cert + `, key_file: ` + key + `}
discovery: {files: [` + write("engines.yaml", "prefill: []\n") + `]}
dispatch: {step_model: {c0_ms: 15, c1_ms: 0.0004}}
prefill: {policies: {mine: {score: p_tokens}}, policy: mine, kv_events: {enabled: true}}
`,
		"shared": peers + `peers: [{id: us-2, region: us, url: "http://127.0.0.1:9"}]}
ha: {mode: shard, engine: etcd, etcd: {endpoints: ["http://127.0.0.1:9"]}}
`,
	} {
		admin := testbed.FreeAddresses(1)[0]
		config := write(name+".yaml",
			"listen: \"127.0.0.1:0\"\nadmin: {listen: \""+admin+"\"}\nself_test: false\nadvice: {interval: 200ms}\n"+engines+text)
		log := filepath.Join(dir, name+".log")
		p, err := testbed.Start(exec.Command(w.Binary, "serve", "--config", config), log)
		require.NoError(t, err)
		t.Cleanup(p.Kill)
		var page string
		err = testbed.Await(t.Context(), time.Minute, name+" sees its engines and has looked at them", func() bool {
			page = ask(t, "http://"+admin+"/metrics")
			return testbed.Sum([]byte(page), "evenkeel_engine_up{") == 5 && strings.Contains(page, "evenkeel_rank_slots{") &&
				(name == "shared" || strings.Contains(page, "evenkeel_advice{"))
		})
		if err != nil {
			said, _ := os.ReadFile(log)
			t.Fatalf("%v\n%s", err, said)
		}
		for series := range testbed.Series([]byte(page)) {
			metric, err := parser.NewParser(parser.Options{}).ParseMetric(series)
			require.NoError(t, err, series)
			all = append(all, metric)
		}
	}
	return all
}

func ask(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(page)
}

// selectors are what a rule looks at: each alternative of a label is one of its
// own.
// A counter's labels that the rule leaves open have all their values.
func selectors(v *parser.VectorSelector, there map[string]metric) (all [][]*labels.Matcher) {
	all = [][]*labels.Matcher{nil}
	matchers := slices.Clone(v.LabelMatchers)
	if m := there[v.Name]; m.kind == "counter" {
		for name, values := range m.labels {
			named := slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return m.Name == name })
			if len(values) > 0 && !named {
				matchers = append(matchers, labels.MustNewMatcher(labels.MatchRegexp, name, strings.Join(values, "|")))
			}
		}
	}
	for _, m := range matchers {
		choices := []string{m.Value}
		if m.Type == labels.MatchRegexp {
			choices = strings.Split(m.Value, "|")
		}
		var next [][]*labels.Matcher
		for _, before := range all {
			for _, c := range choices {
				next = append(next, append(slices.Clone(before), labels.MustNewMatcher(m.Type, m.Name, c)))
			}
		}
		all = next
	}
	return all
}

// A counter that is born with its first event has not increased: Prometheus
// never saw it at 0, and the alert on it misses that event. So what rules look
// at is there from the start.
func TestTheSeriesOfEveryRuleExistBeforeTheFirstRequest(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds the proxy and runs it twice")
	}
	there, known := fresh(t), metrics(t)
	exists := func(want []*labels.Matcher) bool {
		return slices.ContainsFunc(there, func(l labels.Labels) bool {
			return !slices.ContainsFunc(want, func(m *labels.Matcher) bool { return !m.Matches(l.Get(m.Name)) })
		})
	}
	recorded := map[string]bool{"up": true}
	for _, r := range rules(t) {
		recorded[r.Record] = true
	}
	n := 0
	for _, r := range rules(t) {
		expr, err := parser.NewParser(parser.Options{}).ParseExpr(r.Expr)
		require.NoError(t, err)
		parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
			v, ok := node.(*parser.VectorSelector)
			if !ok || recorded[v.Name] || slices.Contains(measured, v.Name) {
				return nil
			}
			for _, want := range selectors(v, known) {
				if n++; !exists(want) {
					t.Errorf("%s%s: a fresh proxy does not export %v", r.Record, r.Alert, want)
				}
			}
			return nil
		})
	}
	require.Greater(t, n, 100)

	for _, fed := range inputs(t) {
		if known[fed.name].kind != "counter" {
			continue
		}
		want := []*labels.Matcher{labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, fed.name)}
		for name, value := range fed.labels {
			if len(known[fed.name].labels[name]) > 0 {
				want = append(want, labels.MustNewMatcher(labels.MatchEqual, name, value))
			}
		}
		if !slices.Contains(measured, fed.name) && !exists(want) {
			t.Errorf("%s: rules_test.yaml begins a series that a fresh proxy does not export: %v", fed.test, want)
		}
	}

	// A rule of somebody else looks at other counters. Those whose labels have few
	// values are there, too.
	for name, m := range known {
		few := m.kind == "counter"
		for _, values := range m.labels {
			few = few && len(values) > 0
		}
		if few {
			v := &parser.VectorSelector{Name: name,
				LabelMatchers: []*labels.Matcher{labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, name)}}
			for _, want := range selectors(v, known) {
				if !exists(want) {
					t.Errorf("a fresh proxy does not export %v", want)
				}
			}
		}
	}
}

// input is a series that rules_test.yaml feeds to the rules.
type input struct {
	test, name, values string
	labels             map[string]string // but for those of the scrape
}

func inputs(t *testing.T) (all []input) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(configs, "prometheus", "rules_test.yaml"))
	require.NoError(t, err)
	var file struct {
		Tests []struct {
			Name   string
			Series []struct{ Series, Values string } `yaml:"input_series"`
		}
	}
	require.NoError(t, yaml.Unmarshal(raw, &file))
	for _, test := range file.Tests {
		for _, s := range test.Series {
			metric, err := parser.NewParser(parser.Options{}).ParseMetric(s.Series)
			require.NoError(t, err, s.Series)
			in := input{test: test.Name, name: metric.Get(model.MetricNameLabel), values: s.Values, labels: map[string]string{}}
			metric.Range(func(l labels.Label) {
				if l.Name != model.MetricNameLabel && !slices.Contains(scraped, l.Name) {
					in.labels[l.Name] = l.Value
				}
			})
			all = append(all, in)
		}
	}
	require.Greater(t, len(all), 100)
	return all
}

// The rules are tested with series of the proxy, and with counters that begin at
// 0 or stood still all the time.
func TestRulesAreTestedWithWhatTheProxyExports(t *testing.T) {
	there := metrics(t)
	for _, in := range inputs(t) {
		if in.name == "up" {
			continue
		}
		m, ok := there[in.name]
		require.True(t, ok, "%s: there is no metric %s", in.test, in.name)
		for name, value := range in.labels {
			values, known := m.labels[name]
			require.True(t, known, "%s: %s has no label %s", in.test, in.name, name)
			if len(values) > 0 {
				require.Contains(t, values, value, "%s: %s", in.test, in.name)
			}
		}
		if m.kind == "counter" {
			require.Regexp(t, `^(0|[0-9]+\+0x)`, in.values, "%s: %s", in.test, in.name)
		}
	}
}
