package gateway

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// A part that cannot start leaves nothing of the proxy behind: another one starts at the same
// addresses.
func TestAStartThatFailsLeavesNothingOpen(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(keys, []byte("k1 "+strings.Repeat("a", 40)+"\n"), 0o600))
	for name, address := range map[string]func(*config.Config) *string{
		"the listener for operators":     func(cfg *config.Config) *string { return &cfg.Admin.Listen },
		"the listener for callbacks":     func(cfg *config.Config) *string { return &cfg.Bind.Listen },
		"the listener for other proxies": func(cfg *config.Config) *string { return &cfg.Geo.Listen },
	} {
		t.Run(name, func(t *testing.T) {
			taken, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			cfg := config.Default()
			cfg.Listen, cfg.Admin.Listen, cfg.Bind.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
			cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: mooncake.AscendLayerwise}}
			cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:9", Slots: 1}}
			cfg.Geo.Mode, cfg.Geo.Self, cfg.Geo.Listen = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}, "127.0.0.1:0"
			cfg.Geo.HMAC.KeysFile = keys
			cfg.Geo.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: "http://127.0.0.1:9"}}
			*address(cfg) = taken.Addr().String()
			require.NoError(t, cfg.Validate())
			g, err := New(cfg, zap.NewNop())
			require.NoError(t, err)
			require.ErrorContains(t, g.Start(http.NotFoundHandler()), taken.Addr().String())
			require.NoError(t, taken.Close())

			cfg.Listen = g.Addr()
			if g.admin != nil {
				cfg.Admin.Listen = g.AdminAddr()
			}
			if callbacks := g.callbacks.Addr(); callbacks != "" {
				cfg.Bind.Listen = callbacks
			}
			again, err := New(cfg, zap.NewNop())
			require.NoError(t, err)
			require.NoError(t, again.Start(http.NotFoundHandler()))
			require.NoError(t, again.Shutdown(t.Context()))
		})
	}
}

// A proxy that cannot be made has no goroutine of its request log.
func TestAProxyThatIsNotMadeLeavesNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	cfg := config.Default()
	cfg.Log.Requests = filepath.Join(t.TempDir(), "requests.jsonl")
	cfg.Tracing.Endpoint, cfg.Tracing.TLS.CAFile = "https://127.0.0.1:9", filepath.Join(t.TempDir(), "none")
	_, err := New(cfg, zap.NewNop())
	require.ErrorContains(t, err, "tracing.tls.ca_file")
	goleak.VerifyNone(t, before)
}
