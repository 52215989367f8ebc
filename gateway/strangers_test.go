package gateway_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
)

// raw sends text on a connection of its own and leaves it open.
func (c *cluster) raw(addr, text string) net.Conn {
	conn, err := net.Dial("tcp", addr)
	require.NoError(c, err)
	c.Cleanup(func() { _ = conn.Close() })
	require.NoError(c, conn.SetDeadline(time.Now().Add(patience)))
	_, _ = io.WriteString(conn, text) // an answer that came before the end may be a reset here
	return conn
}

// status reads the answer to what raw sent.
func status(t *testing.T, conn net.Conn) int {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode
}

func TestPrivateFilesThatAllUsersCanRead(t *testing.T) {
	t.Parallel()
	keys, secret := filepath.Join(t.TempDir(), "keys.yaml"), filepath.Join(t.TempDir(), "secret")
	keyFile(t, keys, "team ek-one")
	require.NoError(t, os.Chmod(keys, 0o644))
	require.NoError(t, os.WriteFile(secret, []byte(strings.Repeat("s", 32)), 0o640))
	c := tlsCluster(t, certtest.New(t), func(cfg *config.Config) {
		cfg.KeysFile, cfg.Predictor.SecretFile = keys, secret
		require.NoError(t, os.Chmod(cfg.TLS.KeyFile, 0o604))
	})
	warned := func() (keys []string) {
		for _, e := range c.logs.FilterMessageSnippet("can read a private file").All() {
			require.Equal(t, zap.WarnLevel, e.Level)
			keys = append(keys, e.ContextMap()["config"].(string))
		}
		return keys
	}
	require.ElementsMatch(t, []string{"keys_file", "tls.key_file", "admin.tls.key_file"}, warned(), "the group may read the other")
}
