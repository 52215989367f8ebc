package request

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/pool"
)

// A fan-out whose client is found gone before any leg has begun gives back what
// its legs were bound to, and is told of like any other.
func TestAClientThatLeavesBeforeTheLegsBegin(t *testing.T) {
	srv := newServer(t)
	srv.Dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 1, Up: true}})
	r := <-srv.Dispatcher.EnqueueLocal(&pool.Entry{ID: 1, Model: "m", Prompt: 7, Arrival: time.Now(), Entered: time.Now()},
		&board.Local{Threshold: 100, InFlight: 100, Ranks: []board.LocalRank{{Worker: 0, Tokens: 7}}})
	require.NoError(t, r.Err)

	kid := edge.NewCloseNotifier(srv.Log)
	kid.MarkGone()
	in := &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
	whole := &job{srv: srv.Server, req: &openai.Request{}, client: kid, isLeg: true, model: roster.Route{Name: "m", Board: "m"}, incoming: in,
		record: in.Record}
	f := &fannedOut{srv: srv.Server, conn: kid, req: whole.req, in: in, stop: make(chan struct{})}
	for i := range 2 {
		f.legs = append(f.legs,
			fanOutLeg{clientShare: kid,
				job: &job{srv: srv.Server, req: whole.req, client: kid, isLeg: true, model: whole.model,
					incoming: in, record: in.Record.Leg(legName(i))}})
	}
	f.legs[0].job.local.boundSlot = r.Slot

	answered, fail := f.queueOrForward(&fasthttp.RequestCtx{}, whole) // no engine serves the model
	require.False(t, answered)
	require.Equal(t, journal.StatusClientClosed, fail.Status)
	require.Zero(t, srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used)
}

// The edge recovers what a handler does to itself, but not on the goroutine of a leg.
func TestAPanicOfALegEndsTheRequestOnly(t *testing.T) {
	srv := newServer(t)
	for _, stream := range []bool{false, true} {
		kid, in := edge.NewCloseNotifier(srv.Log), srv.BeginRequest(journal.LogEntry{ID: "x", Arrival: time.Now()})
		in.CorrectEstimate = func(int) {}
		req := &openai.Request{Stream: stream}
		f := &fannedOut{srv: srv.Server, conn: kid, req: req, in: in, stop: make(chan struct{})}
		for i := range 3 { // a leg without a body, which serve does not expect
			f.legs = append(f.legs,
				fanOutLeg{clientShare: edge.NewCloseNotifier(srv.Log),
					job: &job{srv: srv.Server, req: req, incoming: in, record: in.Record.Leg(legName(i))}})
		}
		var ctx fasthttp.RequestCtx
		if stream {
			f.stream(&ctx)
		} else {
			f.collect(&ctx)
		}
		require.Equal(t, http.StatusInternalServerError, ctx.Response.StatusCode())
		require.Contains(t, string(ctx.Response.Body()), "internal_error")
		require.Eventually(t, func() bool { return srv.Open() == 0 }, time.Minute, time.Millisecond)
	}
}

// A leg that only a decode rank may compute enters no queue for a prefill engine, whose turn it
// would never take.
func TestALegThatGoesWholeTakesNoPrefillEngine(t *testing.T) {
	t.Parallel()
	// The leg that has the slot keeps it until the other leg has failed.
	decode := []refengine.Config{{Slots: 1, Prompts: refengine.Prompts{Base: time.Hour}}}
	b := whole(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull}, decode: decode, waits: true})
	body, _ := tokensOf(t, `"n":2`, "")
	r := b.post(mooncake.Tokens.Path(), body)
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	b.settle()
}
