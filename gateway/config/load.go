package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/parser"

	"evenkeel/mooncake"
)

// Load reads and validates a file.
func Load(path string) (*Config, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return Parse(path, src)
}

// Parse reads and validates src; file is the name errors carry. Unknown and
// duplicate keys are refused.
func Parse(file string, src []byte) (*Config, error) {
	c := Default()
	c.file, c.src = file, src
	err := yaml.NewDecoder(bytes.NewReader(src), yaml.Strict()).Decode(c)
	if err != nil && !errors.Is(err, io.EOF) { // EOF: an empty file, all defaults
		return nil, c.syntaxError(err)
	}
	return c, c.Validate()
}

// finish fills what depends on other keys. Validate calls it first.
func (c *Config) finish() {
	if c.Profiles == nil {
		c.Profiles = map[string]mooncake.Profile{}
	}
	if _, ok := c.Profiles[DefaultProfile]; !ok {
		c.Profiles[DefaultProfile] = mooncake.Profile{}
	}
	for name, p := range c.Profiles {
		p.Name = name
		c.Profiles[name] = p.WithDefaults()
	}
	for _, side := range [][]Engine{c.Engines.Prefill, c.Engines.Decode} {
		for i := range side {
			if side[i].Profile == "" {
				side[i].Profile = DefaultProfile
			}
		}
	}
	for i := range c.Engines.Decode {
		c.completeDecode(&c.Engines.Decode[i])
	}
}

func (c *Config) completeDecode(e *Engine) {
	if e.Group == "" {
		e.Group = "main"
	}
	if e.Barrier == "" {
		e.Barrier = "dp"
	}
	if e.Cost == 0 {
		e.Cost = 1
	}
	p := c.Profiles[e.Profile]
	if e.Slots == 0 {
		e.Slots = p.MaxNumSeqs
	}
	if e.KV == 0 {
		e.KV = p.KVTokensPerRank
	}
}

// Complete fills in and checks an engine that is added while the proxy runs, as
// if it had stood in the file. What it leaves out of a decode engine is taken
// from the first one of the file: ranks added later usually join its group.
func (c *Config) Complete(role string, e Engine) (Engine, error) {
	if role == "decode" && len(c.Engines.Decode) > 0 {
		like := c.Engines.Decode[0]
		if e.Profile == "" {
			e.Profile = like.Profile
		}
		if e.Group == "" {
			e.Group, e.Barrier = like.Group, like.Barrier
		}
		if e.Slots == 0 {
			e.Slots = like.Slots
		}
	}
	if role == "prefill" && e.Profile == "" && len(c.Engines.Prefill) > 0 {
		e.Profile = c.Engines.Prefill[0].Profile
	}
	if e.Profile == "" {
		e.Profile = DefaultProfile
	}
	if role == "decode" {
		c.completeDecode(&e)
	}
	one := &Config{Profiles: c.Profiles, file: e.URL}
	if role == "decode" {
		one.Engines.Decode = []Engine{e}
	} else {
		one.Engines.Prefill = []Engine{e}
	}
	var errs []error
	one.checkEngines(func(path, format string, args ...any) { errs = append(errs, one.at(path, format, args...)) })
	return e, errors.Join(errs...)
}

// Error is a problem at a place of the file.
type Error struct {
	File         string
	Line, Column int // 0 when the value stands nowhere in the file
	Path         string
	Msg          string
	Excerpt      string
}

func (e *Error) Error() string {
	at := e.File
	if e.Line > 0 {
		at = fmt.Sprintf("%s:%d:%d", e.File, e.Line, e.Column)
	}
	msg := at + ": "
	if e.Path != "" {
		msg += e.Path + ": "
	}
	msg += e.Msg
	if e.Excerpt != "" {
		msg += "\n" + e.Excerpt
	}
	return msg
}

// syntaxError turns the decoder's error, which knows its token, into ours.
func (c *Config) syntaxError(err error) error {
	var ye yaml.Error
	if !errors.As(err, &ye) || ye.GetToken() == nil {
		return &Error{File: c.file, Msg: err.Error()}
	}
	pos := ye.GetToken().Position
	return &Error{
		File: c.file, Line: pos.Line, Column: pos.Column,
		Msg: ye.GetMessage(), Excerpt: excerpt(c.src, pos.Line),
	}
}

// at returns an Error that points at a YAML path such as "$.pool.ttl", or at
// its nearest parent that is written in the file.
func (c *Config) at(path, format string, args ...any) error {
	e := &Error{File: c.file, Path: trimRoot(path), Msg: fmt.Sprintf(format, args...)}
	f, err := parser.ParseBytes(c.src, 0)
	if err != nil || len(c.src) == 0 {
		return e
	}
	for p := path; p != "$"; p = parent(p) {
		yp, err := yaml.PathString(p)
		if err != nil {
			return e
		}
		node, err := yp.FilterFile(f)
		if err != nil || node == nil {
			continue
		}
		pos := node.GetToken().Position
		e.Line, e.Column, e.Excerpt = pos.Line, pos.Column, excerpt(c.src, pos.Line)
		return e
	}
	return e
}

func parent(path string) string {
	for i := len(path) - 1; i > 0; i-- {
		if path[i] == '.' || path[i] == '[' {
			return path[:i]
		}
	}
	return "$"
}

func trimRoot(path string) string {
	if len(path) > 2 {
		return path[2:]
	}
	return path
}

// excerpt shows the line with its neighbours, the line itself marked.
func excerpt(src []byte, line int) string {
	lines := bytes.Split(src, []byte("\n"))
	var b bytes.Buffer
	for n := max(1, line-1); n <= min(len(lines), line+1); n++ {
		mark := ' '
		if n == line {
			mark = '>'
		}
		fmt.Fprintf(&b, "%c %4d | %s\n", mark, n, bytes.TrimRight(lines[n-1], "\r"))
	}
	return string(bytes.TrimRight(b.Bytes(), "\n"))
}
