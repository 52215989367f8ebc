package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// unruly is an engine of both roles whose answers a test writes.
type unruly struct {
	probe  func(w http.ResponseWriter)      // nil: a hand-off
	decode func(w *script, r *http.Request) // of a stream
	calls  atomic.Int64                     // to decode, streams only
	ended  chan struct{}                    // one for each of them whose handler returned
	change func(*config.Config)             // of the proxy
}

// script is where an engine writes its stream.
type script struct {
	http.ResponseWriter
	n int64 // of the call, from 1
}

// send writes at once; false: nobody reads any more.
func (w *script) send(text string) bool {
	_, err := io.WriteString(w, text)
	return err == nil && http.NewResponseController(w.ResponseWriter).Flush() == nil
}

// drip sends a text again and again until nobody reads any more.
func (w *script) drip(r *http.Request, text string, pause time.Duration) {
	for w.send(text) {
		select {
		case <-r.Context().Done():
			return
		case <-time.After(pause):
		}
	}
}

const (
	wholeEvents = oneEvent + lastEvent + doneEvent
	oneEvent    = `data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null,"token_ids":[1]}]}` + "\n\n"
	lastEvent   = `data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"delta":{"content":"!"},"finish_reason":"stop","token_ids":[2]}]}` + "\n\n"
	doneEvent   = "data: [DONE]\n\n"
)

