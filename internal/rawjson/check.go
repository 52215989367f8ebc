package rawjson

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unicode/utf8"
)

// DefaultMaxDepth bounds the levels of objects and arrays.
const DefaultMaxDepth = 64

// SyntaxError has the byte offset at which a text violates JSON or a limit of Scan.
type SyntaxError struct {
	Offset int
	Msg    string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Msg)
}

// Place has the offsets of a member's text with the white space around it (From, To), its key with
// the quotes, and its value.
type Place struct{ From, Key, KeyEnd, Val, ValEnd, To int }

// Scan validates a text that must be one JSON object, and returns the offset of its closing '}'. It
// also refuses text that is not UTF-8, and more than maxDepth levels (0: DefaultMaxDepth).
// found, if not nil, gets each member of the object, and may return why to refuse it. Each error is
// a *SyntaxError.
func Scan(text []byte, maxDepth int, found func(Place) (refused string)) (closing int, err error) {
	if maxDepth <= 0 {
		maxDepth = DefaultMaxDepth
	}
	s := scanner{data: text, maxDepth: maxDepth}
	i := Space(text, 0)
	if i >= len(text) || text[i] != '{' {
		s.failAt(i, "'{'")
		return -1, s.err
	}
	if i = s.object(i, 1, found); i < 0 {
		return -1, s.err
	}
	closing = i - 1
	if i = Space(text, i); i < len(text) {
		s.fail(i, "more text after the closing '}'")
		return -1, s.err
	}
	return closing, nil
}

// scanner validates JSON in one pass. Its methods take the index of a start, and return that after
// the end, or -1 after setting err.
type scanner struct {
	data     []byte
	maxDepth int
	err      *SyntaxError
}

// fail keeps the first error.
func (s *scanner) fail(at int, msg string) int {
	if s.err == nil {
		s.err = &SyntaxError{Offset: at, Msg: msg}
	}
	return -1
}

func (s *scanner) failAt(i int, want string) int {
	if i >= len(s.data) {
		return s.fail(i, "the text ends where "+want+" should be")
	}
	return s.fail(i, fmt.Sprintf("%q where %s should be", s.data[i], want))
}

// Classes of bytes by which a value can start.
const (
	classOther = iota
	classQuote
	classOpen // { or [
	classNumber
	classLiteral
)

var class = func() (t [256]uint8) {
	for _, c := range "-0123456789" {
		t[c] = classNumber
	}
	for _, c := range "tfn" {
		t[c] = classLiteral
	}
	t['"'], t['{'], t['['] = classQuote, classOpen, classOpen
	return t
}()

// value: depth is the number of objects and arrays around it.
func (s *scanner) value(i, depth int) int {
	if i >= len(s.data) {
		return s.failAt(i, "a value")
	}
	switch class[s.data[i]] {
	case classQuote:
		return s.str(i)
	case classNumber:
		return s.number(i)
	case classLiteral:
		return s.literal(i)
	case classOpen:
		if depth >= s.maxDepth {
			return s.fail(i, fmt.Sprintf("nested deeper than %d levels", s.maxDepth))
		}
		if s.data[i] == '[' {
			return s.array(i, depth+1)
		}
		return s.object(i, depth+1, nil) // only the outermost members are reported
	}
	// Python's json would accept NaN and Infinity, so engines must not get them
	if c := s.data[i]; c == 'N' || c == 'I' {
		return s.fail(i, "NaN and Infinity are not JSON")
	}
	return s.failAt(i, "a value")
}

func (s *scanner) array(i, depth int) int {
	i = Space(s.data, i+1)
	if i < len(s.data) && s.data[i] == ']' {
		return i + 1
	}
	for {
		if i = s.value(i, depth); i < 0 {
			return -1
		}
		i = Space(s.data, i)
		switch {
		case i < len(s.data) && s.data[i] == ',':
			i = Space(s.data, i+1)
		case i < len(s.data) && s.data[i] == ']':
			return i + 1
		default:
			return s.failAt(i, "',' or ']'")
		}
	}
}

