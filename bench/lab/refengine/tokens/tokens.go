// Package tokens has the words of the endpoints at which engines speak token ids. What they are
// like, as read in vLLM 0.32.0 and 0.33.0 (the lines are of 0.32.0, below entrypoints/scale_out)
// and in SGLang 0.5.23 (below srt):
//
//	vLLM, POST /inference/v1/generate
//	request            token_ids and sampling_params are required; GenerateRequest, token_in_token_out/protocol.py:162
//	its id             generate-tokens- and the header X-Request-Id, or else request_id; token_in_token_out/serving.py:195
//	the prefill's      kv_transfer_params go to extra_args and come back beside choices; serving.py:311
//	max_tokens         the rest of the context if it is absent, no limit if it is null; serving.py:324
//	refused            n above max_num_seqs, scores in a stream, text without a tokenizer; serving.py:203
//	without the flag   403 PermissionDeniedError for each path; factories.py:84
//	event              request_id, usage (null), output_mode, choices; the last one usage alone, then [DONE]; serving.py:539
//	at the end         routed_experts and weight_versions, of the whole output; protocol.py:416
//	output_mode        tokens or text; with 0.33 also derender, which is not streamed
//	abort              POST /inference/v1/abort_requests {"request_ids": []}, 200 before it is done; 400 {"detail"} for a wrong body; the
//	                   answer ends with finish_reason abort and what there is of it; token_in_token_out/api_router.py:79
//
//	SGLang, POST /generate
//	request            text or input_ids, each also as a list; unknown members of sampling_params are refused; managers/io_struct.py
//	event              text, output_ids and meta_info, all so far, and an index if the request has a list or n; then [DONE];
//	                   managers/tokenizer_manager.py:2480, :2211
//	max_new_tokens     128 if it is absent, no limit if it is null; sampling/sampling_params.py
//	both legs          as a completion's: bootstrap_host, bootstrap_port, bootstrap_room, rid, and the ranks
//	errors             {"error": {"message", "type", "code"}}, in a stream as an event; entrypoints/http_server.py:957
//	abort              POST /abort_request {"rid", "abort_all"}, 200 at once; the end is finish_reason {"type": "abort"}; http_server.py:1721
package tokens

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Disabled is what an engine says that was started without --enable-scale-out and without
// --tokens-only (register_scale_out_api_routers in entrypoints/scale_out/factories.py). The status
// is 403.
const Disabled = `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.","type":"PermissionDeniedError","param":null,"code":403}}`

// says is an engine's own text of an error.
type says string

func (s says) Error() string { return string(s) }

// Writer turns a completion's answer into one of token ids.
type Writer struct {
	Minor int // the x of vLLM 0.x

	mode   string
	ids    bool // the client asks for the ids of its prompt
	usage  bool
	every  bool // also in each event
	id     string
	stream bool
	made   int // tokens so far
}

