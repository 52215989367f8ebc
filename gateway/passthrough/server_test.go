package passthrough

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/request"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

const patience = 20 * time.Second

// odd is an engine whose answers a test writes.
type odd struct {
	mu     sync.Mutex
	answer http.HandlerFunc
	bodies []string
}

func (o *odd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	o.mu.Lock()
	o.bodies = append(o.bodies, string(body))
	answer := o.answer
	o.mu.Unlock()
	answer(w, r)
}

func (o *odd) answers(f http.HandlerFunc) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answer, o.bodies = f, nil
}

func (o *odd) got() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bodies
}

func says(status int, kind, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func hangUp(w http.ResponseWriter, _ *http.Request) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		_ = conn.Close()
	}
}

// reset ends a connection as one ends that the peer closed while it was idle, and a request met
// that.
func reset(w http.ResponseWriter, _ *http.Request) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	}
}

// ends is an engine that ends with the request that it gets.
func ends(_ http.ResponseWriter, r *http.Request) {
	_ = r.Context().Value(http.ServerContextKey).(*http.Server).Close()
}

// engines are those of one model, in a fleet that only keeps their calls.
type engines struct {
	*fleet.Fleet
	list   []roster.SoleEngine
	paired bool
}

func (e *engines) SoleEngines(string, bool) ([]roster.SoleEngine, bool) { return e.list, e.paired }

func (e *engines) IncompleteGroup(string) string { return "" }

// proxy serves what is passed through, and nothing else, to callers that are named by a header.
type proxy struct {
	*Server
	t        *testing.T
	engines  *engines
	url      string
	logs     *observer.ObservedLogs
	receipts *receipt.Ring
	registry *prometheus.Registry
	paid     sync.Map
	http     *http.Client
}

func start(t *testing.T, change func(*config.Config), all ...*odd) *proxy {
	cfg := config.Default()
	cfg.Limits.Bodies = 1 << 20
	if change != nil {
		change(cfg)
	}
	core, logs := observer.New(zap.WarnLevel)
	set, reg, log := fleet.NewSettings(cfg), prometheus.NewRegistry(), zap.New(core)
	settings := func() *fleet.Settings { return set }
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	monitor := engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: log})
	p := &proxy{t: t, logs: logs, registry: reg, receipts: receipt.NewRing(3000, 1<<24),
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}, engines: &engines{Fleet: fleet.New(fleet.Deps{
			Context: t.Context(), Serving: t.Context, Started: time.Now(), Log: log, Settings: settings, Monitor: monitor,
			Publish: func([]prefill.Candidate, []local.Rank, []board.Worker) {},
		})}}
	t.Cleanup(p.http.CloseIdleConnections)
	for _, o := range all {
		server := httptest.NewServer(o)
		t.Cleanup(server.Close)
		at, err := url.Parse(server.URL)
		require.NoError(t, err)
		p.engines.list = append(p.engines.list, roster.SoleEngine{Instance: "decode " + at.Host, ID: at.Host,
			Target: &engine.Target{ID: at.Host, URL: at, Rank: -1}, Traffic: &engine.Traffic{}})
	}
	told, err := journal.New(journal.Config{Registerer: reg, Log: log, Receipts: p.receipts})
	require.NoError(t, err)
	requests := &request.Server{Deps: request.Deps{Log: log, Settings: settings, Serving: t.Context, Journal: told, Client: client,
		Monitor: monitor, Fleet: p.engines}}
	bodies := edge.NewBodies(int64(cfg.Limits.Bodies))
	p.Server = New(Deps{Registerer: reg, Settings: settings, Engines: func() Engines { return p.engines }, Requests: requests, Bodies: bodies})

	ln, err := edge.Listen("127.0.0.1:0", edge.ListenOptions{SendBuffer: 64 << 10})
	require.NoError(t, err)
	p.url = "http://" + ln.Addr().String()
	server := edge.NewServer(edge.Options{
		Bodies: bodies, Caller: func(h *fasthttp.RequestHeader) string { return string(h.Peek("X-Caller")) },
		Handler: func(ctx *fasthttp.RequestCtx) {
			path, header := string(ctx.Path()), &ctx.Request.Header
			in := requests.BeginRequest(journal.LogEntry{ID: string(header.Peek("X-Request-Id")), Arrival: time.Now()})
			in.CorrectEstimate = func(tokens int) { p.paid.Store(in.Record.ID, tokens) }
			defer func() {
				if v := recover(); v != nil {
					requests.ConcludePanicked(in)
					panic(v)
				}
			}()
			in.Record.OpenViews(func(name string) string { return string(header.Peek(name)) }, true, path)
			raw, reservation := edge.AcquireBody(ctx)
			in.Body = reservation
			req, fail := Parse(path, raw, string(header.ContentType()), openai.Limits{})
			if fail == nil {
				fail = p.Serve(ctx, in, req, path, raw)
			}
			if fail != nil {
				requests.Refuse(ctx, in, fail)
			}
		},
	})
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	t.Cleanup(func() {
		p.eventually("nothing is held", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.runningCalls) == 0 && p.seats.Held() == 0 && bodies.Held() == 0 && requests.Open() == 0 &&
				p.engines.MoveCalls(func(roster.Location) bool { return true }) == 0
		})
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // nobody waits for what a test left open
		_ = edge.Drain(ctx, server, ln)
		<-served
	})
	return p
}

