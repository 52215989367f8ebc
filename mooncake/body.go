package mooncake

import (
	"encoding/json"
	"iter"
	"math"

	"evenkeel/internal/rawjson"
)

// Body is one JSON object, a client's request or an engine's answer: its text
// and where each top-level member stands in it. Keys compare byte for byte,
// after escapes ("str\u0065am" is "stream", "Stream" is not), as the engines'
// parsers do. A Body points into the text it was scanned from.
type Body struct {
	raw     []byte
	members []member
	closing int      // index of the outermost '}'
	set     []Member // what it says instead of its text, or besides
}

type member struct {
	key        string
	from, to   int32 // its text between the commas, white space included
	val, valTo int32
}

// Member is a key and its JSON value, to be set by Splice.
type Member struct {
	Key   string
	Value []byte
}

// maxMembers bounds what one small body can make us remember: six bytes of
// input cost a whole member record.
const maxMembers = 1024

const tooManyMembers = "more than 1024 keys"

// ScanBody validates raw and finds its top-level members, in one pass. Beyond
// what JSON itself forbids it refuses text that is not UTF-8, anything but an
// object, more than maxDepth levels (0: rawjson.DefaultMaxDepth), more than 1024
// members and more than 2 GiB; every refusal is a *rawjson.SyntaxError.
func ScanBody(raw []byte, maxDepth int) (Body, error) {
	if len(raw) > math.MaxInt32 {
		return Body{}, &rawjson.SyntaxError{Offset: math.MaxInt32, Msg: "more than 2 GiB"}
	}
	b := Body{raw: raw}
	var err error
	b.closing, err = rawjson.Scan(raw, maxDepth, func(at rawjson.Place) string {
		if b.members == nil {
			b.members = make([]member, 0, 16)
		}
		if len(b.members) == maxMembers {
			return tooManyMembers
		}
		b.members = append(b.members, member{rawjson.Key(raw[at.Key+1 : at.KeyEnd-1]), int32(at.From), int32(at.To), int32(at.Val), int32(at.ValEnd)})
		return ""
	})
	if err != nil {
		return Body{}, err
	}
	return b, nil
}

// Set has the body say value for key, whatever its text says.
func (b *Body) Set(key string, value []byte) { b.set = append(b.set, Member{key, value}) }

// Raw is the text the body was scanned from.
func (b *Body) Raw() []byte { return b.raw }

// Get returns the value of key: the last one if there are several, which is
// the one that Python's json keeps.
func (b *Body) Get(key string) (json.RawMessage, bool) {
	for i := range b.set {
		if b.set[i].Key == key {
			return b.set[i].Value, true
		}
	}
	for i := len(b.members) - 1; i >= 0; i-- {
		if m := &b.members[i]; m.key == key {
			return b.raw[m.val:m.valTo:m.valTo], true
		}
	}
	return nil, false
}

// Count tells how often key appears in the text.
func (b *Body) Count(key string) int {
	n := 0
	for i := range b.members {
		if b.members[i].key == key {
			n++
		}
	}
	return n
}

// All yields the members in the order of the text, repeated keys included, and then those that were set.
func (b *Body) All() iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for i := range b.members {
			if replaced(b.set, b.members[i].key) {
				continue
			}
			if m := &b.members[i]; !yield(m.key, b.raw[m.val:m.valTo:m.valTo]) {
				return
			}
		}
		for _, m := range b.set {
			if !yield(m.Key, m.Value) {
				return
			}
		}
	}
}

// usualSegments is how many segments most bodies come to at most.
const usualSegments = 8

// inlineValue is the size up to which a set value is copied beside its key;
// a larger one becomes a segment of its own.
const inlineValue = 128

// Splice appends to dst the segments of a new body: the old text in its order,
// byte for byte, less the members whose key drop reports or set replaces, then
// the members of set. The segments point into the body and into set's values;
// the only allocations are dst's room and one buffer for the keys of set.
func (b *Body) Splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	for _, m := range b.set { // hardly a body has any
		if !replaced(set, m.Key) && (drop == nil || !drop(m.Key)) {
			set = append(set[:len(set):len(set)], m)
		}
	}
	if dst == nil {
		dst = make([][]byte, 0, usualSegments)
	}
	kept := false      // a member stands before what comes next
	var from, to int32 // the stretch that is kept as it is
	if len(b.members) == 0 {
		to = int32(b.closing)
	} else {
		to = b.members[0].from // through the '{'
	}
	for i := range b.members {
		m := &b.members[i]
		if drop != nil && drop(m.key) || replaced(set, m.key) {
			continue
		}
		start := m.from
		if kept {
			start-- // the comma before it
		}
		if start != to {
			dst = append(dst, b.raw[from:to:to])
			from = start
		}
		to, kept = m.to, true
	}
	dst = append(dst, b.raw[from:to:to])
	dst = appendMembers(dst, set, kept)
	return append(dst, b.raw[b.closing:])
}

func replaced(set []Member, key string) bool {
	for i := range set {
		if set[i].Key == key {
			return true
		}
	}
	return false
}

func appendMembers(dst [][]byte, set []Member, comma bool) [][]byte {
	size := 0
	for _, m := range set {
		size += len(m.Key) + len(`,"":`) + min(len(m.Value), inlineValue)
	}
	if size == 0 {
		return dst
	}
	buf := make([]byte, 0, size)
	from := 0
	for _, m := range set {
		if comma {
			buf = append(buf, ',')
		}
		comma = true
		buf = append(buf, '"')
		buf = append(buf, m.Key...)
		buf = append(buf, '"', ':')
		if len(m.Value) <= inlineValue {
			buf = append(buf, m.Value...)
			continue
		}
		dst = append(dst, buf[from:len(buf):len(buf)], m.Value)
		from = len(buf)
	}
	if from < len(buf) {
		dst = append(dst, buf[from:])
	}
	return dst
}