// request is what of a request is not passed on as it came.
type request struct {
	TokenIDs []int                      `json:"token_ids"`
	Params   map[string]json.RawMessage `json:"sampling_params"`
	Mode     *string                    `json:"output_mode"`
	Stream   *bool                      `json:"stream"`
	IDs      *bool                      `json:"return_token_ids"`
	Options  struct {
		Usage bool `json:"include_usage"`
		Every bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
}

// Completion is the completion that a request means, on an engine whose context has so many tokens.
func (w *Writer) Completion(body []byte, context int) ([]byte, error) {
	var q request
	if err := json.Unmarshal(body, &q); err != nil {
		return nil, err
	}
	var members, out = map[string]json.RawMessage{}, map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, err
	}
	switch {
	case len(q.TokenIDs) == 0:
		return nil, says("token_ids: List should have at least 1 item after validation, not 0")
	case q.Params == nil:
		return nil, says("sampling_params: Field required")
	}
	for _, id := range q.TokenIDs {
		if id < 0 {
			return nil, says("token_ids: Value error, token_ids must not contain negative values")
		}
	}
	w.mode = "tokens"
	if q.Mode != nil {
		w.mode = *q.Mode
	}
	is := func(p *bool) bool { return p != nil && *p }
	w.stream, w.ids, w.usage = is(q.Stream), is(q.IDs), q.Options.Usage
	w.every = w.usage && q.Options.Every
	switch {
	case w.mode != "tokens" && w.mode != "text" && (w.mode != "derender" || w.Minor < 33):
		return nil, says("output_mode: Input should be 'tokens' or 'text'")
	case w.mode == "derender" && w.stream:
		return nil, says("output_mode='derender' does not support stream=true.")
	case w.mode != "tokens" && string(q.Params["detokenize"]) == "false":
		return nil, says(fmt.Sprintf("Value error, output_mode='%s' requires sampling_params.detokenize to be true", w.mode))
	case w.stream && q.Params["prompt_logprob_token_ids"] != nil:
		return nil, says("prompt_logprob_token_ids are not available when stream=true.")
	}
	for _, key := range []string{"model", "stream", "stream_options", "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params"} {
		if v, ok := members[key]; ok {
			out[key] = v
		}
	}
	for key, v := range q.Params {
		if key != "prompt_logprobs" || !w.stream { // a stream has no place for them
			out[key] = v
		}
	}
	if out["max_tokens"] == nil {
		out["max_tokens"] = json.RawMessage(fmt.Sprint(max(1, context-len(q.TokenIDs))))
	}
	out["prompt"], out["return_token_ids"] = members["token_ids"], json.RawMessage("true")
	return json.Marshal(out)
}

// Begin is nothing: a stream begins with the first token.
func (w *Writer) Begin(id string) []byte { w.id = id; return nil }

// choice is one of a completion.
type choice struct {
	Text     string          `json:"text"`
	Finish   *string         `json:"finish_reason"`
	Stop     json.RawMessage `json:"stop_reason"`
	IDs      json.RawMessage `json:"token_ids"`
	Prompt   json.RawMessage `json:"prompt_token_ids"`
	Rows     json.RawMessage `json:"prompt_logprobs"`
	Logprobs *struct {
		Tokens []string          `json:"tokens"`
		Values []json.RawMessage `json:"token_logprobs"`
		Top    []json.RawMessage `json:"top_logprobs"`
	} `json:"logprobs"`
}

type completion struct {
	Created int64           `json:"created"`
	Model   string          `json:"model"`
	Choices []choice        `json:"choices"`
	Usage   json.RawMessage `json:"usage"`
	KV      json.RawMessage `json:"kv_transfer_params"`
}

// Events are those of an answer of token ids for some of a completion.
func (w *Writer) Events(of []byte) (events []byte) {
	pieces(of, func(event []byte, c *completion) {
		if c == nil {
			events = append(append(events, event...), "\n\n"...)
			return
		}
		events = w.event(append(events, "data: "...), c)
	})
	return events
}

// pieces gives take each event of some of a completion, and the piece of the answer that it has;
// nil: it has none.
func pieces(of []byte, take func(event []byte, c *completion)) {
	for event := range bytes.SplitSeq(of, []byte("\n\n")) {
		if len(event) == 0 {
			continue
		}
		c := new(completion)
		data, ok := bytes.CutPrefix(event, []byte("data: "))
		if !ok || string(data) == "[DONE]" || bytes.HasPrefix(data, []byte(`{"error"`)) || json.Unmarshal(data, c) != nil {
			c = nil
		}
		take(event, c)
	}
}

func (w *Writer) event(dst []byte, c *completion) []byte {
	dst = fmt.Appendf(dst, `{"request_id":%q`, w.name())
	if len(c.Choices) == 0 {
		return fmt.Appendf(dst, ",\"usage\":%s,\"output_mode\":%q,\"choices\":[]}\n\n", c.Usage, w.mode)
	}
	usage := json.RawMessage("null")
	if w.every {
		usage = c.Usage
	}
	dst = fmt.Appendf(dst, `,"usage":%s`, usage)
	if p := c.Choices[0].Prompt; w.ids && len(p) > 0 && p[0] == '[' {
		dst = fmt.Appendf(dst, `,"prompt_token_ids":%s`, p)
	}
	return append(w.choices(fmt.Appendf(dst, `,"output_mode":%q,"choices":`, w.mode), c.Choices), "}\n\n"...)
}

