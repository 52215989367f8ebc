package reftext

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Prompt is a rendered prompt. Two requests with equal Key have the same
// content in the KV cache.
type Prompt struct {
	Key     uint64  // of the content, all of IDs
	Answer  uint64  // of the answer: says its tokens, its text and its length
	IDs     []int32 // one a word, or as the client gave them; never empty
	Resumed int     // how many of the last IDs are the answer's own first tokens
}

// Tokens is the prompt's length.
func (p Prompt) Tokens() int { return len(p.IDs) }

// Of is the prompt of a completion request whose prompt is text, without a seed.
func Of(text string) Prompt {
	var r renderer
	r.text(text)
	return finish(r.close(), nil)
}

// OfUser is the prompt of a chat request of one user message without tools,
// template arguments or seed.
func OfUser(text string) Prompt {
	var r renderer
	r.mark("role", []byte("user"))
	r.text(text)
	return finish(r.close(), nil)
}

// Render reads a request body of /v1/chat/completions (chat) or
// /v1/completions. Keys are compared exactly and the last of several wins, as
// in Python.
func Render(chat bool, body []byte) (Prompt, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return Prompt{}, fmt.Errorf("reftext: body: %w", err)
	}
	return RenderMembers(chat, members)
}

// RenderMembers is Render for a body that is parsed already.
func RenderMembers(chat bool, body map[string]json.RawMessage) (Prompt, error) {
	seed, err := seedOf(body)
	if err != nil {
		return Prompt{}, err
	}
	if chat {
		return renderChat(body, seed)
	}
	return renderCompletion(body, seed)
}

// OfIDs is the prompt of a request with the given ids.
func OfIDs(ids []int32, seed *int64) Prompt { return finish(ids, seed) }

// shapes are the members of a request that take part in the prompt on a real
// engine and must therefore reach prefill and decode alike.
var shapes = []string{"tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "documents",
	"mm_processor_kwargs", "truncate_prompt_tokens", "add_special_tokens", "response_format"}

func seedOf(body map[string]json.RawMessage) (*int64, error) {
	raw, ok := member(body, "seed")
	if !ok {
		return nil, nil
	}
	var seed int64
	if err := json.Unmarshal(raw, &seed); err != nil {
		return nil, errors.New("seed: not an integer")
	}
	return &seed, nil
}

// member leaves out a null: Python's default and an absent key read the same.
func member(body map[string]json.RawMessage, key string) (json.RawMessage, bool) {
	raw, ok := body[key]
	return raw, ok && string(raw) != "null"
}

func renderCompletion(body map[string]json.RawMessage, seed *int64) (Prompt, error) {
	raw, ok := member(body, "prompt")
	if !ok {
		return Prompt{}, errors.New("prompt: missing")
	}
	if raw[0] == '[' {
		var ids []int32
		if err := json.Unmarshal(raw, &ids); err != nil {
			return Prompt{}, errors.New("prompt: only a string or a flat list of token ids; send the prompts of a list one by one")
		}
		if len(ids) == 0 {
			return Prompt{}, errors.New("prompt: empty list")
		}
		for _, id := range ids {
			if id < 0 || id >= VocabSize {
				return Prompt{}, fmt.Errorf("prompt: token id %d is out of vocabulary [0, %d)", id, VocabSize)
			}
		}
		return finish(ids, seed), nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return Prompt{}, errors.New("prompt: not a string or list")
	}
	var r renderer
	r.shapes(body)
	return r.completion(text, seed), nil
}

// completion renders a prompt of text. It may end with the beginning of the answer
// to what stands before: tokens of answers begin with white space,
// so that is looked for between two words.
func (r *renderer) completion(text string, seed *int64) Prompt {
	var word [40]byte
	h, hashed := uint64(noIDs), 0
	for i := 0; i < len(text); {
		at := i
		for i < len(text) && space(text[i]) {
			i++
		}
		for ; hashed < len(r.ids); hashed++ {
			h = Mix(h ^ uint64(r.ids[hashed]))
		}
		answer := seeded(h, seed)
		if first := AppendToken(word[:0], TokenID(answer, 0)); at > 0 && strings.HasPrefix(text[at:], string(first)) {
			if n, err := Check(answer, 0, text[at:]); err == nil {
				for k := range n {
					r.ids = append(r.ids, TokenID(answer, k))
				}
				break
			}
		}
		for i < len(text) && !space(text[i]) {
			i++
		}
		r.text(text[at:i])
	}
	return finish(r.close(), seed)
}

func seeded(h uint64, seed *int64) uint64 {
	if seed == nil {
		return h
	}
	return Mix(h ^ Mix(uint64(*seed)))
}

func renderChat(body map[string]json.RawMessage, seed *int64) (Prompt, error) {
	raw, ok := member(body, "messages")
	if !ok {
		return Prompt{}, errors.New("messages: missing")
	}
	var messages []map[string]json.RawMessage
	if err := json.Unmarshal(raw, &messages); err != nil {
		return Prompt{}, errors.New("messages: not a list of objects")
	}
	if len(messages) == 0 {
		return Prompt{}, errors.New("messages: empty list")
	}
	var r renderer
	r.shapes(body)
	last := len(messages) - 1
	for i, m := range messages {
		if i == last && i > 0 && string(body["continue_final_message"]) == "true" {
			if p, ok := continued(r.clone(), m, seed); ok {
				return p, nil
			}
		}
		if err := r.message(m); err != nil {
			return Prompt{}, fmt.Errorf("messages[%d]: %w", i, err)
		}
	}
	return finish(r.close(), seed), nil
}

