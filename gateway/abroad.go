package gateway

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Ways of a request, as x-evenkeel-route names them.
const (
	wayLocal     = "local"
	wayForwarded = "forwarded"
	wayFallback  = "fallback"
)

// abroad takes the request's turn, which may end in another region, and answers
// from there; false: it is to be served here. A peer that fails before the
// client has anything gives the request back, once: it takes its old place in
// the queue and stays (geo R28).
func (j *job) abroad(ctx *fasthttp.RequestCtx) (answered bool) {
	for {
		j.asks = false
		if answered = j.turnAbroad(ctx); answered || !j.asks {
			return answered
		}
	}
}

// turnAbroad is one turn of it.
func (j *job) turnAbroad(ctx *fasthttp.RequestCtx) (answered bool) {
	if j.question = j.elsewhere(false); j.question == nil {
		return false
	}
	if !j.gw.conf().Geo.Follows() && !j.failed {
		if j.local.slot = j.bindLocal(); j.local.slot != nil {
			return false
		}
	}
	q := j.question
	lease, err := j.acquire()
	switch {
	case err == nil:
		j.leased = lease
		return false
	case errors.Is(err, prefill.ErrElsewhere) && q.Forward() != nil:
		return j.send(ctx, q.Forward())
	}
	if f := q.Forward(); f != nil {
		f.Drop()
	}
	j.end(ctx, j.notChosen(err))
	return true
}

// goesOn tries another region with a request whose attempts here have all
// failed before its client had anything (geo R2).
func (j *job) goesOn(ctx *fasthttp.RequestCtx, fail *openai.Error) (s *stream, _ *openai.Error, answered bool) {
	for j.unowned && !j.in.aimed() && !j.left() { // as if it had just come: to its owner, or here
		j.unowned, j.returned = false, true
		if j.abroad(ctx) {
			return nil, nil, true
		}
		if s, fail = j.serve(); fail == nil {
			return s, nil, false
		}
	}
	r := j.gw.regions
	if r == nil || !j.failed || j.returned || j.left() || !r.node.Offered(j.model.name) {
		return nil, fail, false
	}
	if q := j.elsewhere(false); !q.Offered() {
		return nil, fail, false
	}
	if j.abroad(ctx) {
		return nil, nil, true
	}
	s, fail = j.serve()
	return s, fail, false
}

// send has another region answer; false: it gave the request back.
func (j *job) send(ctx *fasthttp.RequestCtx, f *geo.Forward) (answered bool) {
	if j.left() {
		f.Drop()
		j.end(ctx, errGone())
		return true
	}
	j.asks = false
	j.told.Attempts++
	j.told.Calls("forward")
	j.reach(journal.Transfer)
	j.told.SentTo(f.PeerID())
	j.client.OnGone(f.Leave)
	whole, failure := f.Send(&geo.Request{
		Method: http.MethodPost, Target: string(ctx.RequestURI()), Headers: j.told.Carry(j.passedOn(ctx)), Body: j.body.Splice(nil, mooncake.Reserved, nil),
		Stream: j.req.Stream, Deadline: j.patience, Most: j.mayRelay(),
	})
	switch {
	case failure != nil:
		j.client.OnGone(nil)
		return j.cameBack(ctx, failure)
	case whole != nil:
		j.client.OnGone(nil)
		j.tookWhole(ctx, f, whole)
	default:
		j.relay(ctx, f)
	}
	return true
}

// passedOn are the client's headers that mean something in another region.
func (j *job) passedOn(ctx *fasthttp.RequestCtx) []engine.Header {
	if s := ctx.Request.Header.Peek(sessionHeader); len(s) > 0 {
		return []engine.Header{{Name: sessionHeader, Value: string(s)}}
	}
	return nil
}

