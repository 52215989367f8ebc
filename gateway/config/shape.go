package config

import (
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"

	"evenkeel/internal/spelling"
	"evenkeel/mooncake"
)

// checkShape compares the file with the Go type that it is decoded into, and records the position
// of every value. It reports all unknown or repeated keys and all values of the wrong type at once.
// The decoder alone would stop at the first problem, name Go types in its errors, and silently
// round 1.5 down to 1.
func (s *source) checkShape(root ast.Node, as reflect.Type, path string) error {
	check := shape{source: s}
	check.checkValue(root, as, path)
	return check.found.join()
}

type shape struct {
	source *source
	found  problems
}

func (s *shape) bad(t *token.Token, path, format string, args ...any) {
	s.found = append(s.found, s.source.errorAtToken(t, path, format, args...))
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	profileType  = reflect.TypeFor[mooncake.Profile]()
)

// checkValue checks one node of the YAML tree, and all nodes below it, against the Go type that the
// node is decoded into. It records the position of each value below the node; the caller has
// recorded that of the node itself.
func (s *shape) checkValue(n ast.Node, t reflect.Type, path string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch n := n.(type) {
	case nil, *ast.NullNode: // no value: the default stays
		return
	case *ast.AnchorNode:
		s.checkValue(n.Value, t, path)
		return
	case *ast.AliasNode: // the value was checked at its anchor; if this key has another type, the decoder reports it
		return
	case *ast.TagNode:
		s.bad(n.GetToken(), path, "tags such as %s have no meaning here; remove the tag", n.Start.Value)
		return
	}
	switch {
	case t.Kind() == reflect.Struct:
		fields, names := keysOf(t)
		s.checkMapping(n, path, func(key string) (reflect.Type, bool) { f, ok := fields[key]; return f, ok }, names)
	case t.Kind() == reflect.Map: // any key is valid
		s.checkMapping(n, path, func(string) (reflect.Type, bool) { return t.Elem(), true }, nil)
	case takesWord(t, n.GetToken().Value): // the file has a word that is valid in place of a list
	case t.Kind() == reflect.Slice:
		list, ok := n.(*ast.SequenceNode)
		if !ok {
			s.bad(n.GetToken(), path, "a list is needed; write [a, b], or one item per line after a dash")
			return
		}
		for i, item := range list.Values {
			at := fmt.Sprintf("%s[%d]", path, i)
			s.recordPosition(at, firstToken(item))
			s.checkValue(item, t.Elem(), at)
		}
	default:
		if problem := scalarProblem(n, t); problem != "" {
			s.bad(n.GetToken(), path, "%s", problem)
		}
	}
}

// takesWord says whether the file may have this word in place of a value of type t, such as off in
// place of a list.
func takesWord(t reflect.Type, word string) bool {
	v, ok := reflect.Zero(t).Interface().(interface{ TakesWord(string) bool })
	return ok && v.TakesWord(word)
}

// checkMapping checks the keys and values of one mapping. typeOf returns the type of a key's value,
// and whether the key exists. If the type is nil, the value is not checked. names lists the valid
// keys, for the error message.
func (s *shape) checkMapping(n ast.Node, path string, typeOf func(key string) (reflect.Type, bool), names []string) {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode: // a mapping with only one key
		values = []*ast.MappingValueNode{n}
	default:
		s.bad(n.GetToken(), path, "keys with values are needed here; write one per line as key: value, or {key: value}")
		return
	}
	seen := map[string]int{}
	for _, v := range values {
		if v.Key.IsMergeKey() {
			continue // a merge key (<<): the merged keys were checked at their anchor
		}
		keyToken := v.Key.GetToken()
		key := keyToken.Value
		keyPath := path + "." + key
		if line, twice := seen[key]; twice {
			s.bad(keyToken, keyPath, "the key is written twice, first in line %d; remove one", line)
			continue
		}
		seen[key] = keyToken.Position.Line
		valueType, known := typeOf(key)
		if !known {
			s.bad(keyToken, keyPath, "no such key%s; the keys here are %s", spelling.Hint(key, names), strings.Join(names, ", "))
			continue
		}
		s.recordPosition(keyPath, keyToken)
		if valueType == nil {
			continue
		}
		// Errors that are found later point at the value itself if it is a scalar, and at its key
		// otherwise.
		if _, scalar := v.Value.(ast.ScalarNode); scalar && v.Value.Type() != ast.NullType {
			s.recordPosition(keyPath, v.Value.GetToken())
		}
		s.checkValue(v.Value, valueType, keyPath)
	}
}

