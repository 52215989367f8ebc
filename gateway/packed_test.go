package gateway_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// packed is a body in a content coding.
func packed(t testing.TB, how, body string) string {
	var b bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&b)
	if how == "zstd" {
		z, err := zstd.NewWriter(&b)
		require.NoError(t, err)
		w = z
	}
	_, err := io.WriteString(w, body)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}

// bench/outside/api has the official client pack its requests.
func TestAPackedBodyIsServed(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{}))
	prompt := reftext.MakePrompt(1, 300)
	for _, how := range []string{"gzip", "zstd"} {
		for path, body := range map[string]string{
			messagesPath: wordsOf(prompt, ""), messagesPath + "/count_tokens": wordsOf(prompt, ""), "/tokenize": completion(prompt, ""),
		} {
			r := c.post(path, packed(t, how, body), "Content-Encoding", how)
			require.Equal(t, http.StatusOK, r.status, "%s: %s", path, r.body)
		}
	}
	c.eventually("no body holds memory any more", func() bool { return c.sum("evenkeel_bodies_bytes") == 0 })
}

func TestAPackedBodyThatIsRefused(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, pooling()}, configure: func(cfg *config.Config) { cfg.Limits.Body = 64 << 10 }})
	long := chat(strings.Repeat("a ", 32<<10), "")
	for _, path := range []string{chatPath, completionPath, messagesPath, responsesPath, "/v1/embeddings", transcriptions} {
		for _, row := range []struct {
			name, how, body string
			status          int
			code            string
		}{
			{"a coding that is not known", "br", chat("a", ""), http.StatusUnsupportedMediaType, "unsupported_encoding"},
			{"two codings", "identity, gzip, zstd", packed(t, "gzip", chat("a", "")), http.StatusUnsupportedMediaType, "unsupported_encoding"},
			{"another coding than it says", "zstd", packed(t, "gzip", chat("a", "")), http.StatusBadRequest, "bad_encoding"},
			{"a body that is cut off", "gzip", packed(t, "gzip", chat("a", ""))[:30], http.StatusBadRequest, "bad_encoding"},
			{"a bomb of gzip", "gzip", packed(t, "gzip", long), http.StatusRequestEntityTooLarge, "body_too_large"},
			{"a bomb of zstd", "zstd", packed(t, "zstd", long), http.StatusRequestEntityTooLarge, "body_too_large"},
		} {
			r := c.post(path, row.body, "Content-Encoding", row.how)
			require.Equal(t, row.status, r.status, "%s, %s: %s", path, row.name, r.body)
			if path != messagesPath { // errors of Anthropic's API have no code
				require.Contains(t, r.body, `"`+row.code+`"`, "%s, %s", path, row.name)
			}
			require.Equal(t, row.status == http.StatusUnsupportedMediaType, r.header.Get("Accept-Encoding") == "gzip, zstd")
			require.NotEmpty(t, r.header.Get("X-Request-Id"))
		}
	}
	require.Equal(t, 200, c.post(chatPath, chat("one", ""), "Content-Encoding", "identity").status)
	require.EqualValues(t, 1, c.prefill[0].Stats().Requests)
}

// What another proxy signs is the body as it is sent.
func TestAnotherProxyMayPackARequest(t *testing.T) {
	t.Parallel()
	c := alone(t, nil)
	keys, err := geo.ParseKeys(geoKey)
	require.NoError(t, err)
	body := packed(t, "gzip", chat("one", ""))
	h := c.hopFrom("eu-1", body)
	r := c.deliver(chatPath, body, append(papers(keys, chatPath, &h), geo.TenantHeader, "t", "Content-Encoding", "gzip")...)
	require.Equal(t, http.StatusOK, r.status, r.body)
}
