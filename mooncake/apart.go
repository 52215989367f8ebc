package mooncake

// Bodies of POST /inference/v1/generate (vLLM 0.32.0 and 0.33.0, GenerateRequest in
// entrypoints/scale_out/token_in_token_out/protocol.py) and of POST /generate (SGLang 0.5.23, GenerateReqInput in
// managers/io_struct.py) say how tokens are sampled in an object of its own, sampling_params, and some of it in words of their
// own. Everything else here reads and writes them in the words of completions, and a form says where a body has each of these words.

// forms has the endpoints whose bodies have one. A body of SGLang has its prompt in text, or else in input_ids.
var forms = [Endpoints]*form{
	// Of extra_args, kv_transfer_params would name the KV of another request. SamplingParams has members that begin with an underline
	// for itself alone (vLLM 0.32.0, sampling_params.py).
	Tokens: newForm(map[string]place{"prompt": {"token_ids", false}}, []string{
		"n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
		"logit_bias", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "structured_outputs",
		"thinking_token_budget", "repetition_detection", "stream_interval", "prompt_logprob_token_ids", "prompt_logprob_start",
		"logprob_token_ids", "trace_decode_token_ids",
	}, func(key string) bool { return key == "extra_args" || key != "" && key[0] == '_' }),
	Generate: generateForm("input_ids"),
}

var textForm = generateForm("text")

// generateForm has the names of SGLang 0.5.23, sampling/sampling_params.py. Clients may set every member of sampling_params there.
func generateForm(prompt string) *form {
	return newForm(map[string]place{
		"prompt": {prompt, false}, "max_tokens": {"max_new_tokens", true}, "min_tokens": {"min_new_tokens", true}, "seed": {"sampling_seed", true},
	}, []string{
		"n", "stop", "stop_token_ids", "stop_regex", "custom_params", "logit_bias", "min_p", "presence_penalty", "frequency_penalty",
		"repetition_penalty", "ignore_eos", "beam_width", "stream_interval", "json_schema", "regex", "ebnf", "structural_tag",
	}, nil)
}

// newForm makes a form of the members with other names than in a completion, and of those of sampling_params with the same name.
func newForm(at map[string]place, inner []string, drops func(key string) bool) *form {
	f := &form{at: at, words: map[place]string{}, drops: drops}
	for _, key := range inner {
		f.at[key] = place{key, true}
	}
	for word, p := range at {
		f.words[p] = word
	}
	return f
}

// ScanFor is ScanBody for an endpoint.
func ScanFor(ep Endpoint, raw []byte, maxDepth int) (Body, error) {
	b, err := ScanBody(raw, maxDepth)
	if err != nil || forms[ep] == nil {
		return b, err
	}
	params, ok := b.Get(paramsKey)
	if !ok || params[0] != '{' {
		params = []byte("{}") // what else stands there is not for us to judge
	}
	inner, err := ScanBody(params, 0)
	if err != nil { // more members than there may be
		return Body{}, err
	}
	text, ok := b.Get("text")
	if b.form, b.inner = forms[ep], &inner; ep == Generate && ok && string(text) != "null" {
		b.form = textForm
	}
	return b, nil
}
