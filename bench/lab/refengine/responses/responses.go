// Package responses has a reference engine speak /v1/responses, in the shapes of vLLM: a request
// becomes the chat that it means, and the chat's answer the response.
package responses

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
)

type object = map[string]json.RawMessage

// Chat is the chat that a request means.
func Chat(body []byte) (chat []byte, err error) {
	var m object
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	var messages []any
	if said, ok := m["instructions"]; ok && string(said) != "null" {
		messages = append(messages, map[string]any{"role": "system", "content": said})
	}
	input, err := inputs(m["input"])
	if err != nil {
		return nil, err
	}
	if m["messages"], err = json.Marshal(append(messages, input...)); err != nil {
		return nil, err
	}
	if raw, ok := m["max_output_tokens"]; ok {
		m["max_tokens"] = raw
	}
	if err := tools(m); err != nil {
		return nil, err
	}
	if string(m["stream"]) == "true" {
		m["stream_options"] = json.RawMessage(`{"include_usage":true}`)
	}
	for _, key := range []string{"input", "instructions", "max_output_tokens", "store", "reasoning", "text", "include", "parallel_tool_calls",
		"top_logprobs"} {
		delete(m, key)
	}
	return json.Marshal(m)
}

// inputs are the messages of an input.
func inputs(raw json.RawMessage) (messages []any, err error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return []any{map[string]any{"role": "user", "content": text}}, nil
	}
	var items []struct {
		Type, Role, Output, Name, Arguments string
		CallID                              string `json:"call_id"`
		Content                             json.RawMessage
	}
	if err := json.Unmarshal(raw, &items); err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	for _, item := range items {
		switch item.Type {
		case "function_call_output":
			messages = append(messages, map[string]any{"role": "tool", "content": item.Output})
		case "function_call":
			messages = append(messages, map[string]any{"role": "assistant", "content": item.Name + item.Arguments})
		default:
			var parts []struct{ Text string }
			if json.Unmarshal(item.Content, &parts) == nil {
				text := ""
				for _, part := range parts {
					text += part.Text
				}
				messages = append(messages, map[string]any{"role": item.Role, "content": text})
				continue
			}
			messages = append(messages, map[string]any{"role": item.Role, "content": item.Content})
		}
	}
	if len(messages) == 0 {
		return nil, errors.New("input: a text or a list of items is required")
	}
	return messages, nil
}

// tools turns the tools of a response into those of a chat.
func tools(m object) error {
	if raw, ok := m["tools"]; ok {
		var list []object
		if err := json.Unmarshal(raw, &list); err != nil {
			return fmt.Errorf("tools: %w", err)
		}
		chat := []any{}
		for _, tool := range list {
			function := maps.Clone(tool)
			delete(function, "type")
			delete(function, "strict")
			chat = append(chat, map[string]any{"type": "function", "function": function})
		}
		m["tools"], _ = json.Marshal(chat)
	}
	if raw, ok := m["tool_choice"]; ok && len(raw) > 0 && raw[0] == '{' {
		var choice struct{ Name string }
		if err := json.Unmarshal(raw, &choice); err != nil {
			return fmt.Errorf("tool_choice: %w", err)
		}
		m["tool_choice"], _ = json.Marshal(map[string]any{"type": "function", "function": map[string]string{"name": choice.Name}})
	}
	return nil
}

// A Writer turns a chat's answer into a response's.
type Writer struct {
	Model string
	// vLLM from 0.33 on ends an answer that its limit ended with response.incomplete, earlier ones
	// with response.completed
	TellsIncomplete bool

	SGLang bool // the answer is as that of SGLang 0.5.23, in entrypoints/openai/serving_responses.py
	holds  bool // a text back until a tool is called, or the answer ends, as SGLang does where there are tools

	broken   bool
	named    string // what the request calls the response; empty: the engine does
	id       string
	sequence int
	text     string
	call     string // name of the tool that is called
	args     string
	opened   bool
	finish   string
	usage    json.RawMessage
}

// event appends one event.
func (w *Writer) event(dst []byte, kind string, members map[string]any) []byte {
	members["type"], members["sequence_number"] = kind, w.sequence
	w.sequence++
	data, _ := json.Marshal(members)
	return fmt.Appendf(dst, "event: %s\ndata: %s\n\n", kind, data)
}

// Begin is what an engine sends before it has computed anything.
func (w *Writer) Begin(id string) (events []byte) {
	w.id = cmp.Or(w.named, "resp_"+id)
	response := w.response("in_progress", nil)
	events = w.event(nil, "response.created", map[string]any{"response": response})
	return w.event(events, "response.in_progress", map[string]any{"response": response})
}