func (u *unruly) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
		return
	case "/v1/models":
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"ref","max_model_len":100000}]}`)
		return
	case chatPath, completionPath:
	default:
		http.NotFound(w, r)
		return
	}
	body, _ := io.ReadAll(r.Body)
	switch {
	case bytes.Contains(body, []byte(`"do_remote_decode":true`)):
		w.Header().Set("Content-Type", "application/json")
		if u.probe != nil {
			u.probe(w)
			return
		}
		_, _ = io.WriteString(w, `{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":7},"kv_transfer_params":`+handoffOnTheWire+`}`)
	case !bytes.Contains(body, []byte(`"stream":true`)):
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}`)
	default:
		defer func() { u.ended <- struct{}{} }()
		w.Header().Set("Content-Type", "text/event-stream")
		u.decode(&script{w, u.calls.Add(1)}, r)
	}
}

// misled is a proxy before such an engine.
func misled(t *testing.T, u *unruly) *cluster {
	t.Helper()
	u.ended = make(chan struct{}, 1000)
	engine := httptest.NewServer(u)
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen, cfg.SelfTest = "127.0.0.1:0", "127.0.0.1:0", false
	cfg.Prefill.Scrape.Interval, cfg.Health.Canary = 0, 0
	cfg.Prefill.Retry.Base = time.Millisecond
	cfg.Engines = config.Engines{Prefill: []config.Engine{{URL: engine.URL}}, Decode: []config.Engine{{URL: engine.URL, Slots: 4}}}
	if u.change != nil {
		u.change(cfg)
	}
	require.NoError(t, cfg.Validate())
	g, err := gateway.New(cfg, zap.NewNop())
	require.NoError(t, err)
	handler, err := admin.New(g, admin.Options{Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, g.Start(handler))
	c := &cluster{T: t, gw: g, url: "http://" + g.Addr(), admin: "http://" + g.AdminAddr(), http: &http.Client{Transport: &http.Transport{}, Timeout: patience}}
	t.Cleanup(func() {
		if !t.Failed() {
			c.settled(true)
		}
		c.http.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, g.Shutdown(ctx))
		engine.CloseClientConnections()
		engine.Close()
	})
	c.eventually("ready", func() bool { ok, _ := g.Ready(); return ok })
	return c
}

// over waits until the engine's side of so many streams has ended.
func (u *unruly) over(t *testing.T, n int) {
	t.Helper()
	for range n {
		select {
		case <-u.ended:
		case <-time.After(patience):
			require.Fail(t, "the proxy still reads")
		}
	}
}

// What keeps a connection alive is no answer: neither comments nor the bytes of
// an event that does not end hold a client and a slot.
func TestAnEngineThatOnlySeemsToGoOnIsSilent(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"comments": ": keep-alive\n\n", "bytes of an event": "x"} {
		for _, begun := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, begun %v", name, begun), func(t *testing.T) {
				t.Parallel()
				u := &unruly{change: func(cfg *config.Config) { cfg.Limits.EventTimeout = time.Second }}
				u.decode = func(w *script, r *http.Request) {
					if w.n > 2 {
						w.send(wholeEvents)
						return
					}
					if begun || w.n == 2 {
						w.send(oneEvent)
					}
					if name != "comments" {
						w.send("data: ")
					}
					w.drip(r, text, 20*time.Millisecond)
				}
				if !begun {
					u.change = func(cfg *config.Config) {
						cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {FirstEventTimeout: time.Second}}
						cfg.Limits.EventTimeout = time.Second
					}
				}
				c := misled(t, u)
				r := c.post(chatPath, chat("a", `"stream":true,`))
				require.Equal(t, 200, r.status, r.body)
				require.Equal(t, "upstream_broken", read(t, r.body).fail)
				u.over(t, int(u.calls.Load()))
				u.calls.Store(0)
				r = c.post(chatPath, chat("a", ""))
				require.Equal(t, 200, r.status, r.body)
				require.Equal(t, []string{"hi!"}, whole(t, r.body), "an answer nobody has seen begins anew")
				u.over(t, 3)
			})
		}
	}
}

// socketsHold is how much of a loopback connection the kernel may keep between
// its two ends: Linux grows the buffers up to these limits. Elsewhere it is a guess.
func socketsHold() int64 {
	hold := int64(0)
	for _, file := range []string{"/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"} {
		text, _ := os.ReadFile(file)
		limits := strings.Fields(string(text)) // least, default, most
		if len(limits) != 3 {
			return 16 << 20
		}
		most, _ := strconv.ParseInt(limits[2], 10, 64)
		hold += most
	}
	return hold
}

// The answer of an engine that does not stop is the engine's fault, and costs
// bounded memory.
func TestAnAnswerWithoutEnd(t *testing.T) {
	t.Parallel()
	big := strings.Replace(oneEvent, "hi", strings.Repeat("x", 1<<20), 1)
	silentBig := strings.Replace(big, `"token_ids":[1]`, `"token_ids":[]`, 1)
	for name, row := range map[string]struct {
		event  string
		most   int // bytes a client is sent
		tokens int // and events with tokens
	}{
		"megabytes for a token":    {silentBig, 16 << 20, 16},
		"more tokens than asked":   {oneEvent, 1 << 20, 40},
		"tokens and nothing else":  {`data: {"choices":[{"index":0,"delta":{},"finish_reason":null,"token_ids":[1]}]}` + "\n\n", 1 << 20, 0},
		"a chunk without a count":  {`data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}` + "\n\n", 1 << 20, 4 * 36},
		"comments behind an event": {oneEvent + ": " + strings.Repeat("c", 1<<20) + "\n\n", 16 << 20, 16},
	} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, stream %v", name, stream), func(t *testing.T) {
				t.Parallel()
				u := &unruly{change: func(cfg *config.Config) { cfg.Limits.AnswerBytes = 4 << 20 }}
				var sent atomic.Int64
				u.decode = func(w *script, r *http.Request) {
					for w.send(row.event) { // on, though the proxy has left: what it reads then it throws away
						if r.Context().Err() == nil {
							sent.Add(int64(len(row.event)))
						}
					}
				}
				c := misled(t, u)
				r := c.post(chatPath, chat("a", fmt.Sprintf(`"max_tokens":4,"stream":%v,`, stream)))
				u.over(t, int(u.calls.Load()))
				require.Less(t, sent.Load(), u.calls.Load()*(16<<20+socketsHold()), "what sockets hold included")
				if !stream || r.status == http.StatusBadGateway { // all of it may come at once
					require.Equal(t, http.StatusBadGateway, r.status)
					code, _, _ := failure(t, r)
					require.Contains(t, []string{"upstream_broken", "decode_failed"}, code)
					return
				}
				require.Equal(t, http.StatusOK, r.status)
				require.LessOrEqual(t, len(r.body), row.most)
				require.LessOrEqual(t, strings.Count(r.body, `"content"`), row.tokens)
				require.Contains(t, r.body[max(0, len(r.body)-300):], `"code":"upstream_broken"`)
				require.True(t, strings.HasSuffix(r.body, doneEvent))
			})
		}
	}
}

// A finished answer does not wait for the end of the engine's body.
func TestTheEndOfABodyIsNotTheAnswers(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		text  string
		pause time.Duration
	}{
		"a drip":  {":", 20 * time.Millisecond},
		"a flood": {": " + strings.Repeat("x", 16<<10) + "\n\n", 0},
		"nothing": {"", time.Hour},
	} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, stream %v", name, stream), func(t *testing.T) {
				t.Parallel()
				u := &unruly{}
				u.decode = func(w *script, r *http.Request) {
					w.send(wholeEvents)
					w.drip(r, row.text, row.pause)
				}
				c := misled(t, u)
				r := c.post(chatPath, chat("a", fmt.Sprintf(`"stream":%v,`, stream)))
				require.NoError(t, r.err)
				require.Equal(t, http.StatusOK, r.status, r.body)
				if stream {
					got := read(t, r.body)
					require.True(t, got.whole(0), r.body)
				} else {
					require.Equal(t, []string{"hi!"}, whole(t, r.body))
				}
				u.over(t, 1)
			})
		}
	}
}

// What an engine counts beyond what there can be is neither billed nor learned.
func TestAnEngineThatCountsTooMuch(t *testing.T) {
	t.Parallel()
	keys := func(cfg *config.Config) {
		sum := sha256.Sum256([]byte("ek-secret"))
		cfg.KeysFile = filepath.Join(t.TempDir(), "keys.yaml")
		require.NoError(t, os.WriteFile(cfg.KeysFile, fmt.Appendf(nil, "keys:\n  - {name: team, sha256: %s, tpm: 100000}\n", hex.EncodeToString(sum[:])), 0o600))
	}
	usage := func(text string) string {
		return `data: {"id":"d","choices":[],"usage":` + text + `}` + "\n\n"
	}
	for name, row := range map[string]struct{ probe, usage string }{
		"tokens of the answer":      {"7", usage(`{"prompt_tokens":7,"completion_tokens":1000000000000000}`)},
		"more than the context has": {"7", usage(`{"prompt_tokens":7,"completion_tokens":100500}`)},
		"tokens of the prompt":      {"7", usage(`{"prompt_tokens":1000000000000000,"completion_tokens":2}`)},
		"a prefill's tokens":        {"1000000000000000", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := &unruly{change: keys}
			probes := 0
			u.probe = func(w http.ResponseWriter) {
				count := row.probe
				if probes++; probes > 3 {
					count = "7"
				}
				_, _ = io.WriteString(w, `{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":`+count+`},"kv_transfer_params":`+handoffOnTheWire+`}`)
			}
			u.decode = func(w *script, _ *http.Request) {
				if w.n == 1 {
					w.send(oneEvent + lastEvent + row.usage + doneEvent)
				} else {
					w.send(wholeEvents)
				}
			}
			c := misled(t, u)
			const key = "Bearer ek-secret"
			r := c.post(chatPath, chat("a", ""), "Authorization", key)
			if r.status != http.StatusOK { // where all of it came at once, it was tried again
				require.Equal(t, http.StatusBadGateway, r.status, r.body)
			}
			c.settled(true)
			r = c.post(chatPath, chat("a", ""), "Authorization", key)
			require.Equal(t, http.StatusOK, r.status, r.body)
			c.settled(true)
			right := int(u.calls.Load())
			if row.usage != "" {
				right-- // the first
			}
			finished := func() int { return int(c.gw.Status(context.Background()).Dispatch.Models[0].Finished) }
			c.eventually("all that finished is learned", func() bool { return c.predictor().Outputs == finished() })
			require.Equal(t, right, c.predictor().Outputs, "answers that were right")
		})
	}
}

