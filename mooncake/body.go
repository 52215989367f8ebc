package mooncake

import (
	"bytes"
	"encoding/json"
	"iter"
	"math"

	"evenkeel/internal/rawjson"
)

// Body is one JSON object. Keys are unescaped ("str\u0065am" is "stream") and then compared byte
// for byte ("Stream" is another key), as engines do. A Body points into its text.
type Body struct {
	raw     []byte
	members []member
	closing int
	pending []Member   // members added by Set; they replace members of the text with the same key
	layout  *keyLayout // how the body's keys differ from those of a completion; nil: they do not
	params  *Body      // the sampling_params; nil if layout is nil
}

type member struct {
	key         string
	start, end  int32 // offsets of the member's text between the commas, including white space
	val, valEnd int32
}

// keyLayout translates the keys of a completion to the keys and places in another endpoint's body.
type keyLayout struct {
	locations      map[string]keyLocation // from the key of a completion
	completionKeys map[keyLocation]string // to the key of a completion
	// dropsParam says which members of sampling_params clients may not set; nil: none.
	dropsParam func(key string) bool
}

type keyLocation struct {
	key      string
	inParams bool
}

const paramsKey = "sampling_params"

// Member is a key, which is written without escaping, and its value as JSON text.
type Member struct {
	Key   string
	Value []byte
}

// maxMembers bounds the memory for a body: a member can be as short as six bytes, but needs a
// member struct of 32 bytes.
const maxMembers = 1024

const tooManyMembers = "more than 1024 keys"

// ScanBody validates raw and finds its top-level members, in one pass. It refuses text that is not
// UTF-8, more than maxDepth levels (0: rawjson.DefaultMaxDepth), more than 1024 members, and more
// than 2 GiB. Each of its errors is a *rawjson.SyntaxError.
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

// Set sets the member for Get, All and Splice. The text itself does not change.
func (b *Body) Set(key string, value []byte) {
	for i := range b.pending {
		if b.pending[i].Key == key {
			b.pending[i].Value = value
			return
		}
	}
	b.pending = append(b.pending, Member{key, value})
}

// Salt returns the client's cache_salt as JSON. A null counts as none, as in engines.
func (b *Body) Salt() (salt json.RawMessage, ok bool) {
	salt, ok = b.Get("cache_salt")
	if !ok || rawjson.IsNull(salt) {
		return nil, false
	}
	return salt, true
}

// Raw returns the text without the changes of Set.
func (b *Body) Raw() []byte { return b.raw }

// Get returns the value from Set, or else from the text. If the text repeats the member, the last
// value counts, as in Python's json. key is the key in a completion, as in all methods.
func (b *Body) Get(key string) (json.RawMessage, bool) {
	for i := range b.pending { // each key at most once
		if b.pending[i].Key == key {
			return b.pending[i].Value, true
		}
	}
	object, keyThere := b.locate(key)
	for i := len(object.members) - 1; i >= 0; i-- {
		if m := &object.members[i]; m.key == keyThere {
			return object.raw[m.val:m.valEnd:m.valEnd], true // so that an append does not overwrite the text
		}
	}
	return nil, false
}

// Count returns how often the text has a member: clients may repeat it.
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

// All yields the members of the text, including repeated keys and those of sampling_params, and
// then those of Set, all under their keys in completions.
func (b *Body) All() iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		for object := b; object != nil; object = object.params { // sampling_params has no params itself
			inParams := object != b
			for i := range object.members {
				m := &object.members[i]
				completionKey := b.completionKey(m.key, inParams)
				// Completions have no such member, or it is yielded below.
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

const usualSegments = 8

// inlineValue is the largest value, in bytes, that Splice copies. A larger one becomes a segment.
const inlineValue = 128

// Splice appends to dst the segments of a new body: the old text, byte for byte, without the
// members that set replaces or drop names, and then the members of set. Those of the method Set
// count as members of set. The segments point into the body and into set. Splice allocates only dst
// and one buffer for the keys of set.
func (b *Body) Splice(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	for _, m := range b.pending {
		if !hasKey(set, m.Key) && (drop == nil || !drop(m.Key)) {
			set = append(set[:len(set):len(set)], m) // so that the caller's memory does not change
		}
	}
	if b.layout != nil {
		return b.spliceWithLayout(dst, drop, set)
	}
	return b.spliceText(dst, drop, set)
}

// spliceText is Splice with the body's own keys. The current segment raw[from:to] grows until a
// member is left out: {"a":1,"b":2,"c":3} becomes {"a":1 and ,"c":3 and } without b.
func (b *Body) spliceText(dst [][]byte, drop func(key string) bool, set []Member) [][]byte {
	if dst == nil {
		dst = make([][]byte, 0, usualSegments)
	}
	keptBefore := false // so a comma is needed before the next
	var from, to int32  // of text that is not appended yet
	if len(b.members) == 0 {
		to = int32(b.closing)
	} else {
		to = b.members[0].start // up to and including the '{'
	}
	for i := range b.members {
		m := &b.members[i]
		if drop != nil && drop(m.key) || hasKey(set, m.key) {
			continue
		}
		start := m.start // behind the comma before the member, or behind the '{'
		if keptBefore {
			start-- // the comma
		}
		if start != to { // a member between is left out
			dst = append(dst, b.raw[from:to:to]) // so that an append does not overwrite the text
			from = start
		}
		to, keptBefore = m.end, true
	}
	dst = append(dst, b.raw[from:to:to])
	dst = appendMembers(dst, set, keptBefore)
	return append(dst, b.raw[b.closing:])
}

func hasKey(set []Member, key string) bool {
	for i := range set {
		if set[i].Key == key {
			return true
		}
	}
	return false
}

// comma says whether another member comes before.
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

// Name returns the body's own key of a completion's key, for error messages.
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

// locate returns where the body would have a completion's member.
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

// completionKey returns a completion's key for the body's own; empty: it has none. In a body of
// SGLang's /generate, max_new_tokens in sampling_params is max_tokens, max_tokens in the body
// itself is nothing, and model, as every key that the layout does not have, is itself.
func (b *Body) completionKey(key string, inParams bool) string {
	if b.layout == nil {
		return key
	}
	if completionKey, ok := b.layout.completionKeys[keyLocation{key, inParams}]; ok {
		return completionKey
	}
	if inParams { // the layout lists all that other code handles; this one is only passed on
		return ""
	}
	if _, isElsewhere := b.layout.locations[key]; isElsewhere { // under another key or place
		return ""
	}
	return key
}

// spliceWithLayout is Splice for a body with a layout: the keys in set and drop are those of
// completions. sampling_params is written anew as a whole.
func (b *Body) spliceWithLayout(dst [][]byte, drop func(completionKey string) bool, set []Member) [][]byte {
	const inBody, inParams = false, true
	outer, params := b.layout.split(set)
	// A sampling_params that is not an object is passed on unchanged, so that the engine refuses it,
	// unless a member must be set in it.
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

// Members that have no key in completions are never left out.
func (b *Body) dropsMember(drop func(completionKey string) bool, key string, inParams bool) bool {
	completionKey := b.completionKey(key, inParams)
	return completionKey != "" && drop != nil && drop(completionKey)
}

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
