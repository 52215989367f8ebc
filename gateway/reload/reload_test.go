package reload

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/gateway/keys"
	"evenkeel/predictor"
)

// A part of the proxy may refuse a config although it was found good: an operator may
// have set another policy meanwhile. Nothing of the config is in force then, nor are the
// files that it names.
func TestAConfigThatIsRefusedAsItIsAppliedChangesNothing(t *testing.T) {
	dir := t.TempDir()
	file, token := filepath.Join(dir, "evenkeel.yaml"), filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	require.NoError(t, os.WriteFile(token, []byte("sesame\n"), 0o600))
	var refuses error
	r, fit, err := New(config.Default(), Deps{
		Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		Prepare: func(old, next *Settings, fit *predictor.Fit) (func(commit func()) error, error) {
			return func(commit func()) error {
				if refuses == nil {
					commit()
				}
				return refuses
			}, nil
		},
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil },
	})
	require.NoError(t, err)
	require.Nil(t, fit)
	r.SetSource(file, func() (*config.Config, error) {
		next := config.Default()
		next.Pool.Size, next.Admin.TokenFile = 77, token
		return next, next.Validate()
	})

	refuses = errors.New("not now")
	got := r.Reload(false)
	require.Equal(t, []string{"refused", "not now"}, []string{got.Outcome, got.Error})
	require.Empty(t, got.Changes)
	require.NotEqual(t, 77, r.Settings().Pool.Size)
	_, asked := r.CheckToken("sesame")
	require.False(t, asked, "its token is not in force either")
	require.Equal(t, "refused", r.Status().Last.Outcome)

	refuses = nil
	require.Equal(t, "dry", r.Reload(true).Outcome)
	require.NotEqual(t, 77, r.Settings().Pool.Size, "a dry one changes nothing")
	require.Equal(t, "used", r.Reload(false).Outcome)
	require.Equal(t, 77, r.Settings().Pool.Size)
	known, asked := r.CheckToken("sesame")
	require.True(t, known && asked)
	require.Equal(t, "unchanged", r.Reload(false).Outcome)
}

// A file that is being written may have no more than its first comment yet. It may also be cut off
// between two readings.
func TestAFileThatSetsNoKeyTakesNoEngineAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "evenkeel.yaml")
	whole := "# The engines of the cell.\n---\nengines: {decode: [{url: \"http://d:1\", slots: 4}]}\n"
	require.NoError(t, os.WriteFile(file, []byte(whole), 0o600))
	cfg, err := config.Load(file)
	require.NoError(t, err)
	r, _, err := New(cfg, Deps{
		Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now(),
		Prepare: func(_, _ *Settings, _ *predictor.Fit) (func(func()) error, error) {
			return func(commit func()) error { commit(); return nil }, nil
		},
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil },
	})
	require.NoError(t, err)
	text := ""
	r.SetSource(file, func() (*config.Config, error) { return config.Parse(file, []byte(text)) })
	for _, text = range []string{"", "\n", "# The engines of the cell.\n", "# The engines of the cell.\n---\n", "{}\n"} {
		got := r.Reload(false)
		require.Equal(t, refused, got.Outcome, "%q", text)
		require.Contains(t, got.Error, "sets no key", "%q", text)
		require.Len(t, r.Settings().Engines.Decode, 1, "%q", text)
	}
	text = whole
	require.Equal(t, unchanged, r.Reload(false).Outcome)
}

// reads is a reloader of a config, and what it logs.
func reads(t *testing.T, change func(*config.Config)) (*observer.ObservedLogs, error) {
	t.Helper()
	cfg := config.Default()
	change(cfg)
	require.NoError(t, cfg.Validate())
	core, logs := observer.New(zap.InfoLevel)
	_, _, err := New(cfg, Deps{Log: zap.New(core), Registerer: prometheus.NewRegistry(), Started: time.Now()})
	return logs, err
}

