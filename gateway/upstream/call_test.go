package upstream

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/owner/ownertest"
	"evenkeel/lease"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Of a message, the body of a leg has no place for its id.
func TestTheHeadersOfALeg(t *testing.T) {
	for connector, want := range map[string]map[mooncake.Endpoint]bool{
		mooncake.SGLang:   {mooncake.Messages: true, mooncake.Responses: false, mooncake.Chat: false, mooncake.Completions: false},
		mooncake.NIXLPush: {mooncake.Messages: false},
	} {
		p := mooncake.Profile{Connector: connector}
		for ep, named := range want {
			headers := PairHeaders("ek-1", ep, &p)
			require.Equal(t, named, slices.Contains(headers, engine.Header{Name: "X-Override-Rid", Value: "ek-1"}), "%s %s", connector, ep.Path())
			require.Equal(t, engine.JSONHeaders("ek-1"), headers[:len(engine.JSONHeaders("ek-1"))])
		}
	}
}

// A fake is an engine on one connection.
type fake struct {
	net.Conn
	call   *Call         // that it serves
	claim  *lease.Claim  // of the scope; nil: no other proxy sends to the engine
	got    *http.Request // that was read
	client *engine.Client
	played sync.WaitGroup
}

// end waits until the engine has played.
func (f *fake) end() {
	f.client.Close()
	f.played.Wait()
}

// hears reads a request.
func (f *fake) hears() {
	req, err := http.ReadRequest(bufio.NewReader(f.Conn))
	if err == nil {
		f.got = req
		_, _ = io.Copy(io.Discard, req.Body)
	}
}

func (f *fake) says(text string) { _, _ = io.WriteString(f.Conn, text) }

// stays keeps the connection until the other side ends it.
func (f *fake) stays() { _, _ = io.Copy(io.Discard, f.Conn) }

// start has the engine play for each connection. dial, which may be nil, is asked before there is
// one.
func start(dial func(context.Context, *fake) error, play func(*fake)) *fake {
	f := &fake{}
	f.client = engine.NewClient(engine.Options{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if dial != nil {
			if err := dial(ctx, f); err != nil {
				return nil, err
			}
		}
		ours, theirs := net.Pipe()
		f.Conn = theirs
		f.played.Go(func() {
			defer theirs.Close()
			if play != nil {
				play(f)
			}
		})
		return ours, nil
	}})
	return f
}

// target is the engine, one rank of a group.
func target() *engine.Target {
	return &engine.Target{ID: "e", URL: &url.URL{Scheme: "http", Host: "engine.test:80"}, Rank: 1}
}

const (
	most  = 16               // bytes of an answer
	limit = 10 * time.Second // of each wait
	whole = time.Minute      // of the whole answer
)

const begun = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"

// down is a run whose engine was declared down.
type down struct{}

func (down) Cause(err error) error {
	var ended *engine.Error
	if !errors.As(err, &ended) {
		return err
	}
	broke := *ended
	broke.Aborted, broke.Err = false, io.ErrUnexpectedEOF
	return &broke
}

// answers has the engine answer with a status, once it has the request.
func answers(status, more string) func(*fake) {
	return func(f *fake) {
		f.hears()
		f.says("HTTP/1.1 " + status + "\r\n" + more)
		f.stays()
	}
}

