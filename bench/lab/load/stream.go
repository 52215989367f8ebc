package load

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"time"

	"evenkeel/sse"
)

// maxAnswer bounds an answer that is not streamed.
const maxAnswer = 64 << 20

// exchange is one request and its answer. It is reused with its buffers.
type exchange struct {
	follower follower
	framer   *sse.Framer
	body     bytes.Buffer
	prompt   []byte
	out      []byte
	gaps     []time.Duration // between events that brought tokens
	buf      [4 << 10]byte

	sent, first, last, end time.Time // first and last: of the events that brought tokens
	answered               bool      // the response head came
	tokens                 int
	events                 int64
	chunked                bool // an answer in one piece may come without its length
}

func (x *exchange) reset() {
	if x.framer == nil {
		x.framer = sse.NewFramer(0)
	}
	x.framer.Reset()
	x.gaps = x.gaps[:0]
	x.first, x.last, x.end = time.Time{}, time.Time{}, time.Time{}
	x.answered, x.tokens, x.events = false, 0, 0
}

// do sends a and reads the answer to its end, or to where it goes wrong.
func (x *exchange) do(ctx context.Context, r *runner, a *ask) *fault {
	x.reset()
	if r.cfg.Own != nil {
		return x.own(ctx, r, a.index)
	}
	x.chunked = r.cfg.Chunked
	x.prompt = r.cfg.appendPrompt(x.prompt[:0], a)
	x.follower.reset(r.cfg.expects(a, string(x.prompt)))
	x.out = r.cfg.appendBody(x.out[:0], a, r.cfg.Model, x.prompt)

	ctx, stop := context.WithTimeoutCause(ctx, r.cfg.Timeout, errTimeout)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if wait := a.cancelAfter(r.ttft()); wait > 0 {
		defer time.AfterFunc(wait, func() { cancel(errCancel) }).Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url(a), bytes.NewReader(x.out))
	if err != nil {
		return faultf(Connect, "%v", err)
	}
	r.header(req, a.index)
	x.sent = time.Now()
	defer func() { x.end = time.Now() }()
	resp, err := r.client.Do(req)
	if err != nil {
		return transportFault(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	x.answered = true
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // a broken error body is still that error
		return statusFault(resp, body)
	}
	if !a.stream {
		return x.whole(ctx, resp)
	}
	if a.cancel == Transferring {
		cancel(errCancel)
	}
	if t := mediaType(resp); t != "text/event-stream" {
		return x.noStream(ctx, resp, t)
	}
	return x.stream(ctx, r, a, resp.Body, cancel)
}

// own has the caller send a request of its own.
func (x *exchange) own(ctx context.Context, r *runner, i int) *fault {
	x.sent = time.Now()
	kind, detail := r.cfg.Own(ctx, r.server(i), i)
	if x.end = time.Now(); kind == OK {
		return nil
	}
	return &fault{kind, detail}
}

func mediaType(resp *http.Response) string {
	t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		return resp.Header.Get("Content-Type")
	}
	return t
}

// noStream reads what a server sent instead of a stream: with status 200 it
// may still be an error.
func (x *exchange) noStream(ctx context.Context, resp *http.Response, mediaType string) *fault {
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return transportFault(ctx, err)
	}
	var c chunk
	if c.scan(body) == nil && c.failed {
		return faultf(ErrorEvent, "type %q, code %q, as %s with status 200: %s", c.kind, c.code, mediaType, clip(c.message))
	}
	return faultf(BadShape, "Content-Type %q instead of a stream: %s", mediaType, clip(body))
}

// stream follows an event stream.
func (x *exchange) stream(ctx context.Context, r *runner, a *ask, body io.Reader, cancel context.CancelCauseFunc) *fault {
	leaveAt := a.cancelTokens()
	for {
		n, err := body.Read(x.buf[:])
		if n > 0 {
			now := time.Now()
			x.framer.Feed(x.buf[:n])
			if f := x.drain(r, now); f != nil {
				return f
			}
			if leaveAt > 0 && x.tokens >= leaveAt && !x.follower.done {
				cancel(errCancel)
				return &fault{kind: Cancelled}
			}
		}
		switch {
		case errors.Is(err, io.EOF) && x.framer.Buffered() > 0:
			return faultf(Truncated, "the body ended inside an event, after %d of %d tokens", x.tokens, a.req.Output)
		case errors.Is(err, io.EOF):
			return x.follower.end()
		case err != nil:
			f := transportFault(ctx, err)
			if f.kind == Truncated {
				f = faultf(Truncated, "the body broke off after %d of %d tokens", x.tokens, a.req.Output)
			}
			return f
		}
	}
}

// drain checks the events that are complete.
func (x *exchange) drain(r *runner, now time.Time) *fault {
	for {
		e, ok := x.framer.Next()
		if !ok {
			return nil
		}
		x.events++
		if f := x.follower.event(e); f != nil {
			return f
		}
		if n := x.follower.tokens(); n > x.tokens {
			r.tokens.Add(int64(n - x.tokens))
			x.tokens = n
			if x.first.IsZero() {
				x.first = now
			} else {
				x.gaps = append(x.gaps, now.Sub(x.last))
			}
			x.last = now
		}
	}
}

// whole checks an answer that is not streamed.
func (x *exchange) whole(ctx context.Context, resp *http.Response) *fault {
	x.body.Reset()
	if _, err := x.body.ReadFrom(io.LimitReader(resp.Body, maxAnswer)); err != nil {
		return transportFault(ctx, err)
	}
	if t := mediaType(resp); t != "application/json" {
		return faultf(BadShape, "Content-Type %q instead of application/json: %s", t, clip(x.body.Bytes()))
	}
	if f := x.follower.object(x.body.Bytes()); f != nil {
		return f
	}
	if resp.ContentLength < 0 && !x.chunked {
		return faultf(BadShape, "no Content-Length, which engines send with every answer in one piece")
	}
	x.tokens = x.follower.tokens()
	return x.follower.whole()
}
