package request

import (
	"cmp"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/prompt"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// send forwards the request to another dispatcher, the peer, which answers it. If the peer gives the request back before the client has
// anything, send returns no error. The request then takes its old place in the queue. It is served here, or evenkeel decides again where
// it goes.
func (j *job) send(ctx *fasthttp.RequestCtx, forward *geo.Forward) (lifecycle.EventKind, *openai.Error) {
	peer := &forwarded{forward, j}
	if j.client.Left() {
		peer.DropUnsent()
		j.freed()
		return lifecycle.PeerRefuses, failure.Gone
	}
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(),
		Call: "forward", Peer: peer.PeerID()})
	j.client.OnGone(peer.AbortByClient)
	var heldBack time.Duration
	if j.incoming.Batch {
		heldBack = j.srv.Settings().Prefill.Queue.BatchTimeout
	}
	whole, returned := peer.Send(&geo.Request{
		Method: http.MethodPost, Target: string(ctx.RequestURI()), Headers: j.record.WithTraceHeaders(j.passedOn(ctx)),
		Body:   j.body.Splice(nil, mooncake.Reserved, nil),
		Stream: j.req.Stream, Deadline: j.incoming.ClientGivesUpAt, ExtraHold: heldBack, MaxBytes: peer.mostAnswerBytes(),
		NewConnection: j.ranElsewhere > 0, // after a lost peer, a kept-alive connection may be dead as well
	})
	if returned == nil {
		edge.StopKeepAlive(ctx)
	}
	switch {
	case returned != nil:
		j.client.OnGone(nil)
		return j.cameBack(returned)
	case whole != nil:
		j.client.OnGone(nil)
		peer.inOnePiece(ctx, whole)
	default:
		peer.started(ctx)
		j.srv.Stream(ctx, peer.ContentType(), peer, j.maxAnswerTokens(j.model.MaxLen))
	}
	return lifecycle.PeerAnswers, nil
}

// passedOn returns the headers of the client's request that the other dispatcher needs, too. The deadline header has the milliseconds that
// are left.
func (j *job) passedOn(ctx *fasthttp.RequestCtx) (headers []engine.Header) {
	for _, name := range [...]string{SessionHeader, SessionEndHeader} {
		if s := ctx.Request.Header.Peek(name); len(s) > 0 {
			headers = append(headers, engine.Header{Name: name, Value: string(s)})
		}
	}
	if j.incoming.Batch {
		headers = append(headers, engine.Header{Name: ClassHeader, Value: ClassBatch})
	}
	if !j.incoming.Deadline.IsZero() {
		left := max(1, time.Until(j.incoming.Deadline).Milliseconds())
		headers = append(headers, engine.Header{Name: DeadlineHeader, Value: strconv.FormatInt(left, 10)})
	}
	return headers
}

// cameBack handles a forward that ended before the client had anything. If it returns no error, the request is served here, or evenkeel
// decides again where it goes.
func (j *job) cameBack(returned *geo.Failure) (lifecycle.EventKind, *openai.Error) {
	if returned.ClientLeft || j.client.Left() {
		j.freed()
		return lifecycle.PeerRefuses, failure.Gone
	}
	if returned.Relay != nil { // the other dispatcher answered with an error that the client gets
		j.incoming.way = wayForwarded
		e := &openai.Error{Status: returned.Relay.Status, Code: "engine_refused", Raw: returned.Relay.Body,
			ContentType: returned.Relay.ContentType}
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
			e.RetryAfter = 1
		}
		return lifecycle.PeerRefuses, e
	}
	j.incoming.way = wayFallback
	what := lifecycle.SiblingReturns
	log := j.srv.Log.With(zap.Inline(j), zap.String("peer", j.record.Peer), zap.String("cause", returned.Reason), zap.Error(returned.Err))
	if returned.Sibling {
		if returned.MayHaveRun && j.ranElsewhere > 0 { // two peers that ran the request were lost; a third one does not get it
			return lifecycle.PeerRefuses, openai.Unavailable("owner_lost",
				"the proxy that served the request was lost, and so was the next one that served it; send the request again", 1)
		}
		if returned.MayHaveRun {
			j.ranElsewhere++
		}
		log.Info("another proxy gave a request back, and the owner of its decode group is looked up again")
	} else {
		log.Info("another region gave a request back, and it is served here")
		what = lifecycle.RegionReturns
		j.query = j.elsewhere(true)
	}
	j.record.Report(journal.Event{Kind: journal.Failed, Cause: "peer " + j.record.Peer + ": " + returned.Reason, Answer: errReturned})
	j.record.Report(journal.Event{Kind: journal.Retried})
	return what, nil
}

