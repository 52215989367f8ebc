package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

const configs = "../../../configs"

func TestTheDashboardsAreWritten(t *testing.T) {
	for _, d := range dashboards {
		want, err := d.encode()
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(configs, "grafana", d.file))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "write them anew: go run ./bench/outside/dashboards -write configs/grafana")
	}
	files, err := filepath.Glob(filepath.Join(configs, "grafana", "*.json"))
	require.NoError(t, err)
	require.Len(t, files, len(dashboards), "a dashboard that panels.go does not have")
}

// metric is a row of docs/metrics.md, which a test of the gateway holds against
// the metrics that there are.
type metric struct {
	kind   string
	labels map[string][]string // with the values they can have, where those are few
}

var label = regexp.MustCompile("`([a-z_]+)`(?:: ([a-z0-9_., ]+))?")

// metrics are those there are, by every name that Prometheus stores.
func metrics(t *testing.T) map[string]metric {
	t.Helper()
	page, err := os.ReadFile("../../../docs/metrics.md")
	require.NoError(t, err)
	all := map[string]metric{
		"up": {"gauge", nil}, "process_resident_memory_bytes": {"gauge", nil}, "process_cpu_seconds_total": {"counter", nil},
	}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) < 6 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "`evenkeel_") {
			continue
		}
		name := strings.Trim(strings.TrimSpace(cells[1]), "`")
		m := metric{strings.TrimSpace(cells[2]), map[string][]string{}}
		for _, l := range label.FindAllStringSubmatch(cells[3], -1) {
			m.labels[l[1]] = strings.FieldsFunc(l[2], func(r rune) bool { return r == ',' || r == ' ' })
		}
		if m.kind != "histogram" {
			all[name] = m
			continue
		}
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			with := metric{m.kind, map[string][]string{}}
			for l, values := range m.labels {
				with.labels[l] = values
			}
			if part == "_bucket" {
				with.labels["le"] = nil
			}
			all[name+part] = with
		}
	}
	require.Greater(t, len(all), 100)
	return all
}

var (
	named = regexp.MustCompile(`evenkeel_[a-z0-9_]+`)
	part  = regexp.MustCompile(`_(bucket|sum|count)$`) // of a histogram
)

// TestEveryMetricHasAReader fails for a metric that is on no dashboard, in no alert and on no page
// of docs/ besides the list of metrics: nobody would look at it.
func TestEveryMetricHasAReader(t *testing.T) {
	read := map[string]bool{}
	for _, pattern := range []string{configs + "/grafana/*.json", configs + "/prometheus/rules.yaml", "../../../docs/*.md",
		"../../../docs/results/*.md"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			if filepath.Base(file) == "metrics.md" {
				continue
			}
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, name := range named.FindAllString(string(text), -1) {
				read[name], read[part.ReplaceAllString(name, "")] = true, true
			}
		}
	}
	for name, m := range metrics(t) {
		if m.kind == "histogram" {
			name = part.ReplaceAllString(name, "")
		}
		if strings.HasPrefix(name, "evenkeel_") && !read[name] {
			t.Errorf("%s has no reader: put it into a panel, an alert or a page of docs/, or remove it", name)
		}
	}
}

// rule is one of rules.yaml.
type rule struct {
	Record, Alert, Expr, For string
	Labels, Annotations      map[string]string
}

func rules(t *testing.T) (all []rule) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(configs, "prometheus", "rules.yaml"))
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	require.NoError(t, yaml.Unmarshal(raw, &file))
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

// scraped are the labels that Prometheus adds itself, or its operator for a PodMonitor.
var scraped = []string{"job", "instance", "namespace"}

