package refengine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"evenkeel/bench/lab/refengine/pins"
)

// Connector is the shape of kv_transfer_params.
type Connector string

// The connectors.
const (
	AscendMooncake Connector = "ascend-mooncake-v1"
	NIXLPull       Connector = "nixl-pull"
	VLLMMooncake   Connector = "vllm-mooncake"
	Opaque         Connector = "opaque"

	// Of these, the decode engine takes part before the prefill ends.
	AscendLayerwise Connector = "ascend-layerwise"
	SGLang          Connector = "sglang"
	NIXLPush        Connector = "nixl-push"
)

// kvParams is a client's kv_transfer_params, read.
type kvParams struct {
	produce, consume bool // do_remote_decode, do_remote_prefill
	transferID       string
	remote           remote
	promptIDs        []int32 // of a resumed request
	metaserver       string  // of a layerwise decode: where to call back
	virtual          bool    // do_virtual: the blocks are believed to be filled
}

// remote says where the KV of a hand-off lies.
type remote struct {
	address string // host:port
	id      string
	name    string // of the request at a prefill engine that pushes, as the proxy says
	blocks  []int  // nil: this connector names none
	engine  string
	missing string // a field without which the pull cannot start

	named bool // the connector names blocks, and crashes without any
}

// readKV checks what a proxy sent. Only types and, of the fields of its own
// connector, presence matter; others pass.
func readKV(cfg Config, raw json.RawMessage) (*kvParams, *apiError) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, refuse(400, "kv_transfer_params: not an object")
	}
	if len(m) == 0 {
		return nil, nil
	}
	f := fields{m: m, where: "kv_transfer_params."}
	p := &kvParams{produce: f.boolean("do_remote_decode"), consume: f.boolean("do_remote_prefill"), transferID: f.text("transfer_id")}
	if key := cfg.resumeKey(); key != "" {
		p.promptIDs = f.ids(key)
	}
	if p.produce && p.consume {
		return nil, refuse(400, "kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
	}
	switch layerwise := cfg.Connector == AscendLayerwise; {
	case layerwise && p.consume:
		p.metaserver, p.virtual = f.text("metaserver"), f.boolean("do_virtual")
	case p.consume || layerwise && p.produce: // of a layerwise prefill it is where the KV goes
		p.remote = f.remote(cfg)
	}
	if p.produce && cfg.Connector == VLLMMooncake && p.transferID == "" {
		return nil, refuse(400, "kv_transfer_params.transfer_id: missing")
	}
	if f.err != nil {
		return nil, f.err
	}
	return p, nil
}

func (f *fields) remote(cfg Config) remote {
	switch cfg.Connector {
	case VLLMMooncake:
		r := remote{address: strings.TrimPrefix(f.text("remote_bootstrap_addr"), "http://"), id: f.text("transfer_id"),
			engine: f.text("remote_engine_id")}
		r.need("transfer_id", r.id == "", "remote_bootstrap_addr", r.address == "", "remote_engine_id", r.engine == "")
		return r
	case Opaque:
		r := remote{address: f.text("where"), id: f.text("what")}
		r.need("where", r.address == "", "what", r.id == "")
		return r
	}
	r := remote{named: !cfg.Connector.written(), id: f.text("remote_request_id"), engine: f.text("remote_engine_id"),
		blocks: f.blocks("remote_block_ids")}
	host, port := f.text("remote_host"), f.number("remote_port")
	r.address = net.JoinHostPort(host, strconv.Itoa(port))
	r.need("remote_engine_id", r.engine == "", "remote_host", host == "", "remote_port", port == 0, "remote_request_id", r.id == "" &&
		cfg.namesRequests() && cfg.Connector != AscendLayerwise)
	return r
}

func (r *remote) need(pairs ...any) {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1].(bool) {
			r.missing = pairs[i].(string)
			return
		}
	}
}

