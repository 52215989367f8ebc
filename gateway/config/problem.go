package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/goccy/go-yaml/token"
)

// Error is a problem with a value, and its position in the file.
type Error struct {
	File         string // the config file, or the flag that set the value; empty: the value is a default
	Line, Column int    // counted from 1; 0: the value is not in the file
	Path         string // path of the key, such as pool.ttl
	Msg          string // what is wrong, and what to write instead
	Excerpt      string
}

// Error returns the position, the key and the message, followed by the lines around the position.
func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File)
		if e.Line > 0 {
			fmt.Fprintf(&b, ":%d:%d", e.Line, e.Column)
		}
		b.WriteString(": ")
	}
	if e.Path != "" {
		b.WriteString(e.Path + ": ")
	}
	b.WriteString(e.Msg)
	if e.Excerpt != "" {
		b.WriteString("\n" + e.Excerpt)
	}
	return b.String()
}

// report records a problem with the value at a path such as "$.pool.ttl". The other arguments are
// those of fmt.Sprintf.
type report func(path, format string, args ...any)

type problems []error

// join returns one error with all problems, in the order of their positions in the file; nil: there
// are none.
func (p problems) join() error {
	slices.SortStableFunc(p, func(a, b error) int {
		var x, y *Error
		if !errors.As(a, &x) || !errors.As(b, &y) { // does not happen: every problem is an *Error
			return 0
		}
		return byPosition(x, y)
	})
	return errors.Join(p...)
}

// byPosition compares two problems by their positions in the file.
func byPosition(a, b *Error) int {
	return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Path, b.Path))
}

// source is the text of a config file, with the position of each value.
type source struct {
	file         string
	text         []byte
	positions    map[string]position // from a path such as "$.pool.ttl" to the position of its value
	flags        map[string]string   // from a path to the command-line flag that set the value instead of the file
	chosenPolicy string              // the prefill.policy that choosePrefillPolicy chose, because the file has none; empty: the file has one
}

type position struct{ line, column int }

// byteOrderMark is what some editors put at the beginning of a file. YAML allows it, so it is
// skipped.
var byteOrderMark = []byte("\ufeff")

func newSource(file string, text []byte) source {
	return source{file: file, text: bytes.TrimPrefix(text, byteOrderMark), positions: map[string]position{}}
}

// Blank says whether the config comes from a file that sets no key, such as an empty one or one
// with comments only.
func (c *Config) Blank() bool { return c.source.file != "" && len(c.source.positions) == 0 }

// Flag records that a flag of the command line set the value at path, such as "pool.ttl".
// Errors about the value then name the flag instead of the file.
func (c *Config) Flag(path, flag string) {
	if c.source.flags == nil {
		c.source.flags = map[string]string{}
	}
	c.source.flags["$."+path] = flag
}

// errorAt makes an Error that points at the value of a path. If the value is not in the file, it
// points at the nearest parent that is. If a flag set the value or that parent, the Error names the
// flag in place of the file. If neither is set, the Error has no line.
func (s *source) errorAt(path, format string, args ...any) *Error {
	e := &Error{File: s.file, Path: trimRoot(path), Msg: fmt.Sprintf(format, args...)}
	for p := path; p != "$"; p = parent(p) {
		if flag, ok := s.flags[p]; ok {
			e.File = flag
			return e
		}
		if at, ok := s.positions[p]; ok {
			e.Line, e.Column, e.Excerpt = at.line, at.column, s.excerpt(at.line)
			return e
		}
	}
	return e
}

// isSet says whether the file or a flag sets the value at path, so that it is not a default.
func (s *source) isSet(path string) bool {
	_, written := s.positions[path]
	_, flag := s.flags[path]
	return written || flag
}

// line returns line n of the text, counted from 1; empty: there is no such line.
func (s *source) line(n int) string {
	lines := bytes.Split(s.text, []byte("\n"))
	if n < 1 || n > len(lines) {
		return ""
	}
	return string(lines[n-1])
}

// errorAtToken makes an Error that points at a token of the file.
func (s *source) errorAtToken(t *token.Token, path, format string, args ...any) *Error {
	return &Error{
		File: s.file, Line: t.Position.Line, Column: t.Position.Column,
		Path: trimRoot(path), Msg: fmt.Sprintf(format, args...), Excerpt: s.excerpt(t.Position.Line),
	}
}

// trimRoot removes the beginning "$." of a path.
func trimRoot(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, "$"), ".") }

// parent returns the path without its last step: that of "$.a.b[1]" is "$.a.b", that of "$.a" is
// "$".
func parent(path string) string {
	if i := strings.LastIndexAny(path, ".["); i > 0 { // where the last step, a key or an index, begins
		return path[:i]
	}
	return "$"
}

// excerpt returns the line of the file with this number and its two neighbours, with a mark at the
// line.
func (s *source) excerpt(line int) string {
	lines := bytes.Split(bytes.TrimRight(s.text, "\n"), []byte("\n"))
	var b bytes.Buffer
	for n := max(1, line-1); n <= min(len(lines), line+1); n++ {
		mark := ' '
		if n == line {
			mark = '>'
		}
		fmt.Fprintf(&b, "%c %4d | %s\n", mark, n, printable(bytes.TrimRight(lines[n-1], "\r")))
	}
	return strings.TrimRight(b.String(), "\n")
}

// printable makes a line safe for a terminal, because the file may contain anything: no control
// characters, and a limited length.
func printable(line []byte) string {
	const most = 200 // characters
	text := strings.Map(func(r rune) rune {
		if r != '\t' && !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, string(line))
	if runes := []rune(text); len(runes) > most {
		text = string(runes[:most]) + "..."
	}
	return text
}
