package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
)

// fake is an engine that answers by reftext, and wrongly where told.
type fake struct {
	// stream changes the events of an answer before they are sent.
	stream func(events []string, in wire) []string
	// instead answers in the fake's place if it returns true.
	instead func(w http.ResponseWriter, in wire) bool
	// before and step are what the first event and each one take.
	before, step time.Duration

	mu   sync.Mutex
	seen []wire
	left int // clients that left before their answer was whole
}

// wire is a request as it came.
type wire struct {
	path   string
	header http.Header
	body   map[string]json.RawMessage
	prompt reftext.Prompt
	tokens int
	stream bool
	usage  bool
}

func (in wire) chat() bool { return in.path == "/v1/chat/completions" }

func (f *fake) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == "/v1/models" {
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"ref"}]}`)
		return
	}
	in := wire{path: req.URL.Path, header: req.Header}
	raw, _ := io.ReadAll(req.Body)
	err := json.Unmarshal(raw, &in.body)
	if err == nil {
		in.prompt, err = reftext.RenderMembers(in.chat(), in.body)
	}
	if err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	_ = json.Unmarshal(in.body["max_tokens"], &in.tokens)
	_ = json.Unmarshal(in.body["stream"], &in.stream)
	in.usage = in.body["stream_options"] != nil
	f.mu.Lock()
	f.seen = append(f.seen, in)
	f.mu.Unlock()
	if f.instead != nil && f.instead(w, in) {
		return
	}
	if !f.answer(req.Context(), w, in) {
		f.mu.Lock()
		f.left++
		f.mu.Unlock()
	}
}

func (f *fake) requests() []wire {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

func (f *fake) answer(ctx context.Context, w http.ResponseWriter, in wire) bool {
	if !pause(ctx, f.before) {
		return false
	}
	if !in.stream {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, in.whole(in.tokens))
		return true
	}
	events := in.events()
	if f.stream != nil {
		events = f.stream(events, in)
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for i, e := range events {
		if i > 0 && !pause(ctx, f.step) {
			return false
		}
		if _, err := io.WriteString(w, e); err != nil {
			return false
		}
		w.(http.Flusher).Flush()
	}
	return true
}

func pause(ctx context.Context, d time.Duration) bool {
	if d == 0 {
		return ctx.Err() == nil
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func (in wire) id() string { return "cmpl-" + in.header.Get("X-Request-Id") }

// event is a chunk with the given text.
func (in wire) event(text, finish string) string {
	delta := any(map[string]any{"content": text})
	key, object := "delta", "chat.completion.chunk"
	if !in.chat() {
		key, object, delta = "text", "text_completion", text
	}
	choice := map[string]any{"index": 0, key: delta, "finish_reason": nil, "logprobs": nil}
	if finish != "" {
		choice["finish_reason"], choice["stop_reason"] = finish, nil
	}
	return in.data(map[string]any{"id": in.id(), "object": object, "created": 1, "model": "ref", "choices": []any{choice}, "usage": nil})
}

func (in wire) data(v any) string {
	b, _ := json.Marshal(v)
	return "data: " + string(b) + "\n\n"
}

func (in wire) counts(tokens int) map[string]any {
	p := in.prompt.Tokens()
	return map[string]any{"prompt_tokens": p, "completion_tokens": tokens, "total_tokens": p + tokens}
}

// events is the right answer: a role chunk in a chat, a token an event, usage
// if asked for, the end.
func (in wire) events() (out []string) {
	if in.chat() {
		out = append(out,
			in.data(map[string]any{"id": in.id(),
				"choices": []any{map[string]any{"index": 0, "delta": map[string]any{"role": "assistant", "content": ""}}}}))
	}
	for i := range in.tokens {
		finish := ""
		if i == in.tokens-1 {
			finish = "length"
		}
		out = append(out, in.event(string(reftext.AppendToken(nil, reftext.TokenID(in.prompt.Answer, i))), finish))
	}
	if in.usage {
		out = append(out, in.data(map[string]any{"id": in.id(), "choices": []any{}, "usage": in.counts(in.tokens)}))
	}
	return append(out, "data: [DONE]\n\n")
}

func (in wire) whole(tokens int) string {
	choice := map[string]any{"index": 0, "finish_reason": "length"}
	if text := reftext.Text(in.prompt.Answer, tokens); in.chat() {
		choice["message"] = map[string]any{"role": "assistant", "content": text}
	} else {
		choice["text"] = text
	}
	b, _ := json.Marshal(map[string]any{"id": in.id(), "object": "x", "choices": []any{choice}, "usage": in.counts(tokens)})
	return string(b)
}

// serve starts the fake on loopback.
func serve(t *testing.T, f *fake) string {
	t.Helper()
	return serveHandler(t, f)
}

func serveHandler(t *testing.T, h http.Handler) string {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

// pipes starts the fake on in-memory connections, for use inside synctest.
func pipes(t *testing.T, f *fake, cfg *Config) {
	t.Helper()
	l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
	srv := &http.Server{Handler: f}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	cfg.URLs = []string{"http://pipe"}
	cfg.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		here, there := net.Pipe()
		select {
		case l.conns <- there:
			return here, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// same is n requests of equal length, a gap apart.
func same(n, prompt, output int, gap time.Duration) []trace.Request {
	out := make([]trace.Request, n)
	for i := range out {
		out[i] = trace.Request{At: time.Duration(i) * gap, Prompt: prompt, Output: output}
	}
	return out
}

func mustRun(t *testing.T, cfg Config) *Result {
	t.Helper()
	r, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	return r
}

func requireAllOK(t *testing.T, r *Result) {
	t.Helper()
	var detail bytes.Buffer
	for _, f := range r.Failures {
		fmt.Fprintf(&detail, "%s: %s\n", f.Kind, f.Detail)
	}
	require.Equal(t, map[Kind]int{OK: r.Sent}, r.Kinds, detail.String())
}
