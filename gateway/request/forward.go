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

// forwardToPeer forwards the request to another proxy, the peer. There are three results. The peer answers the client (PeerAnswers). The
// peer refuses the request, or the client has left, and the request ends with the error (PeerRefuses). Or the peer gives the request back
// before the client has anything (RegionReturns or SiblingReturns, without an error). The request then takes its old place in the queue. It
// is served here, or evenkeel decides again where it goes.
func (j *job) forwardToPeer(ctx *fasthttp.RequestCtx, forward *geo.Forward) (lifecycle.EventKind, *openai.Error) {
	peer := &forwarded{forward, j}
	handedOver := false // Stream has the forward, and ends it
	defer onPanic(func() {
		if !handedOver {
			forward.AbortByClient() // closes the connection to the peer
			forward.End(geo.OutcomeGone)
		}
	})
	if j.client.Left() { // the client has left, so the peer is sent nothing, and the request ends as if the peer had refused it
		peer.DropUnsent()
		j.noteEnginesFreeIfLeft() // no engine works for the request
		return lifecycle.PeerRefuses, failure.ClientGone
	}
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(),
		Call: "forward", Peer: peer.PeerID()})
	j.client.OnGone(peer.AbortByClient) // removed as soon as the forward has ended
	whole, returned := peer.Send(peer.request(ctx))
	if returned != nil { // the forward has ended without an answer
		j.client.OnGone(nil)
		return j.handleReturned(returned)
	}
	edge.StopKeepAlive(ctx) // the peer's answer begins, so the client gets no more comments
	if whole != nil {
		j.client.OnGone(nil)
		memory, ok := edge.ChargeAnswer(ctx, len(whole.Body))
		if !ok {
			peer.noteAnsweredWhole(ctx, whole)
			return lifecycle.PeerRefuses, failure.NoRoomForAnswer
		}
		peer.answerInOnePiece(ctx, whole, memory)
		return lifecycle.PeerAnswers, nil
	}
	// The first event of a stream has come. A client that leaves still ends the forward, until peer.Close removes the callback.
	peer.noteAnswerStarted(ctx)
	handedOver = true
	j.srv.Stream(ctx, peer.ContentType(), peer, j.maxAnswerTokens(j.model.MaxLen))
	return lifecycle.PeerAnswers, nil
}

// request returns the request that the peer gets.
func (f *forwarded) request(ctx *fasthttp.RequestCtx) *geo.Request {
	j := f.job
	var heldBack time.Duration // how long the peer may hold a batch request back, in addition to its other waits
	if j.incoming.Batch {
		heldBack = j.srv.Settings().Prefill.Queue.BatchTimeout
	}
	return &geo.Request{
		Method: http.MethodPost, Target: string(ctx.RequestURI()), Headers: j.record.WithTraceHeaders(j.forwardedHeaders(ctx)),
		Body:   j.body.Splice(nil, mooncake.Reserved, nil), // without the keys whose values clients may not choose (Reserved)
		Stream: j.req.Stream, Deadline: j.incoming.ClientGivesUpAt, ExtraHold: heldBack, MaxBytes: f.maxRelayBytes(),
		NewConnection: j.ranElsewhere > 0, // after a lost peer, a kept-alive connection may be dead as well
	}
}

