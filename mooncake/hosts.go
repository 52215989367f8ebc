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

// ErrUnknownHost means that a hand-off or a callback names a host that is no engine's.
var ErrUnknownHost = errors.New("mooncake: the hand-off points to an unknown host")

// checkHosts keeps an attacker who controls a prefill engine from sending decode engines to other
// hosts. Each connector and version has its own keys for hosts, so all strings are checked, at any
// depth. Below a key that means addresses, each string must be a known host, possibly with a port
// or as a URL; elsewhere, if it looks like a URL or an IP address. The values of kv_plain_keys are
// not checked.
func (p *Profile) checkHosts(handoff json.RawMessage, knownHost func(string) bool) error {
	if knownHost == nil {
		knownHost = func(string) bool { return false }
	}
	w := hostCheck{plainKeys: p.KVPlainKeys, known: knownHost}
	return w.checkValue("", handoff, false)
}

type hostCheck struct {
	plainKeys []string          // keys whose values are not checked
	known     func(string) bool // says whether the hand-off may send decode engines to this host
}

// checkValue takes every string for a host if keyMeansAddress: the name of this key, or of one
// around it, means addresses.
func (w *hostCheck) checkValue(key string, raw json.RawMessage, keyMeansAddress bool) error {
	switch raw[0] {
	case '{':
		for o := rawjson.ObjectAt(raw, 0); o.NextValue(); {
			val := o.Value()
			if bytes.IndexByte(val, '"') < 0 && !mayContainAddress(o.Key) {
				continue
			}
			member := rawjson.Key(o.Key)
			if slices.Contains(w.plainKeys, member) { // declared by the operator to hold no address
				continue
			}
			const meansAddress = false
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

// written is still escaped. Addresses have a dot or a colon, which a backslash may hide.
func mayContainAddress(written []byte) bool {
	return bytes.IndexByte(written, '.') >= 0 || bytes.IndexByte(written, ':') >= 0 || bytes.IndexByte(written, '\\') >= 0
}

// checkText takes every part of s for a host if address is set. key is for the error message.
func (w *hostCheck) checkText(key, s string, address bool) error {
	if !address && !strings.ContainsAny(s, ".:") {
		return nil
	}
	for part := range strings.FieldsFuncSeq(s, func(r rune) bool { return strings.ContainsRune(", ;|\t\r\n", r) }) {
		if w.known(part) { // most hosts are plain names, which need no parser
			continue
		}
		host, looksLikeAddress := splitHost(part)
		meansAddress := address || looksLikeAddress
		if !meansAddress || w.known(host) {
			continue
		}
		return fmt.Errorf("%w: %s under %s; if it is one of yours, add it to kv_hosts of the engine's profile; if it is no address at all, add "+
			"the key to kv_plain_keys",
			ErrUnknownHost, shownHost(host), shownKey(key))
	}
	return nil
}

// One of the words in the key must be host, ip, addr or the like, as in remote_host,
// remoteBootstrapAddr, hosts and local_ip.
func namesAddress(key string) bool {
	start := 0
	meansAddress := func(end int) bool {
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
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		nextOfCamelCase := i > start && c <= 'Z' && key[i-1] >= 'a'
		if !letter || nextOfCamelCase {
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

func isAddressWord(w string) bool {
	switch w {
	case "host", "hostname", "ip", "ipv", "addr", "address", "url", "uri", "endpoint":
		return true
	}
	return false
}

// splitHost takes a host, a host with a port, or a URL, and says whether it looks like a URL or an
// IP address.
func splitHost(s string) (host string, looksLikeAddress bool) {
	if !strings.ContainsAny(s, ".:") {
		return s, false
	}
	if _, afterScheme, ok := strings.Cut(s, "://"); ok {
		looksLikeAddress = true
		s = afterScheme
		if end := strings.IndexAny(s, "/?#\\"); end >= 0 {
			s = s[:end]
		}
	}
	if strings.Contains(s, ":") { // otherwise the parser would allocate an error
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

// An error message shows only the length of a name, because an engine may put any text there, even
// a prompt.
func shownHost(host string) string {
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		return `"` + ip.String() + `"`
	}
	return fmt.Sprintf("a name of %d bytes", len(host))
}

// A key that evenkeel does not know could be a part of a prompt.
func shownKey(key string) string {
	switch key {
	case "remote_host", "remote_engine_id", "remote_request_id", "remote_multi_nodes_meta_mapping", "remote_bootstrap_addr", "host", "hosts",
		"ip", "addr", "url":
		return key
	}
	return "a key that we do not know"
}

// describeValue omits the text, which could be a part of a prompt.
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

func shownFinishReason(s string) string {
	switch s {
	case "":
		return "missing"
	case "stop", "length", "tool_calls", "content_filter", "abort", "error", "recomputed":
		return `"` + s + `"`
	}
	return "one that we do not know"
}