func (w *Writer) choices(dst []byte, list []choice) []byte {
	dst = append(dst, '[')
	for i := range list {
		c := &list[i]
		finish := []byte("null")
		if c.Finish != nil {
			finish, _ = json.Marshal(c.Finish)
		}
		var ids []int
		_ = json.Unmarshal(c.IDs, &ids) // they are numbers, and null is none
		w.made += len(ids)
		spans := "null"
		if c.Finish != nil { // only the last piece has them, and they are of the whole answer
			spans = fmt.Sprintf(`[{"version":"default","start":0,"end":%d}]`, w.made)
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = fmt.Appendf(dst, `{"index":%d,"finish_reason":%s,"stop_reason":%s,"token_ids":%s,"routed_experts":null,"sampling_mask":null,"weight_versions":%s`,
			i, finish, orNull(c.Stop), orNull(c.IDs), spans)
		switch text, _ := json.Marshal(c.Text); w.mode {
		case "text":
			dst = fmt.Appendf(dst, `,"text":%s`, text)
		case "derender":
			dst = fmt.Appendf(dst, `,"message":{"role":"assistant","content":%s}`, text)
		}
		dst = append(w.logprobs(append(dst, `,"logprobs":`...), c, ids), '}')
	}
	return append(dst, ']')
}

func (w *Writer) logprobs(dst []byte, c *choice, ids []int) []byte {
	if c.Logprobs == nil {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		if w.mode == "tokens" {
			one := fmt.Sprintf(`"token_id":%d,"logprob":%s,"rank":1`, id, c.Logprobs.Values[i])
			dst = fmt.Appendf(dst, `{%s,"top_logprobs":[{%s}]}`, one, one)
			continue
		}
		token, _ := json.Marshal(c.Logprobs.Tokens[i])
		dst = fmt.Appendf(dst, `{"token":%s,"logprob":%s,"bytes":null,"top_logprobs":[]}`, token, c.Logprobs.Values[i])
	}
	return append(dst, "]}"...)
}

func orNull(v json.RawMessage) json.RawMessage {
	if len(v) == 0 {
		return json.RawMessage("null")
	}
	return v
}

func (w *Writer) name() string { return "generate-tokens-" + w.id }

// Whole is the answer in one piece.
func (w *Writer) Whole(id string, of []byte) (whole []byte, status int) {
	var c completion
	if json.Unmarshal(of, &c) != nil || len(c.Choices) == 0 {
		return nil, 0
	}
	w.id = id
	prompt := json.RawMessage("null")
	if w.ids {
		prompt = c.Choices[0].Prompt
	}
	whole = fmt.Appendf(nil, `{"request_id":%q,"model":%q,"created":%d,"usage":%s,"prompt_logprobs":%s,"prompt_token_id_logprobs":null,`+
		`"prompt_token_ids":%s,"mm_placeholders":null,"metrics":null,"kv_transfer_params":%s,"ec_transfer_params":null,"output_mode":%q,"choices":`,
		w.name(), c.Model, c.Created, orNull(c.Usage), orNull(c.Choices[0].Rows), orNull(prompt), orNull(c.KV), w.mode)
	return append(w.choices(whole, c.Choices), '}'), 200
}

// Error is as for a completion.
func (w *Writer) Error(status int, of []byte) (body []byte, now int) { return of, status }

// AbortPath is where requests are ended.
const AbortPath = "/inference/v1/abort_requests"

// ReadAbort reads which requests are to end. says is why the body is refused: abort_requests in
// api_router.py.
func ReadAbort(body []byte) (ids []string, says string) {
	var q struct {
		IDs []string `json:"request_ids"`
	}
	switch err := json.Unmarshal(body, &q); {
	case err != nil:
		return nil, "JSON decode error: " + err.Error()
	case q.IDs == nil:
		return nil, "Missing 'request_ids' in request body"
	}
	return q.IDs, ""
}
