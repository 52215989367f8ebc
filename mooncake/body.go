package mooncake

import (
	"bytes"
	"encoding/json"
	"iter"
	"math"

	"evenkeel/internal/rawjson"
)

// Body is one JSON object: a client's request or an engine's answer. It has the text and the offsets of the top-level members. Keys are
// unescaped ("str\u0065am" is "stream") and then compared byte for byte ("Stream" is another key), as engines do. A Body points into the
// text from which it was scanned.
type Body struct {
	raw     []byte
	members []member
	closing int        // index of the outermost '}'
	pending []Member   // members added by Set; they replace members of the text with the same key
	layout  *keyLayout // how the body's keys differ from those of a completion; nil: they do not
	params  *Body      // the scanned member sampling_params, without members if the body has none; nil if layout is nil
}

type member struct {
	key         string
	start, end  int32 // offsets of the member's text between the commas, including white space
	val, valEnd int32 // offsets of the member's value
}

// keyLayout translates between the keys of a completion's body and the keys and places of the same members in another endpoint's body.
type keyLayout struct {
	locations      map[string]keyLocation // from the key in a completion to the member's place in this endpoint's body
	completionKeys map[keyLocation]string // from the place in this endpoint's body to the key in a completion
	dropsParam     func(key string) bool  // says which members of sampling_params are removed, because clients may not set them; nil: none
}

// keyLocation is the place of a member: its key, in the body itself or in sampling_params.
type keyLocation struct {
	key      string
	inParams bool // the member is in sampling_params
}

const paramsKey = "sampling_params"

// Member is a key, written into a body without escaping, and its value as JSON text.
type Member struct {
	Key   string
	Value []byte
}

// maxMembers bounds the memory for scanning a body: a member can be as short as six bytes, but needs a member struct of 32 bytes.
const maxMembers = 1024

const tooManyMembers = "more than 1024 keys"

// ScanBody validates raw and finds its top-level members, in one pass. It refuses invalid JSON, text that is not UTF-8, a value that is not
// an object, more than maxDepth levels (0: rawjson.DefaultMaxDepth), more than 1024 members, and more than 2 GiB. Each of its errors is a
// *rawjson.SyntaxError.
func ScanBody(raw []byte, maxDepth int) (Body, error) {
	if len(raw) > math.MaxInt32 {
		return Body{}, &rawjson.SyntaxError{Offset: math.MaxInt32, Msg: "more than 2 GiB"}
	}
	b := Body{raw: raw}
	var err error
	// Scan calls the function for each member with its offsets, and fails with the text that the function returns, unless it is empty.
	b.closing, err = rawjson.Scan(raw, maxDepth, func(at rawjson.Place) string {
		if b.members == nil { // room for the members of most bodies
			b.members = make([]member, 0, 16)
		}
		if len(b.members) == maxMembers {
			return tooManyMembers
		}
		b.members = append(b.members,
			member{
				// The key is unescaped, without its quotes.
				key: rawjson.Key(raw[at.Key+1 : at.KeyEnd-1]), start: int32(at.From), end: int32(at.To), val: int32(at.Val),
				valEnd: int32(at.ValEnd),
			})
		return ""
	})
	if err != nil {
		return Body{}, err
	}
	return b, nil
}

// Set sets the member with this key for Get, All and Splice. The text itself does not change.
func (b *Body) Set(key string, value []byte) {
	for i := range b.pending {
		if b.pending[i].Key == key {
			b.pending[i].Value = value
			return
		}
	}
	b.pending = append(b.pending, Member{key, value})
}

// Salt returns the client's cache_salt as JSON. ok is false if the salt is missing or null, which means the same to engines.
func (b *Body) Salt() (salt json.RawMessage, ok bool) {
	salt, ok = b.Get("cache_salt")
	if !ok || rawjson.IsNull(salt) {
		return nil, false
	}
	return salt, true
}

// Raw returns the text from which the body was scanned, without the changes of Set.
func (b *Body) Raw() []byte { return b.raw }

// Get returns the value of a member: the value that Set gave it, or else its value in the text. If the text repeats the member, the last
// value counts, as in Python's json. key is the member's key in a completion. The body's endpoint may have the member under another key, or
// in sampling_params: then Get looks there.
func (b *Body) Get(key string) (json.RawMessage, bool) {
	for i := range b.pending { // Set keeps each key at most once
		if b.pending[i].Key == key {
			return b.pending[i].Value, true
		}
	}
	object, keyThere := b.locate(key)
	for i := len(object.members) - 1; i >= 0; i-- {
		if m := &object.members[i]; m.key == keyThere {
			return object.raw[m.val:m.valEnd:m.valEnd], true // without capacity behind it, so that an append does not overwrite the text
		}
	}
	return nil, false
}

