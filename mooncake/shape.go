package mooncake

import "evenkeel/internal/rawjson"

// bodyRules says how the bodies of an endpoint differ from those of chat and completions. Bodies with such rules get no min_tokens,
// stream_options or return_token_ids. There are three kinds of request: a probe makes a prefill engine compute the KV; a decode
// request produces the answer; a discard makes a decode engine pull KV that is not needed, so that the prefill engine frees it.
type bodyRules struct {
	alwaysMembers    []Member              // members of every request
	oneTokenMembers  []Member              // more members of a probe or a discard; they end its answer after one token
	knowsIgnoreEOS   bool                  // the endpoint accepts ignore_eos
	rid              string                // the member in which SGLang expects the request's id; empty: there is none
	drops            func(key string) bool // keys that every request drops
	dropsForOneToken func(key string) bool // more keys that a probe or a discard drops, because they do not change the prompt
}

// bodyRulesOf has the rules of each endpoint that needs some; nil: the endpoint needs none.
var bodyRulesOf = [Endpoints]*bodyRules{
	// store is false because an engine would otherwise keep each answer.
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

// hasThinkingBudget says whether a request of /v1/messages has a budget for thinking. An engine refuses a discard with such a budget,
// because the budget must be below max_tokens, which is 1. It does not check this in a probe.
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

// oneTokenBody appends the body of a probe or a discard, with the members more.
func (s *bodyRules) oneTokenBody(b *Body, drop func(key string) bool, ignoreEOS bool, dst [][]byte, more ...Member) [][]byte {
	members := append(s.commonMembers(false), s.oneTokenMembers...)
	if ignoreEOS && s.knowsIgnoreEOS {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, more...))
}

// probe does what probeBody does, for an endpoint with bodyRules.
func (s *bodyRules) probe(p *Profile, b *Body, changes *Patch, params []byte, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.dropsForOneToken(key) }
	return s.oneTokenBody(b, drop, p.ProbeIgnoreEOS || changes.ignoresEOS(), dst, Member{"kv_transfer_params", params})
}

// discard does what DiscardBody does, for an endpoint with bodyRules.
func (s *bodyRules) discard(b *Body, changes *Patch, kv []byte, salt string, dst [][]byte) [][]byte {
	drop := func(key string) bool {
		return s.drops(key) || s.dropsForOneToken(key) || key == "thinking" && hasThinkingBudget(b)
	}
	return s.oneTokenBody(b, drop, changes.ignoresEOS(), dst, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
}

// decode does what DecodeBody does, for an endpoint with bodyRules.
func (s *bodyRules) decode(p *Profile, b *Body, kv []byte, salt string, stream bool, dst [][]byte) [][]byte {
	members := addSalt(b, salt, s.commonMembers(stream))
	if kv != nil {
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := s.drops
	if !p.mayForwardStopTokens(b) {
		drop = func(key string) bool { return key == "stop_token_ids" || s.drops(key) }
	}
	return b.Splice(dst, drop, members)
}

func (c *Patch) ignoresEOS() bool { return c != nil && c.IgnoreEOS }
