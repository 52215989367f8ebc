package reload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/predictor"
)

// One file has the authority of the other proxies and that of the engines.
func TestOneAuthorityOfProxiesAndEnginesIsReadAgainForBoth(t *testing.T) {
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.crt")
	a, b := certtest.New(t), certtest.New(t)
	copyTo := func(from string) {
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(ca, text, 0o600))
	}
	copyTo(a.File)
	cert, key := a.Issue(t, "us-1", time.Now().Add(time.Hour))
	c := config.Default()
	c.Geo.Mode, c.Geo.Self, c.Geo.Listen = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}, "127.0.0.1:0"
	c.Geo.TLS = geo.TLS{Cert: cert, Key: key, CA: ca}
	c.Geo.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: "https://127.0.0.1:1", SAN: "eu-1"}}
	c.Profiles = map[string]mooncake.Profile{"tls": {Connector: mooncake.NIXLPull, CAFile: ca}}
	engines := 0
	r, _, err := New(c, Host{
		Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		Prepare: func(_, _ *Settings, _ *predictor.Fit) (func(func()) error, error) {
			return func(f func()) error { f(); return nil }, nil
		},
		ReloadTrust: func(changed func(string) bool) (bool, error) {
			if changed(ca) {
				engines++
			}
			return false, nil
		},
		LookAtEngines: func() {}, SetGeoKeys: func(*geo.Keys) {},
	})
	require.NoError(t, err)
	copyTo(b.File)
	for range 3 {
		r.lookAtFiles()
	}
	require.Equal(t, 1, engines, "engines get the new authority, too")
}

// The keys between proxies change together with the config.
func TestGeoKeysThatChangeWithTheConfigComeIntoForce(t *testing.T) {
	dir := t.TempDir()
	file, keysFile := filepath.Join(dir, "evenkeel.yaml"), filepath.Join(dir, "keys")
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	require.NoError(t, os.WriteFile(keysFile, []byte("k1 "+strings.Repeat("a", 40)+"\n"), 0o600))
	sized := func(size int) *config.Config {
		c := config.Default()
		c.Pool.Size = size
		c.Geo.Mode, c.Geo.Self, c.Geo.Listen = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}, "127.0.0.1:0"
		c.Geo.HMAC.KeysFile = keysFile
		c.Geo.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: "http://127.0.0.1:1"}}
		require.NoError(t, c.Validate())
		return c
	}
	size, set := 77, 0
	r, _, err := New(sized(1024), Host{
		Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		Prepare: func(_, _ *Settings, _ *predictor.Fit) (func(func()) error, error) {
			return func(commit func()) error { commit(); return nil }, nil
		},
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil }, LookAtEngines: func() {},
		SetGeoKeys: func(*geo.Keys) { set++ },
	})
	require.NoError(t, err)
	r.ReadsFrom(file, func() (*config.Config, error) { return sized(size), nil })

	require.NoError(t, os.WriteFile(keysFile, []byte("k2 "+strings.Repeat("b", 40)+"\n"), 0o600))
	r.lookAtFiles()
	require.Equal(t, 1, set, "alone they do")

	size = 78
	require.NoError(t, os.WriteFile(keysFile, []byte("k3 "+strings.Repeat("c", 40)+"\n"), 0o600))
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	r.lookAtFiles()
	require.Equal(t, 78, r.Settings().Pool.Size)
	for range 5 {
		r.lookAtFiles()
		r.Reload(false)
	}
	require.Equal(t, 2, set, "with the config they do, too")
}
