package request

import (
	"bytes"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// abortWait is how long an engine may take to end an answer that it was told to end. One that does not is left by its client.
const abortWait = 5 * time.Second

// aborting is a job's share of being ended by its client, which still gets what there is of the answer.
type aborting struct {
	told  atomic.Bool
	ep    mooncake.Endpoint
	leave func() // has the job believe that its client has left
	mode  []byte // output_mode
	legs  []*aborting

	mu   sync.Mutex
	rank *fleet.Rank // that has the request; nil: none has
	id   string      // by which the engine calls it
}

// abortable is a client that is taken for one that left when its request is to end.
type abortable struct{ *edge.Disconnect }

// nameable has the client of a job end it by its name, if its endpoint knows such names.
func nameable(j *job, conn *edge.Conn) {
	if j.ask.ID == nil {
		return
	}
	share := edge.NewDisconnect(j.srv.Log)
	conn.OnGone(share.Leave)
	j.client = reader{abortable{share}}
	j.abort = &aborting{ep: j.req.Endpoint, leave: share.Leave, mode: openai.OutputMode(&j.body)}
	j.ask.Aborted = j.abort.told.Load
	j.in.leave = j.srv.Running.Enter(j.in.Record.Key, string(j.ask.ID), func() { j.abort.end(j.srv) })
}

// split has each leg of the request end instead of the whole.
func (a *aborting) split(srv *Server, legs []branch) {
	if a == nil {
		return
	}
	a.mu.Lock()
	for _, l := range legs {
		own := &aborting{ep: a.ep, leave: l.kid.Leave, mode: a.mode}
		l.job.abort, l.job.ask.Aborted = own, own.told.Load
		a.legs = append(a.legs, own)
	}
	a.mu.Unlock()
	if a.told.Load() {
		a.end(srv)
	}
}

// sent notes that a rank gets the request.
func (a *aborting) sent(rank *fleet.Rank, headers []engine.Header) {
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
	if a.told.Load() {
		a.leave()
	}
}

// lost notes that no rank has the request any more.
func (a *aborting) lost() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rank = nil
}

// is says whether the client has ended the request.
func (a *aborting) is() bool { return a != nil && a.told.Load() }

// end ends the request: by the engine that decodes it, or at once.
func (a *aborting) end(srv *Server) {
	a.told.Store(true)
	a.mu.Lock()
	legs, rank, id := a.legs, a.rank, a.id
	a.mu.Unlock()
	if legs != nil {
		var all sync.WaitGroup
		for _, l := range legs {
			all.Go(func() { l.end(srv) })
		}
		all.Wait()
		return
	}
	if rank == nil {
		a.leave()
		return
	}
	time.AfterFunc(abortWait, a.leave)
	if err := a.abortAt(srv, rank, id); err != nil {
		srv.Log.Warn("an engine was not told to end a request that its client has ended, so that the engine is left instead", zap.String("id", id), zap.String("engine", rank.Target.ID), zap.Error(err))
		a.leave()
	}
}

// abortAt tells an engine to end a request.
func (a *aborting) abortAt(srv *Server, rank *fleet.Rank, id string) error {
	if a.ep == mooncake.Generate {
		return upstream.Abort(srv.Client, rank.Target, id, srv.Log)
	}
	return upstream.AbortTokens(srv.Client, rank.Target, id, srv.Log)
}

// unanswered is the answer to a request that ended before a rank began it: events, or one piece.
func unanswered(j *job) []byte {
	head, ask := sse.Head{ID: []byte(`""`), Mode: j.abort.mode}, j.ask // the mirror has the name
	ask.Seam, ask.Trail, ask.Cached, ask.MaxTokens, ask.Context = nil, nil, sse.OwnCached, 0, 0
	u := sse.Usage{Prompt: j.estimate(), Total: j.estimate(), Cached: -1}
	m, frames := sse.NewMirror(ask), sse.NewFramer(0)
	var assembler *sse.Assembler
	if ask.Whole = !j.req.Stream && j.req.Endpoint == mooncake.Generate; !j.req.Stream && !ask.Whole {
		assembler = newAssembler(j)
	}
	frames.Feed(ending(j.req.Endpoint, head, "abort", u))
	var all []byte
	for e, ok := frames.Next(); ok; e, ok = frames.Next() {
		out, _ := m.Event(e, nil)
		if all = append(all, out...); assembler != nil {
			_ = assembler.Add(out) // it is our own
		}
	}
	switch {
	case assembler != nil:
		all, _ = assembler.JSON(nil)
	case !j.req.Stream: // the one event that there is
		all, _, _ = bytes.Cut(bytes.TrimPrefix(all, []byte("data: ")), []byte("\n\n"))
	}
	return all
}

// answerAborted answers a request that its client has ended before a rank began it. It says whether it did.
func answerAborted(ctx *fasthttp.RequestCtx, j *job, conn client, fail *openai.Error) bool {
	if !j.abort.is() || conn.Left() || fail.Status != failure.Gone.Status {
		return false
	}
	if j.req.Stream {
		j.srv.Stream(ctx, []byte("text/event-stream"), &ready{bytes.NewReader(unanswered(j)), func() { j.srv.Account(j.in, fail) }}, 0)
		return true
	}
	Piece(ctx, "application/json", unanswered(j), nil)
	j.srv.Account(j.in, fail)
	return true
}

// ready is a stream of which all is here.
type ready struct {
	*bytes.Reader
	over func()
}

// Close ends it.
func (r *ready) Close() { r.over() }
