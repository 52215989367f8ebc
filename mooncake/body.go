package mooncake

import (
	"bytes"
	"encoding/json"
	"iter"
	"math"

	"evenkeel/internal/rawjson"
)

// Body is one JSON object, a client's request or an engine's answer: its text and the offsets of its top-level members. Keys are
// unescaped ("str\u0065am" is "stream") and then compared byte for byte ("Stream" is another key), as in engines. A Body points into
// the text from which it was scanned.
type Body struct {
	raw     []byte
	members []member
	closing int      // index of the outermost '}'
	set     []Member // members added by Set; they replace members of the text with the same key
	form    *form    // where the body has the members of a completion; nil: keys are not translated
	inner   *Body    // its sampling_params; nil: form is nil
}

type member struct {
	key        string
	from, to   int32 // its text between the commas, including white space
	val, valTo int32 // its value
}

// form translates between the keys of a completion's body and the places of the same members in another endpoint's body.
type form struct {
	at    map[string]place      // from the key in a completion to the place
	words map[place]string      // from the place to the key in a completion
	drops func(key string) bool // which members of sampling_params clients may not set; nil: they may set all
}

// place names a member of a body, or of its sampling_params.
type place struct {
	key   string
	inner bool // the member is in sampling_params
}

const paramsKey = "sampling_params"

// Member is a key and its JSON value.
type Member struct {
	Key   string
	Value []byte
}

// maxMembers bounds the memory that a small body can occupy: each member of as little as six bytes needs
// a member struct of 32 bytes.
const maxMembers = 1024

const tooManyMembers = "more than 1024 keys"

// ScanBody validates raw and finds its top-level members, in one pass. Besides invalid JSON, it refuses text that is not
// UTF-8, a value that is not an object, more than maxDepth levels (0: rawjson.DefaultMaxDepth), more than 1024
// members, and more than 2 GiB. Each of its errors is a *rawjson.SyntaxError.
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

// Set sets the member with this key; it replaces a member that the text has.
func (b *Body) Set(key string, value []byte) {
	for i := range b.set {
		if b.set[i].Key == key {
			b.set[i].Value = value
			return
		}
	}
	b.set = append(b.set, Member{key, value})
}

// Salt returns the client's cache_salt as JSON. ok is false if it is missing or null, which engines treat alike.
func (b *Body) Salt() (salt json.RawMessage, ok bool) {
	salt, ok = b.Get("cache_salt")
	if !ok || rawjson.IsNull(salt) {
		return nil, false
	}
	return salt, true
}

// Raw returns the text from which the body was scanned, without the changes of Set.
func (b *Body) Raw() []byte { return b.raw }

// Get returns the value of key. If the key is repeated, it returns the last value, as Python's json does.
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

// Count returns how often key appears in the text.
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

// All yields the members in the order of the text, including repeated keys, and then those that Set added. A body with a form yields its
// members, and those of its sampling_params, under their keys in completions.
func (b *Body) All() iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for object := b; object != nil; object = object.inner {
			for i := range object.members {
				m := &object.members[i]
				word := b.word(m.key, object != b)
				if word == "" || replaced(b.set, word) { // no member of a completion, or yielded below with its new value
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

// usualSegments is how many segments are enough for most bodies.
const usualSegments = 8

// inlineValue is the size in bytes of the largest value of set that is copied. A larger value becomes a segment of its own.
const inlineValue = 128

// Splice appends to dst the segments of a new body: the old text, byte for byte, without the members that set replaces or for whose
// key drop returns true, and then the members of set. The segments point into the body and into the values of set. Splice
// allocates only memory for dst and one buffer for the keys of set.
func (b *Body) Splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	for _, m := range b.set { // empty for most bodies
		if !replaced(set, m.Key) && (drop == nil || !drop(m.Key)) {
			set = append(set[:len(set):len(set)], m)
		}
	}
	if b.form != nil {
		return b.spliceForm(dst, drop, set)
	}
	return b.splice(dst, drop, set)
}

// splice does what Splice does, but ignores form and the members that Set added.
func (b *Body) splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	if dst == nil {
		dst = make([][]byte, 0, usualSegments)
	}
	kept := false      // an earlier member stays, so a comma is needed
	var from, to int32 // a stretch of the text that stays and is not appended yet
	if len(b.members) == 0 {
		to = int32(b.closing)
	} else {
		to = b.members[0].from // up to and including the '{'
	}
	for i := range b.members {
		m := &b.members[i]
		if drop != nil && drop(m.key) || replaced(set, m.key) {
			continue
		}
		start := m.from
		if kept {
			start-- // with the comma before the member
		}
		if start != to { // a dropped member lies between
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

// appendMembers appends the segments of the members of set. comma says that another member comes before them. A value of up to
// inlineValue bytes shares a segment with its key; a longer one becomes a segment of its own.
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

// Name returns the key that this body uses for the member which a completion calls word. Error messages show it.
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

// find returns where to look for the member that a completion calls word: the body or its sampling_params, and the key there.
func (b *Body) find(word string) (object *Body, key string) {
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

// word returns the name that a completion uses for the member key; empty: a completion has no such member.
// inner says that the member is in sampling_params.
func (b *Body) word(key string, inner bool) string {
	if b.form == nil {
		return key
	}
	if word, ok := b.form.words[place{key, inner}]; ok {
		return word
	}
	if _, elsewhere := b.form.at[key]; inner || elsewhere { // the key means another member in a completion, or nothing
		return ""
	}
	return key
}

// spliceForm does what Splice does, for a body with a form.
func (b *Body) spliceForm(dst [][]byte, drop func(word string) bool, set []Member) [][]byte {
	var params, outer []Member // the members of set in sampling_params, and those beside it
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
	dropsIn := func(inner bool) func(string) bool {
		return func(key string) bool {
			if inner && b.form.drops != nil && b.form.drops(key) {
				return true
			}
			word := b.word(key, inner)
			return word != "" && drop != nil && drop(word)
		}
	}
	// A sampling_params that is not an object stays as it is if nothing must be set in it, and the engine refuses it.
	if v, ok := b.Get(paramsKey); !ok || v[0] == '{' || len(params) > 0 {
		outer = append(outer, Member{paramsKey, bytes.Join(b.inner.splice(nil, dropsIn(true), params), nil)})
	}
	return b.splice(dst, dropsIn(false), outer)
}
