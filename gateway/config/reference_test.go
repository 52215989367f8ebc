package config

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

const reference = "../../docs/configuration.md"

// keyLine is a line of an example file: indent, dash, key, value, sentence.
var keyLine = regexp.MustCompile(`^( *)(- )?([a-z][a-z0-9_]*): *(.*?)(?: *# (.*))?$`)

// described is a key as an example file has it.
type described struct {
	path, value, sentence string
	section               bool // it has keys of its own
}

// describedIn reads an example file by its lines: every key has a sentence behind it, and a
// section may have sentences above it.
func describedIn(t *testing.T, file string) (list []described) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	type level struct {
		indent int
		path   string
	}
	var above []string
	stack := []level{{-1, ""}}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		bare := strings.TrimSpace(line)
		if comment, ok := strings.CutPrefix(bare, "# "); ok {
			above = append(above, comment)
			continue
		}
		m := keyLine.FindStringSubmatch(line)
		if m == nil {
			above = nil
			continue
		}
		indent := len(m[1])
		for stack[len(stack)-1].indent >= indent {
			stack = stack[:len(stack)-1]
		}
		path := stack[len(stack)-1].path
		if m[2] != "" { // the first key of an element: what follows stands two columns to the right
			stack = append(stack, level{indent, path + "[]"})
			path, indent = path+"[]", indent+2
		}
		path = strings.TrimPrefix(path+"."+m[3], ".")
		stack = append(stack, level{indent, path})
		d := described{path: path, value: m[4], sentence: m[5]}
		if d.sentence == "" {
			d.sentence = strings.Join(above, " ")
		}
		if above = nil; m[4] == "" {
			d.section = true
		}
		list = append(list, d)
	}
	return list
}

// examples are values of configs/evenkeel.yaml that are no defaults.
var examples = regexp.MustCompile(`\.url$|^geo\.self\.|^geo\.peers\[\]\.(id|region|san|price_out|price_in)$|^discovery\..*\.(name|selector|port)$|^discovery\.dns\[\]\.role$`)

// typeAt finds the field of a path such as geo.peers[].url, or of profiles.ascend.bind.
func typeAt(t *testing.T, path string) reflect.Type {
	t.Helper()
	at := reflect.TypeFor[Config]()
	for step := range strings.SplitSeq(path, ".") {
		step, element := strings.CutSuffix(step, "[]")
		if at.Kind() == reflect.Map {
			at = at.Elem()
			continue
		}
		types, _ := keysOf(at)
		next, ok := types[step]
		require.True(t, ok, "%s: the config has no key %s", path, step)
		if at = next; element {
			at = at.Elem()
		}
	}
	for at.Kind() == reflect.Pointer {
		at = at.Elem()
	}
	return at
}

func typeWord(t reflect.Type) string {
	switch {
	case t == durationType:
		return "duration"
	case t.Kind() == reflect.String:
		return "text"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Float32 || t.Kind() == reflect.Float64:
		return "number"
	case t.Kind() == reflect.Slice:
		return "list of " + strings.Replace(typeWord(t.Elem()), "text", "texts", 1)
	case t.Kind() == reflect.Map:
		return "map by name"
	case t.Kind() == reflect.Struct:
		return "keys"
	}
	return "whole number"
}

// units of numbers by the end of a key's path. The longest that fits counts.
var units = map[string]string{
	"bytes": "bytes", "body": "bytes", "tokens": "tokens", "tokens_per_rank": "tokens", "_ms": "ms", "usd": "USD", "price_out": "USD", "price_in": "USD",
	"slots": "requests", "max_num_seqs": "requests", "pool.size": "places", "queue.max": "requests", "receipts": "receipts", "connections": "connections", "per_ip": "connections",
	"max_unanswered": "requests", "ahead": "requests", "ranks": "ranks", "size": "ranks",
	"vocab_size": "token ids", "max_model_len": "tokens", "recompute_max": "times", "attempts": "probes", "misses": "misses",
	"max_hops": "proxies", "event_loops": "goroutines",
	"sample": "share, 0 to 1", "target": "share, 0 to 1", "share": "share, 0 to 1", "kv_threshold": "share, 0 to 1", "budget": "share of requests",
	"cost": "times", "threshold_tokens": "tokens", "token_budget": "tokens", "prefill_schedule_interval": "steps",
}

func unitOf(path string, t reflect.Type) string {
	path = strings.TrimSuffix(path, "[]")
	switch {
	case t == durationType:
		return "ms, s, m, h"
	case t.Kind() == reflect.Bool, t.Kind() == reflect.Map, t.Kind() == reflect.Struct, strings.HasSuffix(path, "port"):
		return ""
	}
	longest := ""
	for end := range units {
		if strings.HasSuffix(path, end) && len(end) > len(longest) {
			longest = end
		}
	}
	if text := t.Kind() == reflect.String || t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.String; text &&
		longest != "ahead" && longest != "threshold_tokens" && longest != "max_unanswered" {
		return ""
	}
	return units[longest]
}

