package gateway_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
