package edge

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func FuzzParseHead(f *testing.F) {
	f.Add([]byte("Host: x\r\nContent-Length: 2\r\n\r\n"), "HTTP/1.1")
	f.Add([]byte("A: b\r\n c\r\n\r\n"), "HTTP/1.1")
	f.Add([]byte("A: b\nC: d\r\n\r\n"), "HTTP/1.0")
	f.Add([]byte("Transfer-Encoding: chunked\r\ncontent-length: 1"), "HTTP/1.0")
	f.Add([]byte(""), "HTTP/1.1")
	f.Fuzz(func(t *testing.T, raw []byte, protocol string) {
		if _, why := parseHead([]byte(protocol), raw); why != "" {
			return
		}
		head, _, _ := bytes.Cut(append([]byte("\r\n"), raw...), []byte("\r\n\r\n"))
		names := map[string]bool{}
		for _, line := range bytes.Split(head, []byte("\r\n"))[1:] {
			if len(line) == 0 {
				continue
			}
			require.NotContains(t, " \t", string(line[:1]))
			require.Equal(t, -1, bytes.IndexAny(line, "\r\n"))
			name, _, ok := bytes.Cut(line, []byte(":"))
			require.True(t, ok)
			require.Equal(t, -1, bytes.IndexAny(name, " \t\x00\""))
			names[string(bytes.ToLower(name))] = true
		}
		require.False(t, names["content-length"] && names["transfer-encoding"])
		require.False(t, names["transfer-encoding"] && protocol != "HTTP/1.1")
	})
}

func TestParseHeadAllocatesNothing(t *testing.T) {
	protocol, raw := []byte("HTTP/1.1"), []byte("Host: x\r\nContent-Length: 2\r\nUser-Agent: openai\r\n\r\n")
	require.Zero(t, testing.AllocsPerRun(100, func() { parseHead(protocol, raw) }))
}

func BenchmarkParseHead(b *testing.B) {
	protocol, raw := []byte("HTTP/1.1"), []byte("Host: api.example.com\r\nAuthorization: Bearer "+
		"ek-0123456789abcdef0123456789abcdef\r\nContent-Type: application/json\r\nContent-Length: 2\r\nUser-Agent: OpenAI/Python\r\n\r\n")
	b.ReportAllocs()
	for b.Loop() {
		parseHead(protocol, raw)
	}
}
