package refengine

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAKilledEngineKeepsItsPorts(t *testing.T) {
	e := start(t, Config{KVEvents: KVEvents{Address: "127.0.0.1:0"}, KV: KV{PrefixCache: 16}})
	kv, _ := e.KVEvents(0)
	ports := []string{strings.TrimPrefix(e.URLs()[0], "http://"), kv}
	alone := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 0) }), err)
	}}
	for range 2 {
		e.Kill()
		for _, at := range ports {
			_, err := net.Dial("tcp", at)
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
			_, err = alone.Listen(t.Context(), "tcp", at)
			require.ErrorIs(t, err, syscall.EADDRINUSE, "it is still the engine's")
		}
		require.NoError(t, e.Revive())
		for _, at := range ports {
			conn, err := net.Dial("tcp", at)
			require.NoError(t, err)
			require.NoError(t, conn.Close())
		}
	}
}
