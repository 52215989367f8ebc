package edge

import "bytes"

// malformed names the rule a request head breaks, or "" when it breaks none.
// fasthttp refuses most of what smuggles a request past a proxy by itself
// (fasthttp 4); these it lets through, and a proxy in front of us may read
// each of them differently than we do. protocol is what the request line ends
// in, raw the header block as it came.
func malformed(protocol, raw []byte) string {
	http11 := string(protocol) == "HTTP/1.1"
	if !http11 && string(protocol) != "HTTP/1.0" { // v1.73.0 serves anything, the HTTP/2 preface too
		return "the protocol is neither HTTP/1.1 nor HTTP/1.0"
	}
	var length, coding bool
	for len(raw) > 0 {
		end := bytes.IndexByte(raw, '\n')
		if end < 1 || raw[end-1] != '\r' {
			return "a header line does not end in CRLF"
		}
		line := raw[:end-1]
		raw = raw[end+1:]
		if len(line) == 0 {
			break
		}
		if line[0] == ' ' || line[0] == '\t' {
			return "a header is folded over several lines"
		}
		colon := bytes.IndexByte(line, ':')
		if colon < 1 {
			return "a header has no name"
		}
		name := line[:colon]
		for _, b := range name {
			if !tokenByte[b] {
				return "a header name contains a character that is not allowed"
			}
		}
		if bytes.IndexByte(line, '\r') >= 0 {
			return "a header contains a bare CR"
		}
		length = length || bytes.EqualFold(name, []byte("Content-Length"))
		coding = coding || bytes.EqualFold(name, []byte("Transfer-Encoding"))
	}
	switch {
	case length && coding:
		return "Content-Length and Transfer-Encoding exclude each other"
	case coding && !http11:
		return "Transfer-Encoding needs HTTP/1.1"
	}
	return ""
}

// tokenByte holds the characters of a token, RFC 9110 5.6.2.
var tokenByte = func() (t [256]bool) {
	for _, b := range []byte("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		t[b] = true
	}
	return t
}()
