package mooncake

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
)

// Resume says how a request continues an answer that another decode rank did not finish. In the prefill and the decode request, the answer
// so far becomes a part of the prompt. A nil Resume changes nothing.
type Resume struct {
	Method string          // how the answer so far is sent: a value of chat_resume, ResumePrompt or ResumeText
	IDs    json.RawMessage // JSON list of the token ids of the prompt and of the answer so far; nil: Text is used instead
	Text   json.RawMessage // JSON string with the answer so far; for ResumeText, the prompt comes before it
	Tokens int             // tokens that the answer has so far

	Limit    int    // most tokens that the rest of the answer may have
	LimitKey string // the key of the body that gets Limit; empty: only the context limits the answer
}

// The values of Method for completions. The new prompt consists of the old prompt and the answer so far, as token ids or, if the engine
// does not report ids, as text.
const (
	ResumePrompt = "prompt"
	ResumeText   = "text"
)

// ByText says whether this value of Method gives the engines text. The engines then tokenise the answer so far again, and may get other
// tokens than the first engine generated.
func ByText(method string) bool { return method == ResumeText || method == ChatResumeContinue }

// replacesPrompt says whether the request gets a longer prompt in place of its own. Otherwise, kv_transfer_params has the answer so far.
func (r *Resume) replacesPrompt() bool { return r.Method == ResumePrompt || ByText(r.Method) }

// promptMembers adds the members that replace the prompt by the prompt and the answer so far.
func (r *Resume) promptMembers(b *Body, members []Member) []Member {
	switch r.Method {
	case ResumePrompt:
		return append(members, Member{"prompt", r.IDs})
	case ResumeText:
		return append(members, Member{"prompt", r.Text})
	}
	// Method is ChatResumeContinue: the answer so far becomes the last message, which the engine continues.
	messages, _ := b.Get("messages")
	longer := bytes.TrimRight(messages[:len(messages)-1], " \t\r\n") // without the closing bracket
	longer = slices.Concat(longer, []byte(`,{"role":"assistant","content":`), r.Text, []byte(`}]`))
	members = append(members, Member{"messages", longer}, Member{"continue_final_message", jsonTrue})
	return append(members, Member{"add_generation_prompt", jsonFalse})
}

// addTokenIDs returns kv, a kv_transfer_params. If this way of resuming (Method) puts the token ids of prompt and answer there, they are
// added. kv itself does not change.
func (r *Resume) addTokenIDs(kv json.RawMessage) json.RawMessage {
	if !r.tokenIDsInParams() {
		return kv
	}
	if kv == nil {
		kv = json.RawMessage("{}")
	}
	// The object without its closing brace. Clip makes append copy, so that kv does not change.
	out := slices.Clip(bytes.TrimRight(kv[:len(kv)-1], " \t\r\n"))
	for _, key := range resumeIDKeys[r.Method] {
		if len(out) > 1 { // an empty object needs no comma
			out = append(out, ',')
		}
		out = slices.Concat(out, []byte(`"`+key+`":`), r.IDs)
	}
	return append(out, '}')
}

// tokenIDsInParams says whether this way of resuming (Method) puts the token ids into kv_transfer_params.
func (r *Resume) tokenIDsInParams() bool { return r != nil && resumeIDKeys[r.Method] != nil }

// resumeIDKeys lists, for each way of resuming, the members of kv_transfer_params that get the token ids of prompt and answer. vLLM reads
// prompt_token_ids from 0.27 on (renderers/online_renderer.py). vllm-ascend 0.26.0rc1 reads the key that begins with an underscore
// (patch/recompute_proxy.py), but 0.27.1rc1 and 0.30.0rc2 do not. Engines of vllm-ascend therefore get both keys. Each engine removes the
// key that it knows, and the connectors ignore the other key (distributed/kv_transfer/kv_p2p).
var resumeIDKeys = map[string][]string{
	ChatResumeVLLM:   {"prompt_token_ids"},
	ChatResumeAscend: {"_vllm_ascend_recompute_token_ids", "prompt_token_ids"},
}

// addLimits adds the members that bound the rest of the answer: the largest number of tokens, and min_tokens, the smallest.
func (r *Resume) addLimits(b *Body, members []Member) []Member {
	if r == nil {
		return members
	}
	if r.LimitKey != "" {
		members = append(members, Member{r.LimitKey, strconv.AppendInt(nil, int64(r.Limit), 10)})
	}
	if raw, ok := b.Get("min_tokens"); ok { // the tokens of the answer so far count towards min_tokens
		if least, err := strconv.Atoi(string(raw)); err == nil {
			members = append(members, Member{"min_tokens", strconv.AppendInt(nil, int64(max(0, least-r.Tokens)), 10)})
		}
	}
	return members
}

// dropForLongerPrompt returns a function that drops the keys that drop drops, and those that must not apply to the longer prompt: the
// engine must not echo it into the answer, nor truncate it a second time. With ChatResumeContinue, the engine still has to truncate the
// messages. A nil Resume returns drop itself.
func (r *Resume) dropForLongerPrompt(drop func(string) bool) func(string) bool {
	if r == nil {
		return drop
	}
	isTruncated := r.Method != ChatResumeContinue
	return func(key string) bool {
		return key == "echo" || isTruncated && key == "truncate_prompt_tokens" || drop(key)
	}
}

// CountIDs returns how many elements a JSON list of numbers has; 0 for a list that is empty or missing.
func CountIDs(list json.RawMessage) int {
	isEmpty := len(list) < len("[]") || len(bytes.TrimSpace(list[1:len(list)-1])) == 0
	if isEmpty {
		return 0
	}
	return bytes.Count(list, []byte{','}) + 1 // one comma between each two numbers
}

// JoinIDs returns the token ids of the prompt, a JSON list, and then those of the answer as one JSON list.
func JoinIDs(prompt json.RawMessage, answer []int32) json.RawMessage {
	list := make([]byte, 0, len(prompt)+8*len(answer)) // an id with its comma rarely has more than 8 bytes
	// The prompt's list is copied without its closing bracket.
	list = append(list, bytes.TrimRight(prompt[:len(prompt)-1], " \t\r\n")...)
	for _, id := range answer {
		if len(list) > 1 { // the first number in a list needs no comma
			list = append(list, ',')
		}
		list = strconv.AppendInt(list, int64(id), 10)
	}
	return append(list, ']')
}
