package metaserver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/mooncake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a metaserver on a socket.
type rig struct {
	*testing.T
	*Server
	client  *http.Client
	allowed atomic.Bool
	log     *observer.ObservedLogs
}

func start(t *testing.T) *rig {
	core, log := observer.New(zap.WarnLevel)
	r := &rig{T: t, client: &http.Client{Transport: &http.Transport{}}, log: log}
	r.allowed.Store(true)
	r.Server = New(Config{
		Listen: "127.0.0.1:0", Advertise: func() string { return "" }, Allowed: func(netip.Addr) bool { return r.allowed.Load() },
		Connections: 100, Registerer: prometheus.NewRegistry(), Log: zap.New(core),
	})
	require.False(t, r.Listening())
	require.NoError(t, r.Start())
	require.True(t, r.Listening())
	t.Cleanup(func() {
		r.client.CloseIdleConnections()
		r.Close()
		require.False(t, r.Listening())
		require.Zero(t, r.Expected())
	})
	return r
}

// read takes any body as the place where the KV goes, but the one word.
func read(body []byte) (mooncake.Callback, error) {
	switch string(body) {
	case "bad":
		return mooncake.Callback{}, mooncake.ErrBadCallback
	case "host":
		return mooncake.Callback{}, mooncake.ErrUnknownHost
	case "short":
		return mooncake.Callback{ShortID: true}, nil
	}
	if keys, ok := bytes.CutPrefix(body, []byte("keys ")); ok {
		return mooncake.Callback{Unknown: strings.Fields(string(keys))}, nil
	}
	return mooncake.Callback{KV: body}, nil
}

func (r *rig) expect() *PendingCallback {
	return r.Expect(Wanted{Rank: "d0/1", Limit: 1000, Read: read})
}

func (r *rig) do(method, url string, body io.Reader) (status int, answer string) {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), method, url, body)
	require.NoError(r, err)
	resp, err := r.client.Do(req)
	require.NoError(r, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	require.NoError(r, err)
	return resp.StatusCode, string(text)
}

func (r *rig) post(url, body string) int {
	r.Helper()
	status, _ := r.do(http.MethodPost, url, strings.NewReader(body))
	return status
}

// counts are how many callbacks came to which end.
func (r *rig) counts() string {
	n := func(result string) int { return int(testutil.ToFloat64(r.results.WithLabelValues(result))) }
	return fmt.Sprintf("ok %d, duplicate %d, unknown %d, bad %d, late %d", n("ok"), n("duplicate"), n("unknown"), n("bad"), n("late"))
}

func nothing(t *testing.T, p *PendingCallback) {
	t.Helper()
	select {
	case c := <-p.Received():
		t.Fatalf("it came: %+v", c)
	default:
	}
}

func TestACallbackIsAnsweredAtOnceAndToldOnce(t *testing.T) {
	r := start(t)
	p, other := r.expect(), r.expect()
	require.NotEqual(t, p.URL, other.URL)
	require.Regexp(t, `^http://127\.0\.0\.1:\d+/v1/metaserver/[0-9a-f]{32}$`, p.URL)
	status, answer := r.do(http.MethodPost, p.URL, strings.NewReader("here"))
	require.Equal(t, 200, status)
	require.Equal(t, `{"status":"ok"}`, answer)
	require.Equal(t, 409, r.post(p.URL, "there"), "while the request lives")
	require.Equal(t, "here", string((<-p.Received()).KV))
	nothing(t, p)
	nothing(t, other)
	p.StopWaiting(time.Hour)
	<-p.Ended()
	require.Equal(t, 404, r.post(p.URL, "here"), "the request is over")
	require.Equal(t, "ok 1, duplicate 1, unknown 1, bad 0, late 0", r.counts())
	other.StopWaiting(0)
	require.Zero(t, r.Expected())
}

