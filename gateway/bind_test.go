package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// Engines and whoever tries to call back are on loopback.
func TestOnlyDecodeEnginesMayCallBack(t *testing.T) {
	t.Parallel()
	var allow []string
	c := start(t, options{
		configure: func(cfg *config.Config) {
			cfg.Bind.Listen, cfg.SelfTest = "127.0.0.1:0", false
			cfg.Profiles[config.DefaultProfile] = mooncake.Profile{Connector: mooncake.AscendLayerwise}
		},
		later: func(cfg *config.Config) { cfg.Bind.Allow = allow },
	})
	for _, row := range []struct {
		name   string
		allow  []string
		status int
	}{
		{"a host of decode engines that call back", nil, http.StatusNotFound},
		{"an address that is not allowed", []string{"10.0.0.1"}, http.StatusForbidden},
		{"an address that is", []string{"127.0.0.0/8"}, http.StatusNotFound},
	} {
		if allow = row.allow; allow != nil {
			r, _ := c.reload("")
			require.Equal(t, "used", r.Outcome, r.Error)
		}
		resp, err := http.Post("http://"+c.gw.BindAddr()+"/v1/metaserver/"+strings.Repeat("0", 32), "application/json", strings.NewReader("{}"))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, row.status, resp.StatusCode, row.name)
	}
	require.Zero(t, c.Prefill[0].Stats().Probes)
	require.NoError(t, c.gw.Shutdown(t.Context()))
	_, err := http.Post("http://"+c.gw.BindAddr()+"/v1/metaserver/x", "application/json", nil) //nolint:bodyclose // there is none
	require.Error(t, err, "nobody listens any more")
}