// An event beyond limits.event_bytes is not gathered: a stream has it as it came,
// an answer in one piece cannot.
func TestEventBytesBoundTheEventsOfAStream(t *testing.T) {
	t.Parallel()
	u := &unruly{change: func(cfg *config.Config) { cfg.Limits.EventBytes = 1000 }}
	large := strings.Replace(oneEvent, "hi", strings.Repeat("x", 5000), 1)
	half := make(chan struct{})
	u.decode = func(w *script, _ *http.Request) {
		w.send(oneEvent + large[:4000])
		if w.n == 1 {
			<-half
		}
		w.send(large[4000:] + lastEvent + doneEvent)
	}
	c := misled(t, u)
	resp, err := c.http.Post(c.url+chatPath, "application/json", strings.NewReader(chat("a", `"stream":true,`)))
	require.NoError(t, err)
	got := make([]byte, 3000)
	_, err = io.ReadFull(resp.Body, got)
	require.NoError(t, err, "it leaves before its end")
	close(half)
	rest, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Contains(t, string(got)+string(rest), large)
	require.True(t, bytes.HasSuffix(rest, []byte(doneEvent)))

	r := c.post(chatPath, chat("a", ""))
	require.Equal(t, http.StatusBadGateway, r.status)
	u.over(t, 2)
}