// forwardedHeaders returns the headers of the client's request that the other proxy needs, too. The deadline header has the
// milliseconds that are left.
func (j *job) forwardedHeaders(ctx *fasthttp.RequestCtx) (headers []engine.Header) {
	for _, name := range [...]string{SessionHeader, SessionEndHeader} {
		if s := ctx.Request.Header.Peek(name); len(s) > 0 {
			headers = append(headers, engine.Header{Name: name, Value: string(s)})
		}
	}
	if j.incoming.NeverForward { // the other proxy is one of this region, and could forward the request once more
		headers = append(headers, engine.Header{Name: GeoHeader, Value: GeoLocal})
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

// handleReturned handles a forward that ended before the client had anything. If it returns an error, the request ends with this error, and
// the event is PeerRefuses. Otherwise the event says who gave the request back: after another region did (RegionReturns), the request is
// served here; after a proxy of this region did (SiblingReturns), evenkeel decides again where it goes.
func (j *job) handleReturned(returned *geo.Failure) (lifecycle.EventKind, *openai.Error) {
	if returned.ClientLeft || j.client.Left() { // no proxy gets the request any more
		j.noteEnginesFreeIfLeft() // the forward has ended, so no engine works for the request any more
		return lifecycle.PeerRefuses, failure.ClientGone
	}
	if returned.Relay != nil { // the other proxy answered with an error that the client gets
		j.incoming.servedBy = servedByPeer
		e := &openai.Error{Status: returned.Relay.Status, Code: "engine_refused", Raw: returned.Relay.Body,
			ContentType: returned.Relay.ContentType}
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable { // the client may try again soon
			e.RetryAfter = 1
		}
		return lifecycle.PeerRefuses, e
	}
	j.incoming.servedBy = servedAfterReturn
	outcome := lifecycle.SiblingReturns
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
		outcome = lifecycle.RegionReturns
		const mustStay = true
		j.query = j.newRoutingQuery(mustStay)
	}
	j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: "peer " + j.record.Peer + ": " + returned.Reason, Answer: errReturned})
	j.record.Report(journal.Event{Kind: journal.Retried})
	return outcome, nil
}

// newRoutingQuery returns the question whether another proxy should serve the request. The question enters the arrival queue together
// with the request. A request that must be served here (mustStay) has a question, too: in the queue it counts for the policy, which also
// decides for other requests. The result is nil if there is no other proxy, or if the request is neither a chat nor a completion: other
// proxies may not know how the streams of other endpoints end, so such requests are always served here.
func (j *job) newRoutingQuery(mustStay bool) *geo.RoutingQuery {
	if j.srv.Peers == nil || !j.req.Endpoint.IsChatOrCompletions() {
		return nil
	}
	staysInRegion := j.incoming.NeverForward // the client has asked for this
	// If the proxies of this region share its decode groups, a request that stays in the region may still go to the owner of a group.
	groupsHaveOwners := j.srv.Owner.Has(owner.Groups)
	staysHere := mustStay || staysInRegion && !groupsHaveOwners
	from := j.incoming.From // the hop by which another proxy sent the request; nil: a client sent it
	if from != nil && from.N >= from.Max {
		staysHere = true // the request was forwarded as often as it may be
	}
	ask := geo.Ask{
		ID: j.id, Model: j.model.Name, Tenant: j.record.Key, InboundHop: from,
		LocalOnly: staysHere, RegionOnly: staysInRegion,
		PreferForward: j.life.TriedHere(), // every attempt here has failed
		RingKey:       geo.RingKeyOf(j.incoming.Session, j.incoming.Address),
	}
	if from != nil {
		ask.ID = cmp.Or(from.RID, ask.ID) // all proxies name the request by the id that the first one has given it
	}
	if !staysHere { // only a request that may go away needs the hashes of its prompt here
		ask.Prompt = j.prefixKeys()
	}
	return j.srv.Peers.NewQuery(ask)
}

var errReturned = openai.NewError(http.StatusBadGateway, "peer_returned", "another proxy gave the request back")

// forwarded is an answer that another proxy gives. It does not hold the handler's context, because it outlives the handler.
type forwarded struct {
	*geo.Forward
	job *job
}

// isFannedOut says whether this proxy would serve the request with a leg for each of its answers. Then only the legs have changes, and the
// job of the whole request has none.
func (f *forwarded) isFannedOut() bool { return f.job.changes == nil }

// noteAnswerStarted notes that the other proxy's answer has begun, and frees the request's body, which is not needed here any more.
func (f *forwarded) noteAnswerStarted(ctx *fasthttp.RequestCtx) {
	j := f.job
	j.enterPhase(journal.Streaming, "")
	j.record.Report(journal.Event{Kind: journal.First, At: f.FirstAt()})
	j.incoming.servedBy = servedByPeer
	j.record.PromptTokens = j.estimatedTokens()
	j.record.CachedTokens = min(max(0, f.Cached()), j.record.PromptTokens) // no more than the prompt can be cached
	j.body = mooncake.Body{}
	j.incoming.Body.Release()
	j.srv.setServedByHeader(ctx, j.incoming)
}

