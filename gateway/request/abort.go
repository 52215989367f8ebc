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

// abortWait is how long an engine may take to end an answer that it was told to end. After that, evenkeel closes the call. It is also how
// long an engine that has ended an answer by itself may take to show that it works.
const abortWait = 5 * time.Second

// abortByName lets the client of a job end the request by its name, and another program at an engine. The client still gets the part of the
// answer that exists by then.
type abortByName struct {
	requested         atomic.Bool // the request is to end: its client has ended it by name, or another program at an engine
	endpoint          mooncake.Endpoint
	endAsIfClientLeft func() // makes the job end as if its client had left
	outputMode        []byte // the output_mode of the request, which an answer without tokens repeats

	once sync.Once // the engine is told once, although a leg of a fan-out may have two names
	mu   sync.Mutex
	rank *roster.Rank // the rank to which the request was sent last; nil: no rank has it
	id   string       // the id under which the engine of rank has the request
}

// errNotAborted is the error of an answer whose client has ended the request by name, but whose engine has not stopped.
var errNotAborted = openai.NewError(http.StatusBadGateway, "upstream_incomplete",
	"the engine did not end the request when it was told to, so evenkeel left the engine")

// noteSent notes the rank to which the request is about to be sent, and its id in the headers. If the client has ended the request in the
// meantime, the job ends as if the client had left. It does nothing for a request without a name (a is nil).
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

// noteNoRank notes that no rank has the request any more.
func (a *abortByName) noteNoRank() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rank = nil
}

// endedByClient says whether the client has ended the request by its name.
func (a *abortByName) endedByClient() bool { return a != nil && a.requested.Load() }

// abort ends the request because its client asked for this by name. It tells the engine that decodes the request to end it, so that the
// client still gets the answer up to this point. If no rank has the request, or the engine cannot be told, the request ends as if the
// client had left. An answer that has begun then ends with an error. Only the first call does this.
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
	time.AfterFunc(abortWait, a.endAsIfClientLeft) // has an effect only if the engine has not ended the answer by then
	if err := a.abortAt(srv, rank, id); err != nil {
		srv.Log.Warn("an engine was not told to end a request that its client has ended, so that the engine is left instead",
			zap.String("id", id), zap.String("engine", rank.Target.ID), zap.Error(err))
		a.endAsIfClientLeft()
	}
}

// endedAtEngine says whether another program, such as an RL trainer that has enough samples, has had an engine end the request. The engine
// has ended it with finish_reason abort. If evenkeel has not stopped new requests to the engine, and a check that is made now finds that
// the engine works, the request ends as if its client had ended it by name. Otherwise the engine is about to end, or evenkeel has paused
// it, and the request goes on elsewhere. A request without a name (a is nil) always does.
func (a *abortByName) endedAtEngine(srv *Server, at roster.Location) bool {
	if a == nil || srv.Engines().Withheld(at) {
		return false
	}
	ctx, stop := context.WithTimeout(srv.Serving(), abortWait)
	defer stop()
	why := srv.Monitor.CheckNow(ctx, at.Instance)
	if why != nil || srv.Engines().Withheld(at) { // a source of discovery may say only now that the engine leaves
		return false
	}
	a.requested.Store(true)
	return true
}

// abortAt tells the engine of a rank to end the request with the given id. Only two endpoints have answers with names: /generate of SGLang,
// and /inference/v1/generate of vLLM.
func (a *abortByName) abortAt(srv *Server, rank *roster.Rank, id string) error {
	if a.endpoint == mooncake.Generate { // SGLang
		return upstream.Abort(srv.Client, rank.Target, id, srv.Log)
	}
	return upstream.AbortTokens(srv.Client, rank.Target, id, srv.Log)
}
