package mooncake

// The bodies of two endpoints have the sampling parameters in a member sampling_params, and name some of them differently from
// completions: POST /inference/v1/generate (vLLM 0.32.0 and 0.33.0, GenerateRequest in
// entrypoints/scale_out/token_in_token_out/protocol.py) and POST /generate (SGLang 0.5.23, GenerateReqInput in managers/io_struct.py).
// Other code uses the keys of completions, and a form translates each key to its place in the body.

// forms has a form for each endpoint whose keys differ from those of completions. A body of SGLang has its prompt in text or in
// input_ids.
var forms = [Endpoints]*form{
	// extra_args is dropped because vLLM takes kv_transfer_params from it, which could name the KV of another client's request. Keys
	// that begin with an underscore are dropped because SamplingParams uses them internally (vLLM 0.32.0, sampling_params.py).
	Tokens: newForm(map[string]place{"prompt": {"token_ids", false}}, []string{
		"n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
		"logit_bias", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "structured_outputs",
		"thinking_token_budget", "repetition_detection", "stream_interval", "prompt_logprob_token_ids", "prompt_logprob_start",
		"logprob_token_ids", "trace_decode_token_ids",
	}, func(key string) bool { return key == "extra_args" || key != "" && key[0] == '_' }),
	Generate: generateForm("input_ids"),
}

var textForm = generateForm("text")

// generateForm returns a form with the names of SGLang 0.5.23 (sampling/sampling_params.py). prompt is the key of the prompt.
// No member is dropped, because in SGLang clients may set every member of sampling_params.
func generateForm(prompt string) *form {
	return newForm(map[string]place{
		"prompt": {prompt, false}, "max_tokens": {"max_new_tokens", true}, "min_tokens": {"min_new_tokens", true}, "seed": {"sampling_seed", true},
	}, []string{
		"n", "stop", "stop_token_ids", "stop_regex", "custom_params", "logit_bias", "min_p", "presence_penalty", "frequency_penalty",
		"repetition_penalty", "ignore_eos", "beam_width", "stream_interval", "json_schema", "regex", "ebnf", "structural_tag",
	}, nil)
}

// newForm makes a form. places says where a body has each key that differs from the key of a completion. inner lists the members of
// sampling_params whose keys do not differ, which newForm adds to places. drops says which members of sampling_params to remove; nil: none.
func newForm(places map[string]place, inner []string, drops func(key string) bool) *form {
	for _, key := range inner {
		places[key] = place{key, true}
	}
	words := map[place]string{}
	for word, p := range places {
		words[p] = word
	}
	return &form{at: places, words: words, drops: drops}
}

// ScanFor does what ScanBody does, and also scans sampling_params if the bodies of this endpoint have it. From then on, the methods of the
// body translate the keys of completions.
func ScanFor(ep Endpoint, raw []byte, maxDepth int) (Body, error) {
	b, err := ScanBody(raw, maxDepth)
	if err != nil || forms[ep] == nil {
		return b, err
	}
	params, ok := b.Get(paramsKey)
	if !ok || params[0] != '{' {
		params = []byte("{}") // another value is left for the engine to refuse
	}
	inner, err := ScanBody(params, 0)
	if err != nil { // too many members
		return Body{}, err
	}
	text, ok := b.Get("text") // before form is set, so that the key is not translated
	hasText := ok && string(text) != "null"
	b.form, b.inner = forms[ep], &inner
	if ep == Generate && hasText { // the prompt is in text, not in input_ids
		b.form = textForm
	}
	return b, nil
}
