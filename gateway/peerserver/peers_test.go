package peerserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/service"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

const key = "a 0123456789abcdef0123456789abcdef\n"

// A wing is the part of a proxy that others call. What comes through its door is noted, and
// answered with 200.
type wing struct {
	t *testing.T
	*Peers
	service    *service.Service
	dispatcher *dispatcher.Dispatcher
	fleet      *fleet.Fleet
	keys       *geo.Keys
	served     []string // who sent what, to which endpoint
	refused    string   // why somebody was refused last
	logs       *observer.ObservedLogs
}

// newWing is that of us-1, which knows eu-1.
func newWing(t *testing.T) *wing {
	t.Helper()
	return wingBeside(t, "http://127.0.0.1:1")
}

// wingBeside is one whose peer has an address.
func wingBeside(t *testing.T, peer string) *wing {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(key), 0o600))
	cfg := config.Default()
	g := &cfg.Geo
	g.Mode, g.Listen, g.HMAC.KeysFile, g.Self = geo.Distributed, "127.0.0.1:0", file, geo.Self{ID: "us-1", Region: "us"}
	g.Probe.Interval = 20 * time.Millisecond
	g.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: peer, PriceOut: 0.02, PriceIn: 0.05}}
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	core, logs := observer.New(zap.InfoLevel)
	reg, log := prometheus.NewRegistry(), zap.New(core)
	ctx, cancel := context.WithCancel(context.Background())
	w := &wing{t: t, logs: logs}
	var err error
	w.keys, err = geo.ParseKeys(key)
	require.NoError(t, err)
	conf, _, err := reload.New(cfg, reload.Deps{Log: log, Registerer: reg, Started: time.Now()})
	require.NoError(t, err)
	w.service = service.New(service.Deps{Context: ctx, Log: log, Grace: func() time.Duration { return 0 }, EndAll: func() int { return 0 }})
	client := engine.NewClient(engine.Options{})
	settings := func() *fleet.Settings { return conf.Settings().Settings }
	w.fleet = fleet.New(fleet.Deps{
		Context: ctx, Serving: w.service.Context, Started: time.Now(), Log: log, Settings: settings, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: log}),
		Publish: func([]prefill.Candidate, []local.Rank, []board.Worker) {},
	})
	places := pool.NewSemaphore(10)
	c := cfg.Prefill
	c.Scrape.Interval, c.Places, c.Registerer, c.Log = 0, places, reg, log
	c.Decode = func(string, string, time.Duration) (int, bool) { return 1, false }
	scheduler, err := prefill.New(c)
	require.NoError(t, err)
	w.dispatcher, err = dispatcher.Start(ctx, dispatcher.Config{
		Config:     board.Config{Policy: cfg.Dispatch.Policy, Window: cfg.Dispatch.Window, TickLimit: cfg.Dispatch.TickLimit, TTL: time.Minute},
		Registerer: reg, Places: places, OnRoom: scheduler.Wake, Log: log,
	})
	require.NoError(t, err)
	var running sync.WaitGroup
	w.Peers, err = New(Deps{
		Context: ctx, Go: func(f func()) { running.Go(f) }, Log: log, Registerer: reg,
		Config: conf, Service: w.service, Fleet: w.fleet, Prefill: scheduler, Dispatcher: w.dispatcher,
		Bodies: edge.NewBodies(1 << 20),
		Fail: func(ctx *fasthttp.RequestCtx, e *openai.Error) {
			ctx.SetStatusCode(e.Status)
			ctx.SetBodyString(e.Code)
			w.refused = e.Message
		},
		Serve: func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *Hop, _ time.Time) {
			w.served = append(w.served, fmt.Sprintf("%s of %s: %s to %s", from.Tenant, from.Origin, ctx.PostBody(), ep.Path()))
		},
	})
	require.NoError(t, err)
	require.NoError(t, w.Start())
	t.Cleanup(func() {
		end, stop := context.WithTimeout(context.Background(), time.Minute)
		defer stop()
		require.NoError(t, w.Drain(end))
		w.peers.Close()
		cancel()
		running.Wait()
		client.Close()
	})
	return w
}

