package request

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/recording"
	"evenkeel/geo"
	"evenkeel/geo/policy"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// withEngines is a server with a prefill engine and a decode rank, which nothing answers for.
func withEngines(t *testing.T) *server {
	srv := newServer(t)
	p := (&mooncake.Profile{}).WithDefaults()
	target := &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:9"}, Rank: -1}
	srv.engines.ranks = map[int32]*roster.Rank{0: {Instance: "decode d", Target: target, Profile: &p, Traffic: &engine.Traffic{},
		Signs: engine.NewLiveness()}}
	srv.Prefill.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "p", Target: target, Profile: &p, Models: []string{"m"}, Live: true}})
	srv.Dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 1, Up: true}})
	return srv
}

// The edge outlives the panic of a handler, and so do the slot and the lease that its
// request had taken.
func TestAPanicGivesBackWhatAStepHasTaken(t *testing.T) {
	srv := withEngines(t)

	kid, in := edge.NewCloseNotifier(zap.NewNop()), &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{Passthrough: true}, client: kid, isLeg: true, model: roster.Route{Name: "m", Board: "m"},
		incoming: in,
		record:   in.Record}
	bound := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, bound.Err)
	lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{ID: "x", Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	require.Equal(t, 1, srv.Prefill.Status()[0].Inflight)

	s := j.newStream(bound.Slot)
	srv.Settings = func() *fleet.Settings { panic("on purpose") } // both steps ask it for their deadlines
	j.step(lifecycle.Event{Kind: lifecycle.Begun}, nil)
	j.step(lifecycle.Event{Kind: lifecycle.NoLocal}, nil)
	require.PanicsWithValue(t, "on purpose", func() { _, _ = (&executor{job: j, lease: lease}).run(lifecycle.Event{Kind: lifecycle.Turn}) })
	j.life, j.recorder = lifecycle.Lifecycle{}, recording.Recorder{}
	j.step(lifecycle.Event{Kind: lifecycle.Begun}, nil)
	require.PanicsWithValue(t, "on purpose", func() {
		_, _ = (&executor{job: j, slot: bound.Slot, stream: s}).run(lifecycle.Event{Kind: lifecycle.LocalBound})
	})
	require.Zero(t, srv.Places.Used())
	require.Zero(t, srv.Prefill.Status()[0].Inflight)
	require.Equal(t, 1, srv.Prefill.Status()[0].Orphans, "its engine may hold the prompt")
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
}

// A slot whose answer cannot be prepared goes back, although the request's life does not know of it
// yet.
func TestAPanicOnASlotGivesItBack(t *testing.T) {
	srv := withEngines(t)
	kid, in := edge.NewCloseNotifier(zap.NewNop()), &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: kid, isLeg: true, incoming: in, record: in.Record}
	bound := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, bound.Err)
	srv.engines.ranks = nil // its rank is not known
	require.Panics(t, (&executor{job: j, slot: bound.Slot}).prepareStream)
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
}

// What a step was to give back is given back, although something panics before its turn.
func TestAPanicBetweenTwoEffectsLosesNone(t *testing.T) {
	srv := withEngines(t)
	<-srv.discards.Close() // none begins
	kid, in := edge.NewCloseNotifier(zap.NewNop()), &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{Stream: true}, client: kid, isLeg: true, model: roster.Route{Name: "m", Board: "m"},
		incoming: in,
		record:   in.Record, promptTokens: 7}
	lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{ID: "x", Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	lease.Answered(prefill.Usage{PromptTokens: 7}, time.Now().Add(time.Minute))
	bound := <-srv.Dispatcher.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now(),
		Deadline: time.Now().Add(time.Minute)})
	require.NoError(t, bound.Err)
	for _, e := range []lifecycle.Event{{Kind: lifecycle.Begun}, {Kind: lifecycle.NoLocal}, {Kind: lifecycle.Turn},
		{Kind: lifecycle.HandedOver}, {Kind: lifecycle.Bound}} {
		j.step(e, nil)
	}
	held := &handoff.Handoff{Handoff: mooncake.NewHandoff(nil, time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)), Lease: lease}
	// without the fault, so that it cannot be judged
	r := &executor{job: j, lease: lease, handoff: held, slot: bound.Slot, stream: j.newStream(bound.Slot)}
	require.Panics(t, func() {
		_, _ = r.run(lifecycle.Event{Kind: lifecycle.CallFailed,
			End: lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Sent, Reason: lifecycle.Broke}})
	})
	require.Equal(t, 1, srv.Prefill.Status()[0].Orphans, "an engine may have read it")
	require.Zero(t, srv.Prefill.Status()[0].Inflight)
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
	require.Zero(t, srv.Places.Used())
}

