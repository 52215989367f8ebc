package sse

import (
	"bytes"

	"evenkeel/internal/rawjson"
)

// fields is a JSON object under construction. Its members are in the order in which they first
// came, each value in its own buffer.
type fields []field

// field is one member of such an object.
type field struct {
	key string // the key without quotes, still escaped
	val []byte
}

// find returns the member with a key; nil: there is none. The pointer is valid until another member
// is appended.
func (fs fields) find(key []byte) *field {
	for i := range fs {
		if fs[i].key == string(key) {
			return &fs[i]
		}
	}
	return nil
}

// keepFirst sets a member to val, unless the member has a value other than null already.
func (fs *fields) keepFirst(key, val []byte) {
	switch f := fs.find(key); {
	case f == nil:
		fs.appendMember(key, val)
	case rawjson.IsNull(f.val):
		f.val = append(f.val[:0], val...)
	}
}

// keepLast sets a member to val, so that the last value that came stays. It ignores null if the
// member exists.
func (fs *fields) keepLast(key, val []byte) {
	switch f := fs.find(key); {
	case f == nil:
		fs.appendMember(key, val)
	case !rawjson.IsNull(val):
		f.val = append(f.val[:0], val...)
	}
}

// appendTo appends val to the member: a string to a string, and an array to an array. Of other
// values it keeps the last. Strings are joined in their escaped form, because two events may each
// have one half of a \u surrogate pair.
func (fs *fields) appendTo(key, val []byte) {
	f := fs.find(key)
	if f == nil {
		fs.appendMember(key, val)
		return
	}
	old := f.val
	switch {
	case rawjson.IsNull(val): // null adds nothing
	case len(old) > 1 && old[0] == '"' && val[0] == '"': // joined without the closing quote of the first and the opening one of the second
		old = append(old[:len(old)-1], val[1:]...)
		f.val = old
	case len(old) > 1 && old[0] == '[' && val[0] == '[':
		f.val = joinArrays(old, val)
	default:
		old = append(old[:0], val...)
		f.val = old
	}
}

// merge adds a value of a member whose meaning evenkeel does not know. It joins lists, and the
// members of objects. Of other values it keeps the last. It ignores a value that equals the one so
// far.
func (fs *fields) merge(key, val []byte) {
	f := fs.find(key)
	switch {
	case f == nil:
		fs.appendMember(key, val)
	case rawjson.IsNull(val), bytes.Equal(f.val, val):
	case f.val[0] == '[' && val[0] == '[':
		f.val = joinArrays(f.val, val)
	case f.val[0] == '{' && val[0] == '{':
		f.val = joinObjects(f.val, val)
	default:
		f.val = append(f.val[:0], val...)
	}
}

// maxMembers bounds the members of an object, the tool calls of a message and the
// choices of an answer under construction.
const maxMembers = 256

// tooMany says whether the object is full, so that the answer must be refused.
func (fs fields) tooMany() bool { return len(fs) > maxMembers }

// appendMember appends a member; a full object ignores it, and the caller finds out by tooMany.
func (fs *fields) appendMember(key, val []byte) {
	if fs.tooMany() {
		return
	}
	*fs = append(*fs, field{string(key), append([]byte(nil), val...)})
}

// joinArrays appends the elements of array b to array a, and may reuse the memory of a.
func joinArrays(a, b []byte) []byte {
	switch first := rawjson.Space(b, 1); { // the offset of b's first element
	case b[first] == ']': // b is empty
		return a
	case a[rawjson.Space(a, 1)] == ']': // a is empty
		return append(a[:0], b...)
	default: // a without its closing bracket, a comma, and b without its opening bracket
		return append(append(a[:len(a)-1], ','), b[first:]...)
	}
}

// joinObjects returns object a with the members of object b. If both have a member, b's value is
// used, unless it is null.
func joinObjects(a, b []byte) []byte {
	var all fields
	for _, from := range [][]byte{a, b} {
		for o := rawjson.ObjectAt(from, 0); o.NextValue(); {
			all.keepLast(o.Key, o.Value())
		}
	}
	return append(all.appendMembers([]byte{'{'}), '}')
}

// appendMembers appends the members to the open object at the end of dst, with commas between them.
func (fs fields) appendMembers(dst []byte) []byte {
	for _, f := range fs {
		dst = append(appendKey(dst, f.key), f.val...)
	}
	return dst
}

// appendKey appends a key to the open object at the end of dst. The key is already escaped.
func appendKey(dst []byte, key string) []byte {
	if last := dst[len(dst)-1]; last != '{' { // the object has a member already
		dst = append(dst, ',')
	}
	return append(append(append(dst, '"'), key...), '"', ':')
}
