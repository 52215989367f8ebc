package request

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// unruly is an engine of both roles whose answers a test writes.
type unruly struct {
	probe   func(w http.ResponseWriter)      // nil: a hand-off
	decode  func(w *script, r *http.Request) // of a stream
	calls   atomic.Int64                     // to decode, streams only
	ended   chan struct{}                    // one for each of them whose handler returned
	change  func(*config.Config)             // of the proxy
	profile mooncake.Profile
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

// handOff is what a prefill engine tells of a prompt of so many tokens; details are other members
// of its usage.
func handOff(tokens, details string) string {
	return `{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":` + tokens + details + `},"kv_transfer_params":` +
		`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2],[3]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}}`
}

func (u *unruly) answer(w http.ResponseWriter, r *http.Request, _ http.Handler) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case bytes.Contains(body, []byte(`"do_remote_decode":true`)):
		w.Header().Set("Content-Type", "application/json")
		if u.probe != nil {
			u.probe(w)
			return
		}
		_, _ = io.WriteString(w, handOff("7", ""))
	case !bytes.Contains(body, []byte(`"stream":true`)): // a hand-off that is discarded
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}`)
	default:
		defer func() { u.ended <- struct{}{} }()
		w.Header().Set("Content-Type", "text/event-stream")
		u.decode(&script{w, u.calls.Add(1)}, r)
	}
}

// misled is a bed whose engines all answer like this one.
func misled(t *testing.T, u *unruly) *bed {
	t.Helper()
	u.ended = make(chan struct{}, 1000)
	return start(t, setup{front: u.answer, profile: u.profile, configure: func(cfg *config.Config, _ *Deps) {
		if u.change != nil {
			u.change(cfg)
		}
	}})
}

// hiWhole says whether an answer is what wholeEvents has, and ends as HTTP and the engine say.
func hiWhole(t *testing.T, r reply) bool {
	t.Helper()
	text, finished, fail := read(t, r)
	return text == "hi!" && finished && fail == ""
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
	const silence = 3 * time.Second // an engine that answers does so within this on a loaded machine, too
	for name, text := range map[string]string{"comments": ": keep-alive\n\n", "bytes of an event": "x"} {
		for _, begun := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, begun %v", name, begun), func(t *testing.T) {
				t.Parallel()
				u := &unruly{change: func(cfg *config.Config) { cfg.Limits.EventTimeout = silence }}
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
					u.profile.FirstEventTimeout = silence
				}
				b := misled(t, u)
				r := b.post(mooncake.Chat.Path(), chat("a", `"stream":true,`))
				require.Equal(t, 200, r.status, r.body)
				_, _, fail := read(t, r)
				require.Equal(t, "upstream_broken", fail)
				u.over(t, int(u.calls.Load()))
				u.calls.Store(0)
				r = b.post(mooncake.Chat.Path(), chat("a", ""))
				require.Equal(t, 200, r.status, r.body)
				require.True(t, hiWhole(t, r), "an answer nobody has seen begins anew: %s", r.body)
				u.over(t, 3)
				b.settle()
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
				b := misled(t, u)
				r := b.post(mooncake.Chat.Path(), chat("a", fmt.Sprintf(`"max_tokens":4,"stream":%v,`, stream)))
				u.over(t, int(u.calls.Load()))
				require.Less(t, sent.Load(), u.calls.Load()*(16<<20+socketsHold()), "what sockets hold included")
				if !stream || r.status == http.StatusBadGateway { // all of it may come at once
					require.Equal(t, http.StatusBadGateway, r.status)
					_, _, fail := read(t, r)
					require.Contains(t, []string{"upstream_broken", "decode_failed"}, fail)
					b.settle()
					return
				}
				require.Equal(t, http.StatusOK, r.status)
				require.LessOrEqual(t, len(r.body), row.most)
				require.LessOrEqual(t, strings.Count(r.body, `"content"`), row.tokens)
				require.Contains(t, r.body[max(0, len(r.body)-300):], `"code":"upstream_broken"`)
				require.True(t, strings.HasSuffix(r.body, doneEvent))
				b.settle()
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
				b := misled(t, u)
				r := b.post(mooncake.Chat.Path(), chat("a", fmt.Sprintf(`"stream":%v,`, stream)))
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.True(t, hiWhole(t, r), r.body)
				u.over(t, 1)
				b.settle()
			})
		}
	}
}

// What an engine counts beyond what there can be is neither billed nor learned.
func TestAnEngineThatCountsTooMuch(t *testing.T) {
	t.Parallel()
	usage := func(text string) string {
		return `data: {"id":"d","choices":[],"usage":` + text + `}` + "\n\n"
	}
	for name, row := range map[string]struct{ probe, usage string }{
		"tokens of the answer":      {"7", usage(`{"prompt_tokens":7,"completion_tokens":1000000000000000}`)},
		"more than the context has": {"7", usage(`{"prompt_tokens":7,"completion_tokens":131500}`)},
		"tokens of the prompt":      {"7", usage(`{"prompt_tokens":1000000000000000,"completion_tokens":2}`)},
		"a prefill's tokens":        {"1000000000000000", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := &unruly{}
			probes := 0
			u.probe = func(w http.ResponseWriter) {
				count := row.probe
				if probes++; probes > 3 {
					count = "7"
				}
				_, _ = io.WriteString(w, handOff(count, ""))
			}
			u.decode = func(w *script, _ *http.Request) {
				if w.n == 1 {
					w.send(oneEvent + lastEvent + row.usage + doneEvent)
				} else {
					w.send(wholeEvents)
				}
			}
			b := misled(t, u)
			r := b.post(mooncake.Chat.Path(), chat("a", ""))
			if r.status != http.StatusOK { // where all of it came at once, it was tried again
				require.Equal(t, http.StatusBadGateway, r.status, r.body)
			}
			b.over()
			r = b.post(mooncake.Chat.Path(), chat("a", ""))
			require.Equal(t, http.StatusOK, r.status, r.body)
			b.over()
			require.Less(t, b.paid.Load(), int64(100), "of two requests")
			right := int(u.calls.Load())
			if row.usage != "" {
				right-- // the first
			}
			learned := func() board.ModelStatus { return b.Dispatcher.Status(t.Context()).Models[0] }
			b.eventually("all that finished is learned", func() bool { m := learned(); return m.Predictors[0].Outputs == int(m.Finished) })
			require.Equal(t, right, learned().Predictors[0].Outputs, "answers that were right")
			b.settle()
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
	b := misled(t, u)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(b.url+mooncake.Chat.Path(), "application/json", strings.NewReader(chat("a", `"stream":true,`)))
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

	r := b.post(mooncake.Chat.Path(), chat("a", ""))
	require.Equal(t, http.StatusBadGateway, r.status)
	u.over(t, 2)
	b.settle()
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
			b := misled(t, u)
			for _, stream := range []string{"true", "false"} {
				r := b.post(mooncake.Chat.Path(), chat("a", `"stream":`+stream+`,`))
				require.Equal(t, http.StatusBadRequest, r.status)
				require.Equal(t, "text/plain; charset=latin1", r.header.Get("Content-Type"))
				require.Len(t, r.body, 1<<20)
				require.True(t, strings.HasPrefix(text, r.body))
			}
			b.settle()
		})
	}
}

// A client that obeyed an engine's Retry-After of three thousand years would not
// come back.
func TestRetryAfterIsClamped(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{"99999999999": "3600", "99999999999999999999999": "3600", "17": "17", "-3": "1", "soon": "1"} {
		for status, code := range map[int]int{http.StatusTooManyRequests: http.StatusTooManyRequests,
			http.StatusServiceUnavailable: http.StatusServiceUnavailable} {
			u := &unruly{change: func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 1 }}
			u.decode = func(w *script, _ *http.Request) {
				w.Header().Set("Retry-After", said)
				w.WriteHeader(status)
			}
			b := misled(t, u)
			r := b.post(mooncake.Chat.Path(), chat("a", ""))
			b.settle()
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
		b := misled(t, u)
		r := b.post(mooncake.Chat.Path(), chat("a", `"n":2,"stream":`+stream+`,`))
		require.Equal(t, http.StatusBadRequest, r.status, r.body)
		require.Equal(t, "too hot", r.body)
		require.EqualValues(t, 1, b.Open(), "the other leg has its slot")
		close(free)
		u.over(t, 2)
		b.settle()
		require.Equal(t, 1.0, b.metric(t, "evenkeel_requests_total", "engine_refused"))
	}
}

// tell is an engine's hand-off of seven tokens, five of them cached.
func tell(w http.ResponseWriter) {
	_, _ = io.WriteString(w, handOff("7", `,"prompt_tokens_details":{"cached_tokens":5}`))
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
	b := misled(t, u)
	run := func() (miscounted float64) {
		require.Equal(t, http.StatusOK, b.post(mooncake.Chat.Path(), chat("a", "")).status)
		b.over()
		return b.metric(t, "evenkeel_miscounted_answers_total", "")
	}
	require.Equal(t, 1.0, run(), "4 for 12 the first time")
	before := 0.0
	for range runs - 1 {
		before = run()
	}
	require.Less(t, before, runs-1.0)
	require.Equal(t, before, run(), "12 in the end")
	got := make(chan reply, 1)
	go func() { got <- b.post(mooncake.Chat.Path(), chat("a", `"stream":true,`)) }()
	<-held
	b.eventually("the rank has the prompt and 12 tokens",
		func() bool { return b.Dispatcher.Status(t.Context()).Models[0].Workers[0].KVTokens == 7+12 })
	close(free)
	require.Equal(t, http.StatusOK, (<-got).status)
	b.settle()
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
	b := misled(t, u)
	conn, err := net.Dial("tcp", strings.TrimPrefix(b.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	body := chat("a", `"stream":true,`)
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", mooncake.Chat.Path(), len(body), body)
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
	b.settle()
}

// What an engine says of one leg of a fan-out comes when another has begun to stream: in an event
// then, since the status is out.
func TestARefusalAfterASiblingBegan(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	var probes atomic.Int64
	u := &unruly{}
	u.probe = func(w http.ResponseWriter) {
		if probes.Add(1) == 1 {
			_, _ = io.WriteString(w, handOff("7", ""))
			return
		}
		<-began
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, `{"error":{"message":"no such luck","type":"BadRequestError","code":400}}`)
	}
	u.decode = func(w *script, r *http.Request) {
		w.send(oneEvent)
		<-r.Context().Done()
	}
	b := misled(t, u)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(b.url+mooncake.Chat.Path(), "application/json", strings.NewReader(chat("a", `"stream":true,"n":2,`)))
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	first := make([]byte, 1)
	_, err = io.ReadFull(resp.Body, first)
	require.NoError(t, err)
	close(began)
	rest, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	body := string(first) + string(rest)
	_, finished, fail := readAll(t, reply{resp.StatusCode, resp.Header, body})
	require.Equal(t, "engine_refused", fail)
	require.Contains(t, body, "an engine refused the request with status 400")
	require.NotContains(t, body, "no such luck", "an engine's words stay in its own answers")
	for choice, ended := range finished {
		require.False(t, ended, choice)
	}
	b.settle()
	require.Equal(t, 1.0, b.metric(t, "evenkeel_requests_total", "engine_refused"))
}

// A client that reads no more of its answer is cut, and all legs of its request end with it: settle
// waits for them.
func TestAnAnswerThatNobodyReads(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"a stream": "", "a fan-out": `"n":4,`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{configure: func(cfg *config.Config, _ *Deps) {
				cfg.Limits.WriteTimeout, cfg.Limits.ClientBacklog = 200*time.Millisecond, 4096
			}})
			conn, err := net.Dial("tcp", strings.TrimPrefix(b.url, "http://"))
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4096))
			body := chat("a story", more+`"stream":true,"ignore_eos":true,`)
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", mooncake.Chat.Path(), len(body), body)
			require.NoError(t, err)
			b.eventually("it is cut", func() bool { return b.ln.Stats().CutStalled == 1 })
			b.settle()
			require.Equal(t, 1.0, b.metric(t, "evenkeel_requests_total", "client_closed"))
		})
	}
}
