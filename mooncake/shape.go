package mooncake

import "evenkeel/internal/rawjson"

// bodyRules says how an endpoint's bodies differ from those of chat and completions. Such bodies
// get no min_tokens, stream_options or return_token_ids.
type bodyRules struct {
	alwaysMembers   []Member // members that every request gets
	oneTokenMembers []Member // of a probe or a discard, which ends after one token
	knowsIgnoreEOS  bool
	rid             string                // SGLang's key of the request's id; empty: none
	drops           func(key string) bool // says which keys every request leaves out
	// dropsForOneToken says which other keys a probe or a discard leaves out: they do not change the
	// prompt.
	dropsForOneToken func(key string) bool
}

// Chat and completions have no such rules.
var bodyRulesOf = [Endpoints]*bodyRules{
	// By default an engine would store each answer.
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
			case "text", "include", "enable_response_messages", "max_tool_calls":
				// They change only the format of the answer.
				return true
			}
			return dropOnProbe(key)
		},
	},
	// vLLM parses the arguments of a tool that the client demands by name, and would fail because they
	// are cut off after the one token of a probe. With the stop string "{" there are none. tool_choice
	// itself must stay, because it changes the prompt.
	Messages: {
		oneTokenMembers:  []Member{{"max_tokens", jsonOne}, {"stop_sequences", []byte(`["{"]`)}},
		drops:            Reserved,
		dropsForOneToken: func(key string) bool { return key == "stop_sequences" || key == "watermarking" },
	},
}

// A budget of tokens for thinking must be below max_tokens, so an engine would refuse it in a
// discard, which has max_tokens 1. It does not check the budget of a probe.
func hasThinkingBudget(b *Body) bool {
	thinking, _ := b.Get("thinking")
	for key, v := range rawjson.Members(thinking) {
		if key == "type" && v[0] == '"' && rawjson.Unquote(v) == "enabled" {
			return true
		}
	}
	return false
}

func (s *bodyRules) commonMembers(stream bool) []Member {
	members := append(make([]Member, 0, 8), Member{"stream", jsonFalse})
	if stream {
		members[0].Value = jsonTrue
	}
	return append(members, s.alwaysMembers...)
}

func (s *bodyRules) oneTokenBody(b *Body, drop func(key string) bool, ignoreEOS bool, dst [][]byte, more ...Member) [][]byte {
	members := append(s.commonMembers(false), s.oneTokenMembers...)
	if ignoreEOS && s.knowsIgnoreEOS {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, more...))
}

func (s *bodyRules) probe(p *Profile, b *Body, changes *Patch, params []byte, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.dropsForOneToken(key) }
	members := addSalt(b, changes.probeSalt(), []Member{{"kv_transfer_params", params}})
	return s.oneTokenBody(b, drop, p.ProbeIgnoreEOS || changes.ignoresEOS(), dst, members...)
}

func (s *bodyRules) discard(b *Body, changes *Patch, kv []byte, salt string, dst [][]byte) [][]byte {
	drop := func(key string) bool {
		return s.drops(key) || s.dropsForOneToken(key) || key == "thinking" && hasThinkingBudget(b)
	}
	return s.oneTokenBody(b, drop, changes.ignoresEOS(), dst, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
}

func (s *bodyRules) decode(p *Profile, b *Body, kv []byte, salt string, stream bool, dst [][]byte) [][]byte {
	members := addSalt(b, salt, s.commonMembers(stream))
	if kv != nil {
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := s.drops
	if !p.mayForwardStopTokens(b) { // they could crash the engine
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