// Of a refusal without end its beginning is passed on, as the type it is.
func TestARefusalIsCut(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("your prompt is bad. ", 50<<20/20)
	refuse := func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "text/plain; charset=latin1")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, text)
	}
	for side, u := range map[string]*unruly{
		"prefill": {probe: refuse},
		"decode":  {decode: func(w *script, _ *http.Request) { refuse(w) }},
	} {
		t.Run(side, func(t *testing.T) {
			c := misled(t, u)
			for _, stream := range []string{"true", "false"} {
				r := c.post(chatPath, chat("a", `"stream":`+stream+`,`))
				require.Equal(t, http.StatusBadRequest, r.status)
				require.Equal(t, "text/plain; charset=latin1", r.header.Get("Content-Type"))
				require.Len(t, r.body, 1<<20)
				require.True(t, strings.HasPrefix(text, r.body))
			}
		})
	}
}

// A client that obeyed an engine's Retry-After of three thousand years would not
// come back.
func TestRetryAfterIsClamped(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{"99999999999": "3600", "99999999999999999999999": "3600", "17": "17", "-3": "1", "soon": "1"} {
		for status, code := range map[int]int{http.StatusTooManyRequests: http.StatusTooManyRequests, http.StatusServiceUnavailable: http.StatusServiceUnavailable} {
			u := &unruly{change: func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 1 }}
			u.decode = func(w *script, _ *http.Request) {
				w.Header().Set("Retry-After", said)
				w.WriteHeader(status)
			}
			r := misled(t, u).post(chatPath, chat("a", ""))
			require.Equal(t, code, r.status, r.body)
			require.Equal(t, want, r.header.Get("Retry-After"), said)
		}
	}
}