func (w *Writer) response(status string, kv json.RawMessage) map[string]any {
	r := map[string]any{
		"id": w.id, "object": "response", "created_at": 1, "model": w.Model, "status": status, "output": []any{}, "parallel_tool_calls": true, "tools": []any{}, "tool_choice": "auto",
		"kv_transfer_params": kv, "ec_transfer_params": nil, "usage": nil, "incomplete_details": nil, "error": nil,
	}
	if w.SGLang {
		delete(r, "kv_transfer_params")
		delete(r, "ec_transfer_params")
	}
	if status == "incomplete" && !w.SGLang {
		r["incomplete_details"] = map[string]string{"reason": "max_output_tokens"}
	}
	if status != "in_progress" {
		r["output"], r["usage"] = []any{w.item(w.itemStatus())}, usageOf(w.usage)
	}
	return r
}

// itemStatus is that of an item that is over.
func (w *Writer) itemStatus() string {
	if w.TellsIncomplete && w.finish == "length" && !w.SGLang {
		return "incomplete"
	}
	return "completed"
}

// item is what the answer is.
func (w *Writer) item(status string) map[string]any {
	if w.call != "" {
		return map[string]any{"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": w.call, "arguments": w.args, "status": status}
	}
	content := []any{map[string]any{"type": "output_text", "text": w.text, "annotations": []any{}, "logprobs": nil}}
	return map[string]any{"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": content}
}

// usageOf is the usage of a chat in a response's words.
func usageOf(chat json.RawMessage) any {
	var u struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if json.Unmarshal(chat, &u) != nil {
		return nil
	}
	return map[string]any{
		"input_tokens": u.Prompt, "output_tokens": u.Completion, "total_tokens": u.Prompt + u.Completion,
		"input_tokens_details":  map[string]any{"cached_tokens": u.Details.Cached, "cached_tokens_per_turn": []int{u.Details.Cached}},
		"output_tokens_details": map[string]int{"reasoning_tokens": 0},
	}
}

type choice struct {
	Delta, Message struct {
		Content   string
		ToolCalls []struct {
			Function struct{ Name, Arguments string }
		} `json:"tool_calls"`
	}
	Finish string `json:"finish_reason"`
}

// Events are those of a response for some of a chat, [DONE] included. What it cannot read it
// returns as it is.
func (w *Writer) Events(chat []byte) (events []byte) {
	for block := range bytes.SplitSeq(chat, []byte("\n\n")) {
		data, ok := bytes.CutPrefix(block, []byte("data: "))
		switch {
		case len(block) == 0 || w.broken:
		case !ok:
			events = append(append(events, block...), "\n\n"...)
		case string(data) == "[DONE]":
			events = append(events, w.end()...)
		default:
			events = w.chunk(events, data)
		}
	}
	return events
}

func (w *Writer) chunk(events, data []byte) []byte {
	var chunk struct {
		Choices []choice
		Usage   json.RawMessage
		Error   json.RawMessage
	}
	err := json.Unmarshal(data, &chunk)
	if w.SGLang && chunk.Error != nil {
		return w.fails(events, messageOf(data))
	}
	if err != nil || chunk.Error != nil {
		return append(append(append(events, "data: "...), data...), "\n\n"...)
	}
	if len(chunk.Usage) > 0 && string(chunk.Usage) != "null" {
		w.usage = chunk.Usage
	}
	for _, c := range chunk.Choices {
		for _, call := range c.Delta.ToolCalls {
			if call.Function.Name != "" {
				w.call = call.Function.Name
			}
			events = w.open(events)
			if w.args += call.Function.Arguments; call.Function.Arguments != "" {
				events = w.event(events, "response.function_call_arguments.delta",
					map[string]any{"item_id": "fc_1", "output_index": 0, "delta": call.Function.Arguments})
			}
		}
		if c.Delta.Content != "" {
			events = w.open(events)
			w.text += c.Delta.Content
			if w.holds {
				continue
			}
			events = w.event(events, "response.output_text.delta",
				map[string]any{"item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": c.Delta.Content, "logprobs": []any{}})
		}
		if c.Finish != "" {
			w.finish = c.Finish
		}
	}
	return events
}