func TestWhatIsNoCallbackIsRefused(t *testing.T) {
	r := start(t)
	p := r.expect()
	at := strings.TrimSuffix(p.URL, p.URL[len(p.URL)-32:])
	for _, tc := range []struct {
		name, method, url, body string
		status                  int
	}{
		{"a token that nobody has", "POST", at + strings.Repeat("0", 32), "x", 404},
		{"no token", "POST", at, "x", 404},
		{"a token and more", "POST", p.URL + "/x", "x", 404},
		{"a token without its end", "POST", p.URL[:len(p.URL)-1], "x", 404},
		{"another path", "POST", "http://" + r.Addr() + "/metrics", "x", 404},
		{"a look", "GET", p.URL, "", 405},
		{"a look at the list", "GET", at, "", 405},
		{"another method", "DELETE", p.URL, "", 405},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, answer := r.do(tc.method, tc.url, strings.NewReader(tc.body))
			require.Equal(t, tc.status, status)
			require.Empty(t, answer, "no hint of which")
		})
	}
	nothing(t, p)
	require.Equal(t, 200, r.post(p.URL, "here"), "nothing of this has spent the token")
	require.Equal(t, "ok 1, duplicate 0, unknown 5, bad 3, late 0", r.counts())
}

func TestACallbackOfNoUseIsToldToItsRequest(t *testing.T) {
	for _, tc := range []struct {
		name, body string
		status     int
		want       error
	}{
		{"malformed", "bad", 400, mooncake.ErrBadCallback},
		{"a host of nobody", "host", 400, mooncake.ErrUnknownHost},
		{"too long", strings.Repeat("x", 1001), 413, mooncake.ErrBadCallback},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := start(t)
			p := r.expect()
			require.Equal(t, tc.status, r.post(p.URL, tc.body))
			require.ErrorIs(t, (<-p.Received()).Err, tc.want)
			require.Equal(t, 409, r.post(p.URL, "here"), "the engine waits in vain by now")
			require.Equal(t, "ok 0, duplicate 1, unknown 0, bad 1, late 0", r.counts())
			require.Equal(t, errors.Is(tc.want, mooncake.ErrUnknownHost), strings.HasPrefix(r.log.All()[0].Message, "ALARM"))
		})
	}
	r := start(t)
	p := r.expect()
	status, _ := r.do(http.MethodPost, p.URL, io.MultiReader(strings.NewReader(strings.Repeat("x", 1001)))) // its length is not told
	require.Equal(t, 413, status)
	require.ErrorIs(t, (<-p.Received()).Err, mooncake.ErrBadCallback)
}

// target is what a URL of ours asks for.
func target(p *PendingCallback) string { return path + p.URL[len(p.URL)-2*tokenBytes:] }

// raw writes a head, and answers whatever comes back without sending a body.
func (r *rig) raw(head string) *http.Response {
	r.Helper()
	conn, err := net.Dial("tcp", r.Addr())
	require.NoError(r, err)
	r.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, head)
	require.NoError(r, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(r, err)
	_ = resp.Body.Close()
	return resp
}

func TestWhoMayNotCallIsRefusedBeforeTheBody(t *testing.T) {
	r := start(t)
	p := r.expect()
	r.allowed.Store(false)
	target := target(p)
	for _, line := range []string{"POST " + target, "POST /x", "GET " + target} {
		resp := r.raw(line + " HTTP/1.1\r\nHost: h\r\nContent-Length: 500\r\n\r\n")
		require.Equal(t, 403, resp.StatusCode)
		require.True(t, resp.Close)
	}
	require.Equal(t, 1, r.log.FilterMessageSnippet("add it to bind.allow").Len(), "said once a minute")
	r.allowed.Store(true)
	require.Equal(t, 413, r.raw("POST "+target+" HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n").StatusCode)
	require.ErrorIs(t, (<-p.Received()).Err, mooncake.ErrBadCallback)
	require.Equal(t, "ok 0, duplicate 0, unknown 0, bad 4, late 0", r.counts())
}

// A connection that breaks in a callback has spent nothing: its engine tries again.
func TestACallbackThatBreaksOffMayComeAgain(t *testing.T) {
	r := start(t)
	p := r.expect()
	target := target(p)
	for range 2 {
		conn, err := net.Dial("tcp", r.Addr())
		require.NoError(t, err)
		_, err = io.WriteString(conn, "POST "+target+" HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\nhal")
		require.NoError(t, err)
		defer func() { _ = conn.Close() }() // and it does not break at once
	}
	require.Equal(t, 200, r.post(p.URL, "here"))
	require.Equal(t, "here", string((<-p.Received()).KV))
}

