package edge

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// HTTP/1.0 has no chunks: the end of the connection is the end of an answer.
func TestAnOldClientGetsItsAnswerWithoutChunks(t *testing.T) {
	for _, row := range []struct {
		name string
		tls  bool
		fail error
	}{{"whole", false, nil}, {"whole, over TLS", true, nil}, {"broken", false, errors.New("the engine is gone")},
		{"broken, over TLS", true, errors.New("the engine is gone")}} {
		t.Run(row.name, func(t *testing.T) {
			ended, next := make(chan error, 1), make(chan struct{})
			large := strings.Repeat("x", 100_000)
			s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
				ctx.SetContentType("text/event-stream")
				parts := []string{"data: 1\n\n", large}
				NewBodyStream(readFunc(func(b []byte) (int, error) {
					if len(parts) == 0 {
						return 0, cmp.Or(row.fail, io.EOF)
					}
					if parts[0] == large {
						<-next
					}
					n := copy(b, parts[0])
					if parts[0] = parts[0][n:]; parts[0] == "" {
						parts = parts[1:]
					}
					return n, nil
				}), func(err error) { ended <- err }, zap.NewNop()).Answer(ctx)
			}}, ListenOptions{TLS: row.tls})
			c := s.dial(t)
			c.send(t, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
			resp, err := http.ReadResponse(c.br, nil)
			require.NoError(t, err)
			require.Empty(t, resp.TransferEncoding)
			require.True(t, resp.Close)
			require.EqualValues(t, -1, resp.ContentLength)
			require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
			first := make([]byte, len("data: 1\n\n"))
			_, err = io.ReadFull(resp.Body, first)
			require.NoError(t, err, "it comes before what follows")
			require.Equal(t, "data: 1\n\n", string(first))
			close(next)
			rest, err := io.ReadAll(resp.Body)
			if row.fail == nil {
				require.NoError(t, err)
				require.Equal(t, large, string(rest))
			} else {
				require.Error(t, err, "never as if it were whole")
			}
			require.Equal(t, row.fail, await(t, ended, "the end"))
		})
	}
}

func TestAnOldClientThatLeavesEndsItsAnswer(t *testing.T) {
	ended := make(chan error, 1)
	s := serve(t, Options{Handler: func(ctx *fasthttp.RequestCtx) {
		NewBodyStream(readFunc(func(b []byte) (int, error) { return copy(b, "data: x\n\n"), nil }), func(err error) { ended <- err },
			zap.NewNop()).Answer(ctx)
	}}, ListenOptions{})
	c := s.dial(t)
	c.send(t, "GET / HTTP/1.0\r\n\r\n")
	_, err := c.br.ReadString('x')
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Equal(t, ErrUnfinished, await(t, ended, "the end"))
}