// blocks reads block ids: nested, or flat as older versions sent them.
func (f *fields) blocks(key string) []int {
	raw, ok := f.member(key)
	if !ok {
		return nil
	}
	var nested [][]int
	if json.Unmarshal(raw, &nested) == nil {
		return slices.Concat(append(nested, []int{})...)
	}
	flat := []int{}
	if json.Unmarshal(raw, &flat) != nil {
		f.fail(key, "not a list of lists of block numbers")
		return nil
	}
	return flat
}

// handoffOf is what a probe returns.
func (l *life) handoffOf(rank int, r *request, k *pins.Pin, cached int, first int32) json.RawMessage {
	cfg := l.engine.cfg
	if cfg.Connector == VLLMMooncake || r.troubles.has(NullHandoff) {
		return json.RawMessage("null")
	}
	host, port := cfg.Server.Advertise, l.ports[l.portOf(rank)]
	if r.troubles.has(WrongHost) {
		host = badHost
	}
	if cfg.Connector == Opaque {
		return fmt.Appendf(nil, `{"do_remote_prefill":true,"do_remote_decode":false,"where":%q,"what":%q,"sealed":[9007199254740993,"é"]}`,
			net.JoinHostPort(host, strconv.Itoa(port)), k.ID)
	}
	named := ""
	if cfg.namesRequests() && !r.troubles.has(NoRequestID) {
		id, _ := json.Marshal(cmp.Or(k.Name, k.ID)) // a string always marshals
		named = fmt.Sprintf(`"remote_request_id":%s,`, id)
	}
	engine := l.engineID(rank)
	common := fmt.Sprintf(`"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":%s,"remote_engine_id":%q,%s"remote_host":%q,"remote_port":%d`,
		blockList(k.Blocks, cfg.KV.FlatBlockIDs || !cfg.namesRequests(), r.troubles), engine, named, host, port)
	switch old := !cfg.namesRequests(); {
	case old && cfg.Connector == NIXLPull:
		return fmt.Appendf(nil, `{%s,"tp_size":1}`, common)
	case cfg.Connector == NIXLPull || cfg.Connector == NIXLPush:
		mode, registration := strings.TrimPrefix(string(cfg.Connector), "nixl-"), ""
		if !cfg.before(33) && cfg.Connector == NIXLPull {
			registration = `"remote_registration_generation":1,`
		}
		return fmt.Appendf(nil, `{%s,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":%d,`+
			`"remote_blocks_expiry_time":null,%s"transfer_mode":%q,"remote_prefill_cached_tokens":%d}`,
			common, k.Tokens, registration, mode, cached)
	case old && cfg.before(12):
		return fmt.Appendf(nil, `{%s,"last_token_id":%d}`, common, first)
	case old:
		return fmt.Appendf(nil, `{%s,"last_token_id":%d,"remote_pcp_size":1,"remote_dcp_size":1,`+
			`"remote_multi_nodes_meta_mapping":{"0":{"host":%q,"engine_id":%q}},"num_prompt_blocks":%d}`,
			common, first, host, engine, len(k.Blocks))
	}
	return fmt.Appendf(nil, `{%s,"remote_pcp_size":1,"remote_dcp_size":1,"remote_ptp_size":1,"last_token_id":%d,`+
		`"remote_multi_nodes_meta_mapping":{"0":{"host":%q,"engine_id":%q,"handshake_port":%d}},"num_prompt_blocks":%d,"remote_block_size":%d,"remote_epoch":9007199254740993}`,
		common, first, host, engine, port, len(k.Blocks), blockSize)
}

// blockList is the list of block ids in a hand-off.
func blockList(ids []int, flat bool, t troubles) []byte {
	if t.has(EmptyBlocks) {
		ids = nil
	}
	list := appendList(nil, 0, len(ids), func(dst []byte, i int) []byte {
		if t.has(StringBlocks) {
			return strconv.AppendQuote(dst, strconv.Itoa(ids[i]))
		}
		return appendInt(dst, ids[i])
	})
	if flat {
		return list
	}
	return append(append([]byte("["), list...), ']')
}
