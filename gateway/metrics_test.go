package gateway_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// documented is a row of docs/metrics.md: name, type, labels, unit, meaning.
type documented struct {
	kind, unit, meaning string
	labels              map[string][]string // with the values they can have, where those are few
}

func metricsDoc(t *testing.T) map[string]documented {
	t.Helper()
	page, err := os.ReadFile("../docs/metrics.md")
	require.NoError(t, err)
	rows := map[string]documented{}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		name := strings.Trim(cells[0], "`")
		if !strings.HasPrefix(name, "evenkeel_") {
			continue
		}
		require.Len(t, cells, 5, "name, type, labels, unit, meaning: %s", line)
		require.NotContains(t, rows, name, "twice")
		require.NotEmpty(t, cells[4], name)
		row := documented{kind: cells[1], unit: cells[3], meaning: strings.ReplaceAll(link.ReplaceAllString(cells[4], "$1"), "`", ""),
			labels: map[string][]string{}}
		for _, l := range label.FindAllStringSubmatch(cells[2], -1) {
			row.labels[l[1]] = strings.FieldsFunc(l[2], func(r rune) bool { return r == ',' || r == ' ' })
		}
		rows[name] = row
	}
	return rows
}

var label = regexp.MustCompile("`([a-z_]+)`(?:: ([a-z0-9_., ]+))?")

var link = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)

var desc = regexp.MustCompile(`fqName: "([^"]+)".*constLabels: {([^}]*)}, variableLabels: {([^}]*)}`)

func TestMetrics(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) {
		cfg.Discovery.Files = []string{filepath.Join(t.TempDir(), "none.yaml")}
		cfg.Bind.Listen, cfg.Health.Interval = "127.0.0.1:0", 20*time.Millisecond
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", "127.0.0.1:1")
		cfg.Geo.Ownership.Engine = geo.OwnStatic
	}})
	// What engines say of their ranks stands beside what the proxy counts there.
	t.Run("have what engines say", func(t *testing.T) {
		leave := c.Endless()
		c.Eventually("both say that one rank runs one request", func() bool {
			page, alike := c.get("/metrics").Body, 0
			ranks := regexp.MustCompile(`evenkeel_rank_running\{(.*)\} (\d)`).FindAllStringSubmatch(page, -1)
			require.Len(c, ranks, 2)
			for _, r := range ranks {
				if strings.Contains(page, "evenkeel_rank_scraped_requests{"+r[1]+`,state="running"} `+r[2]+"\n") {
					alike++
				}
			}
			return alike == 2 && refclient.SumOf(c.T, page, "evenkeel_rank_running") == 1 && refclient.ValueOf(c.T, page, "evenkeel_rank_kv_usage_ratio{"+ranks[0][1]+`,source="scraped"}`)+
				refclient.ValueOf(c.T, page, "evenkeel_rank_kv_usage_ratio{"+ranks[1][1]+`,source="scraped"}`) > 0
		})
		leave()
	})
	// docs/metrics.md has every metric there is, and no other.
	t.Run("are documented, and there are no others", func(t *testing.T) {
		require.Equal(t, "right", c.Judge("one two three", `"stream":true,`))
		c.settled(false)

		exists, docs := c.described(), metricsDoc(t)
		maps.DeleteFunc(docs, func(name string, _ documented) bool { return strings.HasPrefix(name, haMetrics) })
		require.Equal(t, keysSorted(docs), keysSorted(exists), "documented, and there")
		c.asDocumented(exists, docs)
	})
	// Alerts name requests by how they ended: every such word is one that is counted.
	t.Run("have the outcomes that alerts name", func(t *testing.T) {
		families, err := c.gw.Registry().Gather()
		require.NoError(t, err)
		var there []string
		for _, f := range families {
			if f.GetName() == "evenkeel_requests_total" {
				for _, m := range f.GetMetric() {
					there = append(there, m.GetLabel()[0].GetValue())
				}
			}
		}
		rules, err := os.ReadFile("../configs/prometheus/rules.yaml")
		require.NoError(t, err)
		named := regexp.MustCompile(`requests_total{outcome=~?"([a-z_|]+)"`).FindAllStringSubmatch(string(rules), -1)
		require.NotEmpty(t, named)
		for _, n := range named {
			require.Subset(t, there, strings.Split(n[1], "|"))
		}
	})
}

// haMetrics are those that only proxies of one region have, which their own test
// looks at.
const haMetrics = "evenkeel_ha_"

func keysSorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// described are the labels of every metric of the proxy, by name.
func (c *cluster) described() map[string][]string {
	t := c.T
	exists := map[string][]string{}
	descs := make(chan *prometheus.Desc, 1000)
	c.gw.Registry().Describe(descs)
	close(descs)
	for d := range descs {
		m := desc.FindStringSubmatch(d.String())
		require.NotNil(t, m, d.String())
		if !strings.HasPrefix(m[1], "evenkeel_") {
			continue // Go's and the process's own
		}
		exists[m[1]] = []string{}
		for _, l := range strings.FieldsFunc(m[2]+","+m[3], func(r rune) bool { return r == ',' }) {
			name, _, _ := strings.Cut(l, "=")
			exists[m[1]] = append(exists[m[1]], strings.TrimSpace(name))
		}
	}
	return exists
}

// asDocumented holds labels, units, types, values and help texts against their rows.
func (c *cluster) asDocumented(exists map[string][]string, docs map[string]documented) {
	t := c.T
	for name, labels := range exists {
		require.ElementsMatch(t, labels, slices.Collect(maps.Keys(docs[name].labels)), "labels of %s", name)
		for _, unit := range []string{"seconds", "tokens", "ratio"} { // where a name has one
			if strings.HasSuffix(name, "_"+unit) {
				require.True(t, strings.HasPrefix(docs[name].unit, unit), "unit of %s: %s", name, docs[name].unit)
			}
		}
	}
	families, err := c.gw.Registry().Gather()
	require.NoError(t, err)
	for _, f := range families {
		row, ok := docs[f.GetName()]
		if !ok {
			continue
		}
		require.Equal(t, strings.ToLower(f.GetType().String()), row.kind, f.GetName())
		require.Equal(t, row.meaning, f.GetHelp(), "%s: the page and the help text say the same", f.GetName())
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if values := row.labels[l.GetName()]; len(values) > 0 {
					require.Contains(t, values, l.GetValue(), "%s{%s}", f.GetName(), l.GetName())
				}
			}
		}
	}
}
