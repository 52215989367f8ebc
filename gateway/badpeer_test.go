package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// dishonest starts a peer eu-1 that offers everything for nothing.
func dishonest(t *testing.T, offer string, serve http.HandlerFunc) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc(geo.ProbePath, func(w http.ResponseWriter, r *http.Request) {
		var q struct{ Seq uint64 }
		_ = json.NewDecoder(r.Body).Decode(&q)
		_, _ = fmt.Fprintf(w, `{"v":"1.7","id":"eu-1","region":"eu","boot":"b","seq":%d,"proc_us":5,"later":true,"models":{%q:%s}}`, q.Seq, model, offer)
	})
	mux.HandleFunc("/v1/", serve)
	s := &http.Server{Handler: mux}
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close() })
	return ln.Addr().String()
}

const honest = `{"replicas":4,"n_avail":4,"free":30,"queue":0,"queue_wait_ms":0,"queued_new_tokens":0,"running":0,"load":0,"tp_ms":0.001,"t0_ms":0.1}`

// toStub is us-1 alone, whose requests all go to a peer of that kind.
func toStub(t *testing.T, offer string, serve http.HandlerFunc, more ...func(*config.Config)) *cluster {
	t.Helper()
	peer := dishonest(t, offer, serve)
	us := start(t, options{configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", peer)
		remote(cfg)
		for _, f := range more {
			f(cfg)
		}
	}})
	us.hasEngines()
	return us
}

// A stub is a peer that serves in one way, and later in another one.
type stub struct {
	serve atomic.Pointer[http.HandlerFunc]
}

func (s *stub) does(f http.HandlerFunc) { s.serve.Store(&f) }

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) { (*s.serve.Load())(w, r) }

// servesWell serves a request as it should.
func servesWell(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, event(0)+"data: [DONE]\n\n")
}

func event(n int) string {
	return fmt.Sprintf("data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w%d \"}}]}\n\n", n)
}

// What a peer cannot serve is served here, once.
func TestAPeerThatCannotServe(t *testing.T) {
	t.Parallel()
	peer := &stub{}
	us := toStub(t, honest, peer.ServeHTTP, func(cfg *config.Config) { cfg.ExposeRoute = true })
	reset := func(w http.ResponseWriter) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}
	for name, row := range map[string]struct {
		serve http.HandlerFunc
		cause string
	}{
		"it resets the connection": {func(w http.ResponseWriter, _ *http.Request) { reset(w) }, "broken"},
		"it sends headers and a comment, and breaks": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, ": wait\n\n")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, "broken"},
		"it is busy": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Evenkeel-Reject", "peer_busy")
			w.WriteHeader(503)
		}, "peer_busy"},
		"it drains": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Evenkeel-Reject", "draining")
			w.WriteHeader(503)
		}, "draining"},
		"it does not have the model": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Evenkeel-Reject", "model")
			w.WriteHeader(404)
		}, "model"},
		"it says that it was there before": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Evenkeel-Reject", "hop")
			w.WriteHeader(508)
		}, "hop"},
		"it does not believe our key": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Evenkeel-Reject", "signature")
			w.WriteHeader(401)
		}, "signature"},
		"it is asked for too much":        {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }, "status"},
		"its engines fail":                {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }, "status"},
		"it does not know us":             {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) }, "status"},
		"it answers a stream with a page": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }, "broken"},
	} {
		t.Run(name, func(t *testing.T) {
			peer.does(servesWell) // else five fallbacks in a row would take it out
			us.Eventually("it is forwarded again", func() bool {
				return us.availability("eu-1") == "available" && us.Post(refclient.ChatPath, chat("one", `"stream":true,`)).Header.Get("X-Evenkeel-Route") == "forwarded"
			})
			us.Accounted()
			us.reaches("eu-1")
			peer.does(row.serve)
			fallbacks := func() float64 {
				return us.Metric(fmt.Sprintf(`evenkeel_geo_fallbacks_total{cause=%q,peer="eu-1"}`, row.cause))
			}
			before, forwards := fallbacks(), len(us.receipts())
			require.Equal(t, "right", us.Judge("one two three", `"stream":true,`))
			us.Accounted()
			require.Equal(t, before+1, fallbacks())
			require.Len(t, us.receipts(), forwards+1, "it is forwarded once")
			require.Equal(t, geo.OutcomeFallback, us.receipts()[0].Outcome)
			all := us.Outcomes()
			require.Equal(t, "ok", all[len(all)-1])
		})
	}
	t.Run("several answers come back once, too", func(t *testing.T) {
		peer.does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) })
		forwards := len(us.receipts())
		got := us.Post(refclient.ChatPath, chat("one two", `"n":2,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "fallback", got.Header.Get("X-Evenkeel-Route"))
		require.Len(t, us.receipts(), forwards+1)
		us.settled(false)
	})
	t.Run("but the client sees its own faults", func(t *testing.T) {
		peer.does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(400)
			_, _ = io.WriteString(w, `{"error":{"message":"too hot"}}`)
		})
		got := us.Post(refclient.ChatPath, chat("one", `"stream":true,`))
		require.Equal(t, 400, got.Status)
		require.Equal(t, `{"error":{"message":"too hot"}}`, got.Body)
		us.Accounted()
		require.Equal(t, geo.OutcomeRelayed, us.receipts()[0].Outcome)
	})
	t.Run("and a peer that is lost in the middle is said so", func(t *testing.T) {
		peer.does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for n := range 3 {
				_, _ = io.WriteString(w, event(n))
				w.(http.Flusher).Flush()
			}
			_, _ = io.WriteString(w, `data: {"id":"half of an ev`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		})
		forwards := len(us.receipts())
		got := us.Post(refclient.ChatPath, chat("one", `"stream":true,`))
		require.Equal(t, 200, got.Status)
		require.Error(t, got.Err, "the connection is closed in the middle of the body")
		require.Equal(t, event(0)+event(1)+event(2)+`data: {"error":{"message":"the region that served the request was lost; send the request again","type":"server_error","param":null,"code":"peer_lost"}}`+"\n\n", got.Body)
		us.Accounted()
		require.Len(t, us.receipts(), forwards+1)
		require.Equal(t, geo.OutcomeLost, us.receipts()[0].Outcome)
		all := us.Outcomes()
		require.Equal(t, "peer_lost", all[len(all)-1])
	})
}

