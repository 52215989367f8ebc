package reload

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/config"
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
	r, fit, err := New(config.Default(), Host{
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
	r.ReadsFrom(file, func() (*config.Config, error) {
		next := config.Default()
		next.Pool.Size, next.Admin.TokenFile = 77, token
		return next, next.Validate()
	})

	refuses = errors.New("not now")
	got := r.Reload(false)
	require.Equal(t, []string{"refused", "not now"}, []string{got.Outcome, got.Error})
	require.Empty(t, got.Changes)
	require.NotEqual(t, 77, r.Settings().Pool.Size)
	_, asked := r.Operator("sesame")
	require.False(t, asked, "its token is not in force either")
	require.Equal(t, "refused", r.Status().Last.Outcome)

	refuses = nil
	require.Equal(t, "dry", r.Reload(true).Outcome)
	require.NotEqual(t, 77, r.Settings().Pool.Size, "a dry one changes nothing")
	require.Equal(t, "used", r.Reload(false).Outcome)
	require.Equal(t, 77, r.Settings().Pool.Size)
	known, asked := r.Operator("sesame")
	require.True(t, known && asked)
	require.Equal(t, "unchanged", r.Reload(false).Outcome)
}
