package mooncake

// At POST /inference/v1/generate (vLLM 0.32.0 and 0.33.0, GenerateRequest in
// entrypoints/scale_out/token_in_token_out/protocol.py) and POST /generate (SGLang 0.5.23,
// GenerateReqInput in managers/io_struct.py), the sampling parameters are in a member
// sampling_params, and some have other names than in completions. Other code uses the keys of
// completions, which a keyLayout translates.

// A body of SGLang's /generate has its prompt either in text or in input_ids.
var keyLayouts = [Endpoints]*keyLayout{
	// vLLM takes kv_transfer_params also from extra_args, which could name another client's KV.
	// SamplingParams uses keys with an underscore internally (vLLM 0.32.0, sampling_params.py).
	Tokens: newKeyLayout(map[string]keyLocation{"prompt": {"token_ids", false}}, []string{
		"n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
		"logit_bias", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "structured_outputs",
		"thinking_token_budget", "repetition_detection", "stream_interval", "prompt_logprob_token_ids", "prompt_logprob_start",
		"logprob_token_ids", "trace_decode_token_ids",
	}, func(key string) bool { return key == "extra_args" || key != "" && key[0] == '_' }),
	Generate: generateLayout("input_ids"),
}

// textLayout is for a body of SGLang's /generate with text instead of input_ids.
var textLayout = generateLayout("text")

// generateLayout has the keys of SGLang 0.5.23 (sampling/sampling_params.py). It drops no members,
// because in SGLang clients may set every member of sampling_params.
func generateLayout(prompt string) *keyLayout {
	const inBody, inParams = false, true
	otherKeys := map[string]keyLocation{
		"prompt": {prompt, inBody}, "max_tokens": {"max_new_tokens", inParams}, "min_tokens": {"min_new_tokens", inParams},
		"seed": {"sampling_seed", inParams},
	}
	sameKeysInParams := []string{
		"n", "stop", "stop_token_ids", "stop_regex", "custom_params", "logit_bias", "min_p", "presence_penalty", "frequency_penalty",
		"repetition_penalty", "ignore_eos", "beam_width", "stream_interval", "json_schema", "regex", "ebnf", "structural_tag",
	}
	return newKeyLayout(otherKeys, sameKeysInParams, nil)
}

// newKeyLayout takes the places of keys that differ from those of completions (locations), and the
// keys of sampling_params that do not differ, which it adds to locations.
func newKeyLayout(locations map[string]keyLocation, sameInParams []string, dropsParam func(key string) bool) *keyLayout {
	for _, key := range sameInParams {
		locations[key] = keyLocation{key: key, inParams: true}
	}
	completionKeys := map[keyLocation]string{}
	for completionKey, location := range locations {
		completionKeys[location] = completionKey
	}
	return &keyLayout{locations: locations, completionKeys: completionKeys, dropsParam: dropsParam}
}

// ScanFor scans a body, and its sampling_params if the endpoint has them. From then on, the methods
// of the Body take the keys of completions.
func ScanFor(ep Endpoint, raw []byte, maxDepth int) (Body, error) {
	b, err := ScanBody(raw, maxDepth)
	if err != nil || keyLayouts[ep] == nil {
		return b, err
	}
	params, ok := b.Get(paramsKey)
	if !ok || params[0] != '{' {
		params = []byte("{}") // the engine will refuse what is no object
	}
	const usualDepth = 0 // the scan of the whole body has applied maxDepth already
	scannedParams, err := ScanBody(params, usualDepth)
	if err != nil { // too many members
		return Body{}, err
	}
	text, ok := b.Get("text") // before layout is set, so that the key is not translated
	hasText := ok && string(text) != "null"
	b.layout, b.params = keyLayouts[ep], &scannedParams
	if ep == Generate && hasText {
		b.layout = textLayout
	}
	return b, nil
}
