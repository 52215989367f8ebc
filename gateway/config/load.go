package config

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"evenkeel/internal/smallfile"
)

// MaxFile bounds a config file, and a file that lists engines, in bytes. 16 MiB have room for more
// than 50,000 engines.
const MaxFile = 16 << 20

// Load reads and validates a config file. Its error names the position of each problem in the file.
func Load(path string) (*Config, error) {
	src, err := smallfile.Read(path, MaxFile)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return Parse(path, src)
}

// Parse reads and validates the text of a config. file is the name of the file in errors. Parse
// first reports all unknown or repeated keys and all values of the wrong type in one error. It
// checks the values themselves only if there is no such problem.
func Parse(file string, text []byte) (c *Config, err error) {
	defer func() { // goccy/go-yaml 1.19.2 panics on some input
		if r := recover(); r != nil {
			c, err = nil, &Error{File: file, Msg: fmt.Sprintf("not readable as YAML (%v)", r)}
		}
	}()
	src := newSource(file, text)
	root, err := src.root()
	if err != nil {
		return nil, err
	}
	c = Default()
	if root != nil { // otherwise the file is empty, and all values are defaults
		if err := src.checkShape(root, reflect.TypeFor[Config](), "$"); err != nil {
			return nil, err
		}
		if err := yaml.NewDecoder(strings.NewReader(""), yaml.Strict()).DecodeFromNode(root, c); err != nil {
			return nil, src.syntaxError(err)
		}
	}
	c.source = src // must come after decoding, because the decoder may zero all of c
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return c, nil
}

// root returns the file's only YAML document; nil: the file is empty. A second document is an
// error.
func (s *source) root() (ast.Node, error) {
	tokens := lexer.Tokenize(string(s.text))
	if t := firstUnread(tokens); t != nil {
		return nil, s.errorAtToken(t, "", "this and all that follows would not be read, because two lines --- come before it "+
			"with nothing between them; remove one of the two")
	}
	f, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey()) // checkShape reports duplicate keys, all at once
	if err != nil {
		return nil, s.syntaxError(err)
	}
	var root ast.Node
	for _, doc := range f.Docs {
		switch body := doc.Body; {
		case body == nil || body.Type() == ast.NullType || body.Type() == ast.CommentType: // an empty document
		case root != nil:
			return nil, s.errorAtToken(body.GetToken(), "", "a second document begins here; only one is read, remove the --- above")
		default:
			root = body
		}
	}
	return root, nil
}

// firstUnread returns the first token that the parser would ignore; nil: there is none. The parser
// of goccy/go-yaml 1.19.2 silently ignores everything after two lines --- that have nothing or only
// comments between them.
func firstUnread(tokens token.Tokens) *token.Token {
	headers := 0 // lines --- since the last token of a document
	for _, t := range tokens {
		switch {
		case t.Type == token.CommentType:
		case t.Type == token.DocumentHeaderType:
			headers++
		case headers > 1:
			return t
		default:
			headers = 0
		}
	}
	return nil
}

// syntaxError turns an error of the YAML library into an Error with the position in the file.
func (s *source) syntaxError(err error) error {
	var ye yaml.Error
	if !errors.As(err, &ye) || ye.GetToken() == nil { // the library does not say where the error is
		return &Error{File: s.file, Msg: err.Error()}
	}
	e := s.errorAtToken(ye.GetToken(), "", "%s", ye.GetMessage())
	if strings.HasPrefix(s.line(e.Line), "\t") {
		e.Msg += "; the line begins with a tab, and YAML is indented with spaces only"
	}
	return e
}

// ParseEngines reads and checks a file that discovery follows, which has the keys of `engines`. Its
// engines may name the profiles of the config. file is the name of the file in errors.
func (c *Config) ParseEngines(file string, text []byte) (e Engines, err error) {
	defer func() { // goccy/go-yaml panics on some input, as in Parse
		if r := recover(); r != nil {
			e, err = Engines{}, &Error{File: file, Msg: fmt.Sprintf("not readable as YAML (%v)", r)}
		}
	}()
	src := newSource(file, text)
	root, err := src.root()
	if err != nil {
		return Engines{}, err
	}
	if root == nil {
		return Engines{}, fmt.Errorf("%s: %w", file, errNoEngines)
	}
	if err := src.checkShape(root, reflect.TypeFor[Engines](), "$.engines"); err != nil {
		return Engines{}, err
	}
	// A config with only these engines, so that the defaults and the checks of a config file apply to
	// them.
	one := &Config{Profiles: maps.Clone(c.Profiles), source: src}
	if src.isSet("$.engines.prefer") { // checkShape has recorded the keys of this file below $.engines, although they are at its root
		return Engines{}, src.errorAt("$.engines.prefer", "only the config file says which kind of engines comes first; remove it here")
	}
	if err := yaml.NewDecoder(bytes.NewReader(src.text), yaml.Strict()).Decode(&one.Engines); err != nil {
		return Engines{}, src.syntaxError(err)
	}
	one.fillDefaults()
	var found problems
	one.checkEngines(func(path, format string, args ...any) {
		found = append(found, src.errorAt(path, format, args...))
	})
	return one.Engines, found.join()
}
