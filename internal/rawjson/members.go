package rawjson

import (
	"encoding/json"
	"iter"
)

// Elements yields the elements of an array; for any other value it yields nothing. It
// stops where the array is malformed.
func Elements(value json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		for a := ArrayAt(value, 0); a.Next(); {
			a.Pos = ValueEnd(value, a.Val)
			if a.Pos < 0 || !yield(value[a.Val:a.Pos:a.Pos]) { // the element has no end, or the caller wants no more
				return
			}
		}
	}
}

// Members yields the keys and values of an object, including repeated keys; for any other value it yields nothing.
// It stops where the object is malformed.
func Members(value json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for o := ObjectAt(value, 0); o.NextValue(); {
			if !yield(Key(o.Key), o.Value()) {
				return
			}
		}
	}
}

// Blank overwrites with spaces, in place, each member of an object for whose key drop returns true, together with one comma. The object
// keeps its length.
func Blank(value json.RawMessage, drop func(key string) bool) {
	keptBefore := false // an earlier member stays, so the current one has a comma before it to remove
	for o := ObjectAt(value, 0); o.NextValue(); {
		if !drop(Key(o.Key)) {
			keptBefore = true
			continue
		}
		isFirst := !keptBefore // of the members that are left
		// From the comma before the member to its end or, if it is the first one, from its key to the comma after it.
		from, to := Cut(value, o.Comma, o.Quote, o.Pos, isFirst)
		for i := from; i < to; i++ {
			value[i] = ' '
		}
		if isFirst { // the comma after the member is blank now, so the walk must expect none before the next one
			o.N = 0
		}
	}
}

// Cut returns the part of text to delete in order to remove a member of an object, together with one comma. isFirst says that the member is
// the first one left, because all members before it are removed. In this case the comma after the member is removed, and otherwise the
// comma before it. Of {"a":1,"b":2}, the part is `"a":1,` for a, and `,"b":2` for b. comma, quote and end are the member's offsets, as an
// Object has them.
func Cut(text []byte, comma, quote, end int, isFirst bool) (from, to int) {
	if !isFirst {
		return comma, end
	}
	if i := Space(text, end); text[i] == ',' {
		return quote, i + 1
	}
	return quote, end // it is the only member, so there is no comma
}
