package fleet

import (
	"crypto/x509"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// An authority that cannot be used belongs to one profile. The engines of another profile take up
// theirs all the same.
func TestAnAuthorityThatCannotBeUsedKeepsNoOtherFromItsEngines(t *testing.T) {
	a, b := certtest.New(t), certtest.New(t)
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {CAFile: a.File}, "b": {CAFile: b.File}}
	cfg.Engines.Prefill = []config.Engine{{URL: "https://127.0.0.1:2", Profile: "b"}, {URL: "https://127.0.0.1:1", Profile: "a"}}
	f := of(t, cfg)
	for _, e := range cfg.Engines.Prefill {
		require.NoError(t, f.Add(roster.Prefill, e))
	}
	other := certtest.New(t)
	text, err := os.ReadFile(other.File)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(a.File, text, 0o600))
	require.NoError(t, os.WriteFile(b.File, []byte("no PEM"), 0o600))
	changed, err := f.ReloadTrust(func(string) bool { return true })
	require.ErrorContains(t, err, b.File)
	require.True(t, changed)
	trusts := func(engine string) *x509.CertPool { return f.Now().Engine("prefill " + engine).Target.TLS.RootCAs }
	require.True(t, other.Pool().Equal(trusts("127.0.0.1:1")))
	require.True(t, b.Pool().Equal(trusts("127.0.0.1:2")), "the last one that could be used stays")
}