// hop is how a peer sends a body here.
func (w *wing) hop(from, body, boot string) geo.Hop {
	now := time.Now()
	return geo.Hop{
		N: 1, Max: 1, Origin: from, Via: []string{from}, RID: "r", Time: now.UnixMilli(),
		Nonce:    fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()),
		Deadline: now.Add(time.Minute).UnixMilli(), To: "us-1", Boot: boot, Digest: geo.DigestOf([]byte(body)),
	}
}

// send sends a request with a hop that a key signs.
func (w *wing) send(method, path, body string, h geo.Hop, keys *geo.Keys) (status int, reject, answer string) {
	w.t.Helper()
	req, err := http.NewRequest(method, "http://"+w.Addr()+path, strings.NewReader(body))
	require.NoError(w.t, err)
	if keys != nil {
		m := geo.Message{Method: method, Target: path, Headers: []engine.Header{{Name: geo.TenantHeader, Value: "t"}}}
		req.Header.Set(geo.HopHeader, h.String())
		req.Header.Set(geo.SignatureHeader, keys.Sign(&m, &h))
		req.Header.Set(geo.TenantHeader, "t")
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	require.NoError(w.t, err)
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	require.NoError(w.t, err)
	return resp.StatusCode, resp.Header.Get(geo.RejectHeader), string(got)
}

// boot is the run of the proxy, which it tells a peer that probes it.
func (w *wing) boot() string {
	w.t.Helper()
	body := `{"v":"1.0","id":"eu-1"}`
	status, _, answer := w.send(http.MethodPost, geo.ProbePath, body, w.hop("eu-1", body, ""), w.keys)
	require.Equal(w.t, http.StatusOK, status, answer)
	var a struct{ Boot string }
	require.NoError(w.t, json.Unmarshal([]byte(answer), &a))
	require.NotEmpty(w.t, a.Boot)
	return a.Boot
}

// Only a peer that signs what it sends, to this proxy as it runs now, and for whom somebody waits,
// comes through the door.
func TestWhoComesThroughTheDoorOfPeers(t *testing.T) {
	strangers, err := geo.ParseKeys("a fedcba9876543210fedcba9876543210\n")
	require.NoError(t, err)
	const chat, body = "/v1/chat/completions", `{"model":"m"}`
	for _, row := range []struct {
		name   string
		method string // POST
		path   string // of chats
		change func(h *geo.Hop)
		keys   func(*geo.Keys) *geo.Keys // that sign
		before func(*wing)
		status int
		reject string
	}{
		{name: "a peer", status: 200},
		{name: "a peer's completion", path: "/v1/completions", status: 200},
		{name: "nobody", keys: func(*geo.Keys) *geo.Keys { return nil }, status: 508, reject: geo.RejectHop},
		{name: "somebody with another key", keys: func(*geo.Keys) *geo.Keys { return strangers }, status: 401, reject: geo.RejectSignature},
		{name: "a peer that is not known", change: func(h *geo.Hop) { h.Origin, h.Via = "ap-1", []string{"ap-1"} }, status: 403, reject: geo.RejectPeer},
		{name: "what was sent to another proxy", change: func(h *geo.Hop) { h.To = "us-2" }, status: 421, reject: geo.RejectRecipient},
		{name: "what was sent to another run of this proxy", change: func(h *geo.Hop) { h.Boot = "x" }, status: 421, reject: geo.RejectRecipient},
		{name: "what is old", change: func(h *geo.Hop) { h.Time -= time.Hour.Milliseconds() }, status: 401, reject: geo.RejectStale},
		{name: "another body than was signed for", change: func(h *geo.Hop) { h.Digest = geo.DigestOf(nil) }, status: 401, reject: geo.RejectSignature},
		{name: "what nobody waits for any more", change: func(h *geo.Hop) { h.Deadline = h.Time - 1 }, status: 504, reject: geo.RejectDeadline},
		{name: "a path that another version knows", path: "/v1/embeddings", status: 404, reject: geo.RejectVersion},
		{name: "a question with GET", method: http.MethodGet, status: 405},
		{name: "a peer, when the proxy shuts down", before: func(w *wing) { w.service.RefuseForExit() }, status: 503, reject: geo.RejectDraining},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWing(t)
			path, method, keys := row.path, row.method, w.keys
			if path == "" {
				path = chat
			}
			if method == "" {
				method = http.MethodPost
			}
			if row.keys != nil {
				keys = row.keys(keys)
			}
			h := w.hop("eu-1", body, w.boot())
			if row.change != nil {
				row.change(&h)
			}
			if row.before != nil {
				row.before(w)
			}
			status, reject, answer := w.send(method, path, body, h, keys)
			require.Equal(t, row.status, status, answer)
			require.Equal(t, row.reject, reject, answer)
			if row.status != 200 {
				require.Empty(t, w.served)
				return
			}
			require.Equal(t, []string{"t of eu-1: " + body + " to " + path}, w.served)
			status, reject, _ = w.send(method, path, body, h, keys)
			require.Equal(t, 401, status, "the same once more")
			require.Equal(t, geo.RejectSignature, reject)
			require.Len(t, w.served, 1)
		})
	}
}

