package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"evenkeel/internal/rawjson"
)

// Errors of ReadCallback; ErrUnknownHost is another.
var (
	// ErrBadCallback: the body is not a callback of this connector.
	ErrBadCallback = errors.New("mooncake: the decode engine sent a malformed callback")
	// ErrOtherRequest: the request_id in the callback is not the id of the request that waits for this callback.
	ErrOtherRequest = errors.New("mooncake: the callback names another request")
)

const (
	callbackDepth = 8       // nesting levels of a callback's JSON at most
	callbackBase  = 1 << 20 // bytes of a callback without its block numbers, at most
	blockBytes    = 32      // bytes of one block number in a callback at most; it needs about 12
	suffixLength  = 9       // bytes of the suffix that an engine adds to a request's id, and cuts off in a callback
	blockDigits   = 10      // digits of a block's number at most
)

// MaxCallback returns how many bytes a callback may have. prompt is the largest number of tokens that the
// prompt can have; block is the size of the decode engine's KV blocks, in tokens. 0: not known.
func MaxCallback(prompt, block int) int { return callbackBase + blockBytes*maxBlocks(prompt, block) }

// maxBlocks returns how many KV blocks a prompt can have in one KV cache group; 0: not known.
func maxBlocks(prompt, block int) int {
	if prompt <= 0 || block <= 0 {
		return 0
	}
	return (prompt-1)/block + 2
}

// Callback is a message of a decode engine with connector ascend-layerwise: it says where the prefill engine is to write the KV.
type Callback struct {
	KV      json.RawMessage // the message, for the prefill engine, byte for byte; a copy
	Empty   bool            // no KV is needed: the whole prompt is in the decode engine's prefix cache
	ShortID bool            // the request_id lacks the end of the id: this decode engine cuts off a suffix that it did not add
	Unknown []string        // keys that evenkeel does not know, but that hold no address
}

// ReadCallback checks a callback that came to the metaserver, the URL of evenkeel to which decode engines post. All needed keys must be
// there, request_id must be id (see Endpoint.RequestID), all hosts must be known, and there may not be more blocks than the prompt can
// have. An unknown key is accepted only if it looks harmless: see addUnknown. prompt and block are as in MaxCallback.
func (p *Profile) ReadCallback(body []byte, id string, prompt, block int, known func(host string) bool) (Callback, error) {
	bad := func(format string, args ...any) (Callback, error) {
		return Callback{}, fmt.Errorf("%w: "+format, append([]any{ErrBadCallback}, args...)...)
	}
	if limit := MaxCallback(prompt, block); len(body) > limit {
		return bad("it has %d bytes, more than %d", len(body), limit)
	}
	c := callbackMembers{plainKeys: p.KVPlainKeys}
	if _, err := rawjson.Scan(body, callbackDepth, func(at rawjson.Place) string {
		return c.add(rawjson.Key(body[at.Key+1:at.KeyEnd-1]), body[at.Val:at.ValEnd:at.ValEnd])
	}); err != nil {
		return bad("%w", err)
	}
	if wrong := c.firstWrong(); wrong != "" {
		return bad("%s", wrong)
	}
	blocks, ok := largestGroup(c.values[atBlockIDs])
	switch limit := maxBlocks(prompt, block); {
	case !ok:
		return bad("remote_block_ids is %s, not a list of block numbers or a list of such lists", describeValue(c.values[atBlockIDs]))
	case limit > 0 && blocks > limit:
		return bad("remote_block_ids has %d blocks in a group, and the prompt at most %d", blocks, limit)
	}
	named := stringValue(c.values[atRequestID])
	isShort := len(id) > suffixLength && named == id[:len(id)-suffixLength]
	if named != id && !isShort {
		return Callback{}, fmt.Errorf("%w: a request_id of %d bytes", ErrOtherRequest, len(named))
	}
	callback := Callback{KV: bytes.Clone(bytes.TrimSpace(body)), Empty: blocks == 0, ShortID: isShort, Unknown: c.unknown}
	if host, _ := splitHost(stringValue(c.values[atHost])); known == nil || !known(host) { // checkHosts accepts a string without a host
		return Callback{}, fmt.Errorf("%w: %s under remote_host; if it is one of yours, add it to kv_hosts of the engine's profile",
			ErrUnknownHost, shownHost(host))
	}
	if err := p.checkHosts(callback.KV, known); err != nil {
		return Callback{}, err
	}
	return callback, nil
}

