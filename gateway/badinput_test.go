package gateway_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// failure reads OpenAI's error object and holds its shape.
func failure(t *testing.T, r reply) (code, param, kind string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, "application/json", r.header.Get("Content-Type"), r.body)
	var e struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
	require.NotEmpty(t, e.Error.Message)
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	return e.Error.Code, param, e.Error.Type
}

func TestNobodyToServe(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		engine func(*cluster) *refengine.Engine
		code   string
	}{
		"no prefill engine": {func(c *cluster) *refengine.Engine { return c.prefill[0] }, "prefill_unavailable"},
		"no decode engine":  {func(c *cluster) *refengine.Engine { return c.decode[0] }, "decode_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, options{dirty: true})
			row.engine(c).Kill()
			for range 2 { // first found out by the request itself, then known
				r := c.post(chatPath, chat("a", `"stream":true,`))
				require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
				code, _, kind := failure(t, r)
				require.Equal(t, row.code, code)
				require.Equal(t, "server_error", kind)
				require.NotEmpty(t, r.header.Get("Retry-After"))
				c.eventually("not ready any more", func() bool { return c.get("/readyz").status == http.StatusServiceUnavailable })
			}
			require.Equal(t, http.StatusServiceUnavailable, c.ask("GET", c.url+"/health", "").status)
			require.NoError(t, row.engine(c).Revive())
			c.eventually("all is well again", func() bool { return c.judge("one two", "") == "right" })
		})
	}
}
