package gateway_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
)

// A client of HTTP/1.0, such as many reverse proxies, never gets a Transfer-Encoding, in whatever way it is answered.
func TestClientsOfHTTP10(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, pooling(), {Model: "ears", Task: plain.Transcription}}})
	c.served("emb", 1)
	c.served("ears", 1)
	heard, kind := form(t, "speech", "model", "ears", "stream", "true")
	for _, row := range []struct {
		name, method, path, body, kind string
		status                         int
		stream                         bool
	}{
		{"an answer that is streamed", "POST", chatPath, chat("one two", `"stream":true,"max_tokens":20,`), "", 200, true},
		{"a short answer that is streamed", "POST", chatPath, chat("one two", `"stream":true,"max_tokens":2,`), "", 200, true},
		{"several answers that are streamed", "POST", chatPath, chat("one two", `"stream":true,"n":2,"max_tokens":20,`), "", 200, true},
		{"a whole answer", "POST", chatPath, chat("one two", `"max_tokens":20,`), "", 200, false},
		{"a refused request", "POST", chatPath, `{`, "", 400, false},
		{"a list", "GET", "/v1/models", "", "", 200, false},
		{"a path that is not there", "GET", "/other", "", "", 404, false},
		{"a whole answer that is passed through", "POST", "/v1/embeddings", embedding, "", 200, false},
		{"a streamed answer that is passed through", "POST", transcriptions, heard, kind, 200, true},
		{"a refusal of an engine", "POST", "/v1/embeddings", `{"model":"emb"}`, "", 400, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.kind == "" {
				row.kind = "application/json"
			}
			conn := c.raw(c.gw.Addr(), fmt.Sprintf("%s %s HTTP/1.0\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", row.method, row.path, row.kind, len(row.body), row.body))
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Equal(t, row.status, resp.StatusCode, string(body))
			require.Empty(t, resp.TransferEncoding)
			require.Equal(t, row.stream, strings.HasSuffix(string(body), "data: [DONE]\n\n"), string(body))
			require.Equal(t, row.stream, resp.ContentLength < 0)
			if row.stream {
				require.True(t, resp.Close)
			}
			_, err = conn.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF, "the connection ends with the answer")
		})
	}
	c.eventually("nothing runs any more", func() bool { return c.metric("evenkeel_requests_open") == 0 })
}
