package pump

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/loop"
	"evenkeel/sse"
)

// bytes is a stream that hands on what the engine sends, and panics on the loop when it is told to.
type bytes struct {
	resp     *engine.Response
	panics   string // where on the loop
	panicked chan any
	events   []byte // that the loop gave back
}

func (b *bytes) Next() ([]byte, error) {
	if events := b.events; len(events) > 0 {
		b.events = nil
		return events, nil
	}
	p := make([]byte, 100)
	n, err := b.resp.Read(p)
	if n > 0 {
		err = nil // it comes again
	}
	return p[:n], err
}

func (b *bytes) Ended() bool { return false }

func (b *bytes) Torn() bool { return false }

func (b *bytes) Flow() *engine.Response { return b.resp }

func (b *bytes) Wait(time.Time) time.Duration {
	if b.panics == "enter" {
		panic("of Wait")
	}
	return time.Minute
}

func (b *bytes) Arrive(dst, data []byte, _ time.Time) ([]byte, sse.End) {
	if b.panics == "arrival" {
		panic("of Arrive")
	}
	return append(dst, data...), sse.NotEnded
}

func (b *bytes) Pause(time.Time) {}

func (b *bytes) Err() error { return nil }

func (b *bytes) LeaveLoop(events []byte, _ sse.End) { b.events = events }

func (b *bytes) Close() { b.resp.Close() }

func (b *bytes) Panicked(v any) {
	b.resp.Close()
	b.panicked <- v
}

// serve starts an engine and a server whose only path carries the engine's answer as the stream
// that open makes of it. It returns the server's address.
func serve(t *testing.T, answer http.HandlerFunc, open func(*fasthttp.RequestCtx, *engine.Response) Stream) string {
	t.Helper()
	decoder, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	engineServer := &http.Server{ReadHeaderTimeout: time.Minute, Handler: answer}
	go func() { _ = engineServer.Serve(decoder) }()
	t.Cleanup(func() { _ = engineServer.Close() })
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	loops := new(loop.Set)
	require.NoError(t, loops.Start(1, zap.NewNop()))
	t.Cleanup(loops.Close)
	u, err := url.Parse("http://" + decoder.Addr().String())
	require.NoError(t, err)
	server := edge.NewServer(edge.Options{Handler: func(ctx *fasthttp.RequestCtx) {
		r, err := client.NewCall(&engine.Target{ID: "e", URL: u, Rank: -1}).Do(http.MethodPost, "/", nil, nil, engine.Deadlines{})
		if err != nil {
			t.Error(err)
			return
		}
		if !Start(ctx, zap.NewNop(), loops, open(ctx, r)) {
			t.Error("not released")
		}
	}})
	ln, err := edge.Listen("127.0.0.1:0", edge.ListenOptions{})
	require.NoError(t, err)
	go func() { _ = server.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, edge.Drain(ctx, server, ln))
	})
	return ln.Addr().String()
}

// A panic on the loop ends one stream: its connections are closed, and the loop serves the next.
func TestAPanicOnALoopEndsOneStream(t *testing.T) {
	turns := make(chan chan struct{}, 1) // of the answers, each of which goes on with its own: one that ended may not have heard of it
	panicked := make(chan any, 1)
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		next := <-turns
		for _, part := range []string{"one", "two"} {
			_, _ = io.WriteString(w, part)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}, func(ctx *fasthttp.RequestCtx, r *engine.Response) Stream {
		return &bytes{resp: r, panics: string(ctx.QueryArgs().Peek("panics")), panicked: panicked}
	})

	ask := func(panics string) (body []byte, err error) {
		next := make(chan struct{})
		turns <- next
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
		_, err = io.WriteString(conn, "GET /?panics="+panics+" HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		r, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		first := make([]byte, 3)
		_, err = io.ReadFull(r.Body, first)
		require.NoError(t, err)
		if panics != "enter" {
			next <- struct{}{}
			if panics == "" {
				next <- struct{}{}
			}
		}
		rest, err := io.ReadAll(r.Body)
		return slices.Concat(first, rest), err
	}
	for _, where := range []string{"enter", "arrival"} {
		_, err := ask(where)
		require.Error(t, err, "never as if the answer were whole")
		select {
		case v := <-panicked:
			require.Contains(t, v, "on a loop", where)
		case <-time.After(20 * time.Second):
			t.Fatal("the stream was not ended")
		}
		body, err := ask("")
		require.NoError(t, err)
		require.Equal(t, "onetwo", string(body))
	}
}

// waits is a stream that reports when a wait for the engine begins, and when it is interrupted.
type waits struct {
	bytes
	calls chan string
}

func (w *waits) Wait(now time.Time) time.Duration {
	w.report("wait")
	return w.bytes.Wait(now)
}

func (w *waits) Pause(time.Time) { w.report("pause") }

func (w *waits) report(call string) {
	select {
	case w.calls <- call:
	default: // the test has stopped listening
	}
}

// While a client does not take a comment, nothing is read from the engine, so the wait for the
// engine is interrupted. Otherwise the engine would count as silent for as long as the client is.
func TestAClientThatTakesNoCommentsIsNotTheEnginesSilence(t *testing.T) {
	ended, calls := make(chan struct{}), make(chan string, 10_000)
	comment := slices.Repeat([]byte("k"), 256<<10) // some of them fill the buffers of the client's socket
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "one")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-ended:
		case <-r.Context().Done():
		}
	}, func(ctx *fasthttp.RequestCtx, r *engine.Response) Stream {
		edge.StartKeepAlive(ctx, time.Millisecond, time.Now(), comment, zap.NewNop())
		return &waits{bytes: bytes{resp: r}, calls: calls}
	})
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	until := func(want string) {
		for deadline := time.After(20 * time.Second); ; {
			select {
			case call := <-calls:
				if call == want {
					return
				}
			case <-deadline:
				t.Fatalf("no %s came", want)
			}
		}
	}
	until("pause") // the client reads nothing
	select {
	case call := <-calls:
		t.Fatalf("a %s came while the client was blocked", call)
	case <-time.After(50 * time.Millisecond): // some comments would have been due
	}
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	until("wait")
	close(ended)
}
