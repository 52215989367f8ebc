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

// separator ends each part of the rendering of a chat: each tool, role, name, tool_call_id and
// message. Text seldom contains it. The rendering is not the text of the engine's chat template.
// Two renderings need only share a prefix where the two templated texts do: the next turn of a
// conversation must begin with the bytes of the present one.
const separator = '\x1e'

type Text struct {
	Keys  []Key
	Bytes int  // of the rendered prompt
	Media bool // pictures or sound, so that the bytes do not predict the tokens
}

// Chat hashes a chat as one text, first its tools and then its messages. messages and tools are
// members of a scanned mooncake.Body; each may be missing.
func (h *Hasher) Chat(dst []Key, root Key, messages, tools json.RawMessage) Text {
	h.start(dst, root, BlockBytes)
	if len(tools) > 0 && tools[0] == '[' {
		for tool := range rawjson.Elements(tools) {
			h.writeCompact(tool)
			h.writeByte(separator)
		}
	}
	for a := rawjson.ArrayAt(messages, 0); a.Next(); {
		a.Pos = h.writeMessage(messages, a.Val) // the next message is looked for behind this one
	}
	return h.finish()
}

// Prompt appends the keys of a completion's prompt, which must be a string. Token ids are read by
// PromptTokens. A list of prompts gets no keys, because it is not known on which rank each will
// run.
func (h *Hasher) Prompt(dst []Key, root Key, prompt json.RawMessage) Text {
	h.start(dst, root, BlockBytes)
	if len(prompt) > 0 && prompt[0] == '"' {
		h.writeText(prompt)
	}
	return h.finish()
}

func (h *Hasher) finish() Text { return Text{h.end(), h.total, h.media} }

// writeMessage renders the message at offset i, in an order that does not depend on that of its
// members. It returns the message's end (0: no object), so that the caller need not scan a long
// text again. The reasoning is left out, because chat templates drop the reasoning of earlier
// turns.
func (h *Hasher) writeMessage(messages json.RawMessage, i int) (end int) {
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
	h.writeMember(role)
	h.writeMember(name)
	h.writeMember(id)
	h.writeContent(content)
	if len(calls) > 0 && calls[0] == '[' {
		h.writeCompact(calls)
	}
	h.writeByte(separator)
	return max(0, o.Pos)
}

// writeMember always writes a separator, so that the next member is not mistaken for a missing one.
func (h *Hasher) writeMember(value json.RawMessage) {
	if len(value) > 0 && value[0] == '"' {
		h.writeText(value)
	}
	h.writeByte(separator)
}

// writeContent joins the parts of a list by newlines, as engines do.
func (h *Hasher) writeContent(content json.RawMessage) {
	if len(content) == 0 { // as when it only calls tools
		return
	}
	switch content[0] {
	case '"':
		h.writeText(content)
	case '[':
		first := true
		for part := range rawjson.Elements(content) {
			if !first {
				h.writeByte('\n')
			}
			first = false
			h.writePart(part)
		}
	}
}

// writePart replaces a part that is no text, such as a picture or a sound, by a hash of the whole
// part with its URL or data.
func (h *Hasher) writePart(part json.RawMessage) {
	if len(part) > 0 && part[0] == '"' {
		h.writeText(part)
		return
	}
	text, onlyText := json.RawMessage(nil), true
	for key, value := range rawjson.Members(part) {
		switch key {
		case "text", "refusal":
			text = value
		case "type", "cache_control": // they do not change the text
		default:
			onlyText = false
		}
	}
	if onlyText && len(text) > 0 && text[0] == '"' {
		h.writeText(text)
		return
	}
	h.media = true
	var sum [8]byte
	binary.LittleEndian.PutUint64(sum[:], xxhash.Sum64(part))
	h.write(sum[:])
}

// Each constant repeats one byte in all eight bytes of a word.
const (
	ones    = 0x0101010101010101
	highs   = 0x8080808080808080
	slashes = '\\' * ones
)

// writeText writes the text of a valid JSON string. It reads eight bytes at a time: source code in
// prompts is full of escapes, and a search for each of them would cost more than the copying.
func (h *Hasher) writeText(quoted json.RawMessage) {
	text := quoted[1 : len(quoted)-1]
	for len(text) >= 8 {
		word, n := binary.LittleEndian.Uint64(text), 8 // n: bytes before the first backslash
		x := word ^ slashes                            // a backslash becomes a byte 0
		escaped := (x - ones) &^ x & highs             // sets the top bit of a byte 0; only the lowest mark is reliable
		if escaped != 0 {
			n = bits.TrailingZeros64(escaped) >> 3 // from bits to bytes
		}
		if h.filled+8 < len(h.buf) { // the word does not fill the block
			binary.LittleEndian.PutUint64(h.buf[h.filled:], word) // the next write overwrites the bytes after n
			h.filled += n
			h.total += n
		} else {
			h.write(text[:n])
		}
		text = text[n:]
		if escaped != 0 {
			text = h.writeEscaped(text)
		}
	}
	for len(text) > 0 {
		if text[0] == '\\' {
			text = h.writeEscaped(text)
			continue
		}
		h.writeByte(text[0])
		text = text[1:]
	}
}

// writeEscaped writes the character of the escape at the start of text, and returns the rest.
func (h *Hasher) writeEscaped(text []byte) []byte {
	if c := rawjson.Escaped(text[1]); c != 0 {
		h.writeByte(c)
		return text[2:]
	}
	r, n := rawjson.CodePoint(text)
	var buf [utf8.UTFMax]byte
	h.write(buf[:utf8.EncodeRune(buf[:], r)])
	return text[n:]
}

// writeCompact writes valid JSON without the white space between its parts.
func (h *Hasher) writeCompact(value json.RawMessage) {
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

// PromptTokens appends the token ids of a prompt to dst. ok is false for an empty list, or no list
// of token ids.
func PromptTokens(dst []int32, prompt json.RawMessage) (ids []int32, ok bool) {
	if len(prompt) == 0 || prompt[0] != '[' {
		return dst, false
	}
	ids = dst
	for element := range rawjson.Elements(prompt) {
		id, ok := rawjson.Int(element, 0, len(element)) // not strconv: its error would copy the element, which may be long
		if !ok || id > math.MaxInt32 {
			return dst, false
		}
		ids = append(ids, int32(id))
	}
	return ids, len(ids) > len(dst)
}
