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

// send forwards the request to another dispatcher, which answers it. If this peer fails before the client has a part of the answer, the
// request comes back, and send returns no error. The request then takes its old place in the queue and is served here, or evenkeel asks
// again where it should go.
func (j *job) send(ctx *fasthttp.RequestCtx, forward *geo.Forward) (lifecycle.What, *openai.Error) {
	peer := &forwarded{forward, j}
	if j.client.Left() {
		peer.Drop()
		j.freed()
		return lifecycle.PeerRefuses, failure.Gone
	}
	j.record.Report(journal.Event{What: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(),
		Call: "forward", Peer: peer.PeerID()})
	j.client.OnGone(peer.Leave)
	var heldBack time.Duration
	if j.incoming.Batch {
		heldBack = j.srv.Settings().Prefill.Queue.BatchTimeout
	}
	whole, returned := peer.Send(&geo.Request{
		Method: http.MethodPost, Target: string(ctx.RequestURI()), Headers: j.record.Carry(j.passedOn(ctx)),
		Body:   j.body.Splice(nil, mooncake.Reserved, nil),
		Stream: j.req.Stream, Deadline: j.incoming.Patience, Held: heldBack, Most: peer.mayRelay(),
		Dials: j.ranElsewhere > 0, // a peer that ran the request was lost, perhaps with a connection that had been kept alive
	})
	if returned == nil {
		edge.EndWait(ctx)
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

// passedOn returns the headers of the client's request that the other dispatcher gets too. The deadline is the number of milliseconds that
// remain.
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

// cameBack handles a request that another dispatcher gave back before the client had a part of the answer. If it returns no error, the
// request is served here, or evenkeel asks again where it should go.
func (j *job) cameBack(returned *geo.Failure) (lifecycle.What, *openai.Error) {
	if returned.Gone || j.client.Left() {
		j.freed()
		return lifecycle.PeerRefuses, failure.Gone
	}
	if returned.Relay != nil {
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
		if returned.Ran && j.ranElsewhere > 0 { // it has now run in vain on two proxies, and a third run would cost too much
			return lifecycle.PeerRefuses,
				openai.Unavailable("owner_lost",
					"the proxy that served the request was lost, and so was the next one that served it; send the request again", 1)
		}
		if returned.Ran {
			j.ranElsewhere++
		}
		log.Info("another proxy gave a request back, and the owner of its decode group is looked up again")
	} else {
		log.Info("another region gave a request back, and it is served here")
		what = lifecycle.RegionReturns
		j.question = j.elsewhere(true)
	}
	j.record.Report(journal.Event{What: journal.Failed, Cause: "peer " + j.record.Peer + ": " + returned.Reason, Answer: errReturned})
	j.record.Report(journal.Event{What: journal.Retried})
	return what, nil
}

// elsewhere returns the geo.Question that asks whether another dispatcher should serve the request; nil: it is served here. The question
// goes with the request into the arrival queue. stay is true if the request must be served here. Requests to endpoints whose streams have
// no [DONE] are never forwarded.
func (j *job) elsewhere(stay bool) *geo.Question {
	if j.srv.Node == nil || !j.req.Endpoint.Common() {
		return nil
	}
	ask := geo.Ask{
		ID: j.id, Model: j.model.Name, Tenant: j.record.Key, Leave: j.life.Tried(), Stay: stay || j.incoming.Stays &&
			!j.srv.Owner.Has(owner.Groups), Home: j.incoming.Stays, RingKey: geo.RingKeyOf(j.incoming.Session, j.incoming.Address),
	}
	if from := j.incoming.From; from != nil {
		ask.Came = from
		ask.Stay = ask.Stay || from.N >= from.Max
		ask.ID = cmp.Or(from.RID, ask.ID)
	}
	if !ask.Stay {
		ask.Prompt = j.recognize()
	}
	return j.srv.Node.Question(ask)
}

var errReturned = openai.NewError(http.StatusBadGateway, "peer_returned", "another proxy gave the request back")

// forwarded is an answer from another dispatcher. It outlives the handler, so it must not keep the handler's context.
type forwarded struct {
	*geo.Forward
	job *job
}

// started notes that the other dispatcher's answer has begun. From then on the request's body is not needed here any more.
func (f *forwarded) started(ctx *fasthttp.RequestCtx) {
	j := f.job
	j.enter(journal.Streaming, "")
	j.record.Report(journal.Event{What: journal.First, At: f.FirstAt()})
	j.incoming.way = wayForwarded
	j.record.PromptTokens, j.record.CachedTokens = j.estimate(), max(0, f.Cached())
	j.body = mooncake.Body{} // the peer has the body, and cannot give the request back any more
	j.incoming.Body.Give()
	j.srv.markRoute(ctx, j.incoming)
}

// inOnePiece answers with the other dispatcher's answer, which came in one piece, and settles the request.
func (f *forwarded) inOnePiece(ctx *fasthttp.RequestCtx, whole *geo.Relay) {
	j := f.job
	f.started(ctx)
	f.Forward.Close()
	var says struct {
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"usage"`
	}
	if json.Unmarshal(whole.Body, &says) == nil && says.Usage.Prompt > 0 && f.believes(says.Usage.Prompt, says.Usage.Completion) {
		j.record.PromptTokens, j.record.OutputTokens = says.Usage.Prompt, says.Usage.Completion
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
	j.record.Report(journal.Event{What: journal.Relayed, Took: time.Since(f.FirstAt()), Tokens: tokens})
	j.record.EndAttempt(fail)
	j.srv.Conclude(j.incoming, fail)
}

// Panicked replaces Close if the code that streams the answer has panicked.
func (f *forwarded) Panicked(v any) { f.job.panicked(v, f.Close) }

// mayRelay is how many bytes the other dispatcher's answer may have.
func (f *forwarded) mayRelay() int64 {
	j := f.job
	answers := 1
	if j.changes == nil { // several answers
		answers = j.srv.Settings().Limits.Answers
	}
	each := maxStreamBytes(j.maxEchoed()+j.maxAnswerTokens(j.model.MaxLen), j.req.TopLogprobs, j.srv.Settings().Limits.EventBytes)
	if each > math.MaxInt64/int64(answers) {
		return math.MaxInt64
	}
	return int64(answers) * each
}

// believes says whether the token counts that another dispatcher reports for an answer in one piece are possible. Counts that are not
// possible are not recorded.
func (f *forwarded) believes(prompted, completion int) bool {
	j := f.job
	if j.changes == nil { // several answers of several prompts
		return prompt.Credible(prompted, completion, 0)
	}
	return prompt.Credible(prompted, completion, j.model.MaxLen) && completion <= j.maxAnswerTokens(j.model.MaxLen)
}
