package asked

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Parse reads JSON. Numbers stay as they were written, so that they are compared so.
func Parse(text []byte) (v any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("%w in %.200q", err, text)
	}
	return v, nil
}

// Leaves are the values of a document by their paths. Empty lists and objects
// count as values, so that nothing disappears.
func Leaves(doc map[string]any) map[string]any {
	all := map[string]any{}
	leaves("", doc, all)
	return all
}

func leaves(path string, v any, into map[string]any) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			leaves(strings.TrimPrefix(path+"."+key, "."), value, into)
		}
		if len(v) == 0 {
			into[path] = "{}"
		}
	case []any:
		for i, value := range v {
			leaves(fmt.Sprintf("%s[%d]", path, i), value, into)
		}
		if len(v) == 0 {
			into[path] = "[]"
		}
	default:
		into[path] = v
	}
}

// Difference is a field in which two documents differ. An absent field is
// Missing.
type Difference struct {
	Path       string
	Plain, Got any
}

// Missing stands for a field that a document does not have.
type Missing struct{}

func (Missing) String() string { return "no such field" }

func (d Difference) String() string {
	return fmt.Sprintf("%s: %s, not %s", d.Path, Show(d.Got), Show(d.Plain))
}

// Show is how a value looks in a report.
func Show(v any) string {
	if text, ok := v.(string); ok {
		return fmt.Sprintf("%.120q", text)
	}
	if v == nil {
		return "null"
	}
	return fmt.Sprint(v)
}

// Cell is a text as a cell of a table.
func Cell(text string) string { return strings.NewReplacer("|", `\|`, "\n", " ").Replace(text) }

// Compare returns what differs, in the order of the paths, and how many fields were compared. A
// difference that is explained counts as neither.
func Compare(plain, got map[string]any, explained func(Difference) bool) (different []Difference, fields int) {
	a, b := Leaves(plain), Leaves(got)
	for key := range b {
		if _, ok := a[key]; !ok {
			a[key] = Missing{}
		}
	}
	for _, path := range slices.Sorted(maps.Keys(a)) {
		v, ok := b[path]
		if !ok {
			v = Missing{}
		}
		d := Difference{path, a[path], v}
		if d.Plain != d.Got && explained(d) {
			continue
		}
		fields++
		if d.Plain != d.Got {
			different = append(different, d)
		}
	}
	return different, fields
}
