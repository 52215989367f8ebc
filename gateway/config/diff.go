package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Change is one key whose value differs between two versions of the config. The texts contain no
// secrets: the config only names the files and variables that hold secrets, and values of
// tracing.headers are shown as hashes.
type Change struct {
	Path    string `json:"path"`
	Old     string `json:"old"` // value in the old version; empty: the key was not set
	New     string `json:"new"` // value in the new version; empty: the key was removed
	Restart bool   `json:"needs_restart,omitempty"`
}

// String writes the change on one line, for logs.
func (c Change) String() string {
	s := c.Path + ": " + orNothing(c.Old) + " -> " + orNothing(c.New)
	if c.Restart {
		s += " (needs a restart)"
	}
	return s
}

// orNothing replaces an empty value by two quotes, to make it visible.
func orNothing(s string) string {
	if s == "" {
		return `""`
	}
	return s
}

// restoreRestartKeys has a function for each key that only a restart can change. At a reload, the
// function copies the key's value from the running config to the next one.
var restoreRestartKeys = []func(next, running *Config){
	func(n, r *Config) { n.Listen = r.Listen },
	func(n, r *Config) { n.Admin.Listen = r.Admin.Listen },
	func(n, r *Config) { n.TLS = r.TLS.unlessSwitched(n.TLS) },
	func(n, r *Config) { n.Admin.TLS = r.Admin.TLS.unlessSwitched(n.Admin.TLS) },
	func(n, r *Config) { n.Admin.Receipts = r.Admin.Receipts },
	func(n, r *Config) { n.Admin.ReceiptsBytes = r.Admin.ReceiptsBytes },
	func(n, r *Config) { n.SelfTest = r.SelfTest },
	func(n, r *Config) { n.EventLoops = r.EventLoops },
	func(n, r *Config) { n.Dispatch.DecisionLog = r.Dispatch.DecisionLog },
	func(n, r *Config) { n.Bind.Listen = r.Bind.Listen },
	func(n, r *Config) { n.Prefill.Index = r.Prefill.Index },
	func(n, r *Config) { n.Health.Interval = r.Health.Interval },
	func(n, r *Config) { n.Health.Canary = r.Health.Canary },
	func(n, r *Config) { n.Geo = r.Geo },
	func(n, r *Config) { n.HA = r.HA },
	func(n, r *Config) { n.Advice = r.Advice },
	func(n, r *Config) { n.Discovery = r.Discovery },
	func(n, r *Config) { n.Log.Requests = r.Log.Requests },
	func(n, r *Config) { n.Log.Level = r.Log.Level },
	func(n, r *Config) { n.Limits.Body = r.Limits.Body },
	func(n, r *Config) { n.Limits.Bodies = r.Limits.Bodies },
	func(n, r *Config) { n.Limits.Head = r.Limits.Head },
	func(n, r *Config) { n.Limits.Connections = r.Limits.Connections },
	func(n, r *Config) { n.Limits.PerIP = r.Limits.PerIP },
	func(n, r *Config) { n.Limits.PassedThrough = r.Limits.PassedThrough },
	func(n, r *Config) { n.Limits.ReadTimeout = r.Limits.ReadTimeout },
	func(n, r *Config) { n.Limits.IdleTimeout = r.Limits.IdleTimeout },
	func(n, r *Config) { n.Limits.WriteTimeout = r.Limits.WriteTimeout },
}

// unlessSwitched returns next, or t if next would turn TLS on or off, which needs a restart. A
// listener that already speaks TLS can take a new certificate while it runs.
func (t TLS) unlessSwitched(next TLS) TLS {
	if t.On() == next.On() {
		return next
	}
	return t
}

// MergeReload returns the config that a proxy runs with after a reload: next, but with the running
// values of all keys that need a restart. The changes list every key that differs, and mark those
// that need a restart. It fails if the merged config is invalid, for example because only one of
// two keys that belong together needs a restart.
func (c *Config) MergeReload(next *Config) (merged *Config, changes []Change, err error) {
	m := *next
	for _, restore := range restoreRestartKeys {
		restore(&m, c)
	}
	if err := m.Validate(); err != nil {
		return nil, nil, fmt.Errorf("without the keys that need a restart: %w", err)
	}
	changes = Diff(c, next)
	applied := map[string]bool{} // the keys that differ in the merged config, too, so that their change needs no restart
	for _, a := range Diff(c, &m) {
		applied[a.Path] = true
	}
	for i := range changes {
		changes[i].Restart = !applied[changes[i].Path]
	}
	return &m, changes, nil
}

