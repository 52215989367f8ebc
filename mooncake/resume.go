package mooncake

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
)

// Resume is how a request continues an answer that another decode rank did not finish: the answer
// so far becomes a part of the prompt. A nil Resume changes nothing.
type Resume struct {
	Method string          // a value of chat_resume, ResumePrompt or ResumeText
	IDs    json.RawMessage // of the prompt and the answer so far; nil: Text is used
	Text   json.RawMessage // the answer so far; for ResumeText, after the prompt
	Tokens int             // tokens that the answer has so far

	Limit    int    // most tokens that the rest of the answer may have
	LimitKey string // the key of the body that gets Limit; empty: only the context limits the answer
}

// Methods for completions: the old prompt and the answer so far, as token ids or, if the engine
// does not report ids, as text.
const (
	ResumePrompt = "prompt"
	ResumeText   = "text"
)

// ByText says whether engines get text. They may tokenise the answer so far differently than the
// first engine generated it.
func ByText(method string) bool { return method == ResumeText || method == ChatResumeContinue }

// If it does not, kv_transfer_params has the answer so far.
func (r *Resume) replacesPrompt() bool { return r.Method == ResumePrompt || ByText(r.Method) }

func (r *Resume) promptMembers(b *Body, members []Member) []Member {
	switch r.Method {
	case ResumePrompt:
		return append(members, Member{"prompt", r.IDs})
	case ResumeText:
		return append(members, Member{"prompt", r.Text})
	}
	messages, _ := b.Get("messages")
	longer := bytes.TrimRight(messages[:len(messages)-1], " \t\r\n") // without the closing bracket
	longer = slices.Concat(longer, []byte(`,{"role":"assistant","content":`), r.Text, []byte(`}]`))
	members = append(members, Member{"messages", longer}, Member{"continue_final_message", jsonTrue})
	return append(members, Member{"add_generation_prompt", jsonFalse})
}

// addTokenIDs does not change kv.
func (r *Resume) addTokenIDs(kv json.RawMessage) json.RawMessage {
	if !r.tokenIDsInParams() {
		return kv
	}
	if kv == nil {
		kv = json.RawMessage("{}")
	}
	// Clip makes append copy the object, here without its closing brace.
	out := slices.Clip(bytes.TrimRight(kv[:len(kv)-1], " \t\r\n"))
	for _, key := range resumeIDKeys[r.Method] {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = slices.Concat(out, []byte(`"`+key+`":`), r.IDs)
	}
	return append(out, '}')
}

func (r *Resume) tokenIDsInParams() bool { return r != nil && resumeIDKeys[r.Method] != nil }

// resumeIDKeys are the members of kv_transfer_params that get the token ids. vLLM reads
// prompt_token_ids from 0.27 on (renderers/online_renderer.py). vllm-ascend 0.26.0rc1 reads the key
// with an underscore (patch/recompute_proxy.py), but 0.27.1rc1 and 0.30.0rc2 do not, so it gets
// both. Each engine removes the key that it knows, and the connectors ignore the other
// (distributed/kv_transfer/kv_p2p).
var resumeIDKeys = map[string][]string{
	ChatResumeVLLM:   {"prompt_token_ids"},
	ChatResumeAscend: {"_vllm_ascend_recompute_token_ids", "prompt_token_ids"},
}

func (r *Resume) addLimits(b *Body, members []Member) []Member {
	if r == nil {
		return members
	}
	if r.LimitKey != "" {
		members = append(members, Member{r.LimitKey, strconv.AppendInt(nil, int64(r.Limit), 10)})
	}
	if raw, ok := b.Get("min_tokens"); ok { // the answer so far counts towards min_tokens
		if least, err := strconv.Atoi(string(raw)); err == nil {
			members = append(members, Member{"min_tokens", strconv.AppendInt(nil, int64(max(0, least-r.Tokens)), 10)})
		}
	}
	return members
}

// The engine must not echo the longer prompt into the answer, nor truncate it a second time. With
// ChatResumeContinue, it still has to truncate the messages.
func (r *Resume) dropForLongerPrompt(drop func(string) bool) func(string) bool {
	if r == nil {
		return drop
	}
	isTruncated := r.Method != ChatResumeContinue
	return func(key string) bool {
		return key == "echo" || isTruncated && key == "truncate_prompt_tokens" || drop(key)
	}
}

// CountIDs returns how many numbers a JSON list has.
func CountIDs(list json.RawMessage) int {
	isEmpty := len(list) < len("[]") || len(bytes.TrimSpace(list[1:len(list)-1])) == 0
	if isEmpty {
		return 0
	}
	return bytes.Count(list, []byte{','}) + 1
}

// JoinIDs returns the token ids of the prompt and the answer as one JSON list.
func JoinIDs(prompt json.RawMessage, answer []int32) json.RawMessage {
	// An id with its comma rarely has more than 8 bytes.
	list := make([]byte, 0, len(prompt)+8*len(answer))
	list = append(list, bytes.TrimRight(prompt[:len(prompt)-1], " \t\r\n")...)
	for _, id := range answer {
		if len(list) > 1 {
			list = append(list, ',')
		}
		list = strconv.AppendInt(list, int64(id), 10)
	}
	return append(list, ']')
}