// callbackKeys lists the known members of a callback with a check of each value (vllm-ascend 182b75ea,
// mooncake_layerwise_connector.py). The first seven must exist.
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

// Indices in callbackKeys of members that ReadCallback uses.
const (
	atBlockIDs = iota
	atRequestID
	atHost
	requiredKeys = 7 // how many of callbackKeys, from the first on, must exist

	maxCount = 1 << 31 // the largest count that a callback may have
)

// forbiddenKeys lists keys that a callback may not have. It does not need them, and with them the prefill engine would do something other
// than write the KV of this request to the engine that sent the callback. vllm-ascend 182b75ea reads these keys, except the last
// two, which vLLM 0.32.0 reads.
var forbiddenKeys = []string{
	"metaserver",               // a URL to which the engine posts
	"do_virtual",               // the engine writes no KV
	"batch_kv_transfer_params", // replaces all of these parameters (SfaRemoteD2HConnector)
	"remote_te_rpc_port",       // the port of the transfer engine, which the prefill engine asks the decode engine for
	"remote_layer_metadata",    // memory addresses to write to; the prefill engine asks the decode engine for them, too
	"prompt_token_ids",         // another prompt; evenkeel itself adds it to a callback
	"hidden_states_path",       // a file to which the engine writes (ExampleHiddenStatesConnector)
}

const (
	maxUnknownKeys = 32 // unknown keys in a callback at most
	maxKeyBytes    = 64 // bytes of an unknown key at most
)

// callbackMembers holds the members of a callback: the values of the known members, with the indices of callbackKeys,
// and the names of the unknown ones.
type callbackMembers struct {
	plainKeys []string // Profile.KVPlainKeys
	values    [len(callbackKeys)]json.RawMessage
	unknown   []string
}

// add stores a member, or returns why the callback is refused; empty: the member is accepted.
func (c *callbackMembers) add(key string, value json.RawMessage) (refused string) {
	for i := range callbackKeys {
		if callbackKeys[i].name != key {
			continue
		}
		if c.values[i] != nil {
			return key + " stands there twice"
		}
		c.values[i] = value
		return ""
	}
	return c.addUnknown(key, value)
}

// addUnknown returns why an unknown key is refused; empty: it is accepted. An accepted key looks like the name of a variable, so that
// a log may show it, and holds no address. It does not begin with '_', because engines keep internal data under such keys.
func (c *callbackMembers) addUnknown(key string, value json.RawMessage) (refused string) {
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
	case slices.Contains(c.plainKeys, key): // the operator has declared that this key holds no address
	case namesAddress(key), address.checkValue(key, value, false) != nil:
		return key + " seems to hold an address, and this evenkeel does not know it; add it to kv_plain_keys of the engine's profile if it is " +
			"right"
	}
	c.unknown = append(c.unknown, key)
	return ""
}

// isVariable says whether a key looks like the name of a variable: a letter, then letters, digits and underscores.
func isVariable(key string) bool {
	for i := range len(key) {
		c := key[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		inside := c == '_' || c >= '0' && c <= '9' // allowed, but not as the first character
		if !letter && (i == 0 || !inside) {
			return false
		}
	}
	return key != "" && len(key) <= maxKeyBytes
}

// firstWrong describes a member that is missing or has a wrong value; empty: there is none.
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

// largestGroup returns how many blocks the largest KV cache group in ids has; ok is false if ids is
// neither a list of block numbers nor a list of such lists.
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

// isNumbers says whether a value is a list of whole numbers that are not negative.
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

// isNumber says whether a value is a whole number from low to high.
func isNumber(v json.RawMessage, low, high int) bool {
	n, ok := rawjson.Int(v, 0, len(v))
	return ok && n >= low && n <= high
}
