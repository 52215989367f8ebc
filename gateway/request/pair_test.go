package request

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// hearsNoSlot is a dispatcher that hears of no slot.
type hearsNoSlot struct{ Dispatcher }

func (hearsNoSlot) Quarantined(*dispatcher.Slot) []string { return nil }
func (hearsNoSlot) Rerouted(*dispatcher.Slot, string)     {}

// A pair is two legs: a prefill call as it is, to an engine that does what the test says, and a
// decode call that is the test itself.
type pair struct {
	t      *testing.T
	srv    *server
	answer chan func(http.ResponseWriter) // the prefill engine's, to its next request
	gone   chan struct{}                  // closed at the end of the test

	*concurrentPrefill
	ended chan struct{} // closed when the call of the decode call has ended

	mu      sync.Mutex
	aborted []string // engines that were told to abort the request
	mute    bool     // aborts get no answer
	asked   int      // requests that the prefill engine has got
}

func newPair(t *testing.T, connector string, change func(*config.Config)) *pair {
	t.Helper()
	c := &pair{t: t, answer: make(chan func(http.ResponseWriter), 2), gone: make(chan struct{}), ended: make(chan struct{})}
	var profile mooncake.Profile
	c.srv = newServer(t, func(cfg *config.Config, deps *Deps) {
		cfg.Bind.Grace, cfg.Bind.Confirm = 50*time.Millisecond, 50*time.Millisecond
		cfg.Profiles["a"] = mooncake.Profile{FirstEventTimeout: patience} // a busy machine may be late with its first event
		if change != nil {
			change(cfg)
		}
		profile = cfg.Profiles["a"]
		deps.Callbacks = metaserver.New(metaserver.Config{
			Listen: "127.0.0.1:0", Advertise: func() string { return "" }, Connections: 10, Allowed: func(netip.Addr) bool { return true },
			Registerer: deps.Registerer, Log: zap.NewNop(),
		})
		require.NoError(t, deps.Callbacks.Start())
		t.Cleanup(deps.Callbacks.Close)
	})
	c.srv.Deps.Dispatcher = hearsNoSlot{c.srv.Dispatcher}
	serve := func(name string) *engine.Target {
		e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { c.serve(name, w, r) }))
		t.Cleanup(e.Close)
		u, err := url.Parse(e.URL)
		require.NoError(t, err)
		return &engine.Target{ID: name, URL: u, Rank: -1}
	}
	profile.Connector = connector
	profile = profile.WithDefaults()
	p, d := serve("prefill"), serve("decode")
	t.Cleanup(func() { close(c.gone) })
	var all []prefill.Candidate
	for _, id := range []string{"a", "b"} {
		all = append(all,
			prefill.Candidate{ID: id + "/0", Instance: "prefill " + id, Target: p, Models: []string{"m"}, Live: true, Profile: &profile})
	}
	c.srv.Prefill.SetCandidates(all)
	lease, err := c.srv.Prefill.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	c.srv.Places.Release()
	body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
	require.NoError(t, err)
	j := &job{
		srv: c.srv.Server, req: &openai.Request{Endpoint: mooncake.Chat, Stream: true, PromptTokens: 7}, body: body, id: "1",
		record: c.srv.Journal.Begin(journal.LogEntry{}),
		client: edge.NewCloseNotifier(zap.NewNop()), isLeg: true,
	}
	var until lifecycle.Timeout
	for _, e := range []lifecycle.Event{
		{Kind: lifecycle.Begun}, {Kind: lifecycle.NoLocal}, {Kind: lifecycle.Turn, Bind: lifecycle.Early, Traits: lifecycle.Traits[connector]}, {Kind: lifecycle.Bound},
	} {
		todo := j.step(e, nil)
		until = todo[len(todo)-1].Until
	}
	s := &stream{job: j, upstream: upstreamCall{job: j, slot: &dispatcher.Slot{},
		rank: &roster.Rank{Instance: "decode d", Target: d, Profile: &profile},
		call: c.srv.Client.NewCall(d)}}
	require.Nil(t, s.upstream.beginPrefill(lease, 1, until))
	c.concurrentPrefill = s.upstream.prefillCall
	go func() {
		defer close(c.ended)
		resp, err := s.upstream.call.Do(http.MethodPost, "/v1/chat/completions", engine.JSONHeaders("d"), nil, engine.Deadlines{})
		if err == nil {
			resp.Close()
		}
	}()
	t.Cleanup(func() { s.upstream.call.Abort(); <-c.ended })
	return c
}