// Count returns how often a member appears in the text, which is more than once if the client repeats it. key is its key in a completion.
// The body's endpoint may use another key for it, or have it in sampling_params: then Count looks there. Members that Set added do not
// count.
func (b *Body) Count(key string) int {
	n := 0
	object, keyThere := b.locate(key)
	for i := range object.members {
		if object.members[i].key == keyThere {
			n++
		}
	}
	return n
}

// All yields the members in the order of the text, including repeated keys, and then the members that Set added. A body of chat or
// completions has no layout and no params, so its keys are yielded as they are. A body with a layout belongs to an endpoint with other
// keys: All yields its members and those of its sampling_params (params) under their keys in completions.
func (b *Body) All() iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for object := b; object != nil; object = object.params { // the body, and then its sampling_params, which has no params itself
			inParams := object != b
			for i := range object.members {
				m := &object.members[i]
				completionKey := b.completionKey(m.key, inParams)
				// Completions have no such member, or it is yielded below with its value from Set.
				if completionKey == "" || hasKey(b.pending, completionKey) {
					continue
				}
				if !yield(completionKey, object.raw[m.val:m.valEnd:m.valEnd]) {
					return
				}
			}
		}
		for _, m := range b.pending {
			if !yield(m.Key, m.Value) {
				return
			}
		}
	}
}

// usualSegments is the capacity of a new dst: most bodies have no more segments.
const usualSegments = 8

// inlineValue is the largest size, in bytes, of a value that Splice copies. A larger value becomes a segment of its own, without a copy.
const inlineValue = 128

// Splice appends to dst the segments of a new body: the old text, byte for byte, without the members that set replaces or for whose key
// drop returns true, and then the members of set. The members that the method Set has added are treated as members of set, except those
// whose key is in set or is dropped. The segments point into the body and into the values of set. Splice allocates only memory for dst and
// one buffer for the keys of set.
func (b *Body) Splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	for _, m := range b.pending {
		if !hasKey(set, m.Key) && (drop == nil || !drop(m.Key)) {
			set = append(set[:len(set):len(set)], m) // append copies, so that the memory of the caller does not change
		}
	}
	if b.layout != nil { // drop and set have the keys of completions, which must be translated to the keys of this body
		return b.spliceWithLayout(dst, drop, set)
	}
	return b.spliceText(dst, drop, set)
}

// spliceText builds the segments as Splice does, with the body's own keys in drop and set, and without the members that Set added. It goes
// through the members of the text, and lengthens the current segment, raw[from:to], as long as no member between is left out. Where one is,
// the segment is appended, and the next one begins. For example, {"a":1,"b":2,"c":3} becomes the segments {"a":1 and ,"c":3 and } without
// b, and the segments { and "b":2,"c":3 and } without a.
func (b *Body) spliceText(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	if dst == nil {
		dst = make([][]byte, 0, usualSegments)
	}
	keptBefore := false // an earlier member is in the new body, so a comma is needed before the next
	var from, to int32  // offsets of text that belongs to the new body and is not appended yet
	if len(b.members) == 0 {
		to = int32(b.closing)
	} else {
		to = b.members[0].start // the text up to and including the '{'
	}
	for i := range b.members {
		m := &b.members[i]
		if drop != nil && drop(m.key) || hasKey(set, m.key) {
			continue
		}
		start := m.start // the first byte behind the comma before the member, or behind the '{'
		if keptBefore {
			start-- // the comma, which is needed between this member and the one that was kept before
		}
		if start != to { // a member between is left out: otherwise the text of the last one ends right before this comma
			dst = append(dst, b.raw[from:to:to]) // its capacity ends with it, so that an append does not overwrite the text
			from = start
		}
		to, keptBefore = m.end, true
	}
	dst = append(dst, b.raw[from:to:to])
	dst = appendMembers(dst, set, keptBefore)
	return append(dst, b.raw[b.closing:])
}

// hasKey says whether a member in set has this key.
func hasKey(set []Member, key string) bool {
	for i := range set {
		if set[i].Key == key {
			return true
		}
	}
	return false
}