// cameBack handles a forward that gave the client nothing.
func (j *job) cameBack(ctx *fasthttp.RequestCtx, x *geo.Failure) (answered bool) {
	switch {
	case x.Gone || j.left():
		j.end(ctx, errGone())
	case x.Relay != nil:
		j.in.way = wayForwarded
		j.end(ctx, relayedBy(x.Relay))
	case x.Sibling && j.ran > 0 && x.Ran: // it may run a second time for nobody, and no third
		j.in.way = wayFallback
		j.end(ctx, unavailable("owner_lost", "the proxy that served it was lost, and so was the one after it; send the request again", 1))
	case x.Sibling:
		if x.Ran {
			j.ran++
		}
		j.gw.log.Info("another proxy gave a request back, its decode group's owner is asked for again", zap.Inline(j), zap.String("peer", j.told.Peer), zap.String("cause", x.Reason), zap.Error(x.Err))
		j.in.way, j.returned, j.asks = wayFallback, true, true
		j.cameFrom(x)
		return false
	default:
		j.gw.log.Info("another region gave a request back, it is served here", zap.Inline(j), zap.String("peer", j.told.Peer), zap.String("cause", x.Reason), zap.Error(x.Err))
		j.in.way, j.returned = wayFallback, true
		j.cameFrom(x)
		j.question = j.elsewhere(true)
		return false
	}
	return true
}

// cameFrom notes that the attempt to have it served elsewhere was in vain.
func (j *job) cameFrom(x *geo.Failure) {
	j.told.Fails("peer "+j.told.Peer+": "+x.Reason, 0, errReturned)
	j.told.Retries()
}

var errReturned = openai.NewError(http.StatusBadGateway, "peer_returned", "another dispatcher gave the request back")

// relayedBy is another dispatcher's refusal as a client sees it.
func relayedBy(r *geo.Relay) *openai.Error {
	e := &openai.Error{Status: r.Status, Code: "engine_refused", Raw: r.Body, ContentType: r.ContentType}
	if r.Status == http.StatusTooManyRequests || r.Status == http.StatusServiceUnavailable {
		e.RetryAfter = 1
	}
	return e
}

// end answers with an error, on behalf of a request that was never served here.
func (j *job) end(ctx *fasthttp.RequestCtx, fail *openai.Error) {
	j.told.EndAttempt(fail)
	if fail.Status == journal.StatusGone {
		j.told.Cancelled()
		j.freed()
	}
	j.gw.markRoute(ctx, j.in)
	j.gw.refuse(ctx, j.in, fail)
}

// began notes the first event, or all, of a forwarded answer.
func (j *job) began(ctx *fasthttp.RequestCtx, f *geo.Forward) {
	j.reach(journal.Streaming)
	j.told.First(f.FirstAt())
	j.in.way = wayForwarded
	j.told.PromptTokens, j.told.CachedTokens = j.estimate(), max(0, f.Cached())
	j.body = mooncake.Body{} // the peer has it
	j.in.body.Give()
	j.gw.markRoute(ctx, j.in)
}

// tookWhole answers with what came in one piece.
func (j *job) tookWhole(ctx *fasthttp.RequestCtx, f *geo.Forward, whole *geo.Relay) {
	j.began(ctx, f)
	f.Close()
	var says struct {
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"usage"`
	}
	if json.Unmarshal(whole.Body, &says) == nil && says.Usage.Prompt > 0 && j.believes(says.Usage.Prompt, says.Usage.Completion) {
		j.told.PromptTokens, j.told.OutputTokens = says.Usage.Prompt, says.Usage.Completion
	}
	j.told.EndAttempt(nil)
	j.gw.account(j.in, nil)
	ctx.SetStatusCode(whole.Status)
	ctx.SetContentType(whole.ContentType)
	ctx.SetBody(whole.Body)
}

// relay hands the client's connection the peer's stream, event by event as it
// comes.
func (j *job) relay(ctx *fasthttp.RequestCtx, f *geo.Forward) {
	j.began(ctx, f)
	j.gw.startStream(ctx, edge.NewPull(f, func(error) {
		j.client.OnGone(nil)
		var fail *openai.Error
		switch {
		case f.Lost():
			fail = openai.NewError(http.StatusBadGateway, "peer_lost", "upstream region lost")
		case !f.Whole():
			fail = errGone()
			j.told.Cancelled()
		}
		tokens := f.Events()
		f.Close()
		if !f.Whole() {
			j.freed()
		}
		j.told.Relayed(time.Since(f.FirstAt()), tokens)
		j.told.EndAttempt(fail)
		j.gw.account(j.in, fail)
	}, j.gw.log), f.ContentType())
}

// markRoute says in the answer where the request was served, where there is
// more than one place.
func (g *Gateway) markRoute(ctx *fasthttp.RequestCtx, in *incoming) {
	if g.regions != nil && in.from == nil && in.way != "" {
		ctx.Response.Header.Set(routeHeader, in.way)
	}
}