func TestOneOfManyAtOnceIsTold(t *testing.T) {
	r := start(t)
	p := r.expect()
	var ok, duplicate atomic.Int64
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			switch r.post(p.URL, "here") {
			case 200:
				ok.Add(1)
			case 409:
				duplicate.Add(1)
			}
		})
	}
	all.Wait()
	require.Equal(t, []int64{1, 19}, []int64{ok.Load(), duplicate.Load()})
	<-p.Received()
	nothing(t, p)
}

func TestALateCallbackIsToldInItsTimeOfGrace(t *testing.T) {
	r := start(t)
	p := r.expect()
	p.StopWaiting(time.Hour)
	require.Equal(t, 200, r.post(p.URL, "here"))
	require.Equal(t, "here", string((<-p.Received()).KV))
	require.Equal(t, "ok 0, duplicate 0, unknown 0, bad 0, late 1", r.counts())
	require.Zero(t, r.Expected(), "nothing is expected for the rest of the grace")
	require.Equal(t, 404, r.post(p.URL, "again"))

	p = r.expect()
	p.StopWaiting(time.Millisecond)
	<-p.Ended()
	require.Equal(t, 404, r.post(p.URL, "here"))
	nothing(t, p)
	p.StopWaiting(0)
}

func TestAnEngineThatCutsIDsIsNamedOnce(t *testing.T) {
	r := start(t)
	for range 3 {
		p := r.expect()
		require.Equal(t, 200, r.post(p.URL, "short"))
		require.True(t, (<-p.Received()).ShortID)
	}
	require.Equal(t, 1, r.log.FilterMessageSnippet("no random suffix").Len())
}

func TestAnUnknownKeyIsNamedOnce(t *testing.T) {
	r := start(t)
	call := func(keys string) {
		t.Helper()
		p := r.expect()
		require.Equal(t, 200, r.post(p.URL, "keys "+keys))
		require.Equal(t, strings.Fields(keys), (<-p.Received()).Unknown)
	}
	for range 3 {
		call("pp_size layers")
	}
	named := func() (keys []string) {
		for _, line := range r.log.FilterMessageSnippet("a decode engine's callback has a key").All() {
			require.Equal(t, "d0/1", line.ContextMap()["engine"])
			keys = append(keys, line.ContextMap()["key"].(string))
		}
		return keys
	}
	require.Equal(t, []string{"pp_size", "layers"}, named())
	for i := range mostKeys { // any number may come
		call(fmt.Sprintf("a%d b%d pp_size", i, i))
	}
	require.Len(t, named(), mostKeys)
	require.Equal(t, 1, r.log.FilterMessageSnippet("the log names no more of them").Len())
}

func TestCloseForgetsAll(t *testing.T) {
	r := start(t)
	p := r.expect()
	r.Close()
	<-p.Ended()
	<-r.expect().Ended()
	_, err := net.Dial("tcp", r.Addr())
	require.Error(t, err)
	r.Close()
}

func TestTheAdvertisedURLIsTold(t *testing.T) {
	r := start(t)
	r.Advertise = func() string { return "http://proxy:8010/" }
	require.True(t, strings.HasPrefix(r.expect().URL, "http://proxy:8010/v1/metaserver/"))
}

func TestAProxyThatWantsNoCallbacksHasNoServer(t *testing.T) {
	var s *Server
	require.NoError(t, s.Start())
	require.True(t, s.Listening())
	require.Empty(t, s.Addr())
	require.Zero(t, s.Expected())
	s.Close()
}

func TestAnAddressThatIsTakenIsNamed(t *testing.T) {
	r := start(t)
	s := New(Config{Listen: r.Addr(), Advertise: r.Advertise, Registerer: prometheus.NewRegistry(), Log: zap.NewNop()})
	require.ErrorContains(t, s.Start(), "bind.listen: ")
	s.Close()
}
