package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"evenkeel/internal/rawjson"
)

// ErrUnknownHost means that a hand-off or a callback names a host that is not known to be an engine's.
var ErrUnknownHost = errors.New("mooncake: the hand-off points to an unknown host")

// checkHosts refuses a hand-off that names an unknown host, so that an attacker who controls a prefill engine cannot send decode engines to
// other hosts. Each connector and version has its own keys for hosts, so all strings are checked, at any depth. Below a key whose name
// means addresses, each string must be a known host, possibly with a port or as a URL. Elsewhere, a string must have a known host if it
// looks like a URL or an IP address. The values of the profile's kv_plain_keys are not checked.
func (p *Profile) checkHosts(handoff json.RawMessage, knownHost func(string) bool) error {
	if knownHost == nil {
		knownHost = func(string) bool { return false }
	}
	w := hostCheck{plainKeys: p.KVPlainKeys, known: knownHost}
	return w.checkValue("", handoff, false)
}

// hostCheck looks for unknown hosts in a JSON value.
type hostCheck struct {
	plainKeys []string          // keys whose values are not checked
	known     func(string) bool // says whether the hand-off may send decode engines to this host
}

// checkValue returns an error if the value of key contains an unknown host. keyMeansAddress says that the name of this key, or of a key
// around it, means addresses, so that every string in the value counts as a host. Otherwise a string counts only if it looks like an
// address.
func (w *hostCheck) checkValue(key string, raw json.RawMessage, keyMeansAddress bool) error {
	switch raw[0] {
	case '{':
		for o := rawjson.ObjectAt(raw, 0); o.NextValue(); {
			val := o.Value()
			if bytes.IndexByte(val, '"') < 0 && !mayContainAddress(o.Key) { // neither the key nor a string in the value could be an address
				continue
			}
			member := rawjson.Key(o.Key)
			if slices.Contains(w.plainKeys, member) { // the operator has declared that values of this key are no addresses
				continue
			}
			const meansAddress = false // a key counts as a host only if it looks like one
			if err := w.checkText(key, member, meansAddress); err != nil {
				return err
			}
			if err := w.checkValue(member, val, keyMeansAddress || namesAddress(member)); err != nil {
				return err
			}
		}
	case '[':
		for val := range rawjson.Elements(raw) {
			if err := w.checkValue(key, val, keyMeansAddress); err != nil {
				return err
			}
		}
	case '"':
		if keyMeansAddress || mayContainAddress(raw) {
			return w.checkText(key, rawjson.Unquote(raw), keyMeansAddress)
		}
	}
	return nil
}

// mayContainAddress says whether a JSON string that is still escaped may contain something that looks like a URL or an IP address. All of
// these have a dot or a colon, which an escape with a backslash may hide.
func mayContainAddress(written []byte) bool {
	return bytes.IndexByte(written, '.') >= 0 || bytes.IndexByte(written, ':') >= 0 || bytes.IndexByte(written, '\\') >= 0
}

// checkText returns an error if a string, which may be a list of hosts, contains an unknown host. key is for the error message. address
// says that the key means addresses, so that every part of s counts as a host.
func (w *hostCheck) checkText(key, s string, address bool) error {
	if !address && !strings.ContainsAny(s, ".:") { // no part of s looks like an address
		return nil
	}
	for part := range strings.FieldsFuncSeq(s, func(r rune) bool { return strings.ContainsRune(", ;|\t\r\n", r) }) {
		if w.known(part) { // most hosts are plain names, which need no parser
			continue
		}
		host, looksLikeAddress := splitHost(part)
		meansAddress := address || looksLikeAddress // the key, or the form of the part, says that the part is an address
		if !meansAddress || w.known(host) {
			continue
		}
		return fmt.Errorf("%w: %s under %s; if it is one of yours, add it to kv_hosts of the engine's profile; if it is no address at all, add "+
			"the key to kv_plain_keys",
			ErrUnknownHost, shownHost(host), shownKey(key))
	}
	return nil
}

