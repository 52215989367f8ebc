package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"evenkeel/internal/rawjson"
)

// An error of ReadCallback wraps one of these, or ErrUnknownHost.
var (
	ErrBadCallback = errors.New("mooncake: the decode engine sent a malformed callback")
	// ErrOtherRequest means that the callback is not of the request that waits for it.
	ErrOtherRequest = errors.New("mooncake: the callback names another request")
)

const (
	callbackDepth = 8       // most nesting levels of a callback's JSON
	callbackBase  = 1 << 20 // most bytes of a callback without its block numbers
	blockBytes    = 32      // bytes for one block number, which needs about 12
	suffixLength  = 9       // bytes that an engine adds to a request's id and cuts off in a callback
	blockDigits   = 10      // most digits of a block number
)

// MaxCallback bounds a callback, in bytes. prompt is the longest possible prompt, block the size of
// a KV block, both in tokens; 0: not known. The number of blocks is rounded up, with one in
// reserve.
func MaxCallback(prompt, block int) int { return callbackBase + blockBytes*maxBlocks(prompt, block) }

func maxBlocks(prompt, block int) int {
	if prompt <= 0 || block <= 0 {
		return 0
	}
	return (prompt-1)/block + 2
}

// Callback is a message from a decode engine with connector ascend-layerwise, which says where the
// prefill engine must write the KV.
type Callback struct {
	KV      json.RawMessage // a copy of the whole message, for the prefill engine
	Empty   bool            // no KV is needed: the whole prompt is in the decode engine's prefix cache
	ShortID bool            // the decode engine cut off a suffix that it had not added
	Unknown []string        // keys of the message that evenkeel does not know; they hold no address
}

// ReadCallback checks a callback: all required keys must exist once, all hosts be known, request_id
// be id (see Endpoint.RequestID) or lack its last bytes, which some decode engines cut off, and
// there may not be more blocks than the prompt can have. An unknown key is accepted only if it
// holds no address. prompt and block are as in MaxCallback.
func (p *Profile) ReadCallback(body []byte, id string, prompt, block int, known func(host string) bool) (Callback, error) {
	bad := func(format string, args ...any) (Callback, error) {
		return Callback{}, fmt.Errorf("%w: "+format, append([]any{ErrBadCallback}, args...)...)
	}
	if limit := MaxCallback(prompt, block); len(body) > limit {
		return bad("it has %d bytes, more than %d", len(body), limit)
	}
	c := callbackMembers{plainKeys: p.KVPlainKeys}
	if _, err := rawjson.Scan(body, callbackDepth, func(at rawjson.Place) string {
		key, value := rawjson.Key(body[at.Key+1:at.KeyEnd-1]), body[at.Val:at.ValEnd:at.ValEnd]
		return c.add(key, value)
	}); err != nil {
		return bad("%w", err)
	}
	if wrong := c.firstWrong(); wrong != "" {
		return bad("%s", wrong)
	}
	blocks, ok := largestGroup(c.values[atBlockIDs])
	switch limit := maxBlocks(prompt, block); {
	case !ok:
		return bad("remote_block_ids is %s, not a list of block numbers or a list of such lists",
			describeValue(c.values[atBlockIDs]))
	case limit > 0 && blocks > limit:
		return bad("remote_block_ids has %d blocks in a group, and the prompt at most %d", blocks, limit)
	}
	namedID := stringValue(c.values[atRequestID])
	// A decode engine cuts off the random suffix that vLLM adds to ids, or as much of evenkeel's own
	// id if vLLM added none.
	isShort := len(id) > suffixLength && namedID == id[:len(id)-suffixLength]
	if namedID != id && !isShort {
		return Callback{}, fmt.Errorf("%w: a request_id of %d bytes", ErrOtherRequest, len(namedID))
	}
	callback := Callback{KV: bytes.Clone(bytes.TrimSpace(body)), Empty: blocks == 0, ShortID: isShort, Unknown: c.unknown}
	// checkHosts would accept a remote_host that names no host at all.
	if host, _ := splitHost(stringValue(c.values[atHost])); known == nil || !known(host) {
		return Callback{}, fmt.Errorf("%w: %s under remote_host; if it is one of yours, add it to kv_hosts of the engine's profile",
			ErrUnknownHost, shownHost(host))
	}
	if err := p.checkHosts(callback.KV, known); err != nil {
		return Callback{}, err
	}
	return callback, nil
}

// callbackKeys has the known members of a callback (vllm-ascend 182b75ea,
// mooncake_layerwise_connector.py). The first requiredKeys are required.
var callbackKeys = [...]struct {
	name string
	ok   func(json.RawMessage) bool
}{
	atBlockIDs:  {"remote_block_ids", isList},
	atRequestID: {"request_id", isName},
	atHost:      {"remote_host", isName},
	3:           {"remote_engine_id", isName},
	4:           {"remote_port", func(v json.RawMessage) bool { return isNumber(v, 1, 65535) }},
	5:           {"do_remote_prefill", func(v json.RawMessage) bool { return string(v) == "false" }},
	6:           {"do_remote_decode", func(v json.RawMessage) bool { return string(v) == "true" }},
	7:           {"token_ids", isNumbers},
	8:           {"remote_block_size", func(v json.RawMessage) bool { return isNumbers(v) || isNumber(v, 1, maxCount) }},
	9:           {"remote_tp_size", isSize},
	10:          {"remote_pcp_size", isSize},
	11:          {"remote_dcp_size", isSize},
	12:          {"remote_cached_tokens", func(v json.RawMessage) bool { return isNumber(v, 0, maxCount) }},
}

