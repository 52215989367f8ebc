package admin

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// schemas writes OpenAPI schemas of Go types as encoding/json sees them, with
// their comments as descriptions.
type schemas struct {
	t    *testing.T
	docs map[string]map[string]string // by package: "Type" and "Type.Field"
	done map[string]string            // by name
}

// schemaName is what a type is called in the document: live.Document LiveDocument.
// Packages within a part have the part's name: readers of the document have code
// made of it.
func schemaName(t reflect.Type) string {
	upper := func(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
	part := t.PkgPath()[strings.LastIndexByte(t.PkgPath(), '/')+1:]
	switch part {
	case "roster", "journal", "reload", "service":
		part = "gateway"
	case "board":
		part = "dispatcher"
	case "detect":
		part = "live"
	}
	return upper(part) + upper(t.Name())
}

// add writes a type and all it holds. Of a loose one, which is for requests,
// every field may be left out.
func (s *schemas) add(of reflect.Type, loose bool) {
	name := schemaName(of)
	if _, ok := s.done[name]; ok {
		return
	}
	s.done[name] = "" // types may hold themselves
	body := fmt.Sprintf("    %s:\n      type: object\n      description: %s\n      additionalProperties: false\n", name,
		strconv.Quote(s.doc(of, of.Name())))
	fields, required := s.fields(of, loose)
	if len(required) > 0 {
		body += "      required: [" + strings.Join(required, ", ") + "]\n"
	}
	body += "      properties:\n"
	for _, f := range fields {
		body += "        " + f + "\n"
	}
	s.done[name] = body
}

func (s *schemas) fields(of reflect.Type, loose bool, hidden ...string) (lines, required []string) {
	for f := range of.Fields() {
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && tag == "":
			more, must := s.fields(f.Type, loose, slices.Concat(hidden, named(of))...) // encoding/json takes the outer one
			lines, required = append(lines, more...), append(required, must...)
			continue
		case !f.IsExported() || tag == "-" || slices.Contains(hidden, tag):
			continue
		case tag == "":
			tag = f.Name
		}
		optional := loose || strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero")
		if !optional {
			required = append(required, tag)
		}
		what := s.of(f.Type, !optional)
		if doc := s.doc(of, of.Name()+"."+f.Name); doc != "" {
			if strings.HasPrefix(what, "$ref") {
				what = "allOf: [{" + what + "}]"
			}
			what = strings.TrimPrefix(what+", description: "+strconv.Quote(doc), ", ") // anything has no type
		}
		lines = append(lines, tag+": {"+what+"}")
	}
	return lines, required
}

// named are the names of a type's own fields, without those of embedded ones.
func named(of reflect.Type) (all []string) {
	for f := range of.Fields() {
		if tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); tag != "" && tag != "-" {
			all = append(all, tag)
		}
	}
	return all
}

var (
	timeType  = reflect.TypeFor[time.Time]()
	rawType   = reflect.TypeFor[json.RawMessage]()
	marshaler = reflect.TypeFor[json.Marshaler]()
)

// of is the schema of a value; null says whether nil is written as null.
func (s *schemas) of(t reflect.Type, null bool) string {
	orNull := ""
	if null {
		orNull = ", nullable: true"
	}
	switch {
	case t == timeType:
		return "type: string, format: date-time"
	case t == rawType:
		return ""
	case t.Kind() == reflect.Float64 && t.Implements(marshaler): // predictor.Figure
		return "type: number, nullable: true"
	}
	switch t.Kind() {
	case reflect.Bool:
		return "type: boolean"
	case reflect.String:
		return "type: string"
	case reflect.Float32, reflect.Float64:
		return "type: number"
	case reflect.Pointer:
		inner := s.of(t.Elem(), false)
		if strings.HasPrefix(inner, "$ref") && null {
			inner = "allOf: [{" + inner + "}]"
		}
		return inner + orNull
	case reflect.Slice:
		return "type: array, items: {" + s.of(t.Elem(), true) + "}" + orNull
	case reflect.Map:
		return "type: object, additionalProperties: {" + s.of(t.Elem(), true) + "}" + orNull
	case reflect.Struct:
		if t.Name() == "" {
			lines, required := s.fields(t, false)
			return "type: object, additionalProperties: false, required: [" + strings.Join(required, ", ") + "], properties: {" +
				strings.Join(lines, ", ") + "}"
		}
		s.add(t, false)
		return `$ref: "#/components/schemas/` + schemaName(t) + `"`
	}
	require.True(s.t, t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64, "a schema of %v", t)
	return "type: integer"
}

// doc is the comment on a type or a field.
func (s *schemas) doc(of reflect.Type, what string) string {
	path, ok := strings.CutPrefix(of.PkgPath(), "evenkeel/")
	if !ok {
		return "" // a struct without a name
	}
	if s.docs[path] == nil {
		s.docs[path] = comments(s.t, filepath.Join(repository, path))
	}
	return s.docs[path][what]
}

func comments(t *testing.T, dir string) map[string]string {
	all := map[string]string{}
	text := func(groups ...*ast.CommentGroup) string {
		for _, g := range groups {
			if s := strings.Join(strings.Fields(g.Text()), " "); s != "" {
				return strings.TrimSpace(strings.TrimPrefix(s, "(found)")) // that is for those who judge
			}
		}
		return ""
	}
	for _, file := range sources(t, dir) {
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			for _, spec := range g.Specs {
				ts := spec.(*ast.TypeSpec)
				all[ts.Name.Name] = text(ts.Doc, g.Doc)
				st, ok := ts.Type.(*ast.StructType)
				if !ok {
					continue
				}
				for _, f := range st.Fields.List {
					for _, n := range f.Names {
						all[ts.Name.Name+"."+n.Name] = text(f.Comment, f.Doc)
					}
				}
			}
		}
	}
	return all
}

const repository = "../.."

// sources parses the files of a package, tests left out.
func sources(t *testing.T, dir string) (files map[string]*ast.File) {
	t.Helper()
	files = map[string]*ast.File{}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		files[name] = f
	}
	return files
}

// generated is the part of the document that is made of Go types.
func generated(t *testing.T, loose, strict []reflect.Type) string {
	s := &schemas{t: t, docs: map[string]map[string]string{}, done: map[string]string{}}
	for _, of := range loose {
		s.add(of, true)
	}
	for _, of := range strict {
		s.add(of, false)
	}
	names := make([]string, 0, len(s.done))
	for name := range s.done {
		names = append(names, name)
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		b.WriteString(s.done[name])
	}
	return b.String()
}

// regenerate puts the schemas of Go types below the mark, or holds them against
// what is there.
func regenerate(t *testing.T, file, mark, schemas string, update bool) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	head, is, ok := strings.Cut(string(text), mark)
	require.True(t, ok, "%s has no line %q", file, mark)
	if update {
		require.NoError(t, os.WriteFile(file, []byte(head+mark+schemas), 0o644)) //nolint:gosec // a page for everybody
		return
	}
	require.True(t, is == schemas, "the schemas of Go types in %s are old; go test ./gateway/admin -run TestOpenAPI -update", file)
}
