package request

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// late is a client that is found gone once its request has got a slot.
type late struct {
	*edge.CloseNotifier
	bound func() bool
}

func (l *late) Gone() <-chan struct{} {
	for !l.Left() && !l.bound() {
		runtime.Gosched()
	}
	l.MarkGone()
	return l.CloseNotifier.Gone()
}

func TestASlotThatComesAsTheClientLeavesIsGivenBack(t *testing.T) {
	srv := newServer(t)
	<-srv.discards.Close() // none begins
	srv.Prefill.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "prefill p", Models: []string{"m"}, Live: true,
		Profile: &mooncake.Profile{}}})
	srv.Dispatcher.SetWorkers([]board.Worker{{Name: "d/0", Model: "m", Engine: "d", Slots: 1, Up: true}})
	used := func() int { return srv.Dispatcher.Status(t.Context()).Models[0].Workers[0].Used }
	for range 20 { // either may be seen first
		lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
		require.NoError(t, err)
		client := &late{edge.NewCloseNotifier(srv.Log), func() bool { return used() == 1 }}
		j := &job{srv: srv.Server, req: &openai.Request{}, client: client, model: roster.Route{Board: "m"}, incoming: &Incoming{},
			record: srv.Journal.Begin(journal.LogEntry{}), promptTokens: 7}
		h := &handoff.Handoff{Handoff: mooncake.NewHandoff(nil, time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)), Lease: lease,
			Request: j, Prompt: 7}
		slot, f := j.placeHandoff(h)
		if f == nil {
			srv.Dispatcher.Release(slot, board.Outcome{})
		} else {
			require.Equal(t, lifecycle.Consequences{KV: lifecycle.Discard, Next: lifecycle.Over}, f.Verdict())
		}
		lease.Release()
		require.Zero(t, used())
		require.Zero(t, srv.Places.Used())
	}
}

// A decode engine sends heartbeats for a request only once it has the request. Signs of life that it gives while the connection is made do
// not show that the hold is renewed: the engine stands still before its second heartbeat, and goes on when the KV is gone.
func TestSignsOfLifeBeforeARequestIsWrittenRenewNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const connects, signs, begins = 2 * time.Second, 10800 * time.Millisecond, 20 * time.Second
		profile := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		began := time.Now()
		dial := func(context.Context, string, string) (net.Conn, error) {
			time.Sleep(connects)
			proxySide, engineSide := net.Pipe()
			go func() {
				defer engineSide.Close()
				if r, err := http.ReadRequest(bufio.NewReader(engineSide)); err == nil {
					_, _ = io.Copy(io.Discard, r.Body)
					time.Sleep(time.Until(began.Add(begins)))
					_, _ = io.WriteString(engineSide, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+
						`data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\n")
				}
			}()
			return proxySide, nil
		}
		srv := newServer(t, func(_ *config.Config, deps *Deps) { deps.Client = engine.NewClient(engine.Options{Dial: dial}) })
		srv.Prefill.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "prefill p", Models: []string{"m"},
			Live: true, Profile: &profile}})
		lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
		require.NoError(t, err)
		body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
		require.NoError(t, err)
		j := &job{srv: srv.Server, req: &openai.Request{Endpoint: mooncake.Chat, Stream: true}, body: body, incoming: &Incoming{},
			client: edge.NewCloseNotifier(srv.Log), record: srv.Journal.Begin(journal.LogEntry{}), isLeg: true,
			changes: &mooncake.Patch{}}
		rank := &roster.Rank{Signs: engine.NewLiveness(), Traffic: &engine.Traffic{}, Profile: &profile,
			Target: &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "d:1"}, Rank: -1}}
		h := &handoff.Handoff{Lease: lease,
			Handoff: mooncake.NewHandoff([]byte(`{}`), began.Add(time.Second), began.Add(16*time.Second))} // kept for 12.25 s
		s := &stream{job: j, upstream: upstreamCall{job: j, rank: rank, slot: new(dispatcher.Slot), began: began,
			answer: new(buffers), call: srv.Client.NewCall(rank.Target), tracked: new(fleet.TrackedCall)}}
		s.upstream.answer.reset(sse.Options{MaxTokens: 10, Context: 100})
		go func() {
			for time.Since(began) < signs {
				rank.Signs.RecordSign(time.Now())
				time.Sleep(100 * time.Millisecond)
			}
		}()
		fault := s.open(h, lifecycle.ByFirstEvent)
		require.NotNil(t, fault, "the answer may be made of another prompt's KV")
		s.upstream.call.Abort()
		lease.Release()
		srv.Client.Close()
		time.Sleep(begins)
	})
}