// Whoever is on the way between two proxies cannot change how the second one serves a request.
func TestHeadersAreThoseThatThePeerHasSent(t *testing.T) {
	const body = `{"model":"m"}`
	sent := map[string]string{
		geo.TenantHeader: "t", "X-Evenkeel-Session": "a", "X-Evenkeel-Session-End": "false", "X-Evenkeel-Class": "batch",
		"X-Evenkeel-Deadline-Ms": "1000", "X-Evenkeel-Geo": "local", "Content-Encoding": "identity",
	}
	w := newWing(t)
	boot := w.boot()
	deliver := func(signed map[string]string, change func(http.Header)) (status int, reject string) {
		h, m := w.hop("eu-1", body, boot), geo.Message{Method: http.MethodPost, Target: mooncake.Chat.Path()}
		req, err := http.NewRequest(m.Method, "http://"+w.Addr()+m.Target, strings.NewReader(body))
		require.NoError(t, err)
		for name, value := range signed {
			m.Headers = append(m.Headers, engine.Header{Name: name, Value: value})
			req.Header.Set(name, value)
		}
		req.Header.Set(geo.HopHeader, h.String())
		req.Header.Set(geo.SignatureHeader, w.keys.Sign(&m, &h))
		change(req.Header)
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode, resp.Header.Get(geo.RejectHeader)
	}
	for name, change := range map[string]func(http.Header){
		"nothing":   func(http.Header) {},
		"the trace": func(h http.Header) { h.Set("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01") },
		"the case of a name": func(h http.Header) {
			h["x-evenkeel-session"] = h["X-Evenkeel-Session"]
			h.Del("X-Evenkeel-Session")
		},
	} {
		status, _ := deliver(sent, change)
		require.Equal(t, http.StatusOK, status, name)
	}
	served := len(w.served)
	for name, value := range sent {
		without := maps.Clone(sent)
		delete(without, name)
		for _, row := range []struct {
			what   string
			signed map[string]string
			change func(http.Header)
		}{
			{"changed", sent, func(h http.Header) { h.Set(name, value+"0") }},
			{"emptied", sent, func(h http.Header) { h.Set(name, "") }},
			{"removed", sent, func(h http.Header) { h.Del(name) }},
			{"added", without, func(h http.Header) { h.Set(name, value) }},
			{"added without a value", without, func(h http.Header) { h.Set(name, "") }},
			{"there twice", sent, func(h http.Header) { h.Add(name, value) }},
			{"added in small letters", without, func(h http.Header) { h[strings.ToLower(name)] = []string{value} }},
		} {
			status, reject := deliver(row.signed, row.change)
			require.Equal(t, http.StatusUnauthorized, status, "%s %s", name, row.what)
			require.Equal(t, geo.RejectSignature, reject, "%s %s", name, row.what)
		}
	}
	require.Len(t, w.served, served)
}