// Indices in callbackKeys.
const (
	atBlockIDs = iota
	atRequestID
	atHost
	requiredKeys = 7

	maxCount = 1 << 31
)

// forbiddenKeys would make the prefill engine do something other than write this request's KV to
// the decode engine that sent the callback. vllm-ascend 182b75ea reads them, except the last two,
// which vLLM 0.32.0 reads.
var forbiddenKeys = []string{
	"metaserver",               // a URL to which the prefill engine would post
	"do_virtual",               // the prefill engine would write no KV
	"batch_kv_transfer_params", // would replace all other parameters (SfaRemoteD2HConnector)
	// The port of the transfer engine, for which the prefill engine asks the decode engine itself.
	"remote_te_rpc_port",
	// Memory addresses to write to, for which the prefill engine asks the decode engine itself.
	"remote_layer_metadata",
	"prompt_token_ids",   // another prompt; only evenkeel may add it
	"hidden_states_path", // a file to write to (ExampleHiddenStatesConnector)
}

const (
	maxUnknownKeys = 32 // most unknown keys in a callback
	maxKeyBytes    = 64 // most bytes of an unknown key
)

type callbackMembers struct {
	plainKeys []string
	values    [len(callbackKeys)]json.RawMessage
	unknown   []string
}

func (c *callbackMembers) add(key string, value json.RawMessage) (refused string) {
	for i := range callbackKeys {
		if callbackKeys[i].name != key {
			continue
		}
		if c.values[i] != nil { // two parsers could take different ones
			return key + " stands there twice"
		}
		c.values[i] = value
		return ""
	}
	return c.addUnknown(key, value)
}

// An accepted key is like a variable's name, so that a log may show it, and holds no address. It
// does not begin with '_', because engines keep internal data under such keys.
func (c *callbackMembers) addUnknown(key string, value json.RawMessage) (refused string) {
	// It fails for any address, even a known host.
	address := hostCheck{plainKeys: c.plainKeys, known: func(string) bool { return false }}
	switch {
	case slices.Contains(forbiddenKeys, key):
		return "a decode engine may not send " + key
	case !isVariable(key):
		return "a key whose name is not a letter and then at most 63 letters, digits and underscores"
	case slices.Contains(c.unknown, key):
		return key + " stands there twice"
	case len(c.unknown) == maxUnknownKeys:
		return fmt.Sprintf("more than %d keys that this evenkeel does not know", maxUnknownKeys)
	case slices.Contains(c.plainKeys, key): // declared by the operator to hold no address
	case namesAddress(key), address.checkValue(key, value, false) != nil:
		return key + " seems to hold an address, and this evenkeel does not know it; add it to kv_plain_keys of the engine's profile if it is " +
			"right"
	}
	c.unknown = append(c.unknown, key)
	return ""
}

func isVariable(key string) bool {
	for i := range len(key) {
		c := key[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		inside := c == '_' || c >= '0' && c <= '9'
		if !letter && (i == 0 || !inside) {
			return false
		}
	}
	return key != "" && len(key) <= maxKeyBytes
}

func (c *callbackMembers) firstWrong() string {
	for i, v := range c.values {
		k := &callbackKeys[i]
		missing := v == nil && i < requiredKeys
		invalid := v != nil && !k.ok(v)
		if missing || invalid {
			return k.name + " is " + describeValue(v) + ", which it cannot be"
		}
	}
	return ""
}

// ok is false also if a number has more than blockDigits digits.
func largestGroup(ids json.RawMessage) (blocks int, ok bool) {
	if _, ok = countBlocks(ids); !ok {
		return 0, false
	}
	flat := 0
	for id := range rawjson.Elements(ids) {
		if id[0] != '[' {
			flat++
			ok = ok && len(id) <= blockDigits
			continue
		}
		n := 0
		for id := range rawjson.Elements(id) {
			n++
			ok = ok && len(id) <= blockDigits
		}
		blocks = max(blocks, n)
	}
	return max(blocks, flat), ok
}

func isList(v json.RawMessage) bool { return v[0] == '[' }

func isSize(v json.RawMessage) bool { return isNumber(v, 1, maxCount) }

func isNumbers(v json.RawMessage) bool {
	if !isList(v) {
		return false
	}
	for n := range rawjson.Elements(v) {
		if !isNumber(n, 0, maxCount) {
			return false
		}
	}
	return true
}

func isNumber(v json.RawMessage, low, high int) bool {
	n, ok := rawjson.Int(v, 0, len(v))
	return ok && n >= low && n <= high
}
