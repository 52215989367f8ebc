package sse

import (
	"bytes"
	"unicode/utf8"
)

// A scan over JSON by byte positions. It finds where members and values start
// and end and trusts what lies between (a number's digits, an escape): the
// engine wrote it, the client's parser reads it. Every function returns -1 where
// the structure does not hold, and what does not scan is forwarded untouched.
// Keys are compared as written: no engine escapes the letters of a key.

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// stringEnd returns the position after the string whose opening quote is at i.
func stringEnd(b []byte, i int) int {
	for j := i + 1; ; j++ {
		q := bytes.IndexByte(b[j:], '"')
		if q < 0 {
			return -1
		}
		j += q
		slashes := 0
		for b[j-1-slashes] == '\\' { // ends at the opening quote at the latest
			slashes++
		}
		if slashes&1 == 0 {
			return j + 1
		}
	}
}

// valueEnd returns the position after the value that starts at i.
func valueEnd(b []byte, i int) int {
	if i < 0 || i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return stringEnd(b, i)
	case '{', '[':
		return nestEnd(b, i)
	}
	j := i
	for j < len(b) && !endsScalar[b[j]] {
		j++
	}
	if j == i {
		return -1
	}
	return j
}

var endsScalar = [256]bool{',': true, '}': true, ']': true, ' ': true, '\n': true, '\t': true, '\r': true, '"': true, ':': true, '{': true, '[': true}

var nests = [256]bool{'"': true, '{': true, '}': true, '[': true, ']': true}

// nestEnd returns the position after the object or array that starts at i.
func nestEnd(b []byte, i int) int {
	depth := 0
	for i < len(b) {
		c := b[i]
		switch {
		case !nests[c]:
			i++
			continue
		case c == '"':
			if i = stringEnd(b, i); i < 0 {
				return -1
			}
			continue
		case c == '{' || c == '[':
			depth++
		default:
			depth--
		}
		i++
		if depth == 0 {
			return i
		}
	}
	return -1
}

// object walks the members of a JSON object. After each next the caller sets
// pos to the end of the value, -1 to give up.
type object struct {
	b   []byte
	pos int // where to go on; after the last member: behind the object; -1: not an object

	open  int    // its opening brace
	n     int    // members met
	comma int    // before this member; meaningless for the first
	quote int    // of this member's key
	key   []byte // between its quotes, as written
	val   int    // where its value starts
}

// at returns a walk over the object at i.
func at(b []byte, i int) object {
	if i < 0 || i >= len(b) || b[i] != '{' {
		return object{pos: -1}
	}
	return object{b: b, open: i, pos: i + 1}
}

func (o *object) next() bool {
	if o.pos < 0 {
		return false
	}
	b, i := o.b, space(o.b, o.pos)
	o.pos = -1
	if i >= len(b) {
		return false
	}
	if b[i] == '}' {
		o.pos = i + 1
		return false
	}
	if o.n > 0 {
		if b[i] != ',' {
			return false
		}
		o.comma = i
		i = space(b, i+1)
	}
	if i >= len(b) || b[i] != '"' {
		return false
	}
	end := stringEnd(b, i)
	if end < 0 {
		return false
	}
	o.quote, o.key = i, b[i+1:end-1]
	if i = space(b, end); i >= len(b) || b[i] != ':' {
		return false
	}
	if o.val = space(b, i+1); o.val >= len(b) {
		return false
	}
	o.n++
	return true
}

// array walks the elements of a JSON array in the same way.
type array struct {
	b   []byte
	pos int
	n   int
	val int
}

func elements(b []byte, i int) array {
	if i < 0 || i >= len(b) || b[i] != '[' {
		return array{pos: -1}
	}
	return array{b: b, pos: i + 1}
}

func (a *array) next() bool {
	if a.pos < 0 {
		return false
	}
	b, i := a.b, space(a.b, a.pos)
	a.pos = -1
	if i >= len(b) {
		return false
	}
	if b[i] == ']' {
		a.pos = i + 1
		return false
	}
	if a.n > 0 {
		if b[i] != ',' {
			return false
		}
		i = space(b, i+1)
	}
	if i >= len(b) {
		return false
	}
	a.val = i
	a.n++
	return true
}

// intAt reads the non-negative integer that starts at i.
func intAt(b []byte, i, end int) (n int, ok bool) {
	if end-i > 18 || end <= i {
		return 0, false
	}
	for ; i < end; i++ {
		c := b[i] - '0'
		if c > 9 {
			return 0, false
		}
		n = n*10 + int(c)
	}
	return n, true
}

// isNull tells whether the value is null; nothing else starts with an n.
func isNull(value []byte) bool { return len(value) > 0 && value[0] == 'n' }

const hex = "0123456789abcdef"

// appendString appends s as a JSON string.
func appendString[T string | []byte](dst []byte, s T) []byte {
	dst = append(dst, '"')
	for _, r := range string(s) {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default: // an invalid byte ranges as U+FFFD
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