func TestHowALegEnds(t *testing.T) {
	type ended = lifecycle.CallEnd
	for _, tc := range []struct {
		name   string
		dial   func(context.Context, *fake) error
		play   func(*fake)
		set    func(*Call, *fake) // before it is sent
		owned  bool               // its scope is ours when the leg begins
		want   ended
		code   string // that the client sees; before _ stands the side
		status int    // that the engine answered
		fails  error  // the error is one of these; nil: any
	}{
		{name: "no connection is made", dial: func(context.Context, *fake) error { return io.ErrClosedPipe }, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.Unreachable}, code: "_unavailable"},
		{name: "no connection is made in time", dial: func(ctx context.Context, _ *fake) error {
			<-ctx.Done()
			return ctx.Err()
		}, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.Unreachable}, code: "_unavailable"},
		{name: "it must not be sent", set: func(c *Call, _ *fake) { c.Path = "no path" }, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.Broke}, code: "_failed", fails: engine.ErrRefused},
		{name: "the connection ends before a byte is written", play: func(f *fake) { _ = f.Close() }, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.Broke}, code: "_failed"},
		{name: "it ends while the request is written", play: func(f *fake) { _, _ = f.Read(make([]byte, 8)) }, want: ended{Progress: lifecycle.Sent, Reason: lifecycle.Broke}, code: "_failed"},
		{name: "it ends before the head", play: (*fake).hears, want: ended{Progress: lifecycle.Sent, Reason: lifecycle.Broke}, code: "_failed"},
		{name: "it ends in the head", play: func(f *fake) {
			f.hears()
			f.says("HTTP/1.1 200 OK\r\nConte")
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed"},
		{name: "it ends in the answer", play: func(f *fake) {
			f.hears()
			f.says(begun)
			synctest.Wait() // until the rest is waited for
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed", fails: io.ErrUnexpectedEOF},
		{name: "the engine does not take the request", play: func(*fake) { time.Sleep(limit + time.Second) }, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.Broke}, code: "_timeout"},
		{name: "the engine is silent", play: func(f *fake) {
			f.hears()
			f.stays()
		}, want: ended{Progress: lifecycle.Sent, Reason: lifecycle.Silent}, code: "_timeout"},
		{name: "it falls silent in the head", play: answers("200 OK", ""), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Silent}, code: "_timeout"},
		{name: "it falls silent in the answer", play: answers("200 OK", "Content-Length: 9\r\n\r\nhello"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Silent}, code: "_timeout"},
		{name: "it is slow for longer than an answer may take", play: func(f *fake) {
			f.hears()
			f.says("HTTP/1.1 200 OK\r\n\r\n")
			for range most {
				time.Sleep(limit / 2)
				f.says("x")
			}
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Silent}, code: "_timeout"},
		{name: "its answer is not HTTP", play: answers("garbage", "\r\n\r\n"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed", fails: engine.ErrMalformed},
		{name: "its answer says that it is too large", play: answers("200 OK", "Content-Length: 17\r\n\r\n"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed", fails: engine.ErrTooLarge},
		{name: "its answer turns out too large", play: answers("200 OK", "\r\n"+strings.Repeat("x", most+1)), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed", fails: engine.ErrTooLarge},

		{name: "400", play: answers("400 Bad Request", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Rejected}, code: "engine_refused", status: 400},
		{name: "404 for want of the model", play: answers("404 Not Found", "Content-Length: 81\r\n\r\n"+`{"error":{"message":"The model 'x' does not exist","type":"NotFound","code":404}}`), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Unlisted}, code: "model_not_found", status: 404, fails: engine.ErrUnlisted},
		{name: "404", play: answers("404 Not Found", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Rejected}, code: "engine_refused", status: 404},
		{name: "401", play: answers("401 Unauthorized", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Rejected}, code: "_failed", status: 401},
		{name: "429", play: answers("429 Too Many Requests", "Retry-After: 7\r\nContent-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Throttled}, code: "engine_refused", status: 429},
		{name: "500", play: answers("500 Internal Server Error", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Failed}, code: "_failed", status: 500},
		{name: "500 for want of KV", play: answers("500 Internal Server Error", "Content-Length: 19\r\n\r\nno: KVTransferError"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Failed}, code: "_failed", status: 500, fails: failure.ErrUndelivered},
		{name: "501", play: answers("501 Not Implemented", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Unable}, code: "_failed", status: 501},
		{name: "503", play: answers("503 Service Unavailable", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Busy}, code: "_unavailable", status: 503},
		{name: "504", play: answers("504 Gateway Timeout", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Erred}, code: "_failed", status: 504},
		{name: "a status that no engine has", play: answers("302 Found", "Content-Length: 2\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Odd}, code: "_failed", status: 302},
		{name: "an error whose body breaks off", play: func(f *fake) {
			f.hears()
			f.says("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\nno")
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Busy}, code: "_unavailable", status: 503},
		{name: "an error whose body does not end", play: answers("503 Service Unavailable", "Content-Length: 9\r\n\r\nno"), want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Busy}, code: "_unavailable", status: 503},

		{name: "the scope is another proxy's before it begins", owned: true, set: func(_ *Call, f *fake) { f.lose() }, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.NotOurs}, code: "not_owner"},
		{name: "the scope is lost while the connection is made", owned: true, dial: func(_ context.Context, f *fake) error {
			f.lose()
			return nil
		}, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.NotOurs}, code: "not_owner"},
		{name: "the scope is lost while the answer comes", owned: true, play: func(f *fake) {
			f.hears()
			f.lose()
			f.says(begun)
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.Broke}, code: "_failed"},

		{name: "it is ended while the connection is made", dial: func(ctx context.Context, f *fake) error {
			f.call.Abort()
			<-ctx.Done()
			return ctx.Err()
		}, want: ended{Progress: lifecycle.Unsent, Reason: lifecycle.HungUp}, code: "_unavailable"},
		{name: "it is ended before the head", play: func(f *fake) {
			f.hears()
			f.call.Abort()
		}, want: ended{Progress: lifecycle.Sent, Reason: lifecycle.HungUp}, code: "_failed"},
		{name: "it is ended in the answer", play: func(f *fake) {
			f.hears()
			f.says(begun)
			synctest.Wait()
			f.call.Abort()
		}, want: ended{Progress: lifecycle.Headed, Reason: lifecycle.HungUp}, code: "_failed"},
		{name: "it is ended because its engine is down", set: func(c *Call, _ *fake) { c.Tracked = down{} }, play: func(f *fake) {
			f.hears()
			f.call.Abort()
		}, want: ended{Progress: lifecycle.Sent, Reason: lifecycle.Broke}, code: "_failed"},
	} {
		for leg, side := range map[lifecycle.CallKind]string{lifecycle.Prefill: "prefill", lifecycle.Decode: "decode"} {
			t.Run(side+": "+tc.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := start(tc.dial, tc.play)
					defer f.end()
					call := &Call{
						Call: f.client.NewCall(target()), Kind: leg, Engine: side + " e", Path: "/v1/completions", Log: zap.NewNop(),
						Limits: engine.Deadlines{Connect: limit, FirstByte: limit, Idle: limit},
					}
					f.call = call
					if tc.owned {
						call.Scope, f.claim = ownertest.Owned(t, 2)
					}
					if tc.set != nil {
						tc.set(call, f)
					}
					began := time.Now()
					_, got := call.SendAndRead(engine.JSONHeaders("id"), [][]byte{[]byte("{}")}, most, began.Add(whole))
					require.NotNil(t, got)
					want := tc.want
					want.Call = leg
					require.Equal(t, want, got.CallEnd, "%v", got.Err)
					code := tc.code
					if strings.HasPrefix(code, "_") {
						code = side + code
					}
					require.Equal(t, code, got.ClientError.Code)
					require.Equal(t, tc.status, got.Status)
					if tc.fails != nil {
						require.ErrorIs(t, got.Err, tc.fails)
					}
					require.LessOrEqual(t, time.Since(began), whole)
					if tc.owned {
						require.Zero(t, call.Scope.Sending())
					}
					switch {
					case tc.want.Reason == lifecycle.NotOurs:
						require.Nil(t, f.got, "nothing is sent")
						require.True(t, tc.dial != nil || f.Conn == nil, "no connection is made")
						require.Empty(t, got.BlamedEngine, "the engine is not to blame")
					case tc.status > 0:
						require.True(t, errors.Is(tc.fails, engine.ErrUnlisted) || strings.HasPrefix(string(call.RefusalBody), "no"))
						require.Equal(t, errors.Is(tc.fails, engine.ErrUnlisted), got.BlamedEngine != "", "a status says that it lives")
						require.ErrorContains(t, got.Err, side+" engine e answered ")
					default:
						require.Equal(t, side+" e", got.BlamedEngine)
					}
					require.Equal(t, tc.status == http.StatusTooManyRequests, got.RetryAfter == 7*time.Second)
				})
			})
		}
	}
}

// lose gives the scope to another proxy.
func (f *fake) lose() { _ = f.claim.GiveBack(2, func() {}) }

// Where an answer is a stream, its reader says how it broke.
func TestHowAStreamEnds(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want lifecycle.CallEnd
		code string
	}{
		{sse.ErrSilent, lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Headed, Reason: lifecycle.Silent}, "decode_timeout"},
		{errors.New("it is no event stream"), lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Headed, Reason: lifecycle.Garbled}, "decode_failed"},
		{&engine.Error{Sent: true, Answered: true, Phase: engine.PhaseBody, Err: io.ErrUnexpectedEOF}, lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Headed, Reason: lifecycle.Broke}, "decode_failed"},
		{&engine.Error{Phase: engine.PhaseConnect, Err: engine.ErrClosed}, lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Unsent, Reason: lifecycle.HungUp}, "decode_unavailable"},
	} {
		got := (&Call{Kind: lifecycle.Decode, Engine: "decode e"}).FaultOf(tc.err)
		require.Equal(t, tc.want, got.CallEnd, "%v", tc.err)
		require.Equal(t, tc.code, got.ClientError.Code)
		require.Equal(t, "decode e", got.BlamedEngine)
		require.Equal(t, tc.err, got.Err)
	}
}

