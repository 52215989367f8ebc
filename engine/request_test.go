package engine

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRequestHeadOnTheWire(t *testing.T) {
	u, err := url.Parse("http://[fe80::1%25eth0]:8000/base/")
	require.NoError(t, err)
	full := &Target{ID: "d1", URL: u, Rank: 3, APIKey: "secret"}
	got := appendHead(nil, full, "POST", "/v1/completions", []Header{{"Content-Type", "application/json"}}, 12)
	require.Equal(t, "POST /base/v1/completions HTTP/1.1\r\nHost: [fe80::1]:8000\r\nAccept-Encoding: identity\r\nContent-Length: 12\r\n"+
		"Authorization: Bearer secret\r\nX-data-parallel-rank: 3\r\nContent-Type: application/json\r\n\r\n", string(got))

	plain := target(t, "http://p0:8000")
	require.Equal(t, "GET /health HTTP/1.1\r\nHost: p0:8000\r\nAccept-Encoding: identity\r\n\r\n",
		string(appendHead(nil, plain, "GET", "/health", nil, 0)), "no rank, no key, no length")
	require.Contains(t, string(appendHead(nil, plain, "POST", "/", nil, 0)), "Content-Length: 0\r\n", "an empty POST says so")
}

func TestDialAddress(t *testing.T) {
	for _, tt := range []struct{ name, url, address, host string }{
		{"a port is kept", "http://p0:8000", "p0:8000", "p0:8000"},
		{"http is port 80", "http://p0", "p0:80", "p0"},
		{"https is port 443", "https://p0/x", "p0:443", "p0"},
		{"IPv6 keeps its brackets", "http://[::1]:8000", "[::1]:8000", "[::1]:8000"},
		{"IPv6 without a port", "https://[2001:db8::7]", "[2001:db8::7]:443", "[2001:db8::7]"},
		{"an IPv6 zone is dialled but not sent", "http://[fe80::1%25eth0]:9", "[fe80::1%eth0]:9", "[fe80::1]:9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := target(t, tt.url)
			require.Equal(t, tt.address, tg.address())
			require.Equal(t, tt.host, tg.hostHeader())
		})
	}
}

func TestTLSConfigSpeaksHTTP1AndChecksTheName(t *testing.T) {
	tg := target(t, "https://[fe80::1%25eth0]:9")
	require.Equal(t, "fe80::1", tg.tlsConfig().ServerName)
	tg.TLS = &tls.Config{ServerName: "engine.internal", NextProtos: []string{"h2"}}
	got := tg.tlsConfig()
	require.Equal(t, "engine.internal", got.ServerName)
	require.Equal(t, []string{"http/1.1"}, got.NextProtos, "h2 cannot be spoken here")
	require.Equal(t, []string{"h2"}, tg.TLS.NextProtos, "the caller's own config was changed")
}

func TestWhatMustNotReachTheWireIsRefused(t *testing.T) {
	hdr := func(name, value string) []Header { return []Header{{name, value}} }
	for _, tt := range []struct {
		name, url, key, method, path string
		hdr                          []Header
	}{
		{"CRLF in a header value", "http://e", "", "POST", "/", hdr("X-A", "1\r\nX-B: 2")},
		{"LF in a header value", "http://e", "", "POST", "/", hdr("X-A", "1\nX-B: 2")},
		{"CR in a header value", "http://e", "", "POST", "/", hdr("X-A", "1\rX-B: 2")},
		{"NUL in a header value", "http://e", "", "POST", "/", hdr("X-A", "1\x00")},
		{"CRLF in a header name", "http://e", "", "POST", "/", hdr("X-A: 1\r\nX-B", "2")},
		{"a space in a header name", "http://e", "", "POST", "/", hdr("X A", "2")},
		{"an empty header name", "http://e", "", "POST", "/", hdr("", "2")},
		{"a second Content-Length", "http://e", "", "POST", "/", hdr("content-length", "2")},
		{"a Transfer-Encoding", "http://e", "", "POST", "/", hdr("TRANSFER-ENCODING", "chunked")},
		{"a client's rank", "http://e", "", "POST", "/", hdr("x-Data-Parallel-Rank", "0")},
		{"a client's credential", "http://e", "", "POST", "/", hdr("authorization", "Bearer theirs")},
		{"an Expect", "http://e", "", "POST", "/", hdr("Expect", "100-continue")},
		{"CRLF in the path", "http://e", "", "POST", "/ HTTP/1.1\r\nX: y", nil},
		{"a path without slash", "http://e", "", "POST", "v1", nil},
		{"a method with a space", "http://e", "", "GET /", "/", nil},
		{"an empty method", "http://e", "", "", "/", nil},
		{"a line break in the API key", "http://e", "k\r\nX: y", "POST", "/", nil},
		{"a scheme that is not HTTP", "ftp://e", "", "POST", "/", nil},
		{"a target without host", "http:///x", "", "POST", "/", nil},
		{"a password in the URL", "http://u:p@e", "", "POST", "/", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := target(t, tt.url)
			tg.APIKey = tt.key
			c := NewClient(Options{})
			defer c.Close()
			r, err := c.NewCall(tg).Do(tt.method, tt.path, tt.hdr, nil, Deadlines{})
			require.Nil(t, r)
			e := asError(t, err)
			require.ErrorIs(t, err, ErrRefused)
			require.Equal(t, PhaseRequest, e.Phase)
			require.False(t, e.Sent)
		})
	}
}

// Whatever a caller passes, the bytes on the wire are one request with exactly
// the headers it gave, or nothing.
func TestNoHeaderCanBeginASecondRequest(t *testing.T) {
	text := rapid.StringOfN(rapid.SampledFrom([]rune("aZ0 \t\r\n:;,\x00é-_\"/")), 0, 12, -1)
	rapid.Check(t, func(t *rapid.T) {
		tg := &Target{ID: "e", URL: &url.URL{Scheme: "http", Host: "e:1"}, Rank: -1, APIKey: text.Draw(t, "key")}
		path := "/" + text.Draw(t, "path")
		var hdr []Header
		for range rapid.IntRange(0, 4).Draw(t, "headers") {
			hdr = append(hdr, Header{text.Draw(t, "name"), text.Draw(t, "value")})
		}
		if checkRequest(tg, "POST", path, hdr) != nil {
			return
		}
		wire := append(appendHead(nil, tg, "POST", path, hdr, 4), "body"...)
		br := bufio.NewReader(bytes.NewReader(wire))
		req, err := http.ReadRequest(br)
		require.NoError(t, err, "%q", wire)
		body, err := io.ReadAll(req.Body)
		require.NoError(t, err)
		require.Equal(t, "body", string(body))
		require.Zero(t, br.Buffered(), "bytes behind the request: %q", wire)
		require.Equal(t, path, req.RequestURI)
		sent := 0
		for _, values := range req.Header {
			sent += len(values)
		}
		ours := 2 // Accept-Encoding, Content-Length; Host is not in the map
		if tg.APIKey != "" {
			ours++
		}
		require.Equal(t, len(hdr)+ours, sent, "%q", wire)
	})
}
