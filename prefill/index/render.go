package index

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"math/bits"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"

	"evenkeel/internal/rawjson"
)

// separator ends each part of the rendering of a chat: its tools, then its messages. Text seldom holds it. The
// rendering need not be what the engine's template makes. It must only begin alike where the template's text begins
// alike, so that the next turn of a conversation begins with the bytes of this one.
const separator = '\x1e'

// Text is the keys of a prompt that was hashed as text.
type Text struct {
	Keys  []Key
	Bytes int  // of the rendering
	Media bool // some of it is not text, so that its bytes say nothing about its tokens
}

// Chat appends the keys of a chat's rendering. messages and tools are members
// of a scanned mooncake.Body; either may be missing.
func (h *Hasher) Chat(dst []Key, root Key, messages, tools json.RawMessage) Text {
	h.start(dst, root, BlockBytes)
	if len(tools) > 0 && tools[0] == '[' {
		for tool := range rawjson.Elements(tools) {
			h.compact(tool)
			h.writeByte(separator)
		}
	}
	for a := rawjson.ArrayAt(messages, 0); a.Next(); {
		a.Pos = h.message(messages, a.Val)
	}
	return h.text()
}

// Prompt appends the keys of a completion's prompt, a member of a scanned mooncake.Body. Only a string has keys here:
// token ids go to PromptTokens, and for a list of prompts it is not known where each will run.
func (h *Hasher) Prompt(dst []Key, root Key, prompt json.RawMessage) Text {
	h.start(dst, root, BlockBytes)
	if len(prompt) > 0 && prompt[0] == '"' {
		h.unquote(prompt)
	}
	return h.text()
}

func (h *Hasher) text() Text { return Text{h.end(), h.total, h.media} }

// message writes the message that starts at i, in a fixed order whatever the order of its members. It returns where
// the message ends, 0 if it is no object. Reasoning is left out, because templates drop that of earlier turns. The
// walk over the members also finds the end, so that a long text is walked over once.
func (h *Hasher) message(messages json.RawMessage, i int) (end int) {
	var role, name, id, content, calls json.RawMessage
	o := rawjson.ObjectAt(messages, i)
	for o.NextValue() {
		switch rawjson.Key(o.Key) {
		case "role":
			role = o.Value()
		case "name":
			name = o.Value()
		case "tool_call_id":
			id = o.Value()
		case "content":
			content = o.Value()
		case "tool_calls":
			calls = o.Value()
		}
	}
	h.scalar(role)
	h.scalar(name)
	h.scalar(id)
	h.content(content)
	if len(calls) > 0 && calls[0] == '[' {
		h.compact(calls)
	}
	h.writeByte(separator)
	return max(0, o.Pos)
}

// scalar writes a short member and a separator, so that after a missing member the next one does not take its place.
func (h *Hasher) scalar(value json.RawMessage) {
	if len(value) > 0 && value[0] == '"' {
		h.unquote(value)
	}
	h.writeByte(separator)
}

// content writes a message's text. A list of parts is written as the text that engines make by joining the parts.
func (h *Hasher) content(content json.RawMessage) {
	if len(content) == 0 {
		return
	}
	switch content[0] {
	case '"':
		h.unquote(content)
	case '[':
		first := true
		for part := range rawjson.Elements(content) {
			if !first {
				h.writeByte('\n')
			}
			first = false
			h.part(part)
		}
	}
}

// part writes a part's text. A picture or a sound is replaced with a hash of the whole part: its URL or its data.
func (h *Hasher) part(part json.RawMessage) {
	if len(part) > 0 && part[0] == '"' {
		h.unquote(part)
		return
	}
	text, plain := json.RawMessage(nil), true
	for key, value := range rawjson.Members(part) {
		switch key {
		case "text", "refusal":
			text = value
		case "type", "cache_control":
		default:
			plain = false
		}
	}
	if plain && len(text) > 0 && text[0] == '"' {
		h.unquote(text)
		return
	}
	h.media = true
	var sum [8]byte
	binary.LittleEndian.PutUint64(sum[:], xxhash.Sum64(part))
	h.write(sum[:])
}

const (
	ones    = 0x0101010101010101
	highs   = 0x8080808080808080
	slashes = '\\' * ones
)

// unquote writes the text of a valid JSON string, eight bytes at a time: code is full of escapes, and to search for
// each escape would cost more than to copy the text between them.
func (h *Hasher) unquote(quoted json.RawMessage) {
	text := quoted[1 : len(quoted)-1]
	for len(text) >= 8 {
		word, n := binary.LittleEndian.Uint64(text), 8
		x := word ^ slashes
		escaped := (x - ones) &^ x & highs // only the lowest mark is sure to be right, and only it is used
		if escaped != 0 {
			n = bits.TrailingZeros64(escaped) >> 3
		}
		if h.fill+8 < len(h.buf) {
			binary.LittleEndian.PutUint64(h.buf[h.fill:], word) // the next write overwrites what is beyond n
			h.fill += n
			h.total += n
		} else {
			h.write(text[:n])
		}
		text = text[n:]
		if escaped != 0 {
			text = h.escape(text)
		}
	}
	for len(text) > 0 {
		if text[0] == '\\' {
			text = h.escape(text)
			continue
		}
		h.writeByte(text[0])
		text = text[1:]
	}
}

// escape writes what the escape at the start of text means and returns the rest.
func (h *Hasher) escape(text []byte) []byte {
	if c := rawjson.Escaped(text[1]); c != 0 {
		h.writeByte(c)
		return text[2:]
	}
	r, n := rawjson.CodePoint(text)
	var buf [utf8.UTFMax]byte
	h.write(buf[:utf8.EncodeRune(buf[:], r)])
	return text[n:]
}

// compact writes valid JSON without the white space between its parts.
func (h *Hasher) compact(value json.RawMessage) {
	for len(value) > 0 {
		switch c := value[0]; c {
		case ' ', '\t', '\r', '\n':
			value = value[1:]
		case '"':
			end := rawjson.StringEnd(value, 0)
			h.write(value[:end])
			value = value[end:]
		default:
			h.writeByte(c)
			value = value[1:]
		}
	}
}

// PromptTokens appends the token ids of a prompt that is a list of them. ok is
// false when it is anything else.
func PromptTokens(dst []int32, prompt json.RawMessage) (ids []int32, ok bool) {
	if len(prompt) == 0 || prompt[0] != '[' {
		return dst, false
	}
	ids = dst
	for element := range rawjson.Elements(prompt) {
		id, ok := rawjson.Int(element, 0, len(element)) // an error of strconv has a copy of the element, a whole message
		if !ok || id > math.MaxInt32 {
			return dst, false
		}
		ids = append(ids, int32(id))
	}
	return ids, len(ids) > len(dst)
}