func (s *scanner) object(i, depth int, found func(Place) string) int {
	from := i + 1 // with the white space before the key
	i = Space(s.data, from)
	if i < len(s.data) && s.data[i] == '}' {
		return i + 1
	}
	for {
		if i >= len(s.data) || s.data[i] != '"' {
			return s.failAt(i, "a key in double quotes")
		}
		key := i
		keyEnd := s.str(i)
		if keyEnd < 0 {
			return -1
		}
		if i = Space(s.data, keyEnd); i >= len(s.data) || s.data[i] != ':' {
			return s.failAt(i, "':'")
		}
		val := Space(s.data, i+1)
		valEnd := s.value(val, depth)
		if valEnd < 0 {
			return -1
		}
		i = Space(s.data, valEnd)
		if i >= len(s.data) || s.data[i] != ',' && s.data[i] != '}' {
			return s.failAt(i, "',' or '}'")
		}
		if found != nil {
			if refused := found(Place{From: from, Key: key, KeyEnd: keyEnd, Val: val, ValEnd: valEnd, To: i}); refused != "" {
				return s.fail(key, refused)
			}
		}
		if s.data[i] == '}' {
			return i + 1
		}
		from = i + 1
		i = Space(s.data, from)
	}
}

const (
	ones  = 0x0101010101010101 // c*ones has the byte c eight times
	highs = 0x8080808080808080
)

// markSpecial sets the high bit of each of eight bytes that is a quote, a backslash, a control
// character, or not ASCII. A subtraction sets the high bit of a byte that is smaller than what is
// subtracted. Only the lowest set bit is reliable, because a subtraction may borrow from higher
// bytes.
func markSpecial(eight uint64) uint64 {
	quote, slash := eight^('"'*ones), eight^('\\'*ones) // 0 in each byte that is one
	return (eight | (eight - 0x20*ones) | (quote - ones) | (slash - ones)) & highs
}

// str checks that the string is valid UTF-8.
func (s *scanner) str(i int) int {
	data := s.data
	for i++; ; {
		for i+8 <= len(data) { // eight ordinary characters at a time
			if found := markSpecial(binary.LittleEndian.Uint64(data[i:])); found != 0 {
				i += bits.TrailingZeros64(found) >> 3 // 8 bits per byte
				break
			}
			i += 8
		}
		if i >= len(data) {
			return s.fail(i, "the text ends inside a string")
		}
		switch c := data[i]; {
		case c == '"':
			return i + 1
		case c == '\\':
			if i = s.escape(i); i < 0 {
				return -1
			}
		case c < 0x20:
			return s.fail(i, fmt.Sprintf("control character %#02x in a string; write it as \\u%04x", c, c))
		case c < utf8.RuneSelf:
			i++ // fewer than eight bytes are left
		default:
			for i < len(data) && data[i] >= utf8.RuneSelf {
				r, size := utf8.DecodeRune(data[i:])
				if r == utf8.RuneError && size == 1 { // a valid U+FFFD has three bytes
					return s.fail(i, "a string is not valid UTF-8")
				}
				i += size
			}
		}
	}
}

var hex = func() (t [256]bool) {
	for _, c := range "0123456789abcdefABCDEF" {
		t[c] = true
	}
	return t
}()

func (s *scanner) escape(i int) int {
	if i+1 >= len(s.data) {
		return s.fail(i, "the text ends inside a string")
	}
	switch s.data[i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 2
	case 'u':
		if i+6 <= len(s.data) && hex[s.data[i+2]] && hex[s.data[i+3]] && hex[s.data[i+4]] && hex[s.data[i+5]] {
			return i + 6
		}
		return s.fail(i, "\\u without four hexadecimal digits")
	}
	return s.fail(i, "an escape that JSON does not have")
}

func (s *scanner) digits(i int) int {
	for i < len(s.data) && s.data[i]-'0' <= 9 { // a byte below '0' wraps around to a large value
		i++
	}
	return i
}

// number checks only the syntax: a number may have any size.
func (s *scanner) number(i int) int {
	if s.data[i] == '-' {
		i++
		if i < len(s.data) && s.data[i] == 'I' { // Python's json would accept it
			return s.fail(i, "NaN and Infinity are not JSON")
		}
	}
	start := i
	switch i = s.digits(i); {
	case i == start:
		return s.failAt(i, "a digit")
	case s.data[start] == '0' && i > start+1:
		return s.fail(start, "a number with a leading zero")
	}
	if i < len(s.data) && s.data[i] == '.' {
		start = i + 1
		if i = s.digits(start); i == start {
			return s.failAt(i, "a digit")
		}
	}
	if i < len(s.data) && s.data[i]|0x20 == 'e' {
		i++
		if i < len(s.data) && (s.data[i] == '+' || s.data[i] == '-') {
			i++
		}
		start = i
		if i = s.digits(start); i == start {
			return s.failAt(i, "a digit")
		}
	}
	return i
}

func (s *scanner) literal(i int) int {
	want := "null"
	switch s.data[i] {
	case 't':
		want = "true"
	case 'f':
		want = "false"
	}
	if end := i + len(want); end <= len(s.data) && string(s.data[i:end]) == want {
		return end
	}
	return s.fail(i, "a word that JSON does not have; only true, false and null")
}