// continued reads a last assistant message that is the beginning of the
// answer to the messages before it.
func continued(r renderer, m map[string]json.RawMessage, seed *int64) (Prompt, bool) {
	var text string
	if string(m["role"]) != `"assistant"` || json.Unmarshal(m["content"], &text) != nil {
		return Prompt{}, false
	}
	ids := r.close()
	answer := finish(ids, seed).Answer
	n, err := Check(answer, 0, text)
	if err != nil {
		return Prompt{}, false
	}
	for i := range n {
		ids = append(ids, TokenID(answer, i))
	}
	return finish(ids, seed), true
}

const noIDs = 0x65766e6b65656c // the hash of no ids

// finish finds the keys. Ids that end with the first tokens of their own
// answer continue it.
func finish(ids []int32, seed *int64) Prompt {
	first := len(ids)
	for first > 0 && ids[first-1] >= FirstAnswerID {
		first--
	}
	h := uint64(noIDs)
	for _, id := range ids[:first] {
		h = Mix(h ^ uint64(id))
	}
	answer := seeded(h, seed)
	p := Prompt{Key: h, Answer: answer, IDs: ids}
	if first == len(ids) {
		return p
	}
	own := first > 0
	for i, id := range ids[first:] {
		p.Key = Mix(p.Key ^ uint64(id))
		own = own && id == TokenID(answer, i)
	}
	if own {
		p.Resumed = len(ids) - first
		return p
	}
	p.Answer = seeded(p.Key, seed)
	return p
}

// renderer turns text and template marks into ids. What is not a word is held
// back and goes into the id of the next word.
type renderer struct {
	ids  []int32
	held uint64 // hash of what stands since the last word, 0 = nothing
}

const fnvOffset, fnvPrime = 0xcbf29ce484222325, 0x100000001b3

func (r *renderer) clone() renderer { return renderer{ids: slices.Clone(r.ids), held: r.held} }

func (r *renderer) shapes(body map[string]json.RawMessage) {
	for _, key := range shapes {
		if raw, ok := member(body, key); ok {
			r.mark(key, raw)
		}
	}
}

func (r *renderer) mark(name string, value []byte) {
	h := r.held ^ fnvOffset
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * fnvPrime
	}
	for _, b := range value {
		h = (h ^ uint64(b)) * fnvPrime
	}
	r.held = Mix(h) | 1
}

func (r *renderer) text(s string) {
	for i := 0; i < len(s); {
		h := r.held ^ fnvOffset
		for i < len(s) && space(s[i]) {
			h = (h ^ uint64(s[i])) * fnvPrime
			i++
		}
		if i == len(s) { // white space at the end belongs to what follows
			r.held = h | 1
			return
		}
		for i < len(s) && !space(s[i]) {
			h = (h ^ uint64(s[i])) * fnvPrime
			i++
		}
		r.ids, r.held = append(r.ids, wordID(h)), 0
	}
}

func space(b byte) bool { return b == ' ' || b == '\n' || b == '\t' || b == '\r' }

func wordID(h uint64) int32 { return int32(Mix(h) % FirstAnswerID) }

func (r *renderer) message(m map[string]json.RawMessage) error {
	var role string
	if json.Unmarshal(m["role"], &role) != nil || role == "" {
		return errors.New("role: missing or not a string")
	}
	r.mark("role", []byte(role))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if raw, ok := member(m, key); ok && key != "role" && key != "content" {
			r.mark(key, raw)
		}
	}
	content, ok := member(m, "content")
	if !ok {
		return nil
	}
	var text string
	if json.Unmarshal(content, &text) == nil {
		r.text(text)
		return nil
	}
	var parts []json.RawMessage
	if json.Unmarshal(content, &parts) != nil {
		return errors.New("content: not a string or a list of parts")
	}
	for _, raw := range parts {
		if err := r.part(raw); err != nil {
			return fmt.Errorf("content: %w", err)
		}
	}
	return nil
}

func (r *renderer) part(raw json.RawMessage) error {
	var part map[string]json.RawMessage
	if json.Unmarshal(raw, &part) != nil {
		return errors.New("a part is not an object")
	}
	if string(part["type"]) != `"text"` {
		r.mark("part", raw)
		return nil
	}
	var text string
	if json.Unmarshal(part["text"], &text) != nil {
		return errors.New("a text part has no text")
	}
	r.mark("text", nil)
	r.text(text)
	return nil
}

// close puts what is held back into the last word: trailing space or marks
// change the prompt, not its length.
func (r *renderer) close() []int32 {
	if len(r.ids) == 0 {
		r.ids = append(r.ids, wordID(r.held))
	} else if r.held != 0 {
		last := &r.ids[len(r.ids)-1]
		*last = wordID(r.held ^ uint64(*last)<<32)
	}
	r.held = 0
	return r.ids
}
