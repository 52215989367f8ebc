// Package messages has a reference engine speak /v1/messages, Anthropic's dialect, in the shapes of
// vLLM 0.32, and where Before32 says so of 0.27.1: a request becomes the chat that it means, and
// the chat's answer the message.
package messages

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// request is a message as vLLM reads it: it leaves out what it does not know.
type request struct {
	Model     string          `json:"model"`
	Messages  []turn          `json:"messages"`
	System    content         `json:"system"`
	MaxTokens *int            `json:"max_tokens"`
	Stops     []string        `json:"stop_sequences"`
	Stream    bool            `json:"stream"`
	Tools     []tool          `json:"tools"`
	Choice    *choice         `json:"tool_choice"`
	Thinking  *thinking       `json:"thinking"`
	Salt      string          `json:"cache_salt"`
	Heat      json.RawMessage `json:"temperature"`
	TopP      json.RawMessage `json:"top_p"`
	KV        json.RawMessage `json:"kv_transfer_params"`
}

type thinking struct {
	Type   string
	Budget int `json:"budget_tokens"`
}

type turn struct {
	Role    string
	Content content
}

// content is a text or a list of blocks.
type content struct {
	text   string
	blocks []block
}

type block struct {
	Type, Text, Name string
	Input            json.RawMessage
	Content          content
}

func (c *content) UnmarshalJSON(raw []byte) error {
	if raw[0] == '"' {
		return json.Unmarshal(raw, &c.text)
	}
	return json.Unmarshal(raw, &c.blocks)
}

// plain is the text of all blocks.
func (c *content) plain() string {
	text := c.text
	for _, b := range c.blocks {
		text += b.Text
	}
	return text
}

type tool struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Schema      json.RawMessage `json:"input_schema,omitempty"`
}

type choice struct{ Type, Name string }

// said is a turn of a chat.
type said struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Chat is the chat that a request means to vLLM 0.minor.
func Chat(body []byte, minor int) ([]byte, error) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	if r.MaxTokens == nil || *r.MaxTokens <= 0 {
		return nil, errors.New("max_tokens must be positive")
	}
	var kv struct {
		Produces bool `json:"do_remote_decode"`
	}
	_ = json.Unmarshal(r.KV, &kv) // what it is not, generate refuses
	if t := r.Thinking; minor >= 31 && t != nil && t.Type == "enabled" && t.Budget >= *r.MaxTokens && !kv.Produces {
		return nil, errors.New("thinking.budget_tokens must be less than max_tokens")
	}
	chat, err := r.chat()
	if err != nil {
		return nil, err
	}
	chat["max_tokens"] = *r.MaxTokens
	if len(r.Stops) > 0 {
		chat["stop"] = r.Stops
	}
	if r.Salt != "" && minor >= 27 { // an earlier one drops it
		chat["cache_salt"] = r.Salt
	}
	for key, v := range map[string]json.RawMessage{"temperature": r.Heat, "top_p": r.TopP, "kv_transfer_params": r.KV} {
		if len(v) > 0 {
			chat[key] = v
		}
	}
	if r.Stream {
		chat["stream"], chat["stream_options"] = true, map[string]bool{"include_usage": true, "continuous_usage_stats": true}
	}
	return json.Marshal(chat)
}

// Count is the chat whose tokens a request asks for.
func Count(body []byte) ([]byte, error) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	chat, err := r.chat()
	if err != nil {
		return nil, err
	}
	return json.Marshal(chat)
}

// chat has what makes the prompt.
func (r *request) chat() (map[string]any, error) {
	var turns []said
	if text := r.System.plain(); text != "" {
		turns = append(turns, said{"system", text})
	}
	for _, t := range r.Messages {
		text := t.Content.text
		for _, b := range t.Content.blocks {
			switch b.Type {
			case "text":
				text += b.Text
			case "tool_use":
				text += b.Name + string(b.Input)
			case "tool_result":
				turns = append(turns, said{"tool", b.Content.plain()})
			case "image", "thinking", "redacted_thinking":
			default:
				return nil, fmt.Errorf("messages: a block of type %q", b.Type)
			}
		}
		if text != "" {
			turns = append(turns, said{t.Role, text})
		}
	}
	if len(turns) == 0 {
		return nil, errors.New("messages: at least one is required")
	}
	chat := map[string]any{"model": r.Model, "messages": turns}
	if r.Tools != nil {
		tools := []any{}
		for _, t := range r.Tools {
			tools = append(tools,
				map[string]any{"type": "function", "function": map[string]any{"name": t.Name, "description": t.Description, "parameters": t.Schema}})
		}
		chat["tools"] = tools
	}
	switch c := r.Choice; {
	case c == nil:
	case c.Type == "any":
		chat["tool_choice"] = "required"
	case c.Type == "tool":
		chat["tool_choice"] = map[string]any{"type": "function", "function": map[string]string{"name": c.Name}}
	default:
		chat["tool_choice"] = c.Type
	}
	return chat, nil
}