// Where everything is ours, nothing is handed back or pledged to anybody.
func TestAProxyThatOwnsAllGivesNothingBack(t *testing.T) {
	for _, row := range []struct {
		path, body string
		status     int
		code       string
	}{
		{geo.HandBackPath, `{}`, 409, "not_holder"},
		{geo.HandBackPath, `no JSON`, 400, "bad_request"},
		{geo.VotePath, `{}`, 409, "no_pledge"},
		{geo.VotePath, `no JSON`, 400, "bad_request"},
	} {
		w := newWing(t)
		status, _, code := w.send(http.MethodPost, row.path, row.body, w.hop("eu-1", row.body, w.boot()), w.keys)
		require.Equal(t, row.status, status)
		require.Equal(t, row.code, code)
	}
}

// A model that no rank decodes here is not decoded here, whatever was true a moment ago.
func TestWhatIsDecodedHereIsLookedAtAgain(t *testing.T) {
	w := newWing(t)
	require.NoError(t, w.fleet.Add(roster.Decode, config.Engine{URL: "http://127.0.0.1:9", Slots: 4, Profile: "a"}))
	w.fleet.OnStatus("decode 127.0.0.1:9", engine.Status{Models: []engine.Model{{ID: "m"}}, Up: true})
	w.fleet.Publish()
	for _, up := range []bool{true, false} {
		w.dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 4, Up: up}})
		w.RefreshDecodeLoad(t.Context())
		running, slots := w.leastRunningAndSlots("m")
		require.Zero(t, running)
		require.Equal(t, map[bool]int{true: 4}[up], slots)
		require.Equal(t, map[bool]int{true: 1}[up], len(w.decodableModels()))
	}
}

// Only the ranks that list a name decode for it: peers are told of no others.
func TestWhatIsDecodedHereGoesByName(t *testing.T) {
	w := newWing(t)
	for port, names := range map[string][]engine.Model{"8": {{ID: "m"}}, "9": {{ID: "m"}, {ID: "x", Parent: "m"}}} {
		require.NoError(t, w.fleet.Add(roster.Decode, config.Engine{URL: "http://127.0.0.1:" + port, Slots: 4, Profile: "a"}))
		w.fleet.OnStatus("decode 127.0.0.1:"+port, engine.Status{Models: names, Up: true})
	}
	base, both := board.NewNames([]string{"m"}), board.NewNames([]string{"m", "x"})
	slots := func(model string) int {
		w.RefreshDecodeLoad(t.Context())
		_, n := w.leastRunningAndSlots(model)
		return n
	}
	workers := []board.Worker{{ID: 0, Name: "d/0", Model: "m", Slots: 4, Up: true, Lists: base},
		{ID: 1, Name: "e/0", Model: "m", Slots: 3, Up: true, Lists: both}}
	w.dispatcher.SetWorkers(workers)
	require.Equal(t, []int{7, 3}, []int{slots("m"), slots("x")})
	require.Len(t, w.decodableModels(), 2)
	workers[1].Up = false
	w.dispatcher.SetWorkers(workers)
	require.Equal(t, []int{4, 0}, []int{slots("m"), slots("x")})
	require.Equal(t, []string{"m"}, w.decodableModels())
}

// Two look at once: one again and again, and one when it is news who owns what. The second waits
// for the first, but no longer than its caller does.
func TestALookWaitsForTheLookBefore(t *testing.T) {
	w := newWing(t)
	w.refreshLock <- struct{}{}
	defer func() { <-w.refreshLock }()
	before := w.Peers.decodeLoads.Load()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	w.RefreshDecodeLoad(ctx)
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	require.Same(t, before, w.Peers.decodeLoads.Load(), "nothing was read")
}

// A dispatcher that does not answer in time says nothing about its ranks.
func TestALookThatIsNotAnsweredChangesNothing(t *testing.T) {
	w := newWing(t)
	require.NoError(t, w.fleet.Add(roster.Decode, config.Engine{URL: "http://127.0.0.1:9", Slots: 4, Profile: "a"}))
	w.fleet.OnStatus("decode 127.0.0.1:9", engine.Status{Models: []engine.Model{{ID: "m"}}, Up: true})
	w.fleet.Publish()
	w.dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 4, Up: true}})
	w.RefreshDecodeLoad(t.Context())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // some of these ask the dispatcher, and do not wait for its answer
		w.RefreshDecodeLoad(ended)
		_, slots := w.leastRunningAndSlots("m")
		require.Equal(t, 4, slots)
	}
}

