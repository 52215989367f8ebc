package mooncake

// At two endpoints, the sampling parameters are in a member sampling_params, and some have other names than in completions: POST
// /inference/v1/generate (vLLM 0.32.0 and 0.33.0, GenerateRequest in entrypoints/scale_out/token_in_token_out/protocol.py) and POST
// /generate (SGLang 0.5.23, GenerateReqInput in managers/io_struct.py). Other code uses the keys of completions for all endpoints, and a
// keyLayout translates each key to its place in the body.

// keyLayouts has a layout for each endpoint whose keys differ from those of completions. A body of SGLang's /generate has its prompt
// either in text or in input_ids.
var keyLayouts = [Endpoints]*keyLayout{
	// extra_args is dropped, because vLLM takes kv_transfer_params from it, which could name the KV of another client's request. Keys
	// that begin with an underscore are dropped, because SamplingParams uses them internally (vLLM 0.32.0, sampling_params.py).
	Tokens: newKeyLayout(map[string]keyLocation{"prompt": {"token_ids", false}}, []string{
		"n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
		"logit_bias", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "structured_outputs",
		"thinking_token_budget", "repetition_detection", "stream_interval", "prompt_logprob_token_ids", "prompt_logprob_start",
		"logprob_token_ids", "trace_decode_token_ids",
	}, func(key string) bool { return key == "extra_args" || key != "" && key[0] == '_' }),
	Generate: generateLayout("input_ids"),
}

// textLayout is the layout of a body of SGLang's /generate whose prompt is in text instead of input_ids.
var textLayout = generateLayout("text")

// generateLayout returns a layout with the key names of SGLang 0.5.23 (sampling/sampling_params.py). prompt is the key of the prompt. The
// layout drops no members, because in SGLang clients may set every member of sampling_params.
func generateLayout(prompt string) *keyLayout {
	const inBody, inParams = false, true // keyLocation.inParams: the member is in the body itself, or in its sampling_params
	otherKeys := map[string]keyLocation{
		"prompt": {prompt, inBody}, "max_tokens": {"max_new_tokens", inParams}, "min_tokens": {"min_new_tokens", inParams},
		"seed": {"sampling_seed", inParams},
	}
	sameKeysInParams := []string{
		"n", "stop", "stop_token_ids", "stop_regex", "custom_params", "logit_bias", "min_p", "presence_penalty", "frequency_penalty",
		"repetition_penalty", "ignore_eos", "beam_width", "stream_interval", "json_schema", "regex", "ebnf", "structural_tag",
	}
	return newKeyLayout(otherKeys, sameKeysInParams, nil) // nil: no member is dropped
}

// newKeyLayout returns a layout. locations says where a body has each key that differs from the key of a completion: "max_tokens" may be
// "max_new_tokens" in sampling_params. sameInParams lists the members of sampling_params whose keys do not differ; newKeyLayout adds them
// to locations. dropsParam says which members of sampling_params to remove; nil: none.
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

// ScanFor scans a body as ScanBody does. For an endpoint whose bodies have sampling_params, it also scans this member. From then on,
// callers pass the keys of completions to the methods of the Body, which translate them to the keys of this endpoint.
func ScanFor(ep Endpoint, raw []byte, maxDepth int) (Body, error) {
	b, err := ScanBody(raw, maxDepth)
	if err != nil || keyLayouts[ep] == nil {
		return b, err
	}
	params, ok := b.Get(paramsKey)
	if !ok || params[0] != '{' {
		params = []byte("{}") // the engine will refuse a value that is not an object
	}
	const usualDepth = 0 // ScanBody's own bound; the scan of the whole body has applied maxDepth already
	scannedParams, err := ScanBody(params, usualDepth)
	if err != nil { // sampling_params has too many members
		return Body{}, err
	}
	text, ok := b.Get("text") // called before layout is set, so that the key is not translated
	hasText := ok && string(text) != "null"
	b.layout, b.params = keyLayouts[ep], &scannedParams
	if ep == Generate && hasText { // the prompt is in text, not in input_ids
		b.layout = textLayout
	}
	return b, nil
}
