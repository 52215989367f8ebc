package mooncake

import (
	"bytes"
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
	set     []Member // members that Set has added; they replace members of the text
	form    *form    // where the body has the members of a completion; nil: under the same keys, or it has a shape of its own
	inner   *Body    // its sampling_params; nil: the body has no form
}

type member struct {
	key        string
	from, to   int32 // its text between the commas, white space included
	val, valTo int32
}

// form says where a body has the members that a completion has.
type form struct {
	at    map[string]place      // by the key in a completion
	words map[place]string      // the reverse of at: the key in a completion
	drops func(key string) bool // says which members of sampling_params no client may set; nil: it may set all
}

// place is a member of a body, or of its sampling_params.
type place struct {
	key   string
	inner bool
}

const paramsKey = "sampling_params"

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
		b.members = append(b.members,
			member{
				key: rawjson.Key(raw[at.Key+1 : at.KeyEnd-1]), from: int32(at.From), to: int32(at.To), val: int32(at.Val),
				valTo: int32(at.ValEnd),
			})
		return ""
	})
	if err != nil {
		return Body{}, err
	}
	return b, nil
}

// Set replaces or adds the member key of the body.
func (b *Body) Set(key string, value []byte) {
	for i := range b.set {
		if b.set[i].Key == key {
			b.set[i].Value = value
			return
		}
	}
	b.set = append(b.set, Member{key, value})
}

// Salt returns the cache_salt of the client as JSON. ok is false if there is none; null is none to engines, too.
func (b *Body) Salt() (salt json.RawMessage, ok bool) {
	salt, ok = b.Get("cache_salt")
	if !ok || rawjson.IsNull(salt) {
		return nil, false
	}
	return salt, true
}

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
	b, key = b.find(key)
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
	b, key = b.find(key)
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
		for object := b; object != nil; object = object.inner {
			for i := range object.members {
				m := &object.members[i]
				word := b.word(m.key, object != b)
				if word == "" || replaced(b.set, word) {
					continue
				}
				if !yield(word, object.raw[m.val:m.valTo:m.valTo]) {
					return
				}
			}
		}
		for _, m := range b.set {
			if !yield(m.Key, m.Value) {
				return
			}
		}
	}
}

// usualSegments is a number of segments that is enough for most bodies.
const usualSegments = 8

// inlineValue is the size up to which a set value is copied beside its key;
// a larger one becomes a segment of its own.
const inlineValue = 128

// Splice appends to dst the segments of a new body: the old text in its order,
// byte for byte, less the members whose key drop reports or set replaces, then
// the members of set. The segments point into the body and into set's values;
// the only allocations are dst's room and one buffer for the keys of set.
func (b *Body) Splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	for _, m := range b.set { // few bodies have any
		if !replaced(set, m.Key) && (drop == nil || !drop(m.Key)) {
			set = append(set[:len(set):len(set)], m)
		}
	}
	if b.form != nil {
		return b.spliceForm(dst, drop, set)
	}
	return b.splice(dst, drop, set)
}

// splice is Splice without the members of Set and without a form.
func (b *Body) splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
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

// replaced says whether set has a member with this key.
func replaced(set []Member, key string) bool {
	for i := range set {
		if set[i].Key == key {
			return true
		}
	}
	return false
}

// appendMembers appends the segments of the members of set. comma says that a member comes before them. Short values
// are copied beside their keys, and a long value becomes a segment of its own.
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

// Name is the key, in this body, of the member that a completion calls word.
func (b *Body) Name(word string) string {
	if b.form == nil {
		return word
	}
	p, ok := b.form.at[word]
	switch {
	case !ok:
		return word
	case p.inner:
		return paramsKey + "." + p.key
	}
	return p.key
}

// find returns the object that has the member which a completion calls word, the body or its sampling_params, and the key there.
func (b *Body) find(word string) (*Body, string) {
	if b.form == nil {
		return b, word
	}
	if p, ok := b.form.at[word]; ok {
		if p.inner {
			return b.inner, p.key
		}
		return b, p.key
	}
	return b, word
}

// word is what a completion calls the member key; empty: a completion has no such member.
func (b *Body) word(key string, inner bool) string {
	if b.form == nil {
		return key
	}
	if word, ok := b.form.words[place{key, inner}]; ok {
		return word
	}
	if _, elsewhere := b.form.at[key]; inner || elsewhere {
		return ""
	}
	return key
}

// spliceForm is Splice of a body with a form.
func (b *Body) spliceForm(dst [][]byte, drop func(word string) bool, set []Member) [][]byte {
	var params, outer []Member
	for _, m := range set {
		if p, ok := b.form.at[m.Key]; ok {
			m.Key = p.key
			if p.inner {
				params = append(params, m)
				continue
			}
		}
		outer = append(outer, m)
	}
	drops := func(inner bool) func(string) bool {
		return func(key string) bool {
			if inner && b.form.drops != nil && b.form.drops(key) {
				return true
			}
			word := b.word(key, inner)
			return word != "" && drop != nil && drop(word)
		}
	}
	if v, ok := b.Get(paramsKey); !ok || v[0] == '{' || len(params) > 0 {
		outer = append(outer, Member{paramsKey, bytes.Join(b.inner.splice(nil, drops(true), params), nil)})
	}
	return b.splice(dst, drops(false), outer)
}
