package certs

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/certs/certtest"
)

// The authority of servers may change while the proxy runs.
func TestAnAuthorityIsFollowed(t *testing.T) {
	before, after := certtest.New(t), certtest.New(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	use := func(from string) {
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, text, 0o600))
	}
	use(before.File)
	for _, host := range []string{"etcd", "127.0.0.1"} {
		use(before.File)
		client := &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
		require.NoError(t, Follow(client, file, "other", host))
		reaches := func(a *certtest.Authority) bool {
			_, err := shake(t, a.Server(t, "etcd"), client)
			return err == nil
		}
		require.True(t, reaches(before), host)
		require.False(t, reaches(after), host)
		use(after.File)
		require.True(t, reaches(after), host)
		require.False(t, reaches(before), host)
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		require.True(t, reaches(after), "the file is just being written")
	}
}

// A certificate of the right authority counts only for its own server.
func TestAFollowedAuthorityVouchesForTheServerAlone(t *testing.T) {
	a := certtest.New(t)
	for _, tt := range []struct {
		name  string
		hosts []string
		says  string
	}{
		{"etcd", []string{"etcd"}, ""},
		{"127.0.0.1", []string{"10.0.0.1", "127.0.0.1"}, ""},
		{"else", []string{"etcd", "else"}, "valid for etcd, not else"},
		{"10.0.0.1", []string{"10.0.0.1", "etcd"}, "it belongs to none of"},
		{"10.0.0.1", nil, "it belongs to none of"},
	} {
		client := &tls.Config{ServerName: tt.name, MinVersion: tls.VersionTLS12}
		require.NoError(t, Follow(client, a.File, tt.hosts...))
		_, err := shake(t, a.Server(t, "etcd"), client)
		if tt.says == "" {
			require.NoError(t, err, tt.name)
		} else {
			require.ErrorContains(t, err, tt.says)
		}
	}
	require.ErrorContains(t, Follow(&tls.Config{}, a.File+".none"), "authority: open")
}
