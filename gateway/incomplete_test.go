package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
)

// Two engines that were left in the group main wait for each other. When one dies, the other
// answers its health check and serves nothing. Clients and operators are told that a group waits,
// and operators for which address.
func TestAGroupThatWaitsForAnEngineSaysSo(t *testing.T) {
	t.Parallel()
	c := start(t, options{mixed: []refengine.Config{{}, {}}, configure: quickHealth})
	_, _ = c.Say(talk(`"stream":true,`, "hello"))
	c.Decode[1].Kill()
	c.Eventually("the proxy is not ready", func() bool { return c.get("/readyz").Status == http.StatusServiceUnavailable })
	r := c.get("/readyz")
	dead, alive := refclient.AddressOf(c.Decode[1]), refclient.AddressOf(c.Decode[0])
	require.True(t, strings.HasPrefix(r.Body, `no healthy aggregated engine; group "main" waits for an engine`), r.Body)
	require.Contains(t, r.Body, "aggregated "+alive+" is broken: its group main waits for "+dead)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		body := talk(`"stream":true,`, "hello")
		if path == "/v1/completions" {
			body = `{"model":"` + model + `","prompt":"hello"}`
		}
		answer := c.Ask("POST", c.URL+path, body)
		require.Equal(t, http.StatusServiceUnavailable, answer.Status)
		require.Contains(t, answer.Body, `"code":"group_incomplete"`, path)
		require.Contains(t, answer.Body, `group \"main\" waits for one of its engines`)
		require.NotContains(t, answer.Body, dead, "clients get no addresses")
	}
	embedding := c.Ask("POST", c.URL+"/v1/embeddings", `{"model":"`+model+`","input":"hello"}`)
	require.Contains(t, embedding.Body, `"code":"group_incomplete"`, "a group that waits serves no other request either")
}