// verify holds an expression against the metrics: names, labels, the values of
// labels that have few, and functions that fit the type.
func verify(expr string, there map[string]metric) error {
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
	if err != nil {
		return err
	}
	var wrong error
	bad := func(format string, args ...any) {
		if wrong == nil {
			wrong = fmt.Errorf(format, args...)
		}
	}
	parser.Inspect(parsed, func(n parser.Node, path []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			m, ok := there[n.Name]
			if !ok {
				bad("there is no metric %s", n.Name)
				return nil
			}
			for _, matcher := range n.LabelMatchers {
				values, ok := m.labels[matcher.Name]
				switch {
				case matcher.Name == "__name__" || slices.Contains(scraped, matcher.Name):
				case !ok:
					bad("%s has no label %s", n.Name, matcher.Name)
				case len(values) > 0 && !slices.ContainsFunc(values, matcher.Matches):
					bad("no value of %s of %s is %s", matcher.Name, n.Name, matcher)
				case matcher.Type == labels.MatchRegexp && len(values) > 0:
					for _, one := range strings.Split(matcher.Value, "|") {
						if regexp.QuoteMeta(one) == one && !slices.Contains(values, one) {
							bad("no value of %s of %s is %s", matcher.Name, n.Name, one)
						}
					}
				}
			}
			if counted := slices.ContainsFunc(path, func(p parser.Node) bool {
				call, ok := p.(*parser.Call)
				return ok && slices.Contains([]string{"rate", "increase", "irate"}, call.Func.Name)
			}); counted && m.kind == "gauge" {
				bad("%s is a gauge and has no rate", n.Name)
			}
		case *parser.AggregateExpr:
			for _, by := range n.Grouping {
				if !n.Without && !labelled(n.Expr, by, there) {
					bad("by %s: nothing below has that label: %s", by, n.Expr)
				}
			}
		case *parser.BinaryExpr:
			if n.VectorMatching == nil {
				return nil
			}
			for _, by := range n.VectorMatching.MatchingLabels {
				if !labelled(n.LHS, by, there) || n.VectorMatching.On && !labelled(n.RHS, by, there) {
					bad("on %s: a side has no such label: %s", by, n)
				}
			}
		}
		return nil
	})
	return wrong
}

// labelled says whether any selector of an expression has a label.
func labelled(e parser.Expr, name string, there map[string]metric) (found bool) {
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok {
			_, has := there[s.Name].labels[name]
			found = found || has || slices.Contains(scraped, name)
		}
		return nil
	})
	return found
}

func TestEveryExpressionFitsTheMetrics(t *testing.T) {
	there := metrics(t)
	all := rules(t)
	for _, r := range all {
		if r.Record != "" {
			there[r.Record] = metric{"gauge", map[string][]string{}}
		}
	}
	for _, r := range all {
		require.NoError(t, verify(r.Expr, there), "%s%s: %s", r.Record, r.Alert, r.Expr)
	}
	n := 0
	files, err := filepath.Glob(filepath.Join(configs, "grafana", "*.json"))
	require.NoError(t, err)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		require.NoError(t, err)
		var board grafanaBoard
		require.NoError(t, json.Unmarshal(raw, &board))
		for _, p := range board.Panels {
			for _, l := range p.Targets {
				n++
				require.NoError(t, verify(strings.ReplaceAll(l.Expr, "$__rate_interval", "5m"), there), "%s: %s: %s", f, p.Title, l.Expr)
			}
		}
	}
	require.Greater(t, n, 100)
	followed := map[string][]string{}
	for _, f := range []string{"hpa.yaml", "adapter.yaml"} {
		text, err := os.ReadFile(filepath.Join(configs, "kubernetes", f))
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?:name: |seriesQuery: ')(evenkeel_\w+)`).FindAllStringSubmatch(string(text), -1) {
			require.Contains(t, there, m[1], "the autoscaler follows it")
			followed[m[1]] = append(followed[m[1]], f)
		}
	}
	require.NotEmpty(t, followed)
	for name, files := range followed {
		require.Subset(t, files, []string{"hpa.yaml", "adapter.yaml"}, name)
	}
}

func TestWrongExpressionsAreFound(t *testing.T) {
	there := metrics(t)
	for name, expr := range map[string]string{
		"a metric that is not there":            `evenkeel_nothing`,
		"a label that the metric does not have": `evenkeel_engine_up{rank="1"}`,
		"a value that the label never has":      `evenkeel_engine_up{role="router"}`,
		"the same as an alternative":            `evenkeel_engine_up{role=~"prefill|router"}`,
		"a group that nothing has":              `sum by (rank) (evenkeel_engine_up)`,
		"a match on what one side lacks":        `evenkeel_engine_up and on (role) evenkeel_pool_entries`,
		"the rate of a gauge":                   `rate(evenkeel_pool_entries[5m])`,
		"no PromQL at all":                      `sum(`,
	} {
		require.Error(t, verify(expr, there), name)
	}
}

