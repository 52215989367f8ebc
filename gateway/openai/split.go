package openai

import "evenkeel/mooncake"

// CheckSplit refuses a request that cannot be split between a prefill and a decode engine. It sets PrefillOnly if the request needs no
// decode engine. recompute says that the decode engine computes the prompt again if the request asks for logprobs of the prompt's tokens.
func (r *Request) CheckSplit(recompute bool) *Error {
	switch {
	case r.Beams > 0:
		return badRequest(CodeUnsupported, "use_beam_search",
			"\"use_beam_search\" is not supported here: the engines of this model either prefill or "+
				"decode, and beam search cannot be split so")
	case !r.PromptLogprobs: // the decode engine needs only the KV of the prompt
	case r.Limit == 1 && r.Endpoint.Assembles(): // the prefill engine computes the prompt's logprobs and the only token
		r.PrefillOnly = true
	case !recompute: // the prompt's logprobs cannot be computed; the error names the key that asks for them
		key, what := "prompt_logprobs", "\"prompt_logprobs\""
		if r.Endpoint == mooncake.Generate {
			return badRequest(CodeUnsupported, "logprob_start_len",
				"\"logprob_start_len\" of 0 or more with \"return_logprob\" is not supported here: "+
					"the engines of this model either prefill or decode, and tell no logprobs of a prompt then")
		}
		switch value, ok := r.Body.Get(key); {
		case ok && !isNull(value): // the key is prompt_logprobs itself
		case r.Endpoint == mooncake.Tokens: // without prompt_logprobs, only prompt_logprob_token_ids asks for such logprobs
			key, what = "prompt_logprob_token_ids", "\"prompt_logprob_token_ids\""
		default:
			key, what = "echo", "\"echo\" with logprobs"
			if r.Endpoint == mooncake.Chat {
				what = "\"echo\" in a chat"
			}
		}
		return badRequest(CodeUnsupported, key,
			"%s is not supported here with \"max_tokens\" above 1: a decode engine of this model gets the KV cache "+
				"of the prompt from another engine and cannot compute the prompt's logprobs", what)
	}
	return nil
}