func TestFilesThatCannotBeUsedStopTheStart(t *testing.T) {
	dir := t.TempDir()
	nowhere, short, bad := filepath.Join(dir, "none"), filepath.Join(dir, "short"), filepath.Join(dir, "bad.json")
	require.NoError(t, os.WriteFile(short, []byte("secret\n"), 0o600))
	require.NoError(t, os.WriteFile(bad, []byte(`{"evenkeel_fit":2}`), 0o600))
	huge, two := filepath.Join(dir, "huge"), filepath.Join(dir, "two")
	require.NoError(t, os.WriteFile(huge, nil, 0o600))
	require.NoError(t, os.Truncate(huge, maxSecret+1))
	require.NoError(t, os.WriteFile(two, []byte("sesame\r\nclose sesame\r\n"), 0o600))
	predicts := func(p board.PredictorConfig) func(*config.Config) {
		return func(cfg *config.Config) { cfg.Dispatch.Policy, cfg.Predictor = "brh", p } // it may have any of them
	}
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		says   string
	}{
		{"a certificate that is not there", func(cfg *config.Config) { cfg.TLS = config.TLS{CertFile: nowhere, KeyFile: nowhere} }, "tls: certificate: open"},
		{"one of operators that is not there", func(cfg *config.Config) { cfg.Admin.TLS = config.TLS{CertFile: nowhere, KeyFile: nowhere} }, "admin.tls: certificate: open"},
		{"keys that are not there", func(cfg *config.Config) { cfg.KeysFile = nowhere }, "key file: open"},
		{"a fit that is not there", predicts(board.PredictorConfig{Kind: "survival", File: nowhere}), "predictor.file: stat"},
		{"a fit of another version", predicts(board.PredictorConfig{Kind: "survival", File: bad}), "version 2, this evenkeel reads version 1"},
		{"a secret that is not there", predicts(board.PredictorConfig{Kind: "exact", SecretFile: nowhere}), "predictor.secret_file"},
		{"a secret that is short", predicts(board.PredictorConfig{Kind: "exact", SecretFile: short}), "has 6 bytes; write at least 16"},
		{"a secret that is no secret", predicts(board.PredictorConfig{Kind: "exact", SecretFile: huge}), "larger than 65536 bytes"},
		{"a token that is none", func(cfg *config.Config) { cfg.Admin.TokenFile = huge }, "admin.token_file: " + huge + ": larger than 65536 bytes"},
		{"two tokens", func(cfg *config.Config) { cfg.Admin.TokenFile = two }, "has more than one line; write the token alone"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := reads(t, tt.change)
			require.ErrorContains(t, err, tt.says)
		})
	}
}

// The group of a private file may read it, all users may not.
func TestPrivateFilesThatAllUsersCanRead(t *testing.T) {
	dir := t.TempDir()
	list, secret := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "secret")
	require.NoError(t, os.WriteFile(list, []byte("keys:\n  - {name: team, sha256: "+keys.Hash("ek-one")+"}\n"), 0o600))
	require.NoError(t, os.Chmod(list, 0o644))
	require.NoError(t, os.WriteFile(secret, []byte(strings.Repeat("s", 32)), 0o640))
	certFile, keyFile := certtest.New(t).Issue(t, "proxy", time.Now().Add(time.Hour))
	require.NoError(t, os.Chmod(keyFile, 0o604))
	logs, err := reads(t, func(cfg *config.Config) {
		cfg.KeysFile, cfg.Predictor.SecretFile = list, secret
		cfg.TLS = config.TLS{CertFile: certFile, KeyFile: keyFile}
		cfg.Admin.TLS = cfg.TLS
	})
	require.NoError(t, err)
	var warned []string
	for _, e := range logs.FilterMessageSnippet("can read a private file").All() {
		require.Equal(t, zap.WarnLevel, e.Level)
		warned = append(warned, e.ContextMap()["config"].(string))
	}
	require.ElementsMatch(t, []string{"keys_file", "tls.key_file", "admin.tls.key_file"}, warned)
}
