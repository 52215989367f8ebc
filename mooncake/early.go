package mooncake

import (
	"encoding/json"
	"strconv"
)

// Rendezvous is the data by which the prefill and the decode request of one client request find each other if the decode rank is chosen
// before the prefill. Each connector uses other fields.
type Rendezvous struct {
	// The following fields are for connector ascend-layerwise.
	Metaserver string          // the URL to which the decode engine posts its callback
	Callback   json.RawMessage // the decode engine's callback, which the prefill engine gets: Callback.KV
	RequestID  string          // id of the decode request, see Endpoint.RequestID, which the callback must name

	// The following fields are for connector sglang.
	Endpoint Endpoint
	RID      string // id of both requests; no id may be a prefix of the id of another request
	Host     string // host of the prefill engine's bootstrap server
	Port     int    // port of the prefill engine's bootstrap server
	// Room names one transfer of KV, and is new for every attempt. Room modulo the number of prefill ranks must be PrefillRank (SGLang
	// 0094505d, disaggregation/common/conn.py).
	Room                    int64
	PrefillRank, DecodeRank int // numbers of the ranks for the two requests; -1: the engine has one rank, or chooses the rank itself
}

// EarlyProbe appends to dst the segments of the prefill request, for a profile whose Early is true: the client's request has its decode
// rank already, and r says how its prefill and its decode request find each other. stream says whether the decode engine streams its
// answer. Only SGLang uses stream, because its prefill request must be equal to its decode request except for the ranks.
func (p *Profile) EarlyProbe(b *Body, changes *Patch, r *Rendezvous, stream bool, dst [][]byte) [][]byte {
	if p.Connector == SGLang {
		return p.sglangBody(b, changes, r, r.PrefillRank, stream, dst)
	}
	return p.probeBody(b, changes, r.Callback, dst) // the decode engine's callback says where the prefill engine must write the KV
}

// EarlyDecode appends to dst the segments of the decode request, for a profile whose Early is true. If the request continues an answer that
// broke off (Patch.Resume), the answer so far goes with it. salt, if it is not empty, keeps the request from using wrong blocks of the
// decode engine's prefix cache.
func (p *Profile) EarlyDecode(b *Body, changes *Patch, r *Rendezvous, salt string, stream bool, dst [][]byte) [][]byte {
	if p.Connector == SGLang {
		return p.sglangBody(b, changes, r, r.DecodeRank, stream, dst)
	}
	members, drop := p.answerMembers(b, changes, stream)
	resume := changes.resumeOrNil() // nil: the request begins the answer, and the two calls below change nothing
	// The params are from vllm-ascend 182b75ea, load_balance_proxy_layerwise_server_example.py.
	// Some engines take the ids of prompt and answer so far beside the KV.
	params := appendString([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":`), r.Metaserver)
	kv := resume.addTokenIDs(append(params, '}'))
	drop = resume.dropForLongerPrompt(drop) // echo, for example, must not apply to the longer prompt
	members = append(addSalt(b, salt, members), Member{"kv_transfer_params", kv})
	return b.Splice(dst, drop, members)
}

// RIDHeader is the header that gives a request's id to SGLang at endpoints whose body cannot have an id, such as /v1/messages. SGLang
// reads the header only if SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES is set (0.5.23, entrypoints/request_headers.py). Otherwise SGLang
// invents an id and does not return it.
const RIDHeader = "X-Override-Rid"

// Nameless says whether the engine may run requests of this endpoint under an id that evenkeel does not know, as SGLang does at
// endpoints that need RIDHeader.
func (p *Profile) Nameless(e Endpoint) bool {
	return p.Connector == SGLang && bodyRulesOf[e] != nil && bodyRulesOf[e].rid == ""
}

// sglangBody appends the body of SGLang's prefill or decode request. rank is the rank that must run the request. The two bodies are
// equal, byte for byte, except for the ranks at their end, because the prefill engine also samples the first token. The bootstrap
// members are as in SGLang 004dcda2, sgl-model-gateway/src/routers/http/pd_router.rs. The ranks are as in 0.5.23,
// managers/data_parallel_controller.py and disaggregation/decode.py.
//
// Both requests name the prefill engine's rank. Without this name, some prefill ranks derive a rank from the room, and refuse the room if
// the result is not their own rank, which is 0 in all replicas without DP attention. Other prefill ranks would first register the room
// with their bootstrap server, and do no other work meanwhile (SGLang 0.5.23, CommonKVSender in disaggregation/common/conn.py).
func (p *Profile) sglangBody(b *Body, changes *Patch, r *Rendezvous, rank int, stream bool, dst [][]byte) [][]byte {
	b = p.nameAdapter(b, r.Endpoint, changes)
	members, drop, ridKey := p.sglangMembers(b, changes, r.Endpoint, stream)
	if ridKey != "" { // empty: the body cannot have an id, which is then in the header RIDHeader
		members = append(members, Member{ridKey, appendString(nil, r.RID)})
	}
	members = append(members, Member{"bootstrap_host", appendString(nil, r.Host)},
		Member{"bootstrap_port", strconv.AppendInt(nil, int64(r.Port), 10)}, Member{"bootstrap_room", strconv.AppendInt(nil, r.Room, 10)})
	addRank := func(key string, n int) {
		if n >= 0 { // -1: no rank is named
			members = append(members, Member{key, strconv.AppendInt(nil, int64(n), 10)})
		}
	}
	addRank("routed_dp_rank", rank)
	addRank("disagg_prefill_dp_rank", r.PrefillRank)
	// drop says which of the client's keys are left out. If the request continues an answer that broke off, the answer so far is a part
	// of the prompt, to which echo, for example, must not apply.
	drop = changes.resumeOrNil().dropForLongerPrompt(drop)
	return b.Splice(dst, drop, members)
}

// sglangMembers returns the members to set and the keys to drop in a request to SGLang; sglangBody adds further members. ridKey is the key
// of the request's id; empty: the body cannot have an id. Responses and Messages have rules of their own (bodyRulesOf).
func (p *Profile) sglangMembers(b *Body, changes *Patch, e Endpoint, stream bool) (
	members []Member, drop func(key string) bool, ridKey string,
) {
	if s := bodyRulesOf[e]; s != nil {
		return s.commonMembers(stream), s.drops, s.rid
	}
	members, drop = p.answerMembers(b, changes, stream)
	return members, drop, "rid"
}