// reloads tells whether a reload takes another value of a key: it gives one to a config and
// looks whether the keys that are fixed take it away again. A list or a map is one value.
func reloads(t *testing.T, path string) string {
	t.Helper()
	takes := func(first, second int64) bool {
		running, next := Default(), Default()
		set(reflect.ValueOf(running).Elem(), path, first)
		set(reflect.ValueOf(next).Elem(), path, second)
		require.NotEmpty(t, Diff(running, next), path)
		for _, keep := range restoreRestartKeys {
			keep(next, running)
		}
		return len(Diff(running, next)) > 0
	}
	switch begins, changes := takes(0, 1), takes(1, 2); {
	case begins && changes:
		return "yes"
	case changes:
		return "yes, but a restart to begin or end"
	}
	return "restart"
}

// set gives a key one of three values.
func set(v reflect.Value, path string, n int64) {
	step, rest, deeper := strings.Cut(path, ".")
	if v.Kind() == reflect.Struct {
		for key, f := range fieldsOf(v.Type()) {
			if key == strings.TrimSuffix(step, "[]") {
				if v = v.FieldByIndex(f.Index); deeper && v.Kind() == reflect.Struct {
					set(v, rest, n)
					return
				}
				break
			}
		}
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString([]string{"", "a", "b"}[n])
	case reflect.Bool:
		v.SetBool(n == 1)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(n))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), int(n), 2))
		for i := range v.Len() {
			if v.Index(i).Kind() == reflect.String {
				v.Index(i).SetString("x")
			}
		}
		if engines, ok := v.Interface().([]Engine); ok { // one is known by its URL
			for i := range engines {
				engines[i].URL = fmt.Sprintf("http://e%d:1", i)
			}
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for name := range n {
			v.SetMapIndex(reflect.ValueOf(fmt.Sprint(name)), reflect.Zero(v.Type().Elem()))
		}
	default:
		v.SetInt(n)
	}
}

// TestTheReferenceIsCurrent writes docs/configuration.md from the example files, whose
// sentences and defaults it has, and from the types and rules of this package.
func TestTheReferenceIsCurrent(t *testing.T) {
	var b strings.Builder
	head, err := os.ReadFile("testdata/reference.md")
	require.NoError(t, err)
	b.Write(head)
	all := describedIn(t, configs+"/evenkeel.yaml")
	for _, d := range describedIn(t, configs+"/discovery.yaml") {
		if strings.HasPrefix(d.path, "discovery.") && strings.Contains(d.path, "[].") {
			all = append(all, d)
		}
	}
	alone := func(d described) bool { return !d.section && !strings.ContainsAny(d.path, ".[") }
	inSection := func(d described) bool { return !alone(d) }
	all = slices.Concat(slices.DeleteFunc(slices.Clone(all), inSection), slices.DeleteFunc(all, alone)) // what is in no section comes first
	top, n := "", 0
	for _, d := range all {
		if !d.section || d.sentence != "" {
			require.Regexp(t, `[.)]$`, d.sentence, "%s: a sentence of the example file ends with a full stop", d.path)
		}
		path := strings.Replace(d.path, "profiles."+DefaultProfile, "profiles.NAME", 1)
		section, _, _ := strings.Cut(d.path, ".")
		if alone(d) {
			section = "Top level"
		}
		if section != top {
			top = section
			fmt.Fprintf(&b, "\n## %s\n\n", section)
			if d.section && d.sentence != "" {
				b.WriteString(cell(d.sentence) + "\n\n")
			}
			b.WriteString("| Key | Type | Unit | Default | Reload | What it does |\n|---|---|---|---|---|---|\n")
			if d.section {
				continue
			}
		}
		typ := typeAt(t, d.path)
		if d.section && typ.Kind() != reflect.Bool && typ.Kind() != reflect.Slice { // a pointer without a value is no section
			if d.sentence != "" {
				fmt.Fprintf(&b, "| **`%s`** | | | | | %s |\n", path, cell(d.sentence))
			}
			continue
		}
		value := strings.Trim(d.value, `"`)
		switch {
		case examples.MatchString(d.path), value == "", value == "[]", value == "{}":
			value = "–"
		default:
			value = "`" + value + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | %s |\n", path, typeWord(typ), unitOf(d.path, typ), value, reloads(t, d.path),
			cell(d.sentence))
		n++
	}
	require.Greater(t, n, 200)
	if *update {
		require.NoError(t, os.WriteFile(reference, []byte(b.String()), 0o644)) //nolint:gosec // a page of the docs
	}
	have, err := os.ReadFile(reference)
	require.NoError(t, err)
	require.Equal(t, b.String(), string(have), "write it anew with go test ./gateway/config -update")
}

// cell keeps a sentence within a cell of a table, and links the pages that it names.
func cell(s string) string {
	return page.ReplaceAllString(strings.ReplaceAll(s, "|", `\|`), "[$1]($1.md)")
}

var page = regexp.MustCompile(`\bdocs/([a-z-]+)\.md`)

func TestWhatAReloadTakesIsAsTheCodeHasIt(t *testing.T) {
	for path, want := range map[string]string{
		"listen": "restart", "tls.cert_file": "yes, but a restart to begin or end", "admin.token_file": "yes", "engines.prefill[].url": "yes", "profiles.ascend.connector": "yes",
		"pool.ttl": "yes", "geo.push.mode": "restart", "log.level": "restart", "prefill.index.max_bytes": "restart", "prefill.queue.max": "yes", "bind.listen": "restart",
	} {
		require.Equal(t, want, reloads(t, path), path)
	}
	require.Equal(t, mooncake.AscendMooncakeV1, (&mooncake.Profile{}).WithDefaults().Connector, "the page has it as the default")
}
