package gateway_test

import (
	"bufio"
	"fmt"
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

func TestKeysOfStrangers(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "team ek-one", "lists ek-lists , rpm: 2", "large ek-large , rpm: 2", "greedy ek-greedy", "modest ek-modest")
	c := start(t, options{configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.Limits.Body, cfg.Limits.Bodies = file, 1<<20, 2<<20
	}})
	t.Run("two keys are one too many", func(t *testing.T) {
		body := chat("a", "")
		for _, keys := range []string{"ek-one ek-two", "ek-two ek-one", "ek-one ek-one"} {
			first, second, _ := strings.Cut(keys, " ")
			conn := c.raw(strings.TrimPrefix(c.url, "http://"), fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nauthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", chatPath, first, second, len(body), body))
			require.Equal(t, 400, status(t, conn))
		}
		require.Zero(t, c.prefill[0].Stats().Requests)
	})
	// A request counts in its key's minute wherever it is refused.
	t.Run("what no handler serves counts in the minute of its key", func(t *testing.T) {
		addr := strings.TrimPrefix(c.url, "http://")

		for range 2 {
			require.Equal(t, 200, c.ask("GET", c.url+"/v1/models", "", "Authorization", "Bearer ek-lists").status)
		}
		r := c.ask("GET", c.url+"/v1/models", "", "Authorization", "Bearer ek-lists")
		require.Equal(t, 429, r.status)
		code, _, _ := failure(t, r)
		require.Equal(t, "rate_limit_exceeded", code)
		require.NotEmpty(t, r.header.Get("Retry-After"))

		for range 2 {
			conn := c.raw(addr, "POST "+chatPath+" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ek-large\r\nContent-Length: 1048577\r\n\r\n")
			require.Equal(t, 413, status(t, conn))
		}
		require.Equal(t, 429, c.post(chatPath, chat("a", ""), "Authorization", "Bearer ek-large").status)
	})
	// A key that fills its share of the memory for bodies leaves room for others.
	t.Run("a key holds its share of bodies", func(t *testing.T) {
		body := strings.Repeat("x", 1<<20)
		head := func(key string) string {
			return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", chatPath, key, len(body))
		}
		c.raw(strings.TrimPrefix(c.url, "http://"), head("ek-greedy")+body[1:])
		c.eventually("one body is all but whole", func() bool { return c.metric("evenkeel_bodies_bytes") == 1<<20 })
		for range 64 {
			conn := c.raw(strings.TrimPrefix(c.url, "http://"), head("ek-greedy")+"hello")
			require.Equal(t, http.StatusServiceUnavailable, status(t, conn))
		}
		require.Equal(t, 200, c.post(chatPath, chat(strings.Repeat("a ", 10_000), ""), "Authorization", "Bearer ek-modest").status)
	})
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