// Diff lists the changes from a to b, in the order of the keys. Engines are compared
// by host:port, so their order in the list does not matter.
func Diff(a, b *Config) []Change {
	var d diff
	d.compareValues("", reflect.ValueOf(*a), reflect.ValueOf(*b))
	return d.changes
}

type diff struct{ changes []Change }

// compareValues compares two values of one type, and adds a change for each key that differs. path
// is the path of both values in the config.
func (d *diff) compareValues(path string, a, b reflect.Value) {
	switch t := a.Type(); {
	case t == reflect.TypeFor[[]Engine]():
		d.compareEngines(path, a.Interface().([]Engine), b.Interface().([]Engine)) //nolint:forcetypeassert // compared above
	case t.Kind() == reflect.Struct:
		for key, f := range fieldsOf(t) {
			if t == profileType && key == "name" {
				continue // the name of a profile is already in the path
			}
			d.compareValues(joinPath(path, key), a.FieldByIndex(f.Index), b.FieldByIndex(f.Index))
		}
	case t.Kind() == reflect.Map && t.Elem().Kind() == reflect.Struct:
		d.compareMaps(path, a, b)
	default:
		if before, after := text(a), text(b); before != after {
			d.changes = append(d.changes, Change{Path: path, Old: before, New: after})
		}
	}
}

// compareEngines compares two lists of engines by host:port. An engine that is added or removed is
// a single change. For an engine in both lists, each key that differs is a change of its own.
func (d *diff) compareEngines(path string, a, b []Engine) {
	before, after := byID(a), byID(b)
	for _, e := range a {
		id, at := idOf(e), path+"["+idOf(e)+"]"
		if next, stays := after[id]; stays {
			d.compareValues(at, reflect.ValueOf(e), reflect.ValueOf(next))
		} else {
			d.changes = append(d.changes, Change{Path: at, Old: text(reflect.ValueOf(e))})
		}
	}
	for _, e := range b {
		if _, wasThere := before[idOf(e)]; !wasThere {
			d.changes = append(d.changes, Change{Path: path + "[" + idOf(e) + "]", New: text(reflect.ValueOf(e))})
		}
	}
}

// compareMaps compares two maps whose keys are names, such as profiles. An entry that is added or
// removed is a single change. For an entry in both maps, each key that differs is a change of its
// own.
func (d *diff) compareMaps(path string, a, b reflect.Value) {
	names := map[string]bool{} // the names in either map
	for _, m := range []reflect.Value{a, b} {
		for _, k := range m.MapKeys() {
			names[k.String()] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		before, after := a.MapIndex(reflect.ValueOf(name)), b.MapIndex(reflect.ValueOf(name)) // invalid: the map has no such entry
		at := joinPath(path, name)
		switch {
		case before.IsValid() && after.IsValid():
			d.compareValues(at, before, after)
		case before.IsValid(): // the entry was removed
			d.changes = append(d.changes, Change{Path: at, Old: text(before)})
		default: // the entry was added
			d.changes = append(d.changes, Change{Path: at, New: text(after)})
		}
	}
}

// byID returns the engines in a map from host:port, the name of an engine everywhere in evenkeel.
func byID(list []Engine) map[string]Engine {
	all := make(map[string]Engine, len(list))
	for _, e := range list {
		all[idOf(e)] = e
	}
	return all
}

// joinPath returns the path of a key below another path. An empty path stands for the top of the
// config.
func joinPath(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// text returns a value in the form of the config file, on one line. It leaves out struct fields
// that are zero. A nil pointer becomes an empty text.
func text(v reflect.Value) string {
	switch {
	case v.Type() == durationType:
		return time.Duration(v.Int()).String()
	case v.Kind() == reflect.Pointer:
		if v.IsNil() {
			return ""
		}
		return text(v.Elem())
	case v.Kind() == reflect.Slice:
		items := make([]string, v.Len())
		for i := range items {
			items[i] = text(v.Index(i))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case v.Kind() == reflect.Struct:
		var items []string
		for key, f := range fieldsOf(v.Type()) {
			if field := v.FieldByIndex(f.Index); !field.IsZero() {
				items = append(items, key+": "+text(field))
			}
		}
		return "{" + strings.Join(items, ", ") + "}"
	}
	return fmt.Sprint(v.Interface())
}