// A request carries the epoch of its scope's owner, and leaves the fence once it is written, while
// the answer is waited for.
func TestWhatIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sending int64
		f := start(nil, func(f *fake) {
			f.hears()
			synctest.Wait()
			sending = f.call.Scope.Sending()
			f.says(begun + "    ")
		})
		defer f.end()
		f.call = &Call{Call: f.client.NewCall(target()), Kind: lifecycle.Decode, Path: "/v1/completions", InEngineQueue: true,
			Log: zap.NewNop()}
		f.call.Scope, f.claim = ownertest.Owned(t, 2)
		room := make([]byte, 0, 64)
		resp, fault := f.call.Open(engine.JSONHeaders("id"), [][]byte{[]byte("{"), []byte("}")})
		require.Nil(t, fault)
		defer resp.Close()
		answer, fault := f.call.Read(resp, room, most, time.Now().Add(whole))
		require.Nil(t, fault)
		require.Equal(t, "hello    ", string(answer))
		require.Same(t, &room[:1][0], &answer[0])
		require.Zero(t, sending)
		require.Equal(t, "/v1/completions", f.got.URL.Path)
		require.EqualValues(t, 2, f.got.ContentLength)
		for name, value := range map[string]string{"X-Request-Id": "id", "X-Evenkeel-Epoch": "2", BeyondHeader: "1",
			"X-Data-Parallel-Rank": "1"} {
			require.Equal(t, value, f.got.Header.Get(name), name)
		}
	})
}