// serve is an engine. The prefill engine says nothing before the test has it answer, or somebody
// has it abort.
func (c *pair) serve(name string, w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	c.mu.Lock()
	if r.URL.Path == "/abort_request" {
		c.aborted = append(c.aborted, name)
		mute := c.mute
		c.mu.Unlock()
		if mute {
			<-c.gone
		}
		return
	}
	answers := c.answer
	if name == "decode" {
		answers = nil
	} else {
		c.asked++
	}
	c.mu.Unlock()
	select {
	case answer := <-answers:
		answer(w)
	case <-r.Context().Done():
	case <-c.gone:
	}
}

// says answers a prefill that has counted so many tokens.
func says(prompt int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		_, _ = fmt.Fprintf(w, `{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":%d,"completion_tokens":1}}`, prompt)
	}
}

// saysAborted answers a prefill as SGLang 0.5.23 answers one that somebody has aborted.
func saysAborted(w http.ResponseWriter) {
	_, _ = io.WriteString(w, `{"choices":[{"finish_reason":"abort"}],"usage":{"prompt_tokens":7,"completion_tokens":0}}`)
}

// attempts is how many prefill calls have ended so.
func (c *pair) attempts(outcome string) (n float64) {
	families, err := c.srv.registry.Gather()
	require.NoError(c.t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "evenkeel_prefill_attempts_total" && m.Label[0].GetValue() == outcome {
				n += m.Counter.GetValue()
			}
		}
	}
	return n
}

func status(code int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { w.WriteHeader(code) }
}

func resets(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		_ = conn.Close()
	}
}

// sent waits until the prefill engine has the request.
func (c *pair) sent() {
	c.t.Helper()
	require.Eventually(c.t, func() bool { return c.requests() > 0 }, time.Minute, time.Millisecond)
}

func (c *pair) requests() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked
}

// calls is what the decode engine says of where the KV goes.
func (c *pair) calls(change ...string) {
	c.t.Helper()
	body := `{"token_ids":[],"request_id":"chatcmpl-ek-1-0b","do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[7,8,9]],"remote_block_size":[128],` +
		`"remote_engine_id":"d1","remote_host":"127.0.0.1","remote_port":31000,"remote_tp_size":1,"remote_pcp_size":1,"remote_dcp_size":1,"remote_cached_tokens":0}`
	resp, err := http.Post(c.rendezvous.Metaserver, "application/json", strings.NewReader(strings.NewReplacer(change...).Replace(body)))
	require.NoError(c.t, err)
	_ = resp.Body.Close()
}

// isEnded waits until the decode call is ended, and has it say so.
func (c *pair) isEnded() *failure.Fault {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(time.Minute):
		c.t.Fatal("the decode leg goes on")
	}
	f, _ := c.decodeFailed(lifecycle.Died)
	return f
}

// A decode rank is bound already when a prefill engine refuses its prompt. Only an engine that can
// write KV to this rank may replace it.
func TestARefusedPrefillIsNotMovedToARankThatDecodes(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.AscendLayerwise, FirstEventTimeout: 2 * time.Second},
		prefill: []refengine.Config{{}}, decode: []refengine.Config{{}}, mixed: []refengine.Config{{}}})
	require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
	require.Equal(t, "right", b.judge(reftext.MakePrompt(1, 600), `"stream":true,`))
	b.over()
	require.EqualValues(t, 1, b.d[1].Stats().Requests, "it gets the whole request, and no prefill for another rank before")
	require.NotContains(t, b.monitor.judged["decode d0"], engine.Faulted)
	b.settle()
}
