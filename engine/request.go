package engine

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// reserved are the headers that a caller may not set: they mark where the message ends, carry the
// API key or the rank, or ask for a feature that this client does not have.
var reserved = []string{
	"Host", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer",
	"Upgrade", "Expect", "Accept-Encoding", "Authorization", "X-data-parallel-rank",
}

// checkRequest refuses a request with bytes that could end a line or the message early. A CRLF in a
// header, for example, could begin a second request on the connection.
func checkRequest(t *Target, method, path string, hdr []Header) error {
	if err := t.check(); err != nil {
		return err
	}
	if !isToken(method) {
		return fmt.Errorf("%w: method %q", ErrRefused, method)
	}
	if path == "" || path[0] != '/' || !isVisible(path) {
		return fmt.Errorf("%w: path %q must begin with / and be printable ASCII", ErrRefused, path)
	}
	for _, h := range hdr {
		if !isToken(h.Name) {
			return fmt.Errorf("%w: header name %q", ErrRefused, h.Name)
		}
		if isReserved(h.Name) {
			return fmt.Errorf("%w: header %s is set by the client itself", ErrRefused, h.Name)
		}
		if !isFieldValue(h.Value) { // the error does not quote the value, which may be a secret
			return fmt.Errorf("%w: header %s has a control character in its value", ErrRefused, h.Name)
		}
	}
	return nil
}

// appendHead appends the request head, whose Content-Length is length. checkRequest must have
// accepted the request, because appendHead checks nothing.
func appendHead(dst []byte, t *Target, method, path string, hdr []Header, length int) []byte {
	dst = append(dst, method...)
	dst = append(dst, ' ')
	dst = append(dst, strings.TrimSuffix(t.URL.EscapedPath(), "/")...)
	dst = append(dst, path...)
	dst = append(dst, " HTTP/1.1\r\n"...)
	dst = appendField(dst, "Host", t.hostHeader())
	dst = appendField(dst, "Accept-Encoding", "identity")
	mayHaveBody := method != http.MethodGet && method != http.MethodHead
	if length > 0 || mayHaveBody { // a POST without a body has the length 0
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, int64(length), 10)
		dst = append(dst, "\r\n"...)
	}
	if t.APIKey != "" {
		dst = append(dst, "Authorization: Bearer "...)
		dst = append(dst, t.APIKey...)
		dst = append(dst, "\r\n"...)
	}
	if t.Rank >= 0 { // the header has the engine's own number of the rank
		dst = append(dst, "X-data-parallel-rank: "...)
		dst = strconv.AppendInt(dst, int64(t.First+t.Rank), 10)
		dst = append(dst, "\r\n"...)
	}
	for _, h := range hdr {
		dst = appendField(dst, h.Name, h.Value)
	}
	return append(dst, "\r\n"...)
}

// appendField appends one line of a request head. It does not check the value for line ends.
func appendField(dst []byte, name, value string) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

// isReserved says whether a header is in reserved; upper and lower case are equal.
func isReserved(name string) bool {
	for _, r := range reserved {
		if len(r) == len(name) && strings.EqualFold(r, name) {
			return true
		}
	}
	return false
}

// isToken says whether s is a token of RFC 9110, as methods and header names must be.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z' // |0x20 turns upper case into lower case
		digit := c >= '0' && c <= '9'
		if !letter && !digit && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// isFieldValue says whether s may be a header value by RFC 9110: it has no control character except
// tab.
func isFieldValue(s string) bool {
	for i := range len(s) {
		isControl := s[i] < ' ' || s[i] == 0x7f
		if isControl && s[i] != '\t' {
			return false
		}
	}
	return true
}
