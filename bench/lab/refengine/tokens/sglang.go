package tokens

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// SGLang turns a completion's answer into one of POST /generate, as SGLang 0.5.23 does:
// _handle_batch_output in managers/tokenizer_manager.py. Each event has all of the answer so far.
type SGLang struct {
	RID string

	text  string
	ids   []string
	probs []string
	wants bool   // logprobs
	end   string // why it ends, as JSON
}

// renamed are the members of sampling_params that a completion calls otherwise.
var renamed = map[string]string{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}

// known are the members of sampling_params. Another one is refused (SGLang 0.5.23,
// rust_extensions/_server).
var known = map[string]bool{
	"max_new_tokens": true, "stop": true, "stop_token_ids": true, "stop_regex": true, "temperature": true, "top_p": true, "top_k": true, "min_p": true,
	"frequency_penalty": true, "presence_penalty": true, "repetition_penalty": true, "min_new_tokens": true, "n": true, "beam_width": true,
	"json_schema": true, "regex": true, "ebnf": true, "structural_tag": true, "ignore_eos": true, "skip_special_tokens": true,
	"spaces_between_special_tokens": true, "no_stop_trim": true, "stream_interval": true, "logit_bias": true, "sampling_seed": true,
	"custom_params": true, "watermark": true, "choice": true,
}

// Completion is the completion that a request means.
func (s *SGLang) Completion(body []byte) ([]byte, error) {
	var members map[string]json.RawMessage
	var q struct {
		Text   json.RawMessage            `json:"text"`
		IDs    json.RawMessage            `json:"input_ids"`
		Params map[string]json.RawMessage `json:"sampling_params"`
		Stream bool                       `json:"stream"`
		Probs  bool                       `json:"return_logprob"`
		Top    int                        `json:"top_logprobs_num"`
		RID    string                     `json:"rid"`
	}
	if err := errors.Join(json.Unmarshal(body, &q), json.Unmarshal(body, &members)); err != nil {
		return nil, err
	}
	s.RID, s.wants = q.RID, q.Probs
	out := map[string]json.RawMessage{"prompt": q.Text, "return_token_ids": json.RawMessage("true"), "max_tokens": json.RawMessage("128")}
	switch is := func(v json.RawMessage) bool { return len(v) > 0 && string(v) != "null" }; {
	case !is(q.Text) && !is(q.IDs):
		return nil, says("Either text, input_ids or input_embeds should be provided.")
	case string(q.IDs) == "[]":
		return nil, says("input_ids cannot be empty.")
	case !is(q.Text):
		out["prompt"] = q.IDs
	}
	for key, v := range q.Params {
		if !known[key] {
			return nil, fmt.Errorf("sampling_params: unknown field `%s`", key)
		}
		if name := renamed[key]; name != "" {
			key = name
		}
		out[key] = v
	}
	for _, key := range []string{"stream", "cache_salt", "bootstrap_host", "bootstrap_port", "bootstrap_room", "rid", "routed_dp_rank",
		"lora_path",
		"disagg_prefill_dp_rank"} {
		if v, ok := members[key]; ok {
			out[key] = v
		}
	}
	if q.Stream {
		out["stream_options"] = json.RawMessage(`{"include_usage":true,"continuous_usage_stats":true}`)
	}
	if q.Probs {
		out["logprobs"] = json.RawMessage(fmt.Sprint(q.Top))
	}
	return json.Marshal(out)
}

// Begin is nothing: a stream begins with the first token.
func (s *SGLang) Begin(id string) []byte { s.named(id); return nil }

func (s *SGLang) named(id string) {
	if s.RID == "" {
		s.RID = id
	}
}

// counts are those of a completion's usage.
type counts struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// Events are those of /generate for some of a completion. The last one waits for the counts.
func (s *SGLang) Events(of []byte) (events []byte) {
	pieces(of, func(event []byte, c *completion) {
		if c == nil {
			if s.end != "" && string(event) == "data: [DONE]" {
				events = s.event(events, counts{})
			}
			events = append(append(events, event...), "\n\n"...)
			return
		}
		var u counts
		_ = json.Unmarshal(c.Usage, &u) // null is none
		if len(c.Choices) > 0 {
			if s.add(&c.Choices[0]); s.end != "" {
				return
			}
		}
		events = s.event(events, u)
		s.end = ""
	})
	return events
}

func (s *SGLang) event(dst []byte, u counts) []byte {
	return append(s.append(append(dst, "data: "...), u), "\n\n"...)
}

// add takes in a piece of the answer.
func (s *SGLang) add(c *choice) {
	var ids []json.RawMessage
	_ = json.Unmarshal(c.IDs, &ids) // null is none
	s.text += c.Text
	for _, id := range ids {
		s.ids = append(s.ids, string(id))
	}
	if c.Logprobs != nil {
		for i, v := range c.Logprobs.Values {
			s.probs = append(s.probs, fmt.Sprintf("[%s,%s,null]", v, ids[i]))
		}
	}
	if c.Finish == nil {
		return
	}
	switch {
	case *c.Finish == "length":
		s.end = fmt.Sprintf(`{"type":"length","length":%d}`, len(s.ids))
	case *c.Finish == "abort" && len(s.ids) == 0: // _handle_abort_req in managers/tokenizer_manager.py
		s.end = `{"type":"abort","message":"Abort in waiting queue"}`
	case *c.Finish == "abort": // FINISH_ABORT in managers/schedule_batch.py
		s.end = `{"type":"abort","message":"Aborted","status_code":null,"err_type":null}`
	default:
		s.end = fmt.Sprintf(`{"type":%q,"matched":2}`, *c.Finish)
	}
}

func (s *SGLang) append(dst []byte, u counts) []byte {
	text, _ := json.Marshal(s.text)
	end := s.end
	if end == "" {
		end = "null"
	}
	dst = fmt.Appendf(dst, `{"text":%s,"output_ids":[%s],"meta_info":{"id":%q,"finish_reason":%s,"prompt_tokens":%d,"weight_version":"default",`+
		`"num_retractions":0`, text, strings.Join(s.ids, ","), s.RID, end, u.Prompt)
	if s.wants {
		dst = fmt.Appendf(dst, `,"input_token_logprobs":[],"output_token_logprobs":[%s],"output_token_logprobs_length":%d`,
			strings.Join(s.probs, ","), len(s.probs))
	}
	return fmt.Appendf(dst, `,"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d}}`, len(s.ids), u.Details.Cached)
}

// Whole is the answer in one piece.
func (s *SGLang) Whole(id string, of []byte) (whole []byte, status int) {
	var c completion
	if json.Unmarshal(of, &c) != nil || len(c.Choices) == 0 {
		return nil, 0
	}
	var u counts
	_ = json.Unmarshal(c.Usage, &u)
	s.named(id)
	s.add(&c.Choices[0])
	return s.append(nil, u), 200
}

// Error is as for a completion.
func (s *SGLang) Error(status int, of []byte) (body []byte, now int) { return of, status }
