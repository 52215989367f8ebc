package rawjson

import (
	"encoding/json"
	"iter"
)

// Elements yields the elements of an array, nothing for any other value. It
// stops where the array's structure does not hold.
func Elements(value json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		for a := ArrayAt(value, 0); a.Next(); {
			if a.Pos = ValueEnd(value, a.Val); a.Pos < 0 || !yield(value[a.Val:a.Pos:a.Pos]) {
				return
			}
		}
	}
}

// Members yields keys and values of an object, repeated keys included, nothing
// for any other value. It stops where the object's structure does not hold.
func Members(value json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for o := ObjectAt(value, 0); o.NextValue(); {
			if !yield(Key(o.Key), o.Value()) {
				return
			}
		}
	}
}

// Blank writes spaces over the members of an object whose key drop reports, in
// the text that the object stands in. What is left is the same object without
// them, as long as it was.
func Blank(value json.RawMessage, drop func(key string) bool) {
	kept := false
	for o := ObjectAt(value, 0); o.NextValue(); {
		if !drop(Key(o.Key)) {
			kept = true
			continue
		}
		from, to := Cut(value, o.Comma, o.Quote, o.Pos, !kept)
		for i := from; i < to; i++ {
			value[i] = ' '
		}
		if !kept {
			o.N = 0 // the comma before the next member is gone
		}
	}
}

// Cut returns the span to take out of an object for a member to be gone: with the
// comma before it, or, if it is the first of those that stay, with the one behind
// it. Its comma, its opening quote and its end are those of the walk.
func Cut(text []byte, comma, quote, end int, first bool) (from, to int) {
	if !first {
		return comma, end
	}
	if i := Space(text, end); text[i] == ',' {
		return quote, i + 1
	}
	return quote, end
}
