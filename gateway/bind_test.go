package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// The engines of these tests are on loopback, as whoever tries to call back.
func TestOnlyDecodeEnginesMayCallBack(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(*config.Config)
		status int
	}{
		{"a host of decode engines that call back", func(c *config.Config) {
			c.Profiles[config.DefaultProfile] = mooncake.Profile{Connector: mooncake.AscendLayerwise}
		}, http.StatusNotFound},
		{"a host of decode engines that do not", func(*config.Config) {}, http.StatusForbidden},
		{"an address that is allowed", func(c *config.Config) { c.Bind.Allow = []string{"127.0.0.0/8"} }, http.StatusNotFound},
		{"an address that is not", func(c *config.Config) { c.Bind.Allow = []string{"10.0.0.1"} }, http.StatusForbidden},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{configure: func(cfg *config.Config) {
				cfg.Bind.Listen, cfg.SelfTest = "127.0.0.1:0", false
				tc.change(cfg)
			}})
			resp, err := http.Post("http://"+c.gw.BindAddr()+"/v1/metaserver/"+strings.Repeat("0", 32), "application/json", strings.NewReader("{}"))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, tc.status, resp.StatusCode)
			require.Zero(t, c.prefill[0].Stats().Probes)
			require.NoError(t, c.gw.Shutdown(t.Context()))
			_, err = http.Post("http://"+c.gw.BindAddr()+"/v1/metaserver/x", "application/json", nil) //nolint:bodyclose // there is none
			require.Error(t, err, "nobody listens any more")
		})
	}
}
