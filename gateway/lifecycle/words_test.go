package lifecycle

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// words are the names of this package's constants, as its source has them: by type and value, and
// the values by type and name. So a recording stays good when a constant is added.
type words struct {
	names  map[string]map[int]string
	values map[string]map[string]int
}

func readWords(t *testing.T) *words {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	set := token.NewFileSet()
	var parsed []*ast.File
	for _, file := range files {
		if !strings.HasSuffix(file, "_test.go") {
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			parsed = append(parsed, f)
		}
	}
	all := types.Config{Error: func(error) {}} // what it imports is not looked at, and is not needed for constants
	pkg, _ := all.Check("life", set, parsed, nil)
	w := &words{names: map[string]map[int]string{}, values: map[string]map[string]int{}}
	for _, name := range pkg.Scope().Names() {
		c, ok := pkg.Scope().Lookup(name).(*types.Const)
		if !ok || c.Val().Kind() != constant.Int {
			continue
		}
		of, ok := c.Type().(*types.Named)
		n, exact := constant.Int64Val(c.Val())
		if !ok || !exact {
			continue
		}
		typ := of.Obj().Name()
		if w.names[typ] == nil {
			w.names[typ], w.values[typ] = map[int]string{}, map[string]int{}
		}
		w.names[typ][int(n)], w.values[typ][name] = name, int(n)
	}
	return w
}

// of is the name of a value.
func (w *words) of(typ string, value int) string {
	if name := w.names[typ][value]; name != "" {
		return name
	}
	return fmt.Sprint(typ, value)
}

// toldAlways are fields that are written although they have their type's first value, by what
// happens or is done.
var toldAlways = map[string][]string{
	"CallFailed": {"End.Call", "End.Progress", "End.Reason"}, "PrefillFailed": {"End.Progress", "End.Reason"}, "NotFound": {"End.Progress", "End.Reason"}, "DecodeFailed": {"Reason"},
	"Settle": {"Resource", "Disposition"}, "Fail": {"Error"}, "Resolve": {"Blame"}, "ReportFailure": {"Blame", "Call"}, "Pause": {"Retry.Budget"},
}

// text writes a struct: what it says first by its name alone, then each field that is not zero.
func (w *words) text(v any) string {
	var all []string
	var add func(of reflect.Value, path string)
	add = func(of reflect.Value, path string) {
		for i := range of.NumField() {
			f, name := of.Field(i), path+of.Type().Field(i).Name
			switch shown := !f.IsZero() || len(all) > 0 && slices.Contains(toldAlways[all[0]], name); {
			case f.Type() == reflect.TypeFor[time.Time](): // no life asks for the time
			case f.Kind() == reflect.Struct:
				add(f, name+".")
			case f.Kind() == reflect.String && shown:
				all = append(all, name+"="+word(f.String()))
			case f.Kind() == reflect.Slice && shown:
				var list []string
				for i := range f.Len() {
					list = append(list, word(f.Index(i).String()))
				}
				all = append(all, name+"="+strings.Join(list, "+"))
			case name == "Kind":
				all = append(all, w.of(f.Type().Name(), int(f.Uint())))
			case f.Kind() == reflect.Bool && shown:
				all = append(all, name)
			case f.Kind() == reflect.Int && shown:
				all = append(all, fmt.Sprint(name, "=", f.Int()))
			case f.Kind() == reflect.Uint8 && shown:
				all = append(all, name+"="+w.of(f.Type().Name(), int(f.Uint())))
			}
		}
	}
	add(reflect.ValueOf(v), "")
	return strings.Join(all, " ")
}

// word is a text without spaces, and unword is the text again.
func word(text string) string   { return strings.ReplaceAll(text, " ", ":") }
func unword(text string) string { return strings.ReplaceAll(text, ":", " ") }

// set is the other way: it sets the fields of what v points to.
func (w *words) set(t *testing.T, text string, v any) {
	for i, word := range strings.Fields(text) {
		path, value, _ := strings.Cut(word, "=")
		to := reflect.ValueOf(v).Elem()
		if first := to.Type().Field(0).Name; i == 0 && first == "Kind" {
			path, value = first, word
		}
		for name := range strings.SplitSeq(path, ".") {
			to = to.FieldByName(name)
			require.True(t, to.IsValid(), "%s in %s", word, text)
		}
		switch to.Kind() {
		case reflect.Bool:
			to.SetBool(true)
		case reflect.String:
			to.SetString(unword(value))
		case reflect.Slice:
			to.Set(reflect.ValueOf(strings.Split(unword(value), "+")))
		case reflect.Int:
			to.SetInt(int64(number(t, value)))
		default:
			n, ok := w.values[to.Type().Name()][value]
			require.True(t, ok, "%s in %s", word, text)
			to.SetUint(uint64(n)) //nolint:gosec // a constant of a byte
		}
	}
}

// step writes a step: how something begins, or what is told and what is to be done.
func (w *words) step(s step) string {
	all := []string{}
	switch {
	case s.begin != nil:
		return strings.TrimSpace("begin " + w.text(*s.begin))
	default:
		all = append(all, w.text(*s.event))
	}
	if done := w.done(s.do); done != "" {
		all = append(all, done)
	}
	return strings.Join(all, " | ")
}

// done writes what is to be done.
func (w *words) done(do []Effect) string {
	var all []string
	for _, x := range do {
		all = append(all, w.text(x))
	}
	return strings.Join(all, ", ")
}

// parse reads what step has written, behind the state.
func (w *words) parse(t *testing.T, text string) (s step) {
	parts := strings.Split(text, " | ")
	what, rest, _ := strings.Cut(parts[1], " ")
	switch {
	case what == "begin":
		s.begin = new(beginning)
		w.set(t, rest, s.begin)
	default:
		s.event = new(Event)
		w.set(t, parts[1], s.event)
		s.do = parseAll(t, w, parts[2:])
	}
	return s
}

func parseAll(t *testing.T, w *words, text []string) (all []Effect) {
	for _, part := range text {
		for one := range strings.SplitSeq(part, ", ") {
			var e Effect
			w.set(t, one, &e)
			all = append(all, e)
		}
	}
	return all
}
