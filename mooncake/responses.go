package mooncake

// A request to /v1/responses names the length of its answer otherwise than a chat, and
// engines keep what they answered unless they are told not to.

var jsonZero = []byte("0")

// dropOnResponses drops what means nothing to a request whose response is not kept.
func dropOnResponses(key string) bool {
	return key == "background" || key == "previous_response_id" || key == "conversation" || Reserved(key)
}

// dropOnResponsesProbe drops what does not shape the prompt, too.
func dropOnResponsesProbe(key string) bool {
	switch key {
	case "text", "include", "enable_response_messages", "max_tool_calls": // the format of the answer
		return true
	}
	return dropOnResponses(key) || dropOnProbe(key)
}

// responsesOnce adds what ends a response after its first token, in one JSON answer.
func responsesOnce(leg *Leg, members []Member) []Member {
	members = append(members, Member{"stream", jsonFalse}, Member{"store", jsonFalse}, Member{"max_output_tokens", jsonOne}, Member{"top_logprobs", jsonZero})
	if leg != nil && leg.IgnoreEOS {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return members
}

// responsesProbe is probeWith for /v1/responses, which has no min_tokens.
func (p *Profile) responsesProbe(b *Body, leg *Leg, params []byte, dst [][]byte) [][]byte {
	members := responsesOnce(leg, make([]Member, 0, 8))
	if p.ProbeIgnoreEOS && (leg == nil || !leg.IgnoreEOS) {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return b.Splice(dst, dropOnResponsesProbe, append(members, Member{"kv_transfer_params", params}))
}

// responsesDecode is DecodeBody for /v1/responses.
func (p *Profile) responsesDecode(b *Body, kv []byte, stream bool, dst [][]byte) [][]byte {
	members := append(make([]Member, 0, 4), Member{"stream", jsonFalse}, Member{"store", jsonFalse})
	if stream {
		members[0].Value = jsonTrue
	}
	if kv != nil {
		members = append(members, Member{"kv_transfer_params", kv})
	}
	drop := dropOnResponses
	if !p.stopTokensSafe(b) {
		drop = func(key string) bool { return key == "stop_token_ids" || dropOnResponses(key) }
	}
	return b.Splice(dst, drop, members)
}

// responsesDiscard is DiscardBody for /v1/responses.
func responsesDiscard(b *Body, leg *Leg, kv []byte, salt string, dst [][]byte) [][]byte {
	members := append(responsesOnce(leg, make([]Member, 0, 8)), Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
	return b.Splice(dst, dropOnResponsesProbe, members)
}
