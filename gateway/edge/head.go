package edge

import (
	"bytes"
	"strconv"
)

// framing is how a request head announces its body.
type framing struct {
	length         int // length of the body in bytes; 0: there is no body; not used if chunked is set
	chunked        bool
	awaitsContinue bool // the client waits for 100 Continue before it sends the body
}

// parseHead returns the framing of the body; why is the rule that the head breaks. A head that
// another proxy reads differently can smuggle a second request past that proxy, so parseHead
// refuses such heads if fasthttp accepts them. protocol is the last word of the request line, raw
// the header block as received.
func parseHead(protocol, raw []byte) (f framing, why string) {
	http11 := string(protocol) == "HTTP/1.1"
	if !http11 && string(protocol) != "HTTP/1.0" {
		// fasthttp v1.73.0 serves any protocol, even the HTTP/2 preface.
		return f, "the protocol is neither HTTP/1.1 nor HTTP/1.0"
	}
	var hasLength, hasAuthorization, hasKey bool
	for len(raw) > 0 {
		end := bytes.IndexByte(raw, '\n')
		endsInCRLF := end >= 1 && raw[end-1] == '\r'
		if !endsInCRLF {
			return f, "a header line does not end in CRLF"
		}
		line := raw[:end-1]
		raw = raw[end+1:]
		if len(line) == 0 {
			break
		}
		name, why := fieldName(line)
		if why != "" {
			return f, why
		}
		value := bytes.Trim(line[len(name)+1:], " \t")
		switch {
		case equalFold(name, "Content-Length"):
			if f.length, hasLength = decimal(value); !hasLength { // fasthttp refuses a second one
				return f, "Content-Length is not a number"
			}
		case equalFold(name, "Transfer-Encoding"):
			if !equalFold(value, "chunked") {
				// Some parsers read a body after "identity", and others read none.
				return f, "the only Transfer-Encoding is chunked"
			}
			f.chunked = true
		case equalFold(name, "Authorization"):
			if hasAuthorization { // a proxy in front of this one may have checked only one
				return f, "there are two Authorization headers"
			}
			hasAuthorization = true
		case equalFold(name, "X-Api-Key"):
			if hasKey { // for the same reason
				return f, "there are two x-api-key headers"
			}
			hasKey = true
		case equalFold(name, "Expect"):
			f.awaitsContinue = http11 && equalFold(value, "100-continue") // HTTP/1.0 has no 100 Continue
		}
	}
	switch {
	case hasLength && f.chunked:
		return f, "Content-Length and Transfer-Encoding exclude each other"
	case f.chunked && !http11:
		return f, "Transfer-Encoding needs HTTP/1.1"
	}
	hasBody := f.chunked || f.length > 0
	f.awaitsContinue = f.awaitsContinue && hasBody // nothing to wait for
	return f, ""
}

// fieldName takes a line of a head or a trailer without its CRLF.
func fieldName(line []byte) (name []byte, why string) {
	if line[0] == ' ' || line[0] == '\t' {
		return nil, "a header is folded over several lines"
	}
	colon := bytes.IndexByte(line, ':')
	if colon < 1 {
		return nil, "a header has no name"
	}
	for _, b := range line[:colon] {
		if !tokenByte[b] {
			return nil, "a header name contains a character that is not allowed"
		}
	}
	if bytes.IndexByte(line, '\r') >= 0 { // some parsers end a line there
		return nil, "a header contains a bare CR"
	}
	return line[:colon], ""
}

func equalFold(b []byte, word string) bool {
	return len(b) == len(word) && bytes.EqualFold(b, []byte(word))
}

// decimal reads a length: digits only, and at most 18 of them, which fit into 63 bits.
func decimal(b []byte) (n int, ok bool) {
	u, err := strconv.ParseUint(string(b), 10, 63)
	return int(u), err == nil && len(b) <= 18
}

// tokenByte is true for the bytes that a header name may have (a token of RFC 9110).
var tokenByte = func() (t [256]bool) {
	for _, b := range []byte("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		t[b] = true
	}
	return t
}()
