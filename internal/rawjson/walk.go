package rawjson

import "bytes"

// The functions in this file find where members and values start and end. They do not check the
// content of strings, numbers and literals. Each returns -1 if brackets, commas, colons or quotes
// are wrong. Keys are not unescaped.

// Space returns the position of the first byte from i on that is not white space.
func Space(b []byte, i int) int {
	if i < len(b) && b[i] > ' ' { // the usual case, so that the compiler inlines Space
		return i
	}
	return skipSpace(b, i)
}

// skipSpace first compares with ' ', which is larger than the other three, because this one
// comparison ends the loop at most bytes.
func skipSpace(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// StringEnd returns the position after the string whose opening quote is at i; -1: it has no end.
func StringEnd(b []byte, i int) int {
	for quote := i + 1; ; quote++ {
		distance := bytes.IndexByte(b[quote:], '"')
		if distance < 0 {
			return -1
		}
		quote += distance
		slashes := 0
		for b[quote-1-slashes] == '\\' { // ends at the opening quote at the latest
			slashes++
		}
		if slashes%2 == 0 { // an odd number of backslashes escapes the quote
			return quote + 1
		}
	}
}

// ValueEnd returns the position after the value at i; -1: there is none, or it has no end.
func ValueEnd(b []byte, i int) int {
	if i < 0 || i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return StringEnd(b, i)
	case '{', '[':
		return nestEnd(b, i)
	}
	end := i // of a number, true, false or null
	for end < len(b) && !endsScalar[b[end]] {
		end++
	}
	if end == i {
		return -1
	}
	return end
}

var endsScalar = [256]bool{',': true, '}': true, ']': true, ' ': true, '\n': true, '\t': true, '\r': true, '"': true, ':': true, '{': true,
	'[': true}

var nests = [256]bool{'"': true, '{': true, '}': true, '[': true, ']': true}

// nestEnd returns the position after the object or array at i; -1: it has no end.
func nestEnd(b []byte, i int) int {
	depth := 0
	for i < len(b) {
		c := b[i]
		switch {
		case !nests[c]:
			i++
			continue
		case c == '"': // brackets in a string do not count
			if i = StringEnd(b, i); i < 0 {
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

// Object iterates over the members of an object. After Next, a caller that knows the end of the
// value may store it in Pos, so that Next need not search for it. -1 ends the iteration.
type Object struct {
	Text []byte
	// Pos is where the next Next starts. 0: the end of the value is not known yet. After the last
	// member it is the end of the object, and -1 if the object is malformed.
	Pos int

	Open  int
	N     int    // members so far, including the current one
	Comma int    // before the current member; meaningless for the first
	Quote int    // of the current key
	Key   []byte // without quotes, with its escapes
	Val   int    // of the current value
}

// ObjectAt returns an iteration over the object at i. Without an object there, the iteration has no
// members, and Pos is -1.
func ObjectAt(b []byte, i int) Object {
	if i < 0 || i >= len(b) || b[i] != '{' {
		return Object{Pos: -1}
	}
	return Object{Text: b, Open: i, Pos: i + 1}
}

// Next moves to the next member. found is false if there is none, and also if the object is
// malformed; then Pos is -1.
func (o *Object) Next() (found bool) {
	b, i := o.Text, o.Pos
	if i == 0 {
		i = ValueEnd(b, o.Val)
	}
	o.Pos = -1 // stays so if the object is malformed
	if i < 0 {
		return false
	}
	if i = Space(b, i); i >= len(b) {
		return false
	}
	if b[i] == '}' {
		o.Pos = i + 1
		return false
	}
	if o.N > 0 {
		if b[i] != ',' {
			return false
		}
		o.Comma = i
		i = Space(b, i+1)
	}
	if i >= len(b) || b[i] != '"' {
		return false
	}
	end := StringEnd(b, i)
	if end < 0 {
		return false
	}
	o.Quote, o.Key = i, b[i+1:end-1]
	if i = Space(b, end); i >= len(b) || b[i] != ':' {
		return false
	}
	if o.Val = Space(b, i+1); o.Val >= len(b) {
		return false
	}
	o.N++
	o.Pos = 0 // not known yet
	return true
}

// NextValue is Next, and sets Pos to the end of the value. found is also false if the value has no
// end.
func (o *Object) NextValue() (found bool) {
	if !o.Next() {
		return false
	}
	o.Pos = ValueEnd(o.Text, o.Val)
	return o.Pos > 0
}

// Value needs Pos at the end of the value, as after NextValue.
func (o *Object) Value() []byte { return o.Text[o.Val:o.Pos:o.Pos] }

// Array is like Object, for elements.
type Array struct {
	Text []byte
	Pos  int
	N    int
	Val  int
}

// ArrayAt returns an iteration over the array at i. Without an array there, the iteration has no
// elements, and Pos is -1.
func ArrayAt(b []byte, i int) Array {
	if i < 0 || i >= len(b) || b[i] != '[' {
		return Array{Pos: -1}
	}
	return Array{Text: b, Pos: i + 1}
}

// Next is as Object.Next: the next value starts at Val.
func (a *Array) Next() (found bool) {
	b, i := a.Text, a.Pos
	if i == 0 { // not known
		i = ValueEnd(b, a.Val)
	}
	a.Pos = -1 // stays so if the array is malformed
	if i < 0 { // no array, malformed, or a value without an end
		return false
	}
	if i = Space(b, i); i >= len(b) {
		return false
	}
	if b[i] == ']' {
		a.Pos = i + 1
		return false
	}
	if a.N > 0 {
		if b[i] != ',' {
			return false
		}
		i = Space(b, i+1)
	}
	if i >= len(b) {
		return false
	}
	a.Val, a.Pos = i, 0 // not known yet
	a.N++
	return true
}
