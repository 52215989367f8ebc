package request

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
)

// abortWait is how long an engine may take to end an answer, before evenkeel closes the call. It is
// also how long an engine that has ended an answer by itself may take to show that it works.
const abortWait = 5 * time.Second

// abortByName lets the client end a job by its name, and another program at an engine. The client
// still gets what exists of the answer by then.
type abortByName struct {
	requested         atomic.Bool // by the client, or another program at an engine
	endpoint          mooncake.Endpoint
	endAsIfClientLeft func()
	outputMode        []byte // which an answer without tokens repeats

	once sync.Once // a leg of a fan-out may have two names
	mu   sync.Mutex
	rank *roster.Rank // to which the request was sent last; nil: no rank has it
	id   string       // under which that engine has the request
}

// errNotAborted: the client has ended the request by name, but its engine has not stopped.
var errNotAborted = openai.NewError(http.StatusBadGateway, "upstream_incomplete",
	"the engine did not end the request when it was told to, so evenkeel left the engine")

// noteSent notes the rank to which the request is about to be sent. If the client has ended the
// request meanwhile, the job ends as if it had left. a is nil without a name.
func (a *abortByName) noteSent(rank *roster.Rank, headers []engine.Header) {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.rank = rank
	for _, h := range headers {
		if h.Name == engine.RequestID {
			a.id = h.Value
		}
	}
	a.mu.Unlock()
	if a.requested.Load() {
		a.endAsIfClientLeft()
	}
}

func (a *abortByName) noteNoRank() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rank = nil
}

func (a *abortByName) endedByClient() bool { return a != nil && a.requested.Load() }

// abort tells the engine that decodes to end the request, so that the client still gets the answer
// up to this point. If no engine can be told, the request ends as if the client had left, and a
// begun answer with an error.
func (a *abortByName) abort(srv *Server) { a.once.Do(func() { a.abortNow(srv) }) }

func (a *abortByName) abortNow(srv *Server) {
	a.requested.Store(true)
	a.mu.Lock()
	rank, id := a.rank, a.id
	a.mu.Unlock()
	if rank == nil {
		a.endAsIfClientLeft()
		return
	}
	time.AfterFunc(abortWait, a.endAsIfClientLeft) // for an engine that has not ended the answer by then
	if err := a.abortAt(srv, rank, id); err != nil {
		srv.Log.Warn("an engine was not told to end a request that its client has ended, so that the engine is left instead",
			zap.String("id", id), zap.String("engine", rank.Target.ID), zap.Error(err))
		a.endAsIfClientLeft()
	}
}

// endedAtEngine says whether another program, such as an RL trainer that has enough samples, has
// had an engine end the request (finish_reason abort). If evenkeel has not stopped new requests to
// the engine, and it works now, the request ends as if its client had ended it by name. Otherwise
// the engine is about to end, or paused, and the request goes on elsewhere, as it always does
// without a name (a is nil).
func (a *abortByName) endedAtEngine(srv *Server, at roster.Location) bool {
	if a == nil || srv.Engines().Withheld(at) {
		return false
	}
	ctx, stop := context.WithTimeout(srv.Serving(), abortWait)
	defer stop()
	why := srv.Monitor.CheckNow(ctx, at.Instance)
	if why != nil || srv.Engines().Withheld(at) { // discovery may say only now that the engine leaves
		return false
	}
	a.requested.Store(true)
	return true
}

// Only two endpoints have answers with names: /generate of SGLang, and /inference/v1/generate of
// vLLM.
func (a *abortByName) abortAt(srv *Server, rank *roster.Rank, id string) error {
	if a.endpoint == mooncake.Generate { // SGLang
		return upstream.Abort(srv.Client, rank.Target, id, srv.Log)
	}
	return upstream.AbortTokens(srv.Client, rank.Target, id, srv.Log)
}
