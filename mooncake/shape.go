package mooncake

import "evenkeel/internal/rawjson"

// bodyRules says how the bodies of an endpoint differ from those of chat and completions. Bodies with such rules get no min_tokens,
// stream_options or return_token_ids. There are three kinds of request: a probe makes a prefill engine compute the KV; a decode request
// produces the answer; a discard makes a decode engine pull KV that is not needed, so that the prefill engine frees it.
type bodyRules struct {
	alwaysMembers    []Member              // members that every request gets
	oneTokenMembers  []Member              // members that a probe or a discard gets besides, so that its answer ends after one token
	knowsIgnoreEOS   bool                  // the endpoint accepts ignore_eos
	rid              string                // the key under which SGLang expects the request's id; empty: the body cannot have an id
	drops            func(key string) bool // says which keys every request leaves out
	dropsForOneToken func(key string) bool // says which other keys a probe or a discard leaves out, because they do not change the prompt
}

// bodyRulesOf has the rules of each endpoint that differs from chat and completions; nil: the endpoint does not.
var bodyRulesOf = [Endpoints]*bodyRules{
	// store is false, because with the default an engine would keep each answer.
	Responses: {
		alwaysMembers:   []Member{{"store", jsonFalse}},
		oneTokenMembers: []Member{{"max_output_tokens", jsonOne}, {"top_logprobs", []byte("0")}},
		knowsIgnoreEOS:  true,
		rid:             "request_id",
		drops: func(key string) bool {
			return key == "background" || key == "previous_response_id" || key == "conversation" || Reserved(key)
		},
		dropsForOneToken: func(key string) bool {
			switch key {
			case "text", "include", "enable_response_messages", "max_tool_calls": // these change only the format of the answer
				return true
			}
			return dropOnProbe(key)
		},
	},
	// The stop string "{" is for a client that demands a tool by name. vLLM parses the tool's arguments, and would fail because they
	// are cut off after the one token of a probe. With this stop string there are no arguments to parse. tool_choice itself must stay,
	// because it changes the prompt.
	Messages: {
		oneTokenMembers:  []Member{{"max_tokens", jsonOne}, {"stop_sequences", []byte(`["{"]`)}},
		drops:            Reserved,
		dropsForOneToken: func(key string) bool { return key == "stop_sequences" || key == "watermarking" },
	},
}

// hasThinkingBudget says whether a request of /v1/messages has a budget of tokens for thinking, as every request with thinking of type
// enabled has. The budget must be below max_tokens. A discard (see bodyRules) has max_tokens 1, so an engine would refuse it with a budget.
// A probe has max_tokens 1, too, but the engine does not check its budget.
func hasThinkingBudget(b *Body) bool {
	thinking, _ := b.Get("thinking")
	for key, v := range rawjson.Members(thinking) {
		if key == "type" && v[0] == '"' && rawjson.Unquote(v) == "enabled" {
			return true
		}
	}
	return false
}

// commonMembers returns the members that every request gets: stream, and alwaysMembers.
func (s *bodyRules) commonMembers(stream bool) []Member {
	members := append(make([]Member, 0, 8), Member{"stream", jsonFalse})
	if stream {
		members[0].Value = jsonTrue
	}
	return append(members, s.alwaysMembers...)
}

// oneTokenBody appends the body of a probe or a discard, with the additional members more. ignoreEOS keeps an end-of-sequence
// token from ending the answer.
func (s *bodyRules) oneTokenBody(b *Body, drop func(key string) bool, ignoreEOS bool, dst [][]byte, more ...Member) [][]byte {
	members := append(s.commonMembers(false), s.oneTokenMembers...)
	if ignoreEOS && s.knowsIgnoreEOS {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, more...))
}

// probe appends a probe for an endpoint with bodyRules, as probeBody does for the other endpoints.
func (s *bodyRules) probe(p *Profile, b *Body, changes *Patch, params []byte, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.dropsForOneToken(key) }
	members := addSalt(b, changes.probeSalt(), []Member{{"kv_transfer_params", params}})
	return s.oneTokenBody(b, drop, p.ProbeIgnoreEOS || changes.ignoresEOS(), dst, members...)
}

// discard appends a discard for an endpoint with bodyRules, as DiscardBody does for the other endpoints.
func (s *bodyRules) discard(b *Body, changes *Patch, kv []byte, salt string, dst [][]byte) [][]byte {
	drop := func(key string) bool {
		return s.drops(key) || s.dropsForOneToken(key) || key == "thinking" && hasThinkingBudget(b)
	}
	return s.oneTokenBody(b, drop, changes.ignoresEOS(), dst, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
}

// decode appends a decode request for an endpoint with bodyRules, as DecodeBody does for the other endpoints.
func (s *bodyRules) decode(p *Profile, b *Body, kv []byte, salt string, stream bool, dst [][]byte) [][]byte {
	members := addSalt(b, salt, s.commonMembers(stream))
	if kv != nil { // nil: the decode engine computes the prompt itself
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := s.drops
	if !p.mayForwardStopTokens(b) { // these ids could crash the engine
		drop = func(key string) bool { return key == "stop_token_ids" || s.drops(key) }
	}
	return b.Splice(dst, drop, members)
}

func (c *Patch) ignoresEOS() bool { return c != nil && c.IgnoreEOS }

func (c *Patch) probeSalt() string {
	if c == nil {
		return ""
	}
	return c.ProbeSalt
}