// open begins the item of the answer.
func (w *Writer) open(events []byte) []byte {
	if w.opened || w.holds && w.call == "" && w.finish == "" {
		return events
	}
	w.opened = true
	events = w.event(events, "response.output_item.added", map[string]any{"output_index": 0, "item": w.item("in_progress")})
	if w.call != "" {
		return events
	}
	return w.event(events, "response.content_part.added", map[string]any{"item_id": "msg_1", "output_index": 0, "content_index": 0,
		"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}})
}

// end are the last events; a chat without a finish_reason has none.
func (w *Writer) end() []byte {
	switch {
	case w.SGLang && (w.finish == "error" || w.finish == "abort"):
		return w.fails(nil, "Generation aborted")
	case w.finish == "" || w.finish == "error" || w.finish == "abort": // vLLM ends such a stream without a word
		return nil
	}
	events := w.open(nil)
	if w.holds && w.call == "" {
		events = w.event(events, "response.output_text.delta",
			map[string]any{"item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": w.text, "logprobs": []any{}})
	}
	events = w.event(events, "response.output_item.done", map[string]any{"output_index": 0, "item": w.item(w.itemStatus())})
	last := "response.completed"
	if w.TellsIncomplete && w.status() == "incomplete" {
		last = "response.incomplete"
	}
	return w.event(events, last, map[string]any{"response": w.response(w.status(), nil)})
}

func (w *Writer) status() string {
	switch w.finish {
	case "length":
		return "incomplete"
	case "":
		return "in_progress"
	case "error", "abort":
		return "failed"
	}
	return "completed"
}

// Whole is the response for a chat's whole answer; status is 0 for what is none, such as an error.
func (w *Writer) Whole(id string, chat []byte) (response []byte, status int) {
	var whole struct {
		Choices []choice
		Usage   json.RawMessage
		KV      json.RawMessage `json:"kv_transfer_params"`
	}
	if json.Unmarshal(chat, &whole) != nil || len(whole.Choices) == 0 {
		return nil, 0
	}
	c := whole.Choices[0]
	w.id, w.text, w.finish, w.usage = cmp.Or(w.named, "resp_"+id), c.Message.Content, c.Finish, whole.Usage
	for _, call := range c.Message.ToolCalls {
		w.call, w.args = call.Function.Name, call.Function.Arguments
	}
	told := w.response(w.status(), whole.KV)
	if w.SGLang && w.status() == "failed" {
		told["error"] = map[string]string{"code": "server_error", "message": "Generation aborted"}
	}
	response, err := json.Marshal(told)
	if err != nil {
		return nil, 0
	}
	return response, http.StatusOK
}

// Error is an error as a chat has it. SGLang answers 400 whatever has failed, and its text then
// begins with the status.
func (w *Writer) Error(status int, chat []byte) (body []byte, now int) {
	if !w.SGLang {
		return chat, status
	}
	why := messageOf(chat)
	if status != http.StatusBadRequest {
		why = fmt.Sprintf("%d: %s", status, why)
	}
	body, _ = json.Marshal(map[string]any{"error": map[string]any{"message": why, "type": "invalid_request_error", "param": nil,
		"code": http.StatusBadRequest}})
	return body, http.StatusBadRequest
}

// fails ends a stream.
func (w *Writer) fails(events []byte, why string) []byte {
	w.broken = true
	response := w.response("in_progress", nil)
	response["status"], response["error"] = "failed", map[string]string{"code": "server_error", "message": why}
	return w.event(events, "response.failed", map[string]any{"response": response})
}

// messageOf is the text of an error.
func messageOf(chat []byte) string {
	var said struct {
		Message string
		Error   struct{ Message string }
	}
	_ = json.Unmarshal(chat, &said) // what it is not has no text
	return cmp.Or(said.Error.Message, said.Message)
}

// ChatOfSGLang is Chat of an engine of SGLang, whose request_id is its rid. An older engine does
// not know the room. It keeps two tokens of the answer back.
func (w *Writer) ChatOfSGLang(body []byte, knows bool) ([]byte, error) {
	text, err := Chat(body)
	if err != nil {
		return nil, err
	}
	var chat object
	if err := json.Unmarshal(text, &chat); err != nil {
		return nil, err
	}
	delete(chat, "rid")
	delete(chat, "model") // a response is the base model's, whatever it names (create_responses in serving_responses.py)
	if id, ok := chat["request_id"]; ok {
		chat["rid"] = id
		_ = json.Unmarshal(id, &w.named) // what is no text, generate refuses
	}
	var most int
	if json.Unmarshal(chat["max_tokens"], &most) == nil {
		chat["max_tokens"] = strconv.AppendInt(nil, int64(most-2), 10)
	}
	if !knows {
		delete(chat, "bootstrap_room")
	}
	w.holds = len(chat["tools"]) > len("[]") && string(chat["tool_choice"]) != `"none"`
	return json.Marshal(chat)
}