// recordPosition stores where the value at path is in the file, for errors that are found later.
func (s *shape) recordPosition(path string, t *token.Token) {
	s.source.positions[path] = position{t.Position.Line, t.Position.Column}
}

// firstToken returns the first token of a node. For a mapping, GetToken would return its first
// colon.
func firstToken(n ast.Node) *token.Token {
	switch m := n.(type) {
	case *ast.MappingNode:
		if !m.IsFlowStyle && len(m.Values) > 0 { // a mapping in braces begins with its brace
			return m.Values[0].Key.GetToken()
		}
	case *ast.MappingValueNode:
		return m.Key.GetToken()
	}
	return n.GetToken()
}

// scalarProblem says what is wrong with a scalar that must have type t; empty: nothing is wrong.
func scalarProblem(n ast.Node, t reflect.Type) string {
	text := n.GetToken().Value
	is := func(kinds ...ast.NodeType) bool { return slices.Contains(kinds, n.Type()) } // how YAML reads the text
	switch {
	case t == durationType:
		if is(ast.IntegerType, ast.FloatType) {
			return fmt.Sprintf("%s has no unit; write %[1]ss for seconds, or use ms, m, h", text)
		}
		if _, err := time.ParseDuration(text); !is(ast.StringType) || err != nil {
			return fmt.Sprintf("%q is no duration; write a number with a unit, such as 500ms, 20s or 5m", text)
		}
	case t.Kind() == reflect.String:
		if !is(ast.StringType, ast.LiteralType, ast.IntegerType, ast.FloatType) {
			return "one text is needed, in quotes where YAML reads something else into it"
		}
		// The decoder would turn the number into text again, so that 1.10 would become the text 1.1.
		if number, ok := n.(ast.ScalarNode); ok && is(ast.IntegerType, ast.FloatType) && fmt.Sprint(number.GetValue()) != text {
			return fmt.Sprintf("YAML reads %s as the number %v; if this text is meant, write it in quotes",
				text, number.GetValue())
		}
	case t.Kind() == reflect.Bool:
		if !is(ast.BoolType) {
			return fmt.Sprintf("%q is neither true nor false; write one of them", text)
		}
	case t.Kind() == reflect.Float32 || t.Kind() == reflect.Float64:
		if !is(ast.IntegerType, ast.FloatType) {
			return fmt.Sprintf("%q is not a number; write one such as 0.9", text)
		}
	default: // all other types of the config are whole numbers
		if !is(ast.IntegerType) {
			return fmt.Sprintf("%q is not a whole number; write digits only", text)
		}
	}
	return ""
}

// keysOf returns the keys that the file may have for a struct, with the types of their values, and
// their names in order.
func keysOf(t reflect.Type) (types map[string]reflect.Type, names []string) {
	types = map[string]reflect.Type{}
	for key, f := range fieldsOf(t) {
		if t == profileType && key == "name" {
			continue // the name of a profile is its key in the map
		}
		types[key] = f.Type
		names = append(names, key)
	}
	return types, names
}

// fieldsOf yields the fields of a struct that have a key in the file, each with its key, in the
// order of the struct. The fields of an embedded struct are yielded in place of that struct.
func fieldsOf(t reflect.Type) iter.Seq2[string, reflect.StructField] {
	return func(yield func(string, reflect.StructField) bool) {
		for _, f := range reflect.VisibleFields(t) {
			key := f.Tag.Get("yaml")
			inFile := key != "" && key != "-" && !f.Anonymous // VisibleFields lists the fields of an embedded struct by themselves
			if inFile && !yield(key, f) {
				return
			}
		}
	}
}
