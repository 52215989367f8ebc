package rawjson

import (
	"encoding/json"
	"iter"
)

// Elements yields nothing for another value, and stops where the array is malformed.
func Elements(value json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		for a := ArrayAt(value, 0); a.Next(); {
			a.Pos = ValueEnd(value, a.Val)
			if a.Pos < 0 || !yield(value[a.Val:a.Pos:a.Pos]) {
				return
			}
		}
	}
}

// Members yields also repeated keys. It stops where the object is malformed.
func Members(value json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for o := ObjectAt(value, 0); o.NextValue(); {
			if !yield(Key(o.Key), o.Value()) {
				return
			}
		}
	}
}

// Blank overwrites members with spaces, in place, each with one comma, so that the object keeps its
// length.
func Blank(value json.RawMessage, drop func(key string) bool) {
	keptBefore := false // the current member has a comma before it to remove
	for o := ObjectAt(value, 0); o.NextValue(); {
		if !drop(Key(o.Key)) {
			keptBefore = true
			continue
		}
		isFirst := !keptBefore
		from, to := Cut(value, o.Comma, o.Quote, o.Pos, isFirst)
		for i := from; i < to; i++ {
			value[i] = ' '
		}
		if isFirst { // so the walk must expect no comma before the next one
			o.N = 0
		}
	}
}

// Cut returns the part of text to delete to remove a member and one comma: the one before it or, if
// isFirst says that all members before it are removed, the one after it. Of {"a":1,"b":2}, this is
// `"a":1,` for a, and `,"b":2` for b.
func Cut(text []byte, comma, quote, end int, isFirst bool) (from, to int) {
	if !isFirst {
		return comma, end
	}
	if i := Space(text, end); text[i] == ',' {
		return quote, i + 1
	}
	return quote, end // the only member
}
