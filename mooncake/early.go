package mooncake

import (
	"encoding/json"
	"strconv"
)

// Rendezvous is how the prefill and the decode request of one client request find each other if the
// decode rank is chosen before the prefill.
type Rendezvous struct {
	// For connector ascend-layerwise.
	Metaserver string          // the URL to which the decode engine posts its callback
	Callback   json.RawMessage // for the prefill engine: Callback.KV
	RequestID  string          // id that the callback must name: Endpoint.RequestID

	// For connector sglang.
	Endpoint Endpoint
	RID      string // id of both requests; no id may be a prefix of the id of another request
	Host     string // host of the prefill engine's bootstrap server
	Port     int
	// Room names one transfer of KV, and is new for every attempt. Modulo the number of prefill ranks
	// it must be PrefillRank (SGLang 0094505d, disaggregation/common/conn.py).
	Room                    int64
	PrefillRank, DecodeRank int // -1: the engine has one rank, or chooses it
}

// EarlyProbe appends the prefill request to dst, for a profile whose Early is true. stream says
// whether the decode engine streams its answer.
func (p *Profile) EarlyProbe(b *Body, changes *Patch, r *Rendezvous, stream bool, dst [][]byte) [][]byte {
	if p.Connector == SGLang {
		return p.sglangBody(b, changes, r, r.PrefillRank, stream, dst)
	}
	return p.probeBody(b, changes, r.Callback, dst)
}

// EarlyDecode is DecodeBody for a profile whose Early is true.
func (p *Profile) EarlyDecode(b *Body, changes *Patch, r *Rendezvous, salt string, stream bool, dst [][]byte) [][]byte {
	if p.Connector == SGLang {
		return p.sglangBody(b, changes, r, r.DecodeRank, stream, dst)
	}
	members, drop := p.answerMembers(b, changes, stream)
	resume := changes.resumeOrNil() // nil changes nothing
	// The params are as in vllm-ascend 182b75ea, load_balance_proxy_layerwise_server_example.py.
	params := appendString([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":`), r.Metaserver)
	kv := resume.addTokenIDs(append(params, '}'))
	drop = resume.dropForLongerPrompt(drop)
	members = append(addSalt(b, salt, members), Member{"kv_transfer_params", kv})
	return b.Splice(dst, drop, members)
}

// RIDHeader gives a request's id to SGLang at endpoints whose body cannot have one, such as
// /v1/messages. SGLang reads it only if SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES is set (0.5.23,
// entrypoints/request_headers.py), or else invents an id and does not return it.
const RIDHeader = "X-Override-Rid"

// Nameless says whether the engine may run requests of this endpoint under an id that evenkeel does
// not know.
func (p *Profile) Nameless(e Endpoint) bool {
	return p.Connector == SGLang && bodyRulesOf[e] != nil && bodyRulesOf[e].rid == ""
}

// sglangBody appends SGLang's prefill or decode request. Both are equal, byte for byte, except for
// the ranks at their end, because the prefill engine also samples the first token. The bootstrap
// members are as in SGLang 004dcda2, sgl-model-gateway/src/routers/http/pd_router.rs, the ranks as
// in 0.5.23, managers/data_parallel_controller.py and disaggregation/decode.py.
//
// Both name the prefill engine's rank. Without it, some prefill ranks derive a rank from the room,
// and refuse the room if that is not their own, which is 0 in all replicas without DP attention.
// Others would first register the room with their bootstrap server, and do no other work meanwhile
// (SGLang 0.5.23, CommonKVSender in disaggregation/common/conn.py).
func (p *Profile) sglangBody(b *Body, changes *Patch, r *Rendezvous, rank int, stream bool, dst [][]byte) [][]byte {
	b = p.nameAdapter(b, r.Endpoint, changes)
	members, drop, ridKey := p.sglangMembers(b, changes, r.Endpoint, stream)
	if ridKey != "" {
		members = append(members, Member{ridKey, appendString(nil, r.RID)})
	}
	members = append(members, Member{"bootstrap_host", appendString(nil, r.Host)},
		Member{"bootstrap_port", strconv.AppendInt(nil, int64(r.Port), 10)}, Member{"bootstrap_room", strconv.AppendInt(nil, r.Room, 10)})
	addRank := func(key string, n int) {
		if n >= 0 {
			members = append(members, Member{key, strconv.AppendInt(nil, int64(n), 10)})
		}
	}
	addRank("routed_dp_rank", rank)
	addRank("disagg_prefill_dp_rank", r.PrefillRank)
	drop = changes.resumeOrNil().dropForLongerPrompt(drop)
	return b.Splice(dst, drop, members)
}

// ridKey is the key of the request's id; empty: only RIDHeader can have it.
func (p *Profile) sglangMembers(b *Body, changes *Patch, e Endpoint, stream bool) (
	members []Member, drop func(key string) bool, ridKey string,
) {
	if s := bodyRulesOf[e]; s != nil {
		return s.commonMembers(stream), s.drops, s.rid
	}
	members, drop = p.answerMembers(b, changes, stream)
	return members, drop, "rid"
}