// wire is a connection of a client that writes its own bytes.
func (c *cluster) wire() (*net.TCPConn, *bufio.Reader) {
	c.Helper()
	conn, err := net.Dial("tcp", c.gw.Addr())
	require.NoError(c, err)
	c.Cleanup(func() { _ = conn.Close() })
	require.NoError(c, conn.SetDeadline(time.Now().Add(patience)))
	return conn.(*net.TCPConn), bufio.NewReader(conn)
}

// A peer may count no more tokens as cached than the prompt has: sums of larger counts would
// overflow.
func TestAPeerThatCountsMoreCachedTokensThanThereAre(t *testing.T) {
	t.Parallel()
	us := toStub(t, honest, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(geo.CachedHeader, strconv.Itoa(math.MaxInt))
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), `"stream":true`) {
			servesWell(w, r)
			return
		}
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"content":"w0 "}}],"usage":{"prompt_tokens":2,"completion_tokens":1}}`)
	}, func(cfg *config.Config) { cfg.ExposeRoute = true })
	for _, more := range []string{`"stream":true,`, ""} {
		us.Eventually("it is forwarded", func() bool {
			return us.Post(refclient.ChatPath, chat("one two three four five six seven", more)).Header.Get("X-Evenkeel-Route") == "forwarded"
		})
		us.Accounted()
		all := us.Records()
		last := all[len(all)-1]
		require.Positive(t, last.PromptTokens)
		require.Equal(t, last.PromptTokens, last.CachedTokens, more)
	}
}

func TestAPeersEventsAreRelayedAsTheyCome(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, driver func(*config.Config)) {
		const events = 6
		read := make(chan struct{})
		us := toStub(t, honest, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for n := range events {
				_, _ = io.WriteString(w, event(n))
				w.(http.Flusher).Flush()
				select {
				case <-read:
				case <-r.Context().Done():
					return
				}
			}
			_, _ = io.WriteString(w, "data: [DONE]\n\n")
		}, driver)
		us.reaches("eu-1")
		conn, br := us.wire()
		for range 2 { // the second on the same connections
			body := chat("one", `"stream":true,`)
			_, err := fmt.Fprintf(conn,
				"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			require.NoError(t, err)
			answer, err := http.ReadResponse(br, nil)
			require.NoError(t, err)
			for n := range events {
				got := make([]byte, len(event(n)))
				_, err := io.ReadFull(answer.Body, got)
				require.NoError(t, err)
				require.Equal(t, event(n), string(got))
				read <- struct{}{}
			}
			rest, err := io.ReadAll(answer.Body)
			require.NoError(t, err)
			require.Equal(t, "data: [DONE]\n\n", string(rest))
		}
		us.Accounted()
		require.Len(t, us.receipts(), 2)
		require.Equal(t, []string{"ok", "ok"}, us.Outcomes())
	})
}

func TestAPeerThatDiesLosesNoRequestThatHadNotBegun(t *testing.T) {
	t.Parallel()
	us, eu := pair(t, options{configure: remote}, options{})
	streaming := us.Endless()
	defer streaming()
	require.NoError(t, eu.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 60_000})) // none has begun when the peer dies
	us.reaches("eu-1")
	type result struct {
		reply
	}
	results := make(chan result, 4)
	for n := range cap(results) {
		go func() {
			results <- result{us.Post("/v1/chat/completions", chat(fmt.Sprintf("prompt number %d", n), `"stream":true,`))}
		}()
	}
	us.Eventually("they are there", func() bool { return us.gw.Geo().Status().Peers[0].InFlight == 1+cap(results) })
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // at once
	_ = eu.gw.Shutdown(ctx)
	for range cap(results) {
		r := <-results
		require.NoError(t, r.Err)
		require.Equal(t, 200, r.Status)
		require.Equal(t, "fallback", r.Header.Get("X-Evenkeel-Route"))
		got := read(t, r.Body)
		require.True(t, got.Whole(0))
	}
	us.Eventually("it is down", func() bool { return !us.gw.Geo().Status().Peers[0].Up })
}

func TestThreeRequestsAndOneThatComesBack(t *testing.T) {
	t.Parallel()
	asked, fail := make(chan struct{}), make(chan struct{})
	peer := dishonest(t, honest, func(http.ResponseWriter, *http.Request) {
		close(asked)
		<-fail
		panic(http.ErrAbortHandler)
	})
	us := start(t, options{decode: []refengine.Config{{Slots: 1}}, configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", peer)
		remote(cfg)
		cfg.Pool.Size = 1
	}})
	us.hasEngines()
	us.reaches("eu-1")
	require.NoError(t, us.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 60_000}))
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, us.URL+refclient.ChatPath, strings.NewReader(chat("jam", "")))
	require.NoError(t, err)
	req.Header.Set("X-Evenkeel-Geo", "local")
	gone := make(chan error, 1)
	go func() {
		_, err := us.HTTP.Do(req) //nolint:bodyclose // there is none
		gone <- err
	}()
	us.Eventually("the only place is taken", func() bool { return us.gw.Status(t.Context()).PoolUsed == 1 })

	r1 := make(chan reply, 1)
	go func() { r1 <- us.Post(refclient.ChatPath, chat("one", `"max_tokens":2,`)) }()
	<-asked
	r2 := us.queued("", chat("one two", `"max_tokens":2,`), "X-Evenkeel-Geo", "local")
	r3 := us.queued("", chat("one two three", `"max_tokens":2,`), "X-Evenkeel-Geo", "local")
	close(fail)
	us.Eventually("it waits here", func() bool { return us.gw.Geo().Status().Peers[0].InFlight == 0 && len(us.receipts()) == 1 })
	us.Eventually("with the others", func() bool { return us.Sum("evenkeel_prefill_queue_requests") == 3 })
	require.NoError(t, us.Prefill[0].SetFaults())
	leave()
	require.Error(t, <-gone)

	require.Equal(t, "fallback", (<-r1).Header.Get("X-Evenkeel-Route"))
	require.Equal(t, "local", (<-r2).Header.Get("X-Evenkeel-Route"))
	require.Equal(t, "local", (<-r3).Header.Get("X-Evenkeel-Route"))
	us.Accounted()
	var order []int
	for _, r := range us.Records() {
		if r.Outcome == "ok" {
			order = append(order, r.PromptTokens)
		}
	}
	require.Len(t, order, 3)
	require.IsIncreasing(t, order, "r1 is the oldest, and served first")
	require.Equal(t, 1.0, us.Metric(`evenkeel_geo_fallbacks_total{cause="broken",peer="eu-1"}`))
	require.Len(t, us.receipts(), 1, "never forwarded again")
}
