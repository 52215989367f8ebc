package request

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
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
