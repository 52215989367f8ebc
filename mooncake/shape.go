package mooncake

import "evenkeel/internal/rawjson"

// shape is what the bodies of an endpoint have otherwise than those of chat and completions.
// None of them has min_tokens, stream_options or token ids.
type shape struct {
	always []Member              // in every leg
	once   []Member              // besides, what ends the answer after its first token
	eos    bool                  // ignore_eos is known
	rid    string                // what SGLang takes the id of a request from; empty: from no member
	drops  func(key string) bool // from every leg
	aside  func(key string) bool // besides, what does not shape the prompt
}

// shapes has the endpoints with a shape of their own.
var shapes = [Endpoints]*shape{
	// Engines keep what they answered unless they are told not to.
	Responses: {
		always: []Member{{"store", jsonFalse}},
		once:   []Member{{"max_output_tokens", jsonOne}, {"top_logprobs", []byte("0")}},
		eos:    true,
		rid:    "request_id",
		drops: func(key string) bool {
			return key == "background" || key == "previous_response_id" || key == "conversation" || Reserved(key)
		},
		aside: func(key string) bool {
			switch key {
			case "text", "include", "enable_response_messages", "max_tool_calls": // the format of the answer
				return true
			}
			return dropOnProbe(key)
		},
	},
	// vLLM makes a chat of it, and has no word here for a least number of tokens. Of a tool that the client
	// demands by name it reads the arguments, and refuses those that one token cuts short. The stop string leaves
	// none of them. It does not shape the prompt, as tool_choice may, and the engine has the KV by then.
	Messages: {
		once:  []Member{{"max_tokens", jsonOne}, {"stop_sequences", []byte(`["{"]`)}},
		drops: Reserved,
		aside: func(key string) bool { return key == "stop_sequences" || key == "watermarking" },
	},
}

// thinksFor says whether a message has a budget for thinking. Engines refuse one that is not below
// max_tokens, but for a prefill. It does not shape the prompt, as to think or not does.
func thinksFor(b *Body) bool {
	thinking, _ := b.Get("thinking")
	for key, v := range rawjson.Members(thinking) {
		if key == "type" && v[0] == '"' && rawjson.Unquote(v) == "enabled" {
			return true
		}
	}
	return false
}

// begin returns what every leg has first: whether its answer comes as a stream.
func (s *shape) begin(stream bool) []Member {
	members := append(make([]Member, 0, 8), Member{"stream", jsonFalse})
	if stream {
		members[0].Value = jsonTrue
	}
	return append(members, s.always...)
}

// one is a leg of which only the KV counts.
func (s *shape) one(b *Body, drop func(key string) bool, ignoreEOS bool, dst [][]byte, more ...Member) [][]byte {
	members := append(s.begin(false), s.once...)
	if ignoreEOS && s.eos {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, more...))
}

// probe is probeWith for the shape.
func (s *shape) probe(p *Profile, b *Body, leg *Leg, params []byte, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.aside(key) }
	return s.one(b, drop, p.ProbeIgnoreEOS || leg.ignoresEOS(), dst, Member{"kv_transfer_params", params})
}

// discard is DiscardBody for the shape.
func (s *shape) discard(b *Body, leg *Leg, kv []byte, salt string, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.aside(key) || key == "thinking" && thinksFor(b) }
	return s.one(b, drop, leg.ignoresEOS(), dst, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
}

// decode is DecodeBody for the shape.
func (s *shape) decode(p *Profile, b *Body, kv []byte, salt string, stream bool, dst [][]byte) [][]byte {
	members := salted(b, salt, s.begin(stream))
	if kv != nil {
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := s.drops
	if !p.stopTokensSafe(b) {
		drop = func(key string) bool { return key == "stop_token_ids" || s.drops(key) }
	}
	return b.Splice(dst, drop, members)
}

func (l *Leg) ignoresEOS() bool { return l != nil && l.IgnoreEOS }