// answerInOnePiece gives the client the other proxy's answer, which came in one piece and is
// charged to memory, and concludes the request.
func (f *forwarded) answerInOnePiece(ctx *fasthttp.RequestCtx, whole *geo.Relay, memory *edge.Reservation) {
	j := f.job
	f.noteAnsweredWhole(ctx, whole)
	j.record.EndAttempt(nil)
	j.srv.Conclude(j.incoming, nil)
	ctx.SetStatusCode(whole.Status)
	edge.AnswerWhole(ctx, whole.ContentType, whole.Body, memory)
}

// noteAnsweredWhole ends the forward, whose answer has come in one piece, and notes the answer's
// token counts.
func (f *forwarded) noteAnsweredWhole(ctx *fasthttp.RequestCtx, whole *geo.Relay) {
	j := f.job
	f.noteAnswerStarted(ctx)
	f.Forward.Close()
	var answer struct {
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"usage"`
	}
	usage := &answer.Usage
	hasCounts := json.Unmarshal(whole.Body, &answer) == nil && usage.Prompt > 0
	if hasCounts && f.countsPossible(usage.Prompt, usage.Completion) {
		j.record.PromptTokens, j.record.OutputTokens = usage.Prompt, usage.Completion
		j.record.CachedTokens = min(max(0, f.Cached()), usage.Prompt)
	}
}

// Close ends the forward of a request whose answer a peer has streamed, and concludes the request.
func (f *forwarded) Close() {
	j := f.job
	j.client.OnGone(nil)
	var fail *openai.Error
	switch {
	case f.Lost():
		fail = openai.NewError(http.StatusBadGateway, "peer_lost", "the region that served the request was lost; send the request again")
	case !f.Whole(): // the peer was not lost, so the client has left before the end
		fail = failure.ClientGone
	}
	tokens := f.Events()
	f.Forward.Close()
	if !f.Whole() {
		j.noteEnginesFreeIfLeft() // if the client has left: the forward has ended, so no engine works for the request any more
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: time.Since(f.FirstAt()), Tokens: tokens})
	j.record.EndAttempt(fail)
	j.srv.Conclude(j.incoming, fail)
}

// Panicked closes the answer after the code that streamed it has panicked with v.
func (f *forwarded) Panicked(v any) { f.job.closeAfterPanic(v, f.Close) }

// maxRelayBytes is how many bytes the other proxy's answer may have: enough for the tokens of all its texts, with the echo of the prompt.
func (f *forwarded) maxRelayBytes() int64 {
	j := f.job
	answers := 1
	if f.isFannedOut() { // the other proxy sends all answers in one stream or body
		answers = j.srv.Settings().Limits.Answers // the most that a request may ask for
	}
	tokensPerAnswer := j.maxEchoed() + j.maxAnswerTokens(j.model.MaxLen)
	bytesPerAnswer := maxStreamBytes(tokensPerAnswer, j.req.TopLogprobs, j.srv.Settings().Limits.EventBytes)
	if bytesPerAnswer > math.MaxInt64/int64(answers) { // the product would overflow
		return math.MaxInt64
	}
	return int64(answers) * bytesPerAnswer
}

// countsPossible says whether the token counts in another proxy's answer are possible. Impossible counts do not enter the record.
func (f *forwarded) countsPossible(prompted, completion int) bool {
	j := f.job
	if f.isFannedOut() { // the counts are sums over several answers, which may be larger than one context
		const noContextLimit = 0
		return prompt.PlausibleCounts(prompted, completion, noContextLimit)
	}
	return prompt.PlausibleCounts(prompted, completion, j.model.MaxLen) && completion <= j.maxAnswerTokens(j.model.MaxLen)
}