// appendMembers appends the segments of the members of set. comma says whether another member comes before them. A value of up to
// inlineValue bytes is copied into one segment with its key. A longer value becomes a segment of its own.
func appendMembers(dst [][]byte, set []Member, comma bool) [][]byte {
	size := 0
	for _, m := range set {
		size += len(m.Key) + len(`,"":`) + min(len(m.Value), inlineValue)
	}
	if size == 0 { // set is empty
		return dst
	}
	buf := make([]byte, 0, size)
	from := 0 // where in buf the next segment begins
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

// Name returns the key under which this body has the member whose key in a completion is completionKey. Error messages show this key.
func (b *Body) Name(completionKey string) string {
	if b.layout == nil {
		return completionKey
	}
	location, renamed := b.layout.locations[completionKey]
	switch {
	case !renamed:
		return completionKey
	case location.inParams:
		return paramsKey + "." + location.key
	}
	return location.key
}

// locate returns where the body would have the member whose key in a completion is completionKey: in the body itself or in its
// sampling_params, and under which key. The body may lack the member.
func (b *Body) locate(completionKey string) (object *Body, key string) {
	if b.layout == nil {
		return b, completionKey
	}
	if location, renamed := b.layout.locations[completionKey]; renamed {
		if location.inParams {
			return b.params, location.key
		}
		return b, location.key
	}
	return b, completionKey
}

// completionKey returns the key that a completion has for the member key of this body; empty: the member has none, so that code for
// completions does not see it. inParams says that the member is in sampling_params. In a body of SGLang's /generate, for example:
//   - max_new_tokens in sampling_params is the max_tokens of a completion.
//   - max_tokens in the body itself is not: this endpoint has that member in sampling_params. The result is empty.
//   - model in the body itself is the model of a completion, like every key that the layout does not mention.
func (b *Body) completionKey(key string, inParams bool) string {
	if b.layout == nil { // only bodies of endpoints with other keys or places than completions have one
		return key
	}
	if completionKey, ok := b.layout.completionKeys[keyLocation{key, inParams}]; ok {
		return completionKey
	}
	if inParams { // the layout lists every member of sampling_params that other code handles; this one is only passed on to the engine
		return ""
	}
	if _, isElsewhere := b.layout.locations[key]; isElsewhere { // this body has the completion's member under another key or place
		return ""
	}
	return key
}

// spliceWithLayout builds the segments as Splice does, for a body with a layout: some members have other keys than in completions, or are
// in sampling_params. The keys in set, and those passed to drop, are keys of completions. For example, max_tokens in set becomes
// max_new_tokens in the sampling_params of SGLang. sampling_params is written anew as a whole: its new text becomes a member to set in the
// body, and so replaces the old one.
func (b *Body) spliceWithLayout(dst [][]byte, drop func(completionKey string) bool, set []Member) [][]byte {
	const inBody, inParams = false, true // where a member is: in the body itself, or in its sampling_params
	outer, params := b.layout.split(set)
	// A body without sampling_params gets one, which may be empty. A sampling_params that is not an object is passed on unchanged, so
	// that the engine refuses it, unless a member must be set in it.
	oldParams, exists := b.Get(paramsKey)
	writesParams := !exists || oldParams[0] == '{' || len(params) > 0
	if writesParams {
		dropsParam := func(key string) bool {
			neverSent := b.layout.dropsParam != nil && b.layout.dropsParam(key)
			return neverSent || b.dropsMember(drop, key, inParams)
		}
		newParams := b.params.spliceText(nil, dropsParam, params)
		outer = append(outer, Member{paramsKey, bytes.Join(newParams, nil)})
	}
	dropsOuter := func(key string) bool { return b.dropsMember(drop, key, inBody) }
	return b.spliceText(dst, dropsOuter, outer)
}

// dropsMember says whether drop, which takes keys of completions, leaves out the member key of this body. inParams says that the member is
// in sampling_params. Members that have no key in completions are never left out.
func (b *Body) dropsMember(drop func(completionKey string) bool, key string, inParams bool) bool {
	completionKey := b.completionKey(key, inParams)
	return completionKey != "" && drop != nil && drop(completionKey)
}

// split translates the keys of completions in set to the keys of this layout. It returns the members that go into the body itself (outer),
// and those that go into its sampling_params.
func (l *keyLayout) split(set []Member) (outer, params []Member) {
	for _, m := range set {
		location, renamed := l.locations[m.Key]
		if renamed {
			m.Key = location.key
		}
		if renamed && location.inParams {
			params = append(params, m)
		} else {
			outer = append(outer, m)
		}
	}
	return outer, params
}
