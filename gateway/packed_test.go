package gateway_test

import (
	"bytes"
	"io"
	"net/http"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

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
