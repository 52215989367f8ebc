package refengine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func dial(t *testing.T, e *Engine) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.URLs()[0], "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn, bufio.NewReader(conn)
}

func TestAConnectionCarriesManyRequests(t *testing.T) {
	e := start(t, Config{})
	conn, br := dial(t, e)
	body := completionBody("a b", `"stream":true,"max_tokens":2,`)
	for range 3 {
		_, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
		require.NoError(t, err)
		resp, err := http.ReadResponse(br, nil)
		require.NoError(t, err)
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.True(t, parseStream(t, string(data)).done)
	}
	eventually(t, "all three are counted", func() bool { return e.Stats().Finished == 3 })
}

func TestTwoRequestsInOneWriteGetTwoAnswers(t *testing.T) {
	conn, br := dial(t, start(t, Config{}))
	_, err := io.WriteString(conn, "GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
	require.NoError(t, err)
	data, err := io.ReadAll(br)
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(string(data), "HTTP/1.1 200 OK"))
	require.Contains(t, string(data), `"0.27.1"`)
}

func TestBodiesOfEveryForm(t *testing.T) {
	e := start(t, Config{Server: Server{MaxBody: 1000}})
	body := completionBody("a", `"max_tokens":1,`)
	for _, row := range []struct{ name, head, body, answer string }{
		{"chunked", "transfer-encoding: chunked\r\n", fmt.Sprintf("%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n", 5, body[:5], len(body)-5, body[5:]), "200 OK"},
		{"after 100-continue", fmt.Sprintf("expect: 100-continue\r\ncontent-length: %d\r\n", len(body)), body, "100 Continue"},
		{"chunked and too large", "transfer-encoding: chunked\r\n", fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", 2000, strings.Repeat("x", 2000)), "413"},
		{"HTTP/1.0 closes", "content-length: 0\r\n", "", "400"},
	} {
		t.Run(row.name, func(t *testing.T) {
			conn, br := dial(t, e)
			proto := "HTTP/1.1"
			if strings.HasPrefix(row.name, proto[:4]) {
				proto = "HTTP/1.0"
			}
			_, err := fmt.Fprintf(conn, "POST /v1/completions %s\r\nhost: x\r\nconnection: close\r\n%s\r\n%s", proto, row.head, row.body)
			require.NoError(t, err)
			data, err := io.ReadAll(br)
			require.NoError(t, err)
			require.Contains(t, string(data), row.answer)
		})
	}
	conn, br := dial(t, e)
	_, err := io.WriteString(conn, "no http at all\r\n\r\n")
	require.NoError(t, err)
	data, err := io.ReadAll(br)
	require.NoError(t, err)
	require.Contains(t, string(data), "400 Bad Request")
}