// A forward that panics ends, so that its peer does not count it for ever.
func TestAPanicEndsTheForward(t *testing.T) {
	far := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var probe struct{ Seq uint64 }
		_ = json.NewDecoder(r.Body).Decode(&probe)
		text, _ := json.Marshal(map[string]any{"v": "1.0", "id": "eu-1", "boot": "b", "seq": probe.Seq,
			"models": map[string]policy.Offer{"m": {Replicas: 1, NAvail: 1, Free: 8}}})
		_, _ = w.Write(text)
	}))
	t.Cleanup(far.Close)
	at, err := url.Parse(far.URL)
	require.NoError(t, err)
	srv := newServer(t)
	c := geo.Default()
	c.Self, c.Probe.Interval, c.Queue, c.Log = geo.Self{ID: "us-1", Region: "us"}, 50*time.Millisecond, srv.Prefill, zap.NewNop()
	c.FirstByte, c.Idle, c.Connect, c.WholeBytes, c.EventBytes = time.Second, time.Second, time.Second, 1<<20, 1<<20
	c.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", Target: &engine.Target{ID: "eu-1", URL: at, Rank: -1}}}
	c.Running, c.Draining = func(string) (float64, int) { return 5, 64 }, func() bool { return false }
	peers, err := geo.New(c)
	require.NoError(t, err)
	peers.Start()
	t.Cleanup(peers.Close)
	q, round := peers.NewQuery(geo.Ask{ID: "x", Model: "m"}), uint64(0)
	require.Eventually(t, func() bool {
		round++
		now := time.Now()
		return q.Where(&prefill.Here{Model: "m", Now: now, Since: now, Round: round, Tokens: 100}) == prefill.ToThere
	}, patience, time.Millisecond)
	require.Equal(t, 1, peers.Status().Peers[0].InFlight)

	in := &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: edge.NewCloseNotifier(zap.NewNop()), incoming: in, record: in.Record}
	srv.Settings = func() *fleet.Settings { panic("on purpose") } // the limit of the answer's bytes is in them
	require.PanicsWithValue(t, "on purpose", func() { j.forwardToPeer(&fasthttp.RequestCtx{}, q.Forward()) })
	require.Zero(t, peers.Status().Peers[0].InFlight)
	require.Equal(t, geo.OutcomeGone, peers.Receipts(1)[0].Outcome)
}

// A request that waits in the pool leaves it when it panics, and takes its place along.
func TestAPanicInThePoolGivesThePlaceBack(t *testing.T) {
	srv := newServer(t)
	kid, in := edge.NewCloseNotifier(zap.NewNop()), &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: kid, isLeg: true, model: roster.Route{Name: "m", Board: "m"},
		incoming: in,
		record:   in.Record}
	waits := func(enqueue func(*pool.Entry) <-chan dispatcher.Result) {
		srv.Places.Reserve()
		require.PanicsWithValue(t, "on purpose", func() { _, _ = j.place(prefill.Candidate{}, 7, enqueue) })
		require.Zero(t, srv.Places.Used())
	}
	waits(func(*pool.Entry) <-chan dispatcher.Result { panic("on purpose") })
	serving := srv.Serving
	srv.Serving = func() context.Context { panic("on purpose") }
	waits(func(e *pool.Entry) <-chan dispatcher.Result { return srv.Dispatcher.Enqueue(e) })
	srv.Serving = serving
}

// breaks is a client whose connection cannot be watched.
type breaks struct{ client }

func (b breaks) OnGone(f func()) {
	if f != nil {
		panic("on purpose")
	}
}

// early is a request whose turn has come, and whose decode rank is bound before its prefill.
func early(t *testing.T, to client) (*server, *executor) {
	srv := newServer(t)
	p := (&mooncake.Profile{Connector: mooncake.SGLang}).WithDefaults()
	target := &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:9"}, Rank: -1}
	srv.engines.ranks = map[int32]*roster.Rank{0: {Instance: "decode d", Target: target, Profile: &p, Traffic: &engine.Traffic{},
		Signs: engine.NewLiveness()}}
	srv.Prefill.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "p", Target: target, Profile: &p, Models: []string{"m"}, Live: true}})
	srv.Dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 1, Up: true}})
	in := &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
	require.NoError(t, err)
	j := &job{
		srv: srv.Server, body: body, changes: &mooncake.Patch{},
		req:    &openai.Request{Endpoint: mooncake.Chat, Stream: true, PromptTokens: 7},
		client: to,
		model:  roster.Route{Name: "m", Board: "m"}, incoming: in, record: in.Record,
	}
	bound := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, bound.Err)
	lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{ID: "x", Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	for _, e := range []lifecycle.Event{{Kind: lifecycle.Begun}, {Kind: lifecycle.NoLocal},
		{Kind: lifecycle.Turn, Bind: lifecycle.Early, Traits: lifecycle.Traits[mooncake.SGLang]}} {
		j.step(e, nil)
	}
	return srv, &executor{job: j, lease: lease, slot: bound.Slot, stream: j.newStream(bound.Slot)}
}

