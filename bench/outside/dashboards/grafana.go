package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// What Grafana reads: the part of its dashboard format that is used here
// (schema 39, Grafana 10 and later).
type (
	grafanaBoard struct {
		Title         string         `json:"title"`
		UID           string         `json:"uid"`
		Description   string         `json:"description"`
		Tags          []string       `json:"tags"`
		SchemaVersion int            `json:"schemaVersion"`
		Version       int            `json:"version"`
		Editable      bool           `json:"editable"`
		GraphTooltip  int            `json:"graphTooltip"` // 1: one cursor over all panels
		Refresh       string         `json:"refresh"`
		Time          map[string]any `json:"time"`
		Templating    map[string]any `json:"templating"`
		Links         []any          `json:"links"`
		Panels        []grafanaPanel `json:"panels"`
	}
	grafanaPanel struct {
		ID          int             `json:"id"`
		Type        string          `json:"type"`
		Title       string          `json:"title"`
		Description string          `json:"description,omitempty"`
		GridPos     map[string]int  `json:"gridPos"`
		Datasource  any             `json:"datasource,omitempty"`
		Targets     []grafanaTarget `json:"targets,omitempty"`
		FieldConfig any             `json:"fieldConfig,omitempty"`
		Options     any             `json:"options,omitempty"`
		Collapsed   *bool           `json:"collapsed,omitempty"`
	}
	grafanaTarget struct {
		RefID        string `json:"refId"`
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat,omitempty"`
		Instant      bool   `json:"instant,omitempty"`
	}
)

var source = map[string]string{"type": "prometheus", "uid": "${datasource}"}

// metricName finds the metrics of an expression; ours and the process's are all
// that dashboards use.
var metricName = regexp.MustCompile(`\b((?:evenkeel|process)_[a-z0-9_]+)(\{)?`)

// selected puts a selector on every metric of an expression.
func selected(expr, selector string) string {
	return metricName.ReplaceAllStringFunc(expr, func(m string) string {
		name, braced := strings.CutSuffix(m, "{")
		if braced {
			return name + "{" + selector + ","
		}
		return name + "{" + selector + "}"
	})
}

func forGrafana(expr string) string {
	return strings.ReplaceAll(selected(expr, `job="$job",instance=~"$instance"`), "$rate]", "$__rate_interval]")
}

// grafana lays a dashboard out: stats six a row, graphs three.
func (d dashboard) grafana() grafanaBoard {
	b := grafanaBoard{
		Title: d.title, UID: "evenkeel-" + strings.TrimSuffix(d.file, ".json"), Description: d.says, Tags: []string{"evenkeel"},
		SchemaVersion: 39, Version: 1, Editable: true, GraphTooltip: 1, Refresh: "10s",
		Time:  map[string]any{"from": "now-1h", "to": "now"},
		Links: []any{map[string]any{"type": "dashboards", "tags": []string{"evenkeel"}, "title": "evenkeel", "asDropdown": true}},
		Templating: map[string]any{"list": []any{
			map[string]any{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
			variable("job", "label_values(evenkeel_requests_open, job)", false),
			variable("instance", `label_values(evenkeel_requests_open{job="$job"}, instance)`, true),
		}},
	}
	id, y := 0, 0
	for _, r := range d.rows {
		id++
		b.Panels = append(b.Panels, grafanaPanel{ID: id, Type: "row", Title: r.title, GridPos: at(0, y, 24, 1), Collapsed: new(bool)})
		y++
		x, height := 0, 0
		for _, p := range r.panels {
			w, h := 8, 8
			if p.kind == stat {
				w, h = 4, 4
			}
			if x+w > 24 {
				x, y = 0, y+height
			}
			id++
			g := p.grafana(id)
			g.GridPos = at(x, y, w, h)
			b.Panels = append(b.Panels, g)
			x, height = x+w, h
		}
		y += height
	}
	return b
}

func at(x, y, w, h int) map[string]int { return map[string]int{"x": x, "y": y, "w": w, "h": h} }

func variable(name, query string, many bool) map[string]any {
	v := map[string]any{
		"name": name, "type": "query", "datasource": source, "query": map[string]any{"query": query, "refId": name}, "definition": query,
		"refresh": 2, "sort": 1, "multi": many, "includeAll": many,
	}
	if many {
		v["current"] = map[string]any{"text": "All", "value": "$__all"}
	}
	return v
}

func (p panel) grafana(id int) grafanaPanel {
	defaults := map[string]any{"unit": p.unit}
	if p.unit == "percentunit" {
		defaults["min"], defaults["max"] = 0, 1
	}
	g := grafanaPanel{ID: id, Type: string(p.kind), Title: p.title, Description: p.says, Datasource: source}
	switch p.kind {
	case stat:
		delete(defaults, "max")
		if p.zero {
			defaults["thresholds"] = map[string]any{"mode": "absolute",
				"steps": []any{map[string]any{"color": "green", "value": nil}, map[string]any{"color": "red", "value": 1e-9}}}
		}
		g.Options = map[string]any{"colorMode": "background", "graphMode": "none",
			"reduceOptions": map[string]any{"calcs": []string{"lastNotNull"}}}
	case graph:
		defaults["custom"] = map[string]any{"drawStyle": "line", "lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
		g.Options = map[string]any{"legend": map[string]any{"displayMode": "list", "placement": "bottom"},
			"tooltip": map[string]any{"mode": "multi", "sort": "desc"}}
	}
	g.FieldConfig = map[string]any{"defaults": defaults, "overrides": []any{}}
	for i, l := range p.lines {
		g.Targets = append(g.Targets,
			grafanaTarget{RefID: string(rune('A' + i)), Expr: forGrafana(l.expr), LegendFormat: l.legend, Instant: p.kind == stat})
	}
	return g
}

// encode is the file.
func (d dashboard) encode() ([]byte, error) {
	b, err := json.MarshalIndent(d.grafana(), "", "  ")
	return append(b, '\n'), err
}

// writeAll writes every dashboard into a folder.
func writeAll(folder string) error {
	for _, d := range dashboards {
		b, err := d.encode()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, d.file), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}
