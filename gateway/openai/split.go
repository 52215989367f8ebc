package openai

import "evenkeel/mooncake"

// CheckSplit refuses a request that cannot be split between a prefill and a decode engine, and sets
// PrefillOnly. recompute: the decode engine computes the prompt again for logprobs of its tokens.
func (r *Request) CheckSplit(recompute bool) *Error {
	switch {
	case r.Beams > 0:
		return badRequest(CodeUnsupported, "use_beam_search",
			"\"use_beam_search\" is not supported here: the engines of this model either prefill or "+
				"decode, and beam search cannot be split so")
	case !r.PromptLogprobs:
	// The prefill engine can give the whole answer. At /generate, where Assembles is false, it cannot:
	// a prefill engine of SGLang takes no request without a decode engine.
	case r.Limit == 1 && r.Endpoint.Assembles():
		r.PrefillOnly = true
	case !recompute: // the decode engine has no logprobs of the prompt
		return r.refusePromptLogprobs()
	}
	return nil
}

func (r *Request) refusePromptLogprobs() *Error {
	if r.Endpoint == mooncake.Generate {
		return badRequest(CodeUnsupported, "logprob_start_len",
			"\"logprob_start_len\" of 0 or more with \"return_logprob\" is not supported here: "+
				"the engines of this model either prefill or decode, and tell no logprobs of a prompt then")
	}
	key, what := r.keyOfPromptLogprobs()
	return badRequest(CodeUnsupported, key,
		"%s is not supported here with \"max_tokens\" above 1: a decode engine of this model gets the KV cache "+
			"of the prompt from another engine and cannot compute the prompt's logprobs", what)
}

// keyOfPromptLogprobs is for a request that asks for them: if no other key does, it must be echo.
func (r *Request) keyOfPromptLogprobs() (key, what string) {
	value, ok := r.Body.Get("prompt_logprobs")
	switch {
	case ok && !isNull(value):
		return "prompt_logprobs", "\"prompt_logprobs\""
	case r.Endpoint == mooncake.Tokens: // the only other key there
		return "prompt_logprob_token_ids", "\"prompt_logprob_token_ids\""
	case r.Endpoint == mooncake.Chat:
		return "echo", "\"echo\" in a chat"
	}
	return "echo", "\"echo\" with logprobs"
}
