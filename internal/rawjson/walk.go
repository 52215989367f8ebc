package rawjson

import "bytes"

// The functions in this file find where members and values start and end. They do not check the content of
// strings, numbers and literals. Each returns -1 if brackets, commas, colons or quotes are wrong. Keys are not unescaped.

// Space returns the position of the first byte from i on that is not white space; len(b): there is none.
func Space(b []byte, i int) int {
	if i < len(b) && b[i] > ' ' { // the usual case is here and the loop elsewhere, so that the compiler inlines Space
		return i
	}
	return skipSpace(b, i)
}

// skipSpace is the loop of Space, for a byte that may be white space. It first compares with ' ', which is larger than the other three,
// because this one comparison ends the loop at most bytes.
func skipSpace(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// StringEnd returns the position after the string whose opening quote is at i; -1: the string has no closing quote.
func StringEnd(b []byte, i int) int {
	for quote := i + 1; ; quote++ {
		distance := bytes.IndexByte(b[quote:], '"')
		if distance < 0 {
			return -1
		}
		quote += distance // now the offset of the next quote
		slashes := 0
		for b[quote-1-slashes] == '\\' { // the loop ends at the opening quote at the latest
			slashes++
		}
		if slashes%2 == 0 { // an odd number of backslashes would escape the quote
			return quote + 1
		}
	}
}

// ValueEnd returns the position after the value that starts at i; -1: there is no value, or it has no end.
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
	end := i // a number, true, false or null ends before the first byte that cannot be a part of it
	for end < len(b) && !endsScalar[b[end]] {
		end++
	}
	if end == i { // there is no value
		return -1
	}
	return end
}

var endsScalar = [256]bool{',': true, '}': true, ']': true, ' ': true, '\n': true, '\t': true, '\r': true, '"': true, ':': true, '{': true,
	'[': true}

var nests = [256]bool{'"': true, '{': true, '}': true, '[': true, ']': true}

// nestEnd returns the position after the object or array that starts at i; -1: it has no end.
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

// Object iterates over the members of a JSON object. After Next, a caller that knows the end of the value may store it in Pos, so that the
// following Next need not search for it. A caller that stores -1 in Pos ends the iteration.
type Object struct {
	Text []byte
	// Pos is where the following Next starts. 0: the end of the value at Val is not known yet. After the last member it is the end of
	// the object, and -1 if the object is malformed.
	Pos int

	Open  int    // offset of the opening brace
	N     int    // how many members were found so far, including the current one
	Comma int    // offset of the comma before the current member; meaningless for the first
	Quote int    // offset of the opening quote of the current member's key
	Key   []byte // the current member's key without quotes, with its escapes
	Val   int    // offset of the current member's value
}

// ObjectAt returns an iteration over the object at i. Without an object there, the iteration has no members, and Pos is -1.
func ObjectAt(b []byte, i int) Object {
	if i < 0 || i >= len(b) || b[i] != '{' {
		return Object{Pos: -1}
	}
	return Object{Text: b, Open: i, Pos: i + 1}
}

// Next moves to the next member. found is false if there is none, and also if the object is malformed; then Pos is -1.
func (o *Object) Next() (found bool) {
	b, i := o.Text, o.Pos
	if i == 0 { // the caller has not stored the end of the current value
		i = ValueEnd(b, o.Val)
	}
	o.Pos = -1 // stays so if the object turns out to be malformed
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
	if o.N > 0 { // between two members there is a comma
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
	o.Pos = 0 // the end of the value is not known yet
	return true
}

// NextValue moves to the next member, as Next does, and sets Pos to the end of its value. found is also false if the value has no end.
func (o *Object) NextValue() (found bool) {
	if !o.Next() {
		return false
	}
	o.Pos = ValueEnd(o.Text, o.Val)
	return o.Pos > 0
}

// Value returns the current member's value. Pos must be the end of the value, as after NextValue.
func (o *Object) Value() []byte { return o.Text[o.Val:o.Pos:o.Pos] }

// Array iterates over the elements of a JSON array. Its fields mean the same for elements as those of Object for members.
type Array struct {
	Text []byte
	Pos  int
	N    int
	Val  int
}

// ArrayAt returns an iteration over the array at i. Without an array there, the iteration has no elements, and Pos is -1.
func ArrayAt(b []byte, i int) Array {
	if i < 0 || i >= len(b) || b[i] != '[' {
		return Array{Pos: -1}
	}
	return Array{Text: b, Pos: i + 1}
}

// Next moves to the next element, whose value then starts at Val. found is false if there is none, and also if the array is malformed.
//
// Before a call, Pos is where the search starts: the end of the current value, if the caller has stored it there. 0 means that the end is
// not known, and -1 that there is no array, or a malformed one. After a call, Pos is 0 if there is an element. After the last element, it
// is the position after the array, and -1 if the array is malformed.
func (a *Array) Next() (found bool) {
	b, i := a.Text, a.Pos
	if i == 0 { // the end of the current value is not known
		i = ValueEnd(b, a.Val)
	}
	a.Pos = -1 // stays so if the array turns out to be malformed
	if i < 0 { // there is no array, it is malformed, or the current value has no end
		return false
	}
	if i = Space(b, i); i >= len(b) {
		return false
	}
	if b[i] == ']' {
		a.Pos = i + 1
		return false
	}
	if a.N > 0 { // between two elements there is a comma
		if b[i] != ',' {
			return false
		}
		i = Space(b, i+1)
	}
	if i >= len(b) {
		return false
	}
	a.Val, a.Pos = i, 0 // Pos 0: the end of the value is not known yet
	a.N++
	return true
}
