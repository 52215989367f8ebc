package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// The answers of POST /inference/v1/generate resemble those of completions, with other member names
// (vLLM 0.32.0 and 0.33.0, entrypoints/scale_out/token_in_token_out/protocol.py). Each choice has
// the ids of its tokens. It has text only if the member output_mode is text.

// ByTokens makes the assembler build an answer of /inference/v1/generate. model and created are
// arguments because the events of this endpoint do not have them.
func (a *Assembler) ByTokens(model string, created int64) *Assembler {
	a.isTokensForm = true
	a.topMembers.appendMember([]byte("model"), rawjson.AppendString(nil, model))
	a.topMembers.appendMember([]byte("created"), strconv.AppendInt(nil, created, 10))
	return a
}

// The members of an answer in one piece, in the order in which vLLM sends them. Events lack some of
// them.
var (
	tokensFirstKeys = []string{"request_id", "model", "created"}
	tokensLastKeys  = []string{
		"prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params",
		"ec_transfer_params", "output_mode",
	}
	tokensChoiceKeys = []string{"stop_reason", "token_ids", "routed_experts", "sampling_mask", "weight_versions"}
)

// appendNamedOrNull appends the members with these names; a member that is missing becomes null.
func (fs fields) appendNamedOrNull(dst []byte, names []string) []byte {
	for _, name := range names {
		dst = appendKey(dst, name)
		if f := fs.find([]byte(name)); f != nil {
			dst = append(dst, f.val...)
		} else {
			dst = append(dst, "null"...)
		}
	}
	return dst
}

// appendExcept appends all members but those that the caller has appended already; each list of
// written has names of such members. The others stay in the order in which they came.
func (fs fields) appendExcept(dst []byte, written ...[]string) []byte {
	for _, f := range fs {
		if !slices.ContainsFunc(written, func(names []string) bool { return slices.Contains(names, f.key) }) {
			dst = append(appendKey(dst, f.key), f.val...)
		}
	}
	return dst
}

// tokensJSON appends an answer of /inference/v1/generate in one piece. Members that no event had
// become null, as in vLLM's own answers.
func (a *Assembler) tokensJSON(dst []byte) []byte {
	dst = a.topMembers.appendNamedOrNull(append(dst, '{'), tokensFirstKeys)
	dst = appendKey(dst, "usage")
	if a.usage == nil {
		dst = append(dst, "null"...)
	}
	dst = append(dst, a.usage...) // nothing if it is nil
	dst = a.topMembers.appendNamedOrNull(dst, tokensLastKeys)
	dst = a.topMembers.appendExcept(dst, tokensFirstKeys, tokensLastKeys)
	dst = append(appendKey(dst, "choices"), '[')
	for i, c := range a.choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.tokensJSON(dst)
	}
	return append(dst, "]}"...)
}

// tokensJSON appends the choice as vLLM writes it in an answer of /inference/v1/generate in one
// piece.
func (c *choice) tokensJSON(dst []byte) []byte {
	dst = strconv.AppendInt(append(dst, `{"index":`...), int64(c.index), 10)
	dst = appendKey(dst, "finish_reason")
	if c.finishReason == nil {
		dst = append(dst, "null"...)
	}
	dst = append(dst, c.finishReason...)                          // nothing if it is nil
	dst = c.otherMembers.appendNamedOrNull(dst, tokensChoiceKeys) // the members that vLLM always sends, in its order
	dst = c.otherMembers.appendExcept(dst, tokensChoiceKeys)      // all others, in the order in which they came
	if c.text != nil {                                            // nil: the output_mode is not text
		dst = append(appendKey(dst, "text"), c.text...)
	}
	dst = appendKey(dst, "logprobs")
	if len(c.logprobs) == 0 {
		return append(dst, "null}"...)
	}
	return append(c.logprobs.appendMembers(append(dst, '{')), "}}"...)
}

// TokensUsage appends the event that has no choices and carries the usage of a stream of
// /inference/v1/generate. mode is the stream's output_mode, as a JSON string.
func TokensUsage(dst, id, mode []byte, u Usage, details map[string]int) []byte {
	dst = rawjson.AppendString(append(dst, `data: {"request_id":`...), id)
	dst = u.appendJSON(append(dst, `,"usage":`...), details)
	dst = append(append(dst, `,"output_mode":`...), mode...)
	return append(dst, ",\"choices\":[]}\n\n"...)
}

// TokensEnding appends a stream of /inference/v1/generate that has only the end of an answer: the
// finish_reason if it is not empty, the usage and [DONE]. A caller uses it to end an answer that no
// engine needs to continue.
func TokensEnding(dst []byte, h Head, finish string, u Usage) []byte {
	mode := h.Mode
	if mode == nil { // vLLM's default if a request names no output_mode
		mode = []byte(`"tokens"`)
	}
	begin := func(dst []byte) []byte {
		dst = append(append(append(dst, `data: {"request_id":`...), h.ID...), `,"output_mode":`...)
		return append(append(dst, mode...), `,"choices":[`...)
	}
	if finish != "" {
		dst = append(begin(dst), `{"index":0,"finish_reason":`...)
		dst = append(rawjson.AppendString(dst, finish), `,"stop_reason":null,"token_ids":[],"routed_experts":null,"sampling_mask":null,"weight_versions":null`...)
		if string(mode) == `"text"` {
			dst = append(dst, `,"text":""`...)
		}
		dst = append(dst, `,"logprobs":null}],"usage":null}`+"\n\n"...)
	}
	dst = u.appendJSON(append(begin(dst), `],"usage":`...), nil)
	return append(append(dst, "}\n\n"...), Done...)
}