// A prefill call that runs beside a decode call ends as it would without its panic: nothing
// recovers that goroutine.
func TestAPanicLeavesThePrefillLegToItself(t *testing.T) {
	for range 20 {
		srv, r := early(t, breaks{edge.NewCloseNotifier(zap.NewNop())})
		require.PanicsWithValue(t, "on purpose", func() { _, _ = r.run(lifecycle.Event{Kind: lifecycle.Bound}) })
		<-srv.prefillCalls.Close()
		require.Zero(t, srv.Prefill.Status()[0].Inflight)
		require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
	}
}

// The leg that nobody began has the lease back, too.
func TestAPanicBeforeThePrefillLegGivesTheLeaseBack(t *testing.T) {
	srv, r := early(t, edge.NewCloseNotifier(zap.NewNop()))
	r.lease.Candidate.Target = nil // the legs cannot be arranged
	require.Panics(t, func() { _, _ = r.run(lifecycle.Event{Kind: lifecycle.Bound}) })
	require.Zero(t, srv.Prefill.Status()[0].Inflight)
}

// What cleans up after a panic must tell the life of it, and so the panic may not keep the life for
// itself.
func TestAPanicInAStepOfAPairDoesNotHangItsRequest(t *testing.T) {
	for name, told := range map[string]func(*concurrentPrefill){
		"the first event came":     func(p *concurrentPrefill) { p.firstEventCame(0) },
		"the decode leg ended":     func(p *concurrentPrefill) { p.decodeFailed(lifecycle.Died) },
		"the client left":          (*concurrentPrefill).clientLeft,
		"the prefill leg is begun": func(p *concurrentPrefill) { p.runProbe() },
	} {
		t.Run(name, func(t *testing.T) {
			_, r := early(t, edge.NewCloseNotifier(zap.NewNop()))
			j, s := r.job, r.stream
			j.step(lifecycle.Event{Kind: lifecycle.Bound}, nil)
			p := &concurrentPrefill{job: j, pairNumber: 9, rank: s.upstream.rank, slot: s.upstream.slot, lastLease: r.lease} // no such pair
			require.Panics(t, func() { told(p) })
			j.step(lifecycle.Event{Kind: lifecycle.Panicked, Idle: true}, nil) // it would wait for ever
			r.lease.Release()
			s.giveBackAll(board.Failed)
		})
	}
}

// miscounts cannot count calls.
type miscounts struct{ EngineChooser }

func (miscounts) AddRunning(string, int) { panic("on purpose") }

// What stands behind the effect that panics is given back all the same, at the end of an answer,
// too.
func TestAPanicAtTheEndOfAnAnswerGivesTheSeatBack(t *testing.T) {
	srv := newServer(t)
	seats := edge.NewPlaces(5)
	seat := seats.For(nil)
	require.True(t, seat.Acquire(1))
	in := &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"}), CorrectEstimate: func(int) {}}
	srv.openRequests.Add(1)
	p := &Passthrough{Engines: miscounts{}, Seat: seat, Memory: edge.NewBodies(0).For(nil),
		Duration: prometheus.NewHistogram(prometheus.HistogramOpts{})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: edge.NewCloseNotifier(zap.NewNop()), isLeg: true,
		incoming: in, record: in.Record, passthrough: p}
	for _, e := range []lifecycle.Event{{Kind: lifecycle.Begun, Bind: lifecycle.Passthrough}, {Kind: lifecycle.Chosen},
		{Kind: lifecycle.First}} {
		j.step(e, nil)
	}
	s := newSlotlessStream(j, &roster.Rank{Target: &engine.Target{}, Traffic: &engine.Traffic{}}, sse.Options{Form: sse.Verbatim})
	s.firstAt = s.upstream.began
	require.PanicsWithValue(t, "on purpose", s.endWhole)
	s.Panicked("on purpose")
	require.Zero(t, seats.Held())
}