// One leg's refusal is the answer. It does not wait for the others' first events,
// until which those keep their connections all the same.
func TestARefusedLegIsToldAtOnce(t *testing.T) {
	t.Parallel()
	for _, stream := range []string{"true", "false"} {
		held, free := make(chan struct{}), make(chan struct{})
		u := &unruly{}
		u.decode = func(w *script, r *http.Request) {
			if w.n == 1 {
				close(held)
				<-free
				require.NoError(t, r.Context().Err(), "its pull goes on")
				w.send(wholeEvents)
				return
			}
			<-held
			w.Header().Set("Content-Type", "text/plain")
			w.WriteHeader(http.StatusBadRequest)
			w.send("too hot")
		}
		c := misled(t, u)
		r := c.post(chatPath, chat("a", `"n":2,"stream":`+stream+`,`))
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
		require.Equal(t, "too hot", r.body)
		require.Equal(t, 1.0, c.metric("evenkeel_requests_open"), "the other leg has its slot")
		close(free)
		u.over(t, 2)
		c.eventually("it is settled", func() bool { return c.metric("evenkeel_requests_open") == 0 })
		require.Equal(t, 1.0, c.metric(`evenkeel_requests_total{outcome="engine_refused"}`))
	}
}

// tell is an engine's hand-off of seven tokens, five of them cached.
func tell(w http.ResponseWriter) {
	_, _ = io.WriteString(w, `{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":5}},"kv_transfer_params":`+handoffOnTheWire+`}`)
}

// An engine that says of its chunks neither ids nor usage is known by what its
// answers had in the end.
func TestTokensPerChunkAreLearned(t *testing.T) {
	t.Parallel()
	const runs = 40 // each moves the average by a tenth
	chunk := strings.Replace(oneEvent, `,"token_ids":[1]`, "", 1)
	held, free := make(chan struct{}), make(chan struct{})
	u := &unruly{}
	u.decode = func(w *script, _ *http.Request) {
		w.send(strings.Repeat(chunk, 4))
		if w.n == runs+2 {
			close(held)
			<-free
		}
		w.send(strings.NewReplacer(`"content":"!"`, "", `,"token_ids":[2]`, "").Replace(lastEvent) + `data: {"id":"d","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":12}}` + "\n\n" + doneEvent)
	}
	c := misled(t, u)
	run := func() (miscounted float64) {
		require.Equal(t, http.StatusOK, c.post(chatPath, chat("a", "")).status)
		c.settled(true)
		return c.metric("evenkeel_miscounted_answers_total")
	}
	require.Equal(t, 1.0, run(), "4 for 12 the first time")
	before := 0.0
	for range runs - 1 {
		before = run()
	}
	require.Less(t, before, runs-1.0)
	require.Equal(t, before, run(), "12 in the end")
	got := make(chan reply, 1)
	go func() { got <- c.post(chatPath, chat("a", `"stream":true,`)) }()
	<-held
	c.eventually("the rank has the prompt and 12 tokens", func() bool { return c.sum("evenkeel_rank_kv_tokens") == 7+12 })
	close(free)
	require.Equal(t, http.StatusOK, (<-got).status)
}

// A large event leaves as one chunk, not in fasthttp's pieces of 4 KiB: also the
// first, before which the head leaves.
func TestALargeEventIsOneChunk(t *testing.T) {
	t.Parallel()
	large := strings.Replace(oneEvent, "hi", strings.Repeat("x", 60_000), 1)
	u := &unruly{}
	u.decode = func(w *script, _ *http.Request) {
		w.send(large)
		w.send(large)
		w.send(lastEvent + doneEvent)
	}
	c := misled(t, u)
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	body := chat("a", `"stream":true,`)
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	require.NoError(t, err)
	br := bufio.NewReader(conn)
	for line := ""; line != "\r\n"; {
		line, err = br.ReadString('\n')
		require.NoError(t, err)
	}
	chunks, largest := 0, 0
	for {
		var size int
		_, err = fmt.Fscanf(br, "%x\r\n", &size)
		require.NoError(t, err)
		_, err = br.Discard(size + 2)
		require.NoError(t, err)
		if size == 0 {
			break
		}
		chunks, largest = chunks+1, max(largest, size)
	}
	require.GreaterOrEqual(t, largest, 60_000)
	require.LessOrEqual(t, chunks, 4)
}