// Whatever stands in front of an engine and refuses an old epoch names the one that it has seen.
// The claim is told of it, so that it gets the scope back with a higher one.
func TestTheEpochOfARefusalReachesTheClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(nil, answers("409 Conflict", "X-Evenkeel-Epoch: 17\r\nContent-Length: 0\r\n\r\n"))
		defer f.end()
		call := &Call{Call: f.client.NewCall(target()), Kind: lifecycle.Decode, Path: "/", Log: zap.NewNop()}
		call.Scope, f.claim = ownertest.Owned(t, 2)
		resp, fault := call.Open(engine.JSONHeaders("id"), nil)
		require.NotNil(t, resp, "whoever has a slot there waits for the end of it")
		resp.Close()
		require.Equal(t, http.StatusConflict, fault.Status)
		require.EqualValues(t, 17, f.claim.Seen())
		require.Equal(t, lease.Giving, f.claim.View().Phase, "for what is given back can be acquired with a higher one")
	})
}

// The body of a request for SGLang names the rank, and its engines have to be told to end a
// request.
func TestWhatSGLangWants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(nil, answers("200 OK", "Content-Length: 0\r\n\r\n"))
		defer f.end()
		require.Equal(t, -1, NewCall(f.client, &mooncake.Profile{Connector: mooncake.SGLang}, target()).Target().Rank)
		require.Equal(t, 1, NewCall(f.client, &mooncake.Profile{Connector: mooncake.NIXLPull}, target()).Target().Rank)
		require.NoError(t, Abort(f.client, target(), "id", zap.NewNop()))
		require.Equal(t, "/abort_request", f.got.URL.Path)
		require.Empty(t, f.got.Header.Get("X-Data-Parallel-Rank"))
	})
	synctest.Test(t, func(t *testing.T) {
		f := start(nil, func(f *fake) { f.stays() })
		defer f.end()
		began := time.Now()
		require.Error(t, Abort(f.client, target(), "id", zap.NewNop()))
		require.Equal(t, abortTimeout, time.Since(began), "an engine that stands still is not waited for any longer")
	})
}

// A room belongs to the rank of the prefill engine that it names, and no two are the same.
func TestRooms(t *testing.T) {
	seen, p := map[int64]bool{}, &mooncake.Profile{Connector: mooncake.SGLang}
	for _, ranks := range []int{0, 1, 4, 8, 144} {
		for rank := range max(1, ranks) {
			target := &engine.Target{URL: &url.URL{Host: "p:8000"}, Rank: rank}
			for range 50 {
				room := NewRendezvous("r", mooncake.Completions, p, target, ranks, p, target).Room
				require.Positive(t, room+1, "0 to 2^63-1")
				require.EqualValues(t, rank, room%int64(max(1, ranks)))
				require.False(t, seen[room])
				seen[room] = true
			}
		}
	}
}

// A request that one engine of SGLang serves alone names its rank in the header, unless ranks must
// not be named; one that two engines serve names it in its body.
func TestWhereARankIsNamed(t *testing.T) {
	for _, row := range []struct {
		profile mooncake.Profile
		want    string
	}{
		{mooncake.Profile{Connector: mooncake.None}.Alone(), "1"},
		{mooncake.Profile{Connector: mooncake.SGLang}.Alone(), "1"},
		{mooncake.Profile{Connector: mooncake.SGLang, NameRanks: new(false)}.Alone(), ""},
		{mooncake.Profile{Connector: mooncake.SGLang}, ""},
		{mooncake.Profile{}, "1"},
	} {
		f := start(nil, answers("400 Bad Request", "Content-Length: 0\r\n\r\n"))
		p := row.profile.WithDefaults()
		c := Call{Call: NewCall(f.client, &p, target()), Kind: lifecycle.Decode, Engine: "e", Path: "/v1/completions",
			Limits: engine.Deadlines{Connect: limit, FirstByte: limit, Idle: limit}, Log: zap.NewNop()}
		resp, fault := c.Open(engine.JSONHeaders("id"), [][]byte{[]byte("{}")})
		require.NotNil(t, fault)
		resp.Close()
		require.Equal(t, row.want, f.got.Header.Get("X-Data-Parallel-Rank"), "%+v", row.profile)
		f.end()
	}
}
