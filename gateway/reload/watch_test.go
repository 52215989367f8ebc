package reload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/gateway/certs"
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
	r, _, err := New(c, Deps{
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
		SetGeoKeys: func(*geo.Keys) {},
	})
	require.NoError(t, err)
	copyTo(b.File)
	for range 3 {
		r.reloadChangedFiles()
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
	r, _, err := New(sized(1024), Deps{
		Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		Prepare: func(_, _ *Settings, _ *predictor.Fit) (func(func()) error, error) {
			return func(commit func()) error { commit(); return nil }, nil
		},
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil },
		SetGeoKeys:  func(*geo.Keys) { set++ },
	})
	require.NoError(t, err)
	r.SetSource(file, func() (*config.Config, error) { return sized(size), nil })

	require.NoError(t, os.WriteFile(keysFile, []byte("k2 "+strings.Repeat("b", 40)+"\n"), 0o600))
	r.reloadChangedFiles()
	require.Equal(t, 1, set, "alone they do")

	size = 78
	require.NoError(t, os.WriteFile(keysFile, []byte("k3 "+strings.Repeat("c", 40)+"\n"), 0o600))
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	r.reloadChangedFiles()
	require.Equal(t, 78, r.Settings().Pool.Size)
	for range 5 {
		r.reloadChangedFiles()
		r.Reload(false)
	}
	require.Equal(t, 2, set, "with the config they do, too")
}

// A new config may name a file that comes a moment later, such as one of another Kubernetes volume.
// Nothing about the config itself changes when the file comes.
func TestAConfigThatWasRefusedForAFileThatItNamesIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	file, token := filepath.Join(dir, "evenkeel.yaml"), filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	core, logs := observer.New(zap.ErrorLevel)
	registry := prometheus.NewRegistry()
	r, _, err := New(config.Default(), Deps{
		Log: zap.New(core), Registerer: registry, Started: time.Now(),
		Prepare: func(_, _ *Settings, _ *predictor.Fit) (func(func()) error, error) {
			return func(commit func()) error { commit(); return nil }, nil
		},
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil },
	})
	require.NoError(t, err)
	r.SetSource(file, func() (*config.Config, error) {
		next := config.Default()
		next.Admin.TokenFile = token
		return next, next.Validate()
	})

	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	for range 3 {
		r.reloadChangedFiles()
	}
	require.Equal(t, "refused", r.Status().Last.Outcome)
	require.Equal(t, 1, logs.Len(), "the same error is logged once")
	require.EqualValues(t, 1, testutil.ToFloat64(r.metrics.reloads.WithLabelValues(keyConfig, refused)))

	require.NoError(t, os.WriteFile(token, []byte("sesame\n"), 0o600))
	r.reloadChangedFiles()
	require.Equal(t, "used", r.Status().Last.Outcome)
	known, required := r.CheckToken("sesame")
	require.True(t, known && required)
}

// Some tools replace the authority, the certificate and its key one after the other.
func TestAnAuthorityThatWasRefusedForAClientCertificateIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	ca, cert, key := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	a, b := certtest.New(t), certtest.New(t)
	replace := func(to, from string) {
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, text, 0o600))
	}
	oldCert, oldKey := a.Issue(t, "proxy", time.Now().Add(time.Hour))
	newCert, newKey := b.Issue(t, "proxy", time.Now().Add(time.Hour))
	replace(ca, a.File)
	replace(cert, oldCert)
	replace(key, oldKey)
	c := config.Default()
	c.Profiles = map[string]mooncake.Profile{"tls": {Connector: mooncake.NIXLPull, CAFile: ca, CertFile: cert, KeyFile: key}}
	trusted := 0
	core, logs := observer.New(zap.ErrorLevel)
	r, _, err := New(c, Deps{
		Log: zap.New(core), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		ReloadTrust: func(changed func(string) bool) (bool, error) {
			if !changed(ca) {
				return false, nil
			}
			if _, err := certs.Client("engine", ca, cert, key); err != nil {
				return false, err
			}
			trusted++
			return true, nil
		},
	})
	require.NoError(t, err)

	replace(ca, b.File)
	replace(cert, newCert)
	for range 3 {
		r.reloadChangedFiles()
	}
	require.Zero(t, trusted, "the key is still that of the certificate before")
	require.Equal(t, 1, logs.Len(), "the error is logged once")
	replace(key, newKey)
	for range 3 {
		r.reloadChangedFiles()
	}
	require.Equal(t, 1, trusted)
}