// elsewhere returns the question whether another dispatcher should serve the request. The question enters the arrival queue together with
// the request. It is nil if there is no other dispatcher, or if the endpoint's streams have no [DONE]: such requests are always served
// here. stay is true if this request must be served here.
func (j *job) elsewhere(stay bool) *geo.RoutingQuery {
	if j.srv.Peers == nil || !j.req.Endpoint.IsChatOrCompletions() {
		return nil
	}
	groupsHaveOwners := j.srv.Owner.Has(owner.Groups) // then a request that stays in this region may still go to another proxy of it
	ask := geo.Ask{
		ID: j.id, Model: j.model.Name, Tenant: j.record.Key, PreferForward: j.life.Tried(),
		LocalOnly:  stay || j.incoming.NeverForward && !groupsHaveOwners,
		RegionOnly: j.incoming.NeverForward, RingKey: geo.RingKeyOf(j.incoming.Session, j.incoming.Address),
	}
	if from := j.incoming.From; from != nil {
		ask.InboundHop = from
		ask.LocalOnly = ask.LocalOnly || from.N >= from.Max // it was forwarded as often as it may be
		ask.ID = cmp.Or(from.RID, ask.ID)
	}
	if !ask.LocalOnly {
		ask.Prompt = j.recognize()
	}
	return j.srv.Peers.NewQuery(ask)
}

var errReturned = openai.NewError(http.StatusBadGateway, "peer_returned", "another proxy gave the request back")

// forwarded is an answer that another dispatcher gives. It does not hold the handler's context, because it outlives the handler.
type forwarded struct {
	*geo.Forward
	job *job
}

// started notes that the other dispatcher's answer has begun, and frees the request's body, which is not needed here any more.
func (f *forwarded) started(ctx *fasthttp.RequestCtx) {
	j := f.job
	j.enter(journal.Streaming, "")
	j.record.Report(journal.Event{Kind: journal.First, At: f.FirstAt()})
	j.incoming.way = wayForwarded
	j.record.PromptTokens = j.estimate()
	j.record.CachedTokens = min(max(0, f.Cached()), j.record.PromptTokens) // no more than the prompt can be cached
	j.body = mooncake.Body{}
	j.incoming.Body.Release()
	j.srv.markRoute(ctx, j.incoming)
}

// inOnePiece gives the client the other dispatcher's answer, which came in one piece, and settles the request.
func (f *forwarded) inOnePiece(ctx *fasthttp.RequestCtx, whole *geo.Relay) {
	j := f.job
	f.started(ctx)
	f.Forward.Close()
	var answer struct {
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"usage"`
	}
	usage := &answer.Usage
	if json.Unmarshal(whole.Body, &answer) == nil && usage.Prompt > 0 && f.believes(usage.Prompt, usage.Completion) {
		j.record.PromptTokens, j.record.OutputTokens = usage.Prompt, usage.Completion
		j.record.CachedTokens = min(max(0, f.Cached()), usage.Prompt)
	}
	j.record.EndAttempt(nil)
	j.srv.Conclude(j.incoming, nil)
	ctx.SetStatusCode(whole.Status)
	Piece(ctx, whole.ContentType, whole.Body, nil)
}

// Close settles a request whose answer a peer has streamed.
func (f *forwarded) Close() {
	j := f.job
	j.client.OnGone(nil)
	var fail *openai.Error
	switch {
	case f.Lost():
		fail = openai.NewError(http.StatusBadGateway, "peer_lost", "the region that served the request was lost; send the request again")
	case !f.Whole():
		fail = failure.Gone
	}
	tokens := f.Events()
	f.Forward.Close()
	if !f.Whole() {
		j.freed()
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: time.Since(f.FirstAt()), Tokens: tokens})
	j.record.EndAttempt(fail)
	j.srv.Conclude(j.incoming, fail)
}

// Panicked closes the answer after the code that streamed it has panicked with v.
func (f *forwarded) Panicked(v any) { f.job.panicked(v, f.Close) }

// mostAnswerBytes is how many bytes the other dispatcher's answer may have.
func (f *forwarded) mostAnswerBytes() int64 {
	j := f.job
	answers := 1
	if j.changes == nil { // the request asks for several answers: a leg of a fan-out would have changes
		answers = j.srv.Settings().Limits.Answers
	}
	each := maxStreamBytes(j.maxEchoed()+j.maxAnswerTokens(j.model.MaxLen), j.req.TopLogprobs, j.srv.Settings().Limits.EventBytes)
	if each > math.MaxInt64/int64(answers) { // the product would overflow
		return math.MaxInt64
	}
	return int64(answers) * each
}

// believes says whether the token counts in another dispatcher's answer are possible. Impossible counts do not enter the record.
func (f *forwarded) believes(prompted, completion int) bool {
	j := f.job
	if j.changes == nil { // the counts are sums over several answers, maybe of several prompts
		return prompt.PlausibleCounts(prompted, completion, 0)
	}
	return prompt.PlausibleCounts(prompted, completion, j.model.MaxLen) && completion <= j.maxAnswerTokens(j.model.MaxLen)
}
