package mooncake

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
)

// Resume is how a request goes on with an answer that another decode rank gave
// up: the answer so far becomes part of the prompt, on the probe and on the
// decode leg alike. A nil Resume changes nothing.
type Resume struct {
	How    string          // a chat_resume, ResumePrompt or ResumeText
	IDs    json.RawMessage // token ids of the prompt and of the answer so far; nil: Text has them as text
	Text   json.RawMessage // a JSON string: for ChatResumeContinue the answer so far, for ResumeText with the prompt before it
	Tokens int             // how many tokens the answer has so far

	Limit    int    // tokens that the rest may have
	LimitKey string // the key of the body that gets Limit; empty: only the context limits the answer
}

// The ways of completions: their prompt becomes the token ids of prompt and answer,
// or the text of both, where an engine does not tell ids.
const (
	ResumePrompt = "prompt"
	ResumeText   = "text"
)

// ByText tells whether a way to resume gives the engines text. The engines then tokenise
// the answer so far, and may get other tokens than those that were generated.
func ByText(how string) bool { return how == ResumeText || how == ChatResumeContinue }

func (r *Resume) replacesPrompt() bool { return r.How == ResumePrompt || ByText(r.How) }

// promptMembers adds the members that replace the prompt: they have the prompt and the answer so far.
func (r *Resume) promptMembers(b *Body, members []Member) []Member {
	switch r.How {
	case ResumePrompt:
		return append(members, Member{"prompt", r.IDs})
	case ResumeText:
		return append(members, Member{"prompt", r.Text})
	}
	messages, _ := b.Get("messages")
	longer := bytes.TrimRight(messages[:len(messages)-1], " \t\r\n")
	longer = slices.Concat(longer, []byte(`,{"role":"assistant","content":`), r.Text, []byte(`}]`))
	return append(members, Member{"messages", longer}, Member{"continue_final_message", jsonTrue}, Member{"add_generation_prompt", jsonFalse})
}

// addIDs adds the token ids to kv_transfer_params, if How puts them there; else it returns kv as it is.
func (r *Resume) addIDs(kv json.RawMessage) json.RawMessage {
	if !r.idsInParams() {
		return kv
	}
	if kv == nil {
		kv = json.RawMessage("{}")
	}
	out := slices.Clip(bytes.TrimRight(kv[:len(kv)-1], " \t\r\n")) // kv stays as it is
	for _, key := range idKeys[r.How] {
		if len(out) > 1 { // an empty object needs no comma
			out = append(out, ',')
		}
		out = slices.Concat(out, []byte(`"`+key+`":`), r.IDs)
	}
	return append(out, '}')
}

// idsInParams says whether the token ids stand in kv_transfer_params.
func (r *Resume) idsInParams() bool { return r != nil && idKeys[r.How] != nil }

// idKeys are the members of kv_transfer_params that have the token ids of prompt and answer. vLLM reads its own from 0.27 on
// (renderers/online_renderer.py). vllm-ascend 0.26.0rc1 has another key (patch/recompute_proxy.py), because its vLLM 0.26 reads none,
// and 0.27.1rc1 and 0.30.0rc2 no longer have that key. So engines of vllm-ascend get both keys: each engine takes out the key that it
// knows, and the connectors of vllm-ascend only read the members that they know (distributed/kv_transfer/kv_p2p).
var idKeys = map[string][]string{
	ChatResumeVLLM:   {"prompt_token_ids"},
	ChatResumeAscend: {"_vllm_ascend_recompute_token_ids", "prompt_token_ids"},
}

// addLimits adds the members that say how many tokens the rest of the answer may have, and must have.
func (r *Resume) addLimits(b *Body, members []Member) []Member {
	if r == nil {
		return members
	}
	if r.LimitKey != "" {
		members = append(members, Member{r.LimitKey, strconv.AppendInt(nil, int64(r.Limit), 10)})
	}
	if raw, ok := b.Get("min_tokens"); ok {
		if least, err := strconv.Atoi(string(raw)); err == nil {
			members = append(members, Member{"min_tokens", strconv.AppendInt(nil, int64(max(0, least-r.Tokens)), 10)})
		}
	}
	return members
}

// alsoDrop returns a function that drops what inner drops, and also the keys that were meant for the client's own
// prompt: the prompt of a resumed leg was cut to size already, and the engine must not echo it into the answer.
func (r *Resume) alsoDrop(inner func(string) bool) func(string) bool {
	if r == nil {
		return inner
	}
	return func(key string) bool {
		return key == "echo" || key == "truncate_prompt_tokens" && r.How != ChatResumeContinue || inner(key)
	}
}

// CountIDs counts the elements of a list of numbers.
func CountIDs(list json.RawMessage) int {
	if len(list) <= len("[]") {
		return 0
	}
	return bytes.Count(list, []byte{','}) + 1
}

// JoinIDs makes one list of the prompt's ids and the answer's.
func JoinIDs(prompt json.RawMessage, answer []int32) json.RawMessage {
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