func TestEveryAlertHasItsRunbookEntry(t *testing.T) {
	page, err := os.ReadFile("../../../docs/runbook.md")
	require.NoError(t, err)
	// a test of gateway/detect looks at the entries of kinds
	entries, anchors := map[string]string{}, map[string]bool{"{{ $labels.kind }}": true}
	for _, part := range strings.Split(string(page), "\n## ")[1:] {
		name, text, _ := strings.Cut(part, "\n")
		entries[name], anchors[strings.ToLower(name)] = text, true
	}
	tests, err := os.ReadFile(filepath.Join(configs, "prometheus", "rules_test.yaml"))
	require.NoError(t, err)
	for _, r := range rules(t) {
		if r.Alert == "" {
			continue
		}
		require.NotEmpty(t, r.Annotations["summary"], r.Alert)
		require.Contains(t, []string{"page", "ticket"}, r.Labels["severity"], r.Alert)
		at, found := strings.CutPrefix(r.Annotations["runbook_url"], "docs/runbook.md#")
		require.True(t, found, r.Alert)
		require.True(t, anchors[at], "docs/runbook.md has no entry for %s", r.Alert)
		if text, own := entries[r.Alert]; own {
			require.Equal(t, strings.ToLower(r.Alert), at)
			require.Regexp(t, `^\n\*`+r.Labels["severity"]+`\*\. \S`, text, r.Alert)
			require.Regexp(t, `(?s)\n\n\*\*Clients\*\* .*\n\n\*\*Causes\*\*.*\n1\. .*\n\n\*\*Over\*\* `, text, r.Alert)
		}
		require.Contains(t, string(tests), "alertname: "+r.Alert+"\n        exp_alerts:", "rules_test.yaml has no test in which %s fires",
			r.Alert)
		require.Contains(t, string(tests), "alertname: "+r.Alert+"}", "nor one in which it is quiet")
	}
	there := metrics(t)
	for _, name := range regexp.MustCompile(`evenkeel_[a-z_]+\b`).FindAllString(string(page), -1) {
		found := false
		for m := range there {
			found = found || strings.HasPrefix(m, name)
		}
		require.True(t, found, "the runbook looks at %s, which does not exist", name)
	}
}

// Who follows the name of an alert on a page finds it in the rules.
func TestThePagesNameAlertsThatExist(t *testing.T) {
	known := map[string]bool{}
	for _, r := range rules(t) {
		known[r.Alert] = true
	}
	alert := regexp.MustCompile(`\bEvenkeel[A-Z]\w*`)
	for _, pattern := range []string{"../../../*.md", "../../../docs/*.md", "../../../docs/results/*.md", configs + "/*.yaml",
		configs + "/*/*.yaml", configs + "/*/*/*.yaml", configs + "/grafana/*.json"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, name := range alert.FindAllString(string(text), -1) {
				require.True(t, known[name], "%s: there is no alert %s", file, name)
			}
		}
	}
}

func TestRulesPassPromtool(t *testing.T) {
	race.Alone(t) // promtool computes, which is not ours
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed (Debian's package prometheus): the rules were parsed, not run")
	}
	outages, err := filepath.Abs("testdata/outages")
	require.NoError(t, err)
	staged, err := filepath.Glob(filepath.Join(outages, "*.yaml")) // bench/claims/outages writes them
	require.NoError(t, err)
	require.NotEmpty(t, staged)
	tests := append([]string{"test", "rules", "rules_test.yaml"}, staged...)
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, tests} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = filepath.Join(configs, "prometheus")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "promtool %s: %s", strings.Join(args, " "), out)
	}
}

// What counts as failed is the same on the overview and in the alerts.
func TestFailedIsTheSameEverywhere(t *testing.T) {
	for _, r := range rules(t) {
		if strings.HasPrefix(r.Record, "evenkeel:request_errors") {
			require.Contains(t, r.Expr, `outcome=~"`+failed+`"`, r.Record)
		}
	}
}

// What a client is told with a 5xx counts against the promise to clients, unless it is the
// request's own wish or no request.
func TestEveryFailureOfOursCounts(t *testing.T) {
	page, err := os.ReadFile("../../../docs/errors.md")
	require.NoError(t, err)
	clients, _, found := strings.Cut(string(page), "## Errors of operators' calls")
	require.True(t, found)
	counted := strings.Split(failed, "|")
	rows := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| 5\\d\\d \\|").FindAllStringSubmatch(clients, -1)
	require.NotEmpty(t, rows)
	for _, row := range rows {
		switch row[1] {
		case "deadline_unmet", "too_many_connections": // a wish of the request; no request
		case "not_owner", "owner_lost": // sent again to the owner
		default:
			require.Contains(t, counted, row[1])
		}
	}
}