// A Writer turns a chat's answer into a message's.
type Writer struct {
	Before32 bool // no stop string is told, and with it nothing that stands in its place, as "recomputed" does

	begun  bool
	open   string // type of the block that is open; empty: none is
	blocks int    // that are closed
	called bool
	args   []byte // of the last tool
	finish string
	stop   *string // the stop string that ended it
	broken bool

	unsigned bool // thinking is, as with SGLang
}

// Begin is nothing: a message begins with the first token.
func (w *Writer) Begin(string) []byte { return nil }

// chunk is one of a chat, or its whole answer.
type chunk struct {
	ID, Model string
	Usage     *usage
	Error     json.RawMessage
	Heat      json.RawMessage `json:"temperature"`
	TopP      json.RawMessage `json:"top_p"`
	KV        json.RawMessage `json:"kv_transfer_params"`
	Choices   []struct {
		Delta, Message words
		Finish         string          `json:"finish_reason"`
		Stop           json.RawMessage `json:"stop_reason"`
	}
}

type words struct {
	Content   string
	Reasoning string
	Older     string `json:"reasoning_content"`
	Calls     []struct {
		ID       string
		Function struct{ Name, Arguments string }
	} `json:"tool_calls"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// spent is a usage in a message's words: what was cached is no input.
func (u *usage) spent() map[string]int {
	if u == nil {
		return map[string]int{"input_tokens": 0, "output_tokens": 0}
	}
	told := map[string]int{"input_tokens": u.Prompt, "output_tokens": u.Completion}
	if u.Details != nil {
		told["input_tokens"], told["cache_read_input_tokens"] = max(0, u.Prompt-u.Details.Cached), u.Details.Cached
	}
	return told
}

// reason is how the answer ended, as a message says it; nil: it does not. A tool whose arguments a
// stop string cut short must not be called (_to_anthropic_stop_reason in
// entrypoints/anthropic/serving.py).
func (w *Writer) reason() (why, stop *string) {
	reason := "end_turn"
	switch {
	case w.finish == "length":
		reason = "max_tokens"
	case w.finish != "stop" && w.finish != "tool_calls":
		return nil, nil
	case w.Before32 && w.finish == "tool_calls", !w.Before32 && w.called && (w.stop == nil || json.Valid(w.args)):
		reason = "tool_use"
	case !w.Before32 && w.stop != nil:
		reason, stop = "stop_sequence", w.stop
	}
	return &reason, stop
}

func event(dst []byte, kind string, members map[string]any) []byte {
	members["type"] = kind
	data, _ := json.Marshal(members)
	return fmt.Appendf(dst, "event: %s\ndata: %s\n\n", kind, data)
}

// Events are those of a message for some of a chat, [DONE] included. Comments stay.
func (w *Writer) Events(chat []byte) (events []byte) {
	for block := range bytes.SplitSeq(chat, []byte("\n\n")) {
		data, ok := bytes.CutPrefix(block, []byte("data: "))
		switch {
		case len(block) == 0 || w.broken:
		case !ok:
			events = append(append(events, block...), "\n\n"...)
		case string(data) == "[DONE]":
			events = event(w.close(events), "message_stop", map[string]any{})
		default:
			events = w.chunk(events, data)
		}
	}
	return events
}

// chunk has vLLM's words for what it cannot read, an error included.
func (w *Writer) chunk(events, data []byte) []byte {
	var c chunk
	if json.Unmarshal(data, &c) != nil || c.Error != nil || c.Choices == nil {
		w.broken = true
		return event(events, "error",
			map[string]any{"error": map[string]string{"type": "internal_error", "message": "validation errors for ChatCompletionStreamResponse"}})
	}
	if !w.begun {
		w.begun = true
		return event(events, "message_start", map[string]any{"message": map[string]any{
			"id": c.ID, "type": "message", "role": "assistant", "content": []any{}, "model": c.Model, "stop_reason": nil, "stop_sequence": nil, "usage": c.Usage.spent(),
		}})
	}
	if len(c.Choices) == 0 {
		why, stop := w.reason()
		delta := map[string]any{"stop_reason": why, "stop_sequence": stop}
		if w.Before32 {
			delete(delta, "stop_sequence")
		}
		return event(w.close(events), "message_delta", map[string]any{"delta": delta, "usage": c.Usage.spent()})
	}
	one := &c.Choices[0]
	if one.Finish != "" {
		w.finish = one.Finish
		_ = json.Unmarshal(one.Stop, &w.stop) // an id of a token is none
	}
	return w.deltas(events, &one.Delta)
}

// deltas are the events for what a chunk adds.
func (w *Writer) deltas(events []byte, d *words) []byte {
	if thought := cmp.Or(d.Reasoning, d.Older); thought != "" {
		events = w.begin(events, "thinking", map[string]any{"type": "thinking", "thinking": ""})
		events = w.delta(events, map[string]any{"type": "thinking_delta", "thinking": thought})
	}
	if d.Content != "" {
		events = w.begin(events, "text", map[string]any{"type": "text", "text": ""})
		events = w.delta(events, map[string]any{"type": "text_delta", "text": d.Content})
	}
	for _, call := range d.Calls {
		if call.Function.Name != "" {
			w.called, w.args = true, nil
			events = w.begin(w.close(events), "tool_use",
				map[string]any{"type": "tool_use", "id": call.ID, "name": call.Function.Name, "input": map[string]any{}})
		}
		if call.Function.Arguments != "" {
			w.args = append(w.args, call.Function.Arguments...)
			events = w.delta(events, map[string]any{"type": "input_json_delta", "partial_json": call.Function.Arguments})
		}
	}
	return events
}

// begin opens a block, unless one of its type is open.
func (w *Writer) begin(events []byte, kind string, block map[string]any) []byte {
	if w.open == kind {
		return events
	}
	events = w.close(events)
	w.open = kind
	return event(events, "content_block_start", map[string]any{"index": w.blocks, "content_block": block})
}

func (w *Writer) delta(events []byte, delta map[string]any) []byte {
	return event(events, "content_block_delta", map[string]any{"index": w.blocks, "delta": delta})
}

// close closes the block that is open.
func (w *Writer) close(events []byte) []byte {
	switch {
	case w.open == "":
		return events
	case w.open == "thinking" && !w.unsigned:
		events = w.delta(events, map[string]any{"type": "signature_delta", "signature": "signed"})
	}
	events = event(events, "content_block_stop", map[string]any{"index": w.blocks})
	w.open = ""
	w.blocks++
	return events
}

// Whole is the message for a chat's whole answer, or why there is none; status is 0 for what is no
// answer, such as an error. vLLM reads the arguments of a tool that was demanded by name, and
// refuses a request whose arguments were cut short, when all is computed.
func (w *Writer) Whole(_ string, chat []byte) (message []byte, status int) {
	var c chunk
	if json.Unmarshal(chat, &c) != nil || len(c.Choices) == 0 {
		return nil, 0
	}
	one := &c.Choices[0]
	w.finish, w.called = one.Finish, len(one.Message.Calls) > 0
	_ = json.Unmarshal(one.Stop, &w.stop)
	w.args = []byte("{}") // where they are not, there is no answer
	var blocks []any
	if thought := cmp.Or(one.Message.Reasoning, one.Message.Older); thought != "" {
		blocks = append(blocks, map[string]any{"type": "thinking", "thinking": thought, "signature": "signed"})
	}
	if text := one.Message.Content; text != "" {
		blocks = append(blocks, map[string]any{"type": "text", "text": text})
	}
	for _, call := range one.Message.Calls {
		if !json.Valid([]byte(call.Function.Arguments)) {
			return []byte(`{"type":"error","error":{"type":"BadRequestError","message":"Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"}}`), http.StatusBadRequest
		}
		blocks = append(blocks,
			map[string]any{"type": "tool_use", "id": call.ID, "name": call.Function.Name, "input": json.RawMessage(call.Function.Arguments)})
	}
	if blocks == nil {
		blocks = append(blocks, map[string]any{"type": "text", "text": ""})
	}
	told := map[string]any{"id": c.ID, "type": "message", "role": "assistant", "content": blocks, "model": c.Model, "usage": c.Usage.spent()}
	why, stop := w.reason() // what is null is left out
	if why != nil {
		told["stop_reason"] = why
	}
	if stop != nil {
		told["stop_sequence"] = stop
	}
	if len(c.KV) > 0 && string(c.KV) != "null" {
		told["kv_transfer_params"] = c.KV
	}
	message, err := json.Marshal(told)
	if err != nil {
		return nil, 0
	}
	return message, http.StatusOK
}

// Error is an error of a chat in a message's words. What is not the chat's own stays as it is.
func (w *Writer) Error(status int, chat []byte) (body []byte, now int) {
	var said struct {
		Error struct{ Type, Message string }
	}
	if json.Unmarshal(chat, &said) != nil || said.Error.Message == "" {
		return chat, status
	}
	body, _ = json.Marshal(map[string]any{"type": "error", "error": map[string]string{"type": said.Error.Type, "message": said.Error.Message}})
	return body, status
}
