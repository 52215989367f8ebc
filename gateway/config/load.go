package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Load reads and validates a file.
func Load(path string) (*Config, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return Parse(path, src)
}

// Parse reads and validates src; file is the name errors carry. Keys that are
// unknown or written twice and values of the wrong type are refused, all of
// them in one error; only then are the values looked at.
func Parse(file string, src []byte) (c *Config, err error) {
	c = Default()
	c.source = source{file: file, text: src, places: map[string]place{}}
	defer func() { // goccy/go-yaml 1.19.2 panics on some input, such as a tag it does not know
		if r := recover(); r != nil {
			c, err = nil, &Error{File: file, Msg: fmt.Sprintf("not readable as YAML (%v)", r)}
		}
	}()
	root, err := c.root()
	if err != nil {
		return nil, err
	}
	if root != nil {
		if err := c.checkShape(root); err != nil {
			return nil, err
		}
		if err := yaml.NewDecoder(bytes.NewReader(src), yaml.Strict()).Decode(c); err != nil {
			return nil, c.syntaxError(err)
		}
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return c, nil
}

// root is the file's only document, nil when there is nothing in it.
func (c *Config) root() (ast.Node, error) {
	f, err := parser.ParseBytes(c.source.text, 0, parser.AllowDuplicateMapKey()) // checkShape reports those, all at once
	if err != nil {
		return nil, c.syntaxError(err)
	}
	var root ast.Node
	for _, doc := range f.Docs {
		switch body := doc.Body; {
		case body == nil || body.Type() == ast.NullType || body.Type() == ast.CommentType:
		case root != nil:
			return nil, c.source.atToken(body.GetToken(), "", "a second document begins here; only one is read, remove the --- above")
		default:
			root = body
		}
	}
	return root, nil
}

// syntaxError turns the library's error, which knows its token, into ours.
func (c *Config) syntaxError(err error) error {
	var ye yaml.Error
	if !errors.As(err, &ye) || ye.GetToken() == nil {
		return &Error{File: c.source.file, Msg: err.Error()}
	}
	return c.source.atToken(ye.GetToken(), "", "%s", ye.GetMessage())
}
