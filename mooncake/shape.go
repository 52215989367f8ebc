package mooncake

import "evenkeel/internal/rawjson"

// shape says how the bodies of an endpoint differ from those of chat and completions.
// evenkeel adds no min_tokens, stream_options or return_token_ids to bodies with a shape.
// A probe makes the KV on a prefill engine; a discard has a decode engine pull KV that nobody needs, so that it is freed.
type shape struct {
	always         []Member              // members of every leg
	once           []Member              // further members, which end the answer of a probe or a discard after its first token
	knowsIgnoreEOS bool                  // the endpoint knows ignore_eos
	rid            string                // the member from which SGLang takes the request's id; empty: there is none
	drops          func(key string) bool // keys that every leg drops
	dropsOnce      func(key string) bool // further keys, which a leg sent for its KV only (onceBody) drops: they do not shape the prompt
}

// shapes has the endpoints with a shape of their own.
var shapes = [Endpoints]*shape{
	// store is false because engines keep their answers otherwise.
	Responses: {
		always:         []Member{{"store", jsonFalse}},
		once:           []Member{{"max_output_tokens", jsonOne}, {"top_logprobs", []byte("0")}},
		knowsIgnoreEOS: true,
		rid:            "request_id",
		drops: func(key string) bool {
			return key == "background" || key == "previous_response_id" || key == "conversation" || Reserved(key)
		},
		dropsOnce: func(key string) bool {
			switch key {
			case "text", "include", "enable_response_messages", "max_tool_calls": // the format of the answer
				return true
			}
			return dropOnProbe(key)
		},
	},
	// vLLM turns a message into a chat, and this endpoint has no min_tokens. If the client demands a tool by name,
	// vLLM parses the tool's arguments, and fails if they are cut off after the probe's one token. The stop string "{"
	// leaves no arguments to parse. Unlike tool_choice, it does not shape the prompt, and the engine has the KV by then.
	Messages: {
		once:      []Member{{"max_tokens", jsonOne}, {"stop_sequences", []byte(`["{"]`)}},
		drops:     Reserved,
		dropsOnce: func(key string) bool { return key == "stop_sequences" || key == "watermarking" },
	},
}

// thinksFor says whether a message has a budget for thinking. Engines refuse a budget that is not below
// max_tokens, except for a prefill. The budget does not shape the prompt; whether the model thinks does.
func thinksFor(b *Body) bool {
	thinking, _ := b.Get("thinking")
	for key, v := range rawjson.Members(thinking) {
		if key == "type" && v[0] == '"' && rawjson.Unquote(v) == "enabled" {
			return true
		}
	}
	return false
}

// commonMembers returns the members that every leg has: stream, and the members in always.
func (s *shape) commonMembers(stream bool) []Member {
	members := append(make([]Member, 0, 8), Member{"stream", jsonFalse})
	if stream {
		members[0].Value = jsonTrue
	}
	return append(members, s.always...)
}

// onceBody appends the body of a leg that is sent for its KV only: a probe or a discard. more are its further members.
func (s *shape) onceBody(b *Body, drop func(key string) bool, ignoreEOS bool, dst [][]byte, more ...Member) [][]byte {
	members := append(s.commonMembers(false), s.once...)
	if ignoreEOS && s.knowsIgnoreEOS {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, more...))
}

// probe is probeWith for the shape.
func (s *shape) probe(p *Profile, b *Body, changes *Changes, params []byte, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.dropsOnce(key) }
	return s.onceBody(b, drop, p.ProbeIgnoreEOS || changes.ignoresEOS(), dst, Member{"kv_transfer_params", params})
}

// discard is DiscardBody for the shape.
func (s *shape) discard(b *Body, changes *Changes, kv []byte, salt string, dst [][]byte) [][]byte {
	drop := func(key string) bool { return s.drops(key) || s.dropsOnce(key) || key == "thinking" && thinksFor(b) }
	return s.onceBody(b, drop, changes.ignoresEOS(), dst, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
}

// decode is DecodeBody for the shape.
func (s *shape) decode(p *Profile, b *Body, kv []byte, salt string, stream bool, dst [][]byte) [][]byte {
	members := salted(b, salt, s.commonMembers(stream))
	if kv != nil {
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := s.drops
	if !p.stopTokensSafe(b) {
		drop = func(key string) bool { return key == "stop_token_ids" || s.drops(key) }
	}
	return b.Splice(dst, drop, members)
}

func (l *Changes) ignoresEOS() bool { return l != nil && l.IgnoreEOS }