// A proxy without peers has none of this.
func TestAProxyThatIsAlone(t *testing.T) {
	conf, _, err := reload.New(config.Default(), reload.Deps{Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Started: time.Now()})
	require.NoError(t, err)
	p, err := New(Deps{Config: conf})
	require.NoError(t, err)
	require.Nil(t, p)
	require.Nil(t, p.Geo())
	require.Empty(t, p.Addr())
}

// Decisions know of a model how many slots its ranks have, and how busy the idlest of them is.
func TestHowBusyTheRanksOfAModelAre(t *testing.T) {
	up := func(used, slots int) board.WorkerStatus {
		return board.WorkerStatus{Up: true, Used: used, Slots: slots, Limit: slots}
	}
	down := board.WorkerStatus{Used: 0, Slots: 9, Limit: 9}
	for _, row := range []struct {
		name    string
		workers []board.WorkerStatus
		want    decodeLoad
		free    int
	}{
		{"no rank", nil, decodeLoad{}, 0},
		{"one", []board.WorkerStatus{up(3, 8)}, decodeLoad{leastRunning: 3, slots: 8}, 5},
		{"the idlest of two counts", []board.WorkerStatus{up(3, 8), up(1, 4)}, decodeLoad{leastRunning: 1, slots: 12}, 8},
		{"one that is down does not", []board.WorkerStatus{down, up(3, 8)}, decodeLoad{leastRunning: 3, slots: 8}, 5},
		{"one that may have fewer now has nothing free", []board.WorkerStatus{{Up: true, Used: 8, Slots: 8, Limit: 2}}, decodeLoad{leastRunning: 8, slots: 8}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			require.Equal(t, row.want, loadOfRanks(row.workers))
			require.Equal(t, row.free, freeSlots(row.workers))
		})
	}
	d := loadOfRanks([]board.WorkerStatus{up(3, 8)})
	d.add(loadOfRanks([]board.WorkerStatus{up(1, 4)}))
	require.Equal(t, decodeLoad{leastRunning: 1, slots: 12}, d, "of another board")
	d.add(decodeLoad{})
	require.Equal(t, decodeLoad{leastRunning: 1, slots: 12}, d, "a board without ranks is not the idlest")
}

// Proxies of two versions refuse each other, and each says once what to do.
func TestProxiesOfTwoVersionsSayWhyTheyRefuseEachOther(t *testing.T) {
	var probes atomic.Int64
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // which begins with v1, and knows nothing else
		probes.Add(1)
		require.True(t, strings.HasPrefix(r.Header.Get(geo.HopHeader), "v3;"))
		w.Header().Set(geo.RejectHeader, geo.RejectHop)
		w.WriteHeader(http.StatusLoopDetected)
	}))
	defer old.Close()
	w := wingBeside(t, old.URL)
	refuses := func() int { return w.logs.FilterMessage("a peer refuses the probes of this proxy").Len() }
	require.Eventually(t, func() bool { return refuses() == 1 }, time.Minute, time.Millisecond)
	require.Contains(t, w.peers.Status().Peers[0].Fault, "run the same version of evenkeel on both sides")
	for range 2 {
		req, err := http.NewRequest(http.MethodPost, "http://"+w.Addr()+geo.ProbePath, strings.NewReader("{}"))
		require.NoError(t, err)
		req.Header.Set(geo.HopHeader, "v2;n=1;max=1;origin=eu-1;via=eu-1")
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusBadRequest, resp.StatusCode)
		require.Equal(t, geo.RejectVersion, resp.Header.Get(geo.RejectHeader))
		require.Contains(t, w.refused, "run the same version")
	}
	require.Equal(t, 1, w.logs.FilterMessageSnippet("a proxy of another version").Len())
	require.Eventually(t, func() bool { return probes.Load() > 3 }, time.Minute, time.Millisecond)
	require.Equal(t, 1, refuses(), "not with every probe")
}
