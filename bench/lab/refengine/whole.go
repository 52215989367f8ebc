package refengine

import (
	"encoding/json"
	"fmt"

	"evenkeel/internal/rawjson"
)

// appendWhole is the answer of n tokens to a request that does not stream.
func (a *answer) appendWhole(dst []byte, n int, finish, stopReason string, handoff []byte) []byte {
	object := "text_completion"
	if a.r.chat {
		object = "chat.completion"
	}
	dst = append(a.appendHead(dst, a.r, object), `{"index":0,`...)
	if a.r.chat {
		dst = a.appendMessage(dst, n, finish)
	} else {
		dst = append(dst, `"text":"`...)
		if a.r.echo {
			dst = rawjson.AppendEscaped(dst, a.r.echoText)
		}
		dst = append(a.appendText(dst, 0, n), '"')
	}
	dst = a.appendLogprobs(append(dst, `,"logprobs":`...), 0, n)
	dst = a.appendReason(dst, finish, stopReason, true)
	if a.sglang() {
		dst = a.appendPromptIDs(append(a.appendIDs(append(dst, ','), 0, n), ','), a.r.returnIDs)
		dst = a.appendUsageObject(append(dst, `}],"usage":`...), n, true)
		return append(dst, `,"metadata":{"weight_version":"default"}}`...)
	}
	dst = a.appendIDs(append(dst, ','), 0, n)
	if !a.r.chat {
		dst = a.appendPromptIDs(append(a.appendRows(append(dst, `,"prompt_logprobs":`...)), ','), a.r.returnIDs)
	}
	dst = append(append(dst, `,"routed_experts":null}],"service_tier":null`...), fingerprint...)
	dst = a.appendWholeUsage(append(dst, `,"usage":`...), n)
	if a.r.chat {
		dst = append(a.appendPromptIDs(append(a.appendRows(append(dst, `,"prompt_logprobs":`...)), ','), a.r.returnIDs), `,"prompt_text":null`...)
	}
	if handoff == nil {
		handoff = json.RawMessage("null")
	}
	dst = append(append(dst, `,"kv_transfer_params":`...), handoff...)
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// appendRows is what the logprobs of the prompt's tokens are. The first has none.
func (a *answer) appendRows(dst []byte) []byte {
	if !a.r.rows {
		return append(dst, "null"...)
	}
	return appendList(dst, 0, a.r.prompt.Tokens(), func(dst []byte, i int) []byte {
		if i == 0 {
			return append(dst, "null"...)
		}
		id := a.r.prompt.IDs[i]
		return fmt.Appendf(dst, `{"%d":{"logprob":%.4f,"rank":1,"decoded_token":"t"}}`, id, logprob(id, 0))
	})
}

// appendWholeUsage is the usage of an answer without a stream, which has every member.
func (a *answer) appendWholeUsage(dst []byte, made int) []byte {
	prompt := a.prompt
	dst = fmt.Appendf(dst, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":`, prompt, prompt+made, made)
	switch {
	case !a.details:
		dst = append(dst, "null"...)
	case a.r.chat:
		dst = fmt.Appendf(dst, `{"cached_tokens":%d,"created_cache_tokens":0,"multimodal_tokens":null}`, a.cached)
	default:
		dst = fmt.Appendf(dst, `{"cached_tokens":%d,"created_cache_tokens":null,"multimodal_tokens":null}`, a.cached)
	}
	return append(dst, `,"completion_tokens_details":null}`...)
}

func (a *answer) appendMessage(dst []byte, n int, finish string) []byte {
	thought := min(n, a.reasoningEnd())
	dst = append(dst, `"message":{"role":"assistant","content":`...)
	dst = append(dst, '"')
	switch {
	case a.r.tool == "":
		dst = a.appendText(dst, thought, n)
	case a.cutCall(finish):
		dst = rawjson.AppendEscaped(dst, `<tool_call>{"name": "`+a.r.tool+`", "arguments": `)
		dst = a.appendArguments(dst, thought, n, false)
	}
	dst = append(dst, '"')
	if !a.sglang() {
		dst = append(dst, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
	}
	if a.r.tool != "" && !a.noCall && !a.cutCall(finish) {
		dst = append(rawjson.AppendEscaped(append(dst, `,"tool_calls":[{"id":"call_`...), a.r.id), `","type":"function","function":{"name":"`...)
		dst = append(rawjson.AppendEscaped(dst, a.r.tool), `","arguments":"`...)
		dst = append(a.appendArguments(dst, thought, n, finish == "tool_calls"), `"}}]`...)
	}
	if thought <= 0 || a.r.hideReasoning {
		return append(append(append(dst, `,"`...), a.field...), `":null}`...)
	}
	dst = append(append(append(dst, `,"`...), a.field...), `":"`...)
	dst = append(a.appendText(dst, 0, thought), '"')
	return append(dst, '}')
}
