package request

import (
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
)

// abortWait is how long an engine may take to end an answer after it was told to abort the request. After that, evenkeel closes the call.
const abortWait = 5 * time.Second

// aborting is what a job needs so that its client can end the request by name and still get the part of the answer that exists then.
type aborting struct {
	asked      atomic.Bool // the client has ended the request by name
	endpoint   mooncake.Endpoint
	leave      func() // makes the job treat its client as gone
	outputMode []byte // output_mode of the request

	mu   sync.Mutex
	rank *fleet.Rank // the rank that has the request; nil: no rank has it
	id   string      // the engine's id of the request
}

// errNotAborted is the error at the end of an answer whose client has ended the request by name, but whose engine has not ended it.
var errNotAborted = openai.NewError(http.StatusBadGateway, "upstream_incomplete",
	"the engine did not end the request when it was told to, so evenkeel left the engine")

// abortable is a client that also counts as gone once aborting.leave was called. It is a type of its own, so that isLeg does not take it
// for the leg of a fan-out.
type abortable struct{ *edge.Disconnect }

// sentTo notes that the request is about to be sent to a rank, and under which id. If the client has already ended the request by name, the
// job treats the client as gone from now on.
func (a *aborting) sentTo(rank *fleet.Rank, headers []engine.Header) {
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
	if a.asked.Load() {
		a.leave()
	}
}

// lostRank notes that no rank has the request any more.
func (a *aborting) lostRank() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rank = nil
}

// endedByClient says whether the client has ended the request by its name.
func (a *aborting) endedByClient() bool { return a != nil && a.asked.Load() }

// end is called when a client ends its request by name. It tells the decode engine to abort the request, so that the client still gets the
// part of the answer that exists. If no rank has the request, or the engine cannot be told, the request ends as if the client had left. An
// answer that has begun then ends with an error.
func (a *aborting) end(srv *Server) {
	a.asked.Store(true)
	a.mu.Lock()
	rank, id := a.rank, a.id
	a.mu.Unlock()
	if rank == nil {
		a.leave()
		return
	}
	time.AfterFunc(abortWait, a.leave)
	if err := a.abortAt(srv, rank, id); err != nil {
		srv.Log.Warn("an engine was not told to end a request that its client has ended, so that the engine is left instead",
			zap.String("id", id), zap.String("engine", rank.Target.ID), zap.Error(err))
		a.leave()
	}
}

func (a *aborting) abortAt(srv *Server, rank *fleet.Rank, id string) error {
	if a.endpoint == mooncake.Generate {
		return upstream.Abort(srv.Client, rank.Target, id, srv.Log)
	}
	return upstream.AbortTokens(srv.Client, rank.Target, id, srv.Log)
}
