package openai

import (
	"cmp"

	"evenkeel/mooncake"
)

// sglangRefused has the keys that no client may set for engines of SGLang. Other engines ignore
// them (SGLang 0.5.23, entrypoints/openai/protocol.py).
var sglangRefused = map[string]string{
	"custom_logit_processor": "it is code that the engine would run",
	"custom_params":          "it is for code that the engine would run",
	"session_params":         "a session keeps KV on one engine, and another client could name it",
	"lora_path":              "a LoRA adapter is chosen by the model's name, which the proxy checks",
	"input_ids":              "the prompt is in prompt or messages, and only that is counted and checked",
	"input_embeds":           "prompts are text or token ids here",
	"stop_regex":             "an expression can keep the engine's scheduler busy for all; use stop",
}

// maxSGLangTopLogprobs is for a vocabulary of unknown size.
const maxSGLangTopLogprobs = 20

// CheckForSGLang refuses a request that must not reach an engine of SGLang. It clears
// PromptLogprobs for a chat. vocabulary is in tokens; 0: unknown.
func (r *Request) CheckForSGLang(vocabulary int) *Error {
	// SGLang's scheduler does not check this number, and would crash (0.5.23, layers/sampler.py).
	// AllTokens is below 0.
	if maxTop := cmp.Or(vocabulary, maxSGLangTopLogprobs); r.TopLogprobs < 0 || r.TopLogprobs > maxTop {
		key := "top_logprobs"
		switch r.Endpoint {
		case mooncake.Completions:
			key = "logprobs"
		case mooncake.Generate:
			key = "top_logprobs_num"
		case mooncake.Chat, mooncake.Responses, mooncake.Messages, mooncake.Tokens:
		}
		return badRequest(CodeInvalidValue, key, "%d likeliest tokens are asked for; the engines of this model take 0 to %d",
			r.TopLogprobs, maxTop)
	}
	for key, v := range r.Body.All() {
		if why, ok := sglangRefused[key]; ok && !isNull(v) {
			return badRequest(CodeUnsupported, key, "%q is not supported: %s", key, why)
		}
	}
	if r.Beams > 0 {
		return badRequest(CodeUnsupported, "use_beam_search",
			"\"use_beam_search\" is not supported: the engines of this model have no beam search")
	}
	if v, there := r.Body.Get("prompt_logprobs"); there && !isNull(v) {
		return badRequest(CodeUnsupported, "prompt_logprobs",
			"\"prompt_logprobs\" is not supported: the engines of this model tell them only with \"echo\" and \"logprobs\"")
	}
	if r.Endpoint == mooncake.Chat {
		// It can be only because of "echo", for which vLLM computes logprobs of the prompt. SGLang has no
		// echo in chats.
		r.PromptLogprobs = false
	}
	if r.Endpoint == mooncake.Chat && r.ReturnTokenIDs {
		return badRequest(CodeUnsupported, "return_token_ids",
			"\"return_token_ids\" is not supported for chats by the engines of this model, which "+
				"have no place for token ids in a stream; completions have one")
	}
	return nil
}
