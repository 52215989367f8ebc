package messages

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"net/http"
)

// routing are the members by which the two legs of a message meet on engines of SGLang (0.5.23,
// PDRoutingFields in entrypoints/openai/protocol.py). A message has no rid.
var routing = []string{"bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"}

// ChatOfSGLang is Chat of an engine of SGLang. An older one does not know the members of routing.
func ChatOfSGLang(body []byte, knows bool) ([]byte, error) {
	text, err := Chat(body, math.MaxInt)
	if err != nil {
		return nil, err
	}
	var members, chat map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &chat); err != nil {
		return nil, err
	}
	delete(chat, "kv_transfer_params")
	for _, key := range routing {
		if v, ok := members[key]; ok && knows {
			chat[key] = v
		}
	}
	return json.Marshal(chat)
}

// SGLang turns a chat's answer into a message's as SGLang 0.5.23 does, in
// entrypoints/anthropic/serving.py.
type SGLang struct {
	Model string
	Taken bool // the request was understood, and what refuses it is the engine

	w    Writer
	made int // tokens
	said bool
}

// Begin is nothing: a message begins with the first token.
func (s *SGLang) Begin(string) []byte { return nil }

// Events are those of a message for some of a chat, [DONE] included.
func (s *SGLang) Events(chat []byte) (events []byte) {
	for block := range bytes.SplitSeq(chat, []byte("\n\n")) {
		data, ok := bytes.CutPrefix(block, []byte("data: "))
		switch {
		case len(block) == 0 || s.w.broken || !ok:
		case string(data) == "[DONE]":
			events = s.end(events)
		default:
			events = s.chunk(events, data)
		}
	}
	return events
}

// start has the event that begins a message, once.
func (s *SGLang) start(events []byte, prompt int) []byte {
	if s.w.begun {
		return events
	}
	s.w.begun, s.w.unsigned = true, true
	return event(events, "message_start", map[string]any{"message": map[string]any{
		"id": "msg_1", "type": "message", "role": "assistant", "content": []any{}, "model": s.Model, "usage": map[string]int{"input_tokens": prompt, "output_tokens": 0},
	}})
}

// fails are the events of a message that fails.
func (s *SGLang) fails(events []byte, kind, why string) []byte {
	events = s.w.close(s.start(events, 0))
	events = event(events, "error", map[string]any{"error": map[string]string{"type": kind, "message": why}})
	s.w.broken = true
	return event(events, "message_stop", map[string]any{})
}

func (s *SGLang) end(events []byte) []byte {
	if events = s.start(events, 0); !s.said && s.w.finish == "" {
		return s.fails(events, "api_error", "Backend produced no content")
	}
	events = event(s.w.close(events), "message_delta",
		map[string]any{"delta": map[string]string{"stop_reason": s.reason()}, "usage": map[string]int{"output_tokens": s.made}})
	return event(events, "message_stop", map[string]any{})
}

// reason has no words for an abort.
func (s *SGLang) reason() string {
	switch s.w.finish {
	case "length":
		return "max_tokens"
	case "tool_calls":
		return "tool_use"
	}
	return "end_turn"
}

func (s *SGLang) chunk(events, data []byte) []byte {
	var c chunk
	if err := json.Unmarshal(data, &c); err != nil || c.Error != nil {
		status, why := errorIn(data)
		return s.fails(events, kindOf(status), why)
	}
	if c.Usage != nil {
		s.made = c.Usage.Completion
	}
	if len(c.Choices) == 0 {
		return events
	}
	one := &c.Choices[0]
	d := &one.Delta
	s.w.finish = cmp.Or(one.Finish, s.w.finish)
	speaks := cmp.Or(d.Reasoning, d.Older, d.Content) != "" || len(d.Calls) > 0
	switch {
	case c.Usage != nil:
		events = s.start(events, c.Usage.Prompt)
	case speaks || one.Finish != "":
		events = s.start(events, 0)
	}
	s.said = s.said || speaks
	return s.w.deltas(events, d)
}

// Whole is the message for a chat's whole answer; status is 0 for what is no answer, such as an
// error.
func (s *SGLang) Whole(_ string, chat []byte) (message []byte, status int) {
	var c chunk
	if json.Unmarshal(chat, &c) != nil || len(c.Choices) == 0 {
		return nil, 0
	}
	one := &c.Choices[0]
	s.w.finish = one.Finish
	var blocks []any
	if thought := cmp.Or(one.Message.Reasoning, one.Message.Older); thought != "" {
		blocks = append(blocks, map[string]any{"type": "thinking", "thinking": thought})
	}
	if text := one.Message.Content; text != "" {
		blocks = append(blocks, map[string]any{"type": "text", "text": text})
	}
	for _, call := range one.Message.Calls {
		input := json.RawMessage(call.Function.Arguments)
		if !json.Valid(input) {
			input = json.RawMessage("{}")
		}
		blocks = append(blocks, map[string]any{"type": "tool_use", "id": call.ID, "name": call.Function.Name, "input": input})
	}
	if blocks == nil {
		blocks = append(blocks, map[string]any{"type": "text", "text": ""})
	}
	usage := map[string]int{"input_tokens": c.Usage.Prompt, "output_tokens": c.Usage.Completion}
	if d := c.Usage.Details; d != nil && d.Cached > 0 {
		usage["input_tokens"], usage["cache_read_input_tokens"] = max(0, c.Usage.Prompt-d.Cached), d.Cached
	}
	message, err := json.Marshal(map[string]any{
		"id": "msg_1", "type": "message", "role": "assistant", "content": blocks, "model": s.Model, "stop_reason": s.reason(), "usage": usage,
	})
	if err != nil {
		return nil, 0
	}
	return message, http.StatusOK
}

// Error tells nothing of what went wrong in the engine.
func (s *SGLang) Error(status int, chat []byte) (body []byte, now int) {
	_, why := errorIn(chat)
	kind := kindOf(status)
	if status >= http.StatusInternalServerError {
		why = "Internal server error"
	} else if s.Taken {
		var said struct{ Type string }
		_ = json.Unmarshal(chat, &said) // what it is not says nothing
		kind = cmp.Or(said.Type, kind)
	}
	body, _ = json.Marshal(map[string]any{"type": "error", "error": map[string]string{"type": kind, "message": why}})
	return body, status
}

// errorIn is the status and the text of a chat's error: SGLang has them under "error" in streams
// only.
func errorIn(chat []byte) (status int, why string) {
	type fields struct {
		Message string
		Code    int
	}
	var e struct {
		fields
		Error fields
	}
	_ = json.Unmarshal(chat, &e) // what it is not says nothing
	return cmp.Or(e.Error.Code, e.Code), cmp.Or(e.Error.Message, e.Message, "Request failed")
}

// kindOf is the type of an error with a status.
func kindOf(status int) string {
	switch status {
	case http.StatusBadRequest:
		return "invalid_request_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	return "api_error"
}
