package load

import (
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

const maxDepth = 64

// scanError is what is wrong with the bytes, and where.
type scanError struct {
	offset int
	what   string
}

func (e *scanError) Error() string { return fmt.Sprintf("at byte %d: %s", e.offset, e.what) }

// scanner reads JSON in one pass, checking all of it and keeping what chunk
// names. Keys are compared as they stand: one with escapes is not ours.
type scanner struct {
	b   []byte
	i   int
	err *scanError
}

func (s *scanner) fail(what string) {
	if s.err == nil {
		s.err = &scanError{s.i, what}
	}
}

// peek is the next byte, 0 at the end or after an error.
func (s *scanner) peek() byte {
	if s.err != nil || s.i >= len(s.b) {
		return 0
	}
	return s.b[s.i]
}

func (s *scanner) space() {
	for s.i < len(s.b) && (s.b[s.i] == ' ' || s.b[s.i] == '\n' || s.b[s.i] == '\t' || s.b[s.i] == '\r') {
		s.i++
	}
}

func (s *scanner) expect(c byte, what string) {
	if s.peek() != c {
		s.fail(what)
		return
	}
	s.i++
}

func (s *scanner) word(w string) {
	if len(s.b)-s.i < len(w) || string(s.b[s.i:s.i+len(w)]) != w {
		s.fail("not a value")
		return
	}
	s.i += len(w)
}

// object reads an object, or null as an object without members. f must read
// the member's value.
func (s *scanner) object(depth int, f func(key []byte)) {
	if s.peek() == 'n' {
		s.word("null")
		return
	}
	s.expect('{', "not an object")
	s.space()
	if s.peek() == '}' {
		s.i++
		return
	}
	for s.err == nil && s.deep(depth) {
		key, _ := s.raw()
		s.space()
		s.expect(':', "no colon after a key")
		s.space()
		f(key)
		s.space()
		if s.peek() == '}' {
			s.i++
			return
		}
		s.expect(',', "neither a comma nor the end of an object")
		s.space()
	}
}

// list reads a list, or null as an empty one. f must read item n.
func (s *scanner) list(depth int, f func(n int)) {
	if s.peek() == 'n' {
		s.word("null")
		return
	}
	s.expect('[', "not a list")
	s.space()
	if s.peek() == ']' {
		s.i++
		return
	}
	for n := 0; s.err == nil && s.deep(depth); n++ {
		f(n)
		s.space()
		if s.peek() == ']' {
			s.i++
			return
		}
		s.expect(',', "neither a comma nor the end of a list")
		s.space()
	}
}

func (s *scanner) deep(depth int) bool {
	if depth > maxDepth {
		s.fail("nested too deeply")
	}
	return depth <= maxDepth
}

// skip reads any value.
func (s *scanner) skip(depth int) {
	switch c := s.peek(); {
	case c == '{':
		s.object(depth, func([]byte) { s.skip(depth + 1) })
	case c == '[':
		s.list(depth, func(int) { s.skip(depth + 1) })
	case c == '"':
		s.raw()
	case c == 't':
		s.word("true")
	case c == 'f':
		s.word("false")
	case c == 'n':
		s.word("null")
	default:
		s.digits()
	}
}

// digits reads a number and returns it as it stands.
func (s *scanner) digits() []byte {
	start := s.i
	if s.peek() == '-' {
		s.i++
	}
	if s.peek() == '0' {
		s.i++
	} else {
		s.run()
	}
	if s.peek() == '.' {
		s.i++
		s.run()
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		s.i++
		if c := s.peek(); c == '+' || c == '-' {
			s.i++
		}
		s.run()
	}
	return s.b[start:s.i]
}

// run reads at least one digit.
func (s *scanner) run() {
	start := s.i
	for c := s.peek(); c >= '0' && c <= '9'; c = s.peek() {
		s.i++
	}
	if s.i == start {
		s.fail("not a value")
	}
}

// number reads a count: a small integer that is not negative.
func (s *scanner) number() int {
	n := 0
	at := s.i
	for _, c := range s.digits() {
		if c < '0' || c > '9' || n > 1<<40 {
			s.i = at
			s.fail("not a count")
			return 0
		}
		n = n*10 + int(c-'0')
	}
	return n
}

// scalar reads a string, number or null.
func (s *scanner) scalar(c *chunk) []byte {
	if s.peek() == '"' || s.peek() == 'n' {
		return s.text(c)
	}
	return s.digits()
}

// text reads a string or null.
func (s *scanner) text(c *chunk) []byte {
	if s.peek() == 'n' {
		s.word("null")
		return nil
	}
	raw, escaped := s.raw()
	if !escaped || s.err != nil {
		return raw
	}
	from := len(c.scratch)
	c.scratch = unescape(c.scratch, raw)
	return c.scratch[from:len(c.scratch):len(c.scratch)]
}

// raw reads a string and returns what stands between its quotes.
func (s *scanner) raw() (inside []byte, escaped bool) {
	s.expect('"', "not a string")
	start := s.i
	for s.err == nil && s.i < len(s.b) {
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return s.b[start : s.i-1], escaped
		case c < 0x20:
			s.fail("a control character inside a string")
		case c == '\\':
			escaped = true
			s.escape()
		default:
			s.i++
		}
	}
	s.fail("a string without end")
	return nil, false
}

// escape reads \n, \u0041 and the like.
func (s *scanner) escape() {
	s.i++
	switch s.peek() {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.i++
	case 'u':
		s.i++
		for range 4 {
			if _, ok := hexDigit(s.peek()); !ok {
				s.fail("not four hex digits after \\u")
				return
			}
			s.i++
		}
	default:
		s.fail("an unknown escape")
	}
}

func hexDigit(c byte) (rune, bool) {
	switch {
	case c >= '0' && c <= '9':
		return rune(c - '0'), true
	case c >= 'a' && c <= 'f':
		return rune(c-'a') + 10, true
	case c >= 'A' && c <= 'F':
		return rune(c-'A') + 10, true
	}
	return 0, false
}

// unescape appends what a string means; its escapes were checked.
func unescape(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			dst = append(dst, raw[i])
			i++
			continue
		}
		c := raw[i+1]
		i += 2
		switch c {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r := unit(raw[i:])
			i += 4
			if utf16.IsSurrogate(r) {
				pair := rune(utf8.RuneError)
				if i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
					pair = utf16.DecodeRune(r, unit(raw[i+2:]))
				}
				if r = pair; r != utf8.RuneError {
					i += 6
				}
			}
			dst = utf8.AppendRune(dst, r)
		default: // a quote, slash or backslash
			dst = append(dst, c)
		}
	}
	return dst
}

// unit is the UTF-16 unit that four hex digits name.
func unit(digits []byte) (r rune) {
	for _, c := range digits[:4] {
		d, _ := hexDigit(c)
		r = r<<4 | d
	}
	return r
}
