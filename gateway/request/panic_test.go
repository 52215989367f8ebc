package request

import (
	"context"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// withEngines is a server with a prefill engine and a decode rank, which nothing answers for.
func withEngines(t *testing.T) *server {
	srv := newServer(t)
	p := (&mooncake.Profile{}).WithDefaults()
	target := &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:9"}, Rank: -1}
	srv.engines.ranks = map[int32]*fleet.Rank{0: {Instance: "decode d", Target: target, Profile: &p, Traffic: &engine.Traffic{}, Signs: engine.NewSigns()}}
	srv.Tier.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "p", Target: target, Profile: &p, Models: []string{"m"}, Live: true}})
	srv.Dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 1, Up: true}})
	return srv
}

// The edge outlives the panic of a handler, and so do the slot and the lease that its
// request had taken.
func TestAPanicGivesBackWhatAStepHasTaken(t *testing.T) {
	srv := withEngines(t)

	kid, in := edge.NewDisconnect(zap.NewNop()), &Incoming{Record: srv.Journal.Request(journal.Facts{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{Passthrough: true}, client: reader{kid}, model: fleet.Route{Name: "m", Board: "m"}, in: in, record: in.Record}
	bound := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, bound.Err)
	lease, err := srv.Tier.Acquire(t.Context(), prefill.Request{ID: "x", Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	require.Equal(t, 1, srv.Tier.Status()[0].Inflight)

	s := j.newStream(bound.Slot)
	srv.Settings = func() *fleet.Settings { panic("on purpose") } // both steps ask it for their deadlines
	j.life.Step(lifecycle.Event{What: lifecycle.Begun}, nil)
	j.life.Step(lifecycle.Event{What: lifecycle.NoRankTakes}, nil)
	require.PanicsWithValue(t, "on purpose", func() { _, _ = (&runner{job: j, lease: lease}).run(lifecycle.Event{What: lifecycle.Turn}) })
	j.life = lifecycle.Lifecycle{}
	j.life.Step(lifecycle.Event{What: lifecycle.Begun}, nil)
	require.PanicsWithValue(t, "on purpose", func() {
		_, _ = (&runner{job: j, slot: bound.Slot, stream: s}).run(lifecycle.Event{What: lifecycle.RankTakes})
	})
	require.Zero(t, srv.Places.Used())
	require.Zero(t, srv.Tier.Status()[0].Inflight)
	require.Equal(t, 1, srv.Tier.Status()[0].Orphans, "its engine may hold the prompt")
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
}

// A slot whose answer cannot be prepared goes back, although the request's life does not know of it yet.
func TestAPanicOnASlotGivesItBack(t *testing.T) {
	srv := withEngines(t)
	kid, in := edge.NewDisconnect(zap.NewNop()), &Incoming{Record: srv.Journal.Request(journal.Facts{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: reader{kid}, in: in, record: in.Record}
	bound := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, bound.Err)
	srv.engines.ranks = nil // its rank is not known
	require.Panics(t, (&runner{job: j, slot: bound.Slot}).begin)
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
}

// What a step was to give back is given back, although something panics before its turn.
func TestAPanicBetweenTwoEffectsLosesNone(t *testing.T) {
	srv := withEngines(t)
	<-srv.discards.Close() // none begins
	kid, in := edge.NewDisconnect(zap.NewNop()), &Incoming{Record: srv.Journal.Request(journal.Facts{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{Stream: true}, client: reader{kid}, model: fleet.Route{Name: "m", Board: "m"}, in: in, record: in.Record, prompt: 7}
	lease, err := srv.Tier.Acquire(t.Context(), prefill.Request{ID: "x", Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	lease.Answered(prefill.Usage{PromptTokens: 7}, time.Now().Add(time.Minute))
	bound := <-srv.Dispatcher.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now(), Deadline: time.Now().Add(time.Minute)})
	require.NoError(t, bound.Err)
	for _, e := range []lifecycle.Event{{What: lifecycle.Begun}, {What: lifecycle.NoRankTakes}, {What: lifecycle.Turn}, {What: lifecycle.HandedOver}, {What: lifecycle.Bound}} {
		j.life.Step(e, nil)
	}
	held := &handoff.Handoff{Handoff: mooncake.NewHandoff(nil, time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)), Lease: lease}
	r := &runner{job: j, lease: lease, held: held, slot: bound.Slot, stream: j.newStream(bound.Slot)} // without the fault, so that it cannot be judged
	require.Panics(t, func() {
		_, _ = r.run(lifecycle.Event{What: lifecycle.Fell, End: lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Broke}})
	})
	require.Equal(t, 1, srv.Tier.Status()[0].Orphans, "an engine may have read it")
	require.Zero(t, srv.Tier.Status()[0].Inflight)
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
	require.Zero(t, srv.Places.Used())
}

// A request that waits in the pool leaves it when it panics, and takes its place along.
func TestAPanicInThePoolGivesThePlaceBack(t *testing.T) {
	srv := newServer(t)
	kid, in := edge.NewDisconnect(zap.NewNop()), &Incoming{Record: srv.Journal.Request(journal.Facts{ID: "x"})}
	j := &job{srv: srv.Server, req: &openai.Request{}, client: reader{kid}, model: fleet.Route{Name: "m", Board: "m"}, in: in, record: in.Record}
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