func (p *proxy) eventually(what string, ok func() bool) {
	p.t.Helper()
	require.Eventually(p.t, ok, patience, time.Millisecond, what)
}

// reply is an answer as its client has it.
type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

// post sends a request of a caller and reads its answer.
func (p *proxy) post(ctx context.Context, path, body, id, caller string) reply {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+path, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	req.Header.Set("X-Caller", caller)
	resp, err := p.http.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	all, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(all), err: err}
}

func (p *proxy) ask(path, id string) reply { return p.post(p.t.Context(), path, embedding, id, "") }

// receipt is what became of a request that has ended, or will soon.
func (p *proxy) receipt(id string) (r *receipt.Receipt) {
	p.t.Helper()
	p.eventually("the receipt of "+id+" is closed", func() bool {
		found := p.receipts.Find(id, 1)
		if len(found) == 0 || found[0].State != receipt.Ended {
			return false
		}
		r = found[0]
		return true
	})
	return r
}

// cancels are the clients that left in a phase.
func (p *proxy) cancels(phase string) (n float64) {
	p.t.Helper()
	all, err := p.registry.Gather()
	require.NoError(p.t, err)
	for _, f := range all {
		for _, m := range f.GetMetric() {
			if f.GetName() == "evenkeel_cancels_total" && m.GetLabel()[0].GetValue() == phase {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

const embedding = `{"model":"emb","input":"a"}`

// An engine's refusal may be as long as an answer, and waits for its client as one does.
func TestALongRefusalIsChargedUntilItIsRead(t *testing.T) {
	o := &odd{}
	const long = 400 << 10
	o.answers(says(http.StatusUnprocessableEntity, "application/json", `{"detail":"`+strings.Repeat("a", long)+`"}`))
	p := start(t, nil, o)
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(16<<10))
	_, err = fmt.Fprintf(conn, "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nX-Caller: a\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", len(embedding), embedding)
	require.NoError(t, err)
	p.eventually("it waits", func() bool { return p.Bodies.Held() > long })
	r := p.post(t.Context(), "/v1/embeddings", embedding, "second", "a")
	require.Equal(t, http.StatusServiceUnavailable, r.status, "the caller would have more than is left for others")
	require.Contains(t, r.body, `"overloaded"`)
	r = p.post(t.Context(), "/v1/embeddings", embedding, "third", "b")
	require.Equal(t, http.StatusUnprocessableEntity, r.status, "another caller has nothing else")
	require.NoError(t, conn.Close())
	p.eventually("nothing is charged", func() bool { return p.Bodies.Held() == 0 })
}