// namesAddress says whether the name of a key means addresses: one of the words in it is host, ip, addr or the like, as in remote_host,
// remoteBootstrapAddr, hosts and local_ip.
func namesAddress(key string) bool {
	start := 0                           // where the current word begins
	meansAddress := func(end int) bool { // says whether the word from start to end means an address
		if end-start < len("ip") {
			return false
		}
		lower := strings.ToLower(key[start:end])
		singular := strings.TrimSuffix(lower, "s")
		return isAddressWord(lower) || isAddressWord(singular) || isAddressWord(strings.TrimSuffix(lower, "es")) ||
			strings.HasSuffix(singular, "addr") || strings.HasSuffix(singular, "host") || strings.HasSuffix(singular, "hostname")
	}
	for i := range len(key) {
		c := key[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'                    // |0x20 turns an upper-case letter into its lower-case one
		nextOfCamelCase := i > start && c <= 'Z' && key[i-1] >= 'a' // an upper-case letter after a lower-case one
		if !letter || nextOfCamelCase {                             // the word ends before i
			if meansAddress(i) {
				return true
			}
			start = i
			if !letter {
				start = i + 1
			}
		}
	}
	return meansAddress(len(key))
}

// isAddressWord says whether a word means an address. The caller passes the word in the singular and in lower case.
func isAddressWord(w string) bool {
	switch w {
	case "host", "hostname", "ip", "ipv", "addr", "address", "url", "uri", "endpoint":
		return true
	}
	return false
}

// splitHost returns the host in s, which may be a host, a host with a port, or a URL. looksLikeAddress says whether s
// looks like a URL or an IP address.
func splitHost(s string) (host string, looksLikeAddress bool) {
	if !strings.ContainsAny(s, ".:") {
		return s, false // a plain name, which needs no parser
	}
	if _, afterScheme, ok := strings.Cut(s, "://"); ok {
		looksLikeAddress = true
		s = afterScheme
		if end := strings.IndexAny(s, "/?#\\"); end >= 0 {
			s = s[:end]
		}
	}
	if strings.Contains(s, ":") { // without a colon there is no port, and the parser would allocate an error
		if at, err := netip.ParseAddrPort(s); err == nil {
			return at.Addr().String(), true
		}
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if ip, err := netip.ParseAddr(bare); err == nil {
		return ip.String(), true
	}
	name, port, ok := strings.Cut(s, ":")
	hasPort := ok && port != "" && strings.Trim(port, "0123456789") == ""
	if hasPort {
		return name, looksLikeAddress
	}
	return s, looksLikeAddress
}

// shownHost returns what an error message may show of a host: an IP address, but only the length of a name, because an engine may put
// any text there, even a prompt.
func shownHost(host string) string {
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		return `"` + ip.String() + `"`
	}
	return fmt.Sprintf("a name of %d bytes", len(host))
}

// shownKey returns what an error message may show of a key. A key that evenkeel does not know is hidden, because it could
// be a part of a prompt.
func shownKey(key string) string {
	switch key {
	case "remote_host", "remote_engine_id", "remote_request_id", "remote_multi_nodes_meta_mapping", "remote_bootstrap_addr", "host", "hosts",
		"ip", "addr", "url":
		return key
	}
	return "a key that we do not know"
}

// describeValue describes a JSON value by its type and length for an error message, without its text, which could be a part of a prompt.
func describeValue(raw json.RawMessage) string {
	if len(raw) == 0 {
		return "missing"
	}
	switch raw[0] {
	case '"':
		return fmt.Sprintf("a string of %d bytes", len(raw)-2)
	case '[':
		return fmt.Sprintf("a list of %d bytes", len(raw))
	case '{':
		return fmt.Sprintf("an object of %d bytes", len(raw))
	case 't', 'f', 'n':
		return string(raw)
	}
	return "a number"
}

// shownFinishReason returns what an error message may show of a finish_reason: only values that evenkeel knows.
func shownFinishReason(s string) string {
	switch s {
	case "":
		return "missing"
	case "stop", "length", "tool_calls", "content_filter", "abort", "error", "recomputed":
		return `"` + s + `"`
	}
	return "one that we do not know"
}
