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

// forwardToPeer forwards the request to another proxy, the peer. The peer answers it (PeerAnswers),
// refuses it with the error (PeerRefuses), or gives it back before the client has anything
// (RegionReturns, SiblingReturns). The request then takes its old place in the queue.
func (j *job) forwardToPeer(ctx *fasthttp.RequestCtx, forward *geo.Forward) (lifecycle.EventKind, *openai.Error) {
	peer := &forwarded{forward, j}
	handedOver := false // Stream has the forward, and ends it
	defer onPanic(func() {
		if !handedOver {
			forward.AbortByClient() // closes the connection to the peer
			forward.End(geo.OutcomeGone)
		}
	})
	if j.client.Left() { // nothing is sent, as if the peer had refused
		peer.DropUnsent()
		j.noteEnginesFreeIfLeft()
		return lifecycle.PeerRefuses, failure.ClientGone
	}
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(),
		Call: "forward", Peer: peer.PeerID()})
	j.client.OnGone(peer.AbortByClient) // until the forward has ended
	whole, returned := peer.Send(peer.request(ctx))
	if returned != nil { // without an answer
		j.client.OnGone(nil)
		return j.handleReturned(returned)
	}
	edge.StopKeepAlive(ctx) // no more comments
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
	// A client that leaves still ends the forward, until peer.Close removes the callback.
	peer.noteAnswerStarted(ctx)
	handedOver = true
	j.srv.Stream(ctx, peer.ContentType(), peer, j.maxAnswerTokens(j.model.MaxLen))
	return lifecycle.PeerAnswers, nil
}

func (f *forwarded) request(ctx *fasthttp.RequestCtx) *geo.Request {
	j := f.job
	var heldBack time.Duration // by the peer, in addition to its other waits
	if j.incoming.Batch {
		heldBack = j.srv.Settings().Prefill.Queue.BatchTimeout
	}
	return &geo.Request{
		Method: http.MethodPost, Target: string(ctx.RequestURI()), Headers: j.record.WithTraceHeaders(j.forwardedHeaders(ctx)),
		Body:   j.body.Splice(nil, mooncake.Reserved, nil), // without keys that clients may not choose
		Stream: j.req.Stream, Deadline: j.incoming.ClientGivesUpAt, ExtraHold: heldBack, MaxBytes: f.maxRelayBytes(),
		NewConnection: j.ranElsewhere > 0, // after a lost peer, a kept-alive connection may be dead as well
	}
}

// The deadline header has the milliseconds that are left.
func (j *job) forwardedHeaders(ctx *fasthttp.RequestCtx) (headers []engine.Header) {
	for _, name := range [...]string{SessionHeader, SessionEndHeader} {
		if s := ctx.Request.Header.Peek(name); len(s) > 0 {
			headers = append(headers, engine.Header{Name: name, Value: string(s)})
		}
	}
	if j.incoming.NeverForward { // the other proxy of this region could forward it once more
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

// handleReturned handles a forward that ended before the client had anything. A request that
// another region gave back is served here. If a proxy of this region did, evenkeel decides again
// where it goes.
func (j *job) handleReturned(returned *geo.Failure) (lifecycle.EventKind, *openai.Error) {
	if returned.ClientLeft || j.client.Left() { // no proxy gets the request any more
		j.noteEnginesFreeIfLeft()
		return lifecycle.PeerRefuses, failure.ClientGone
	}
	if returned.Relay != nil { // an error for the client
		j.incoming.servedBy = servedByPeer
		e := &openai.Error{Status: returned.Relay.Status, Code: "engine_refused", Raw: returned.Relay.Body,
			ContentType: returned.Relay.ContentType}
		// The client may try again soon.
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
			e.RetryAfter = 1
		}
		return lifecycle.PeerRefuses, e
	}
	j.incoming.servedBy = servedAfterReturn
	outcome := lifecycle.SiblingReturns
	log := j.srv.Log.With(zap.Inline(j), zap.String("peer", j.record.Peer), zap.String("cause", returned.Reason), zap.Error(returned.Err))
	if returned.Sibling {
		if returned.MayHaveRun && j.ranElsewhere > 0 { // two were lost, so a third peer does not get it
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

// newRoutingQuery returns the question whether another proxy should serve the request, which enters
// the arrival queue. A request that must stay has one, too: in the queue it counts for the policy,
// which also decides for others. Only chats and completions have one: other proxies may not know
// how the streams of other endpoints end.
func (j *job) newRoutingQuery(mustStay bool) *geo.RoutingQuery {
	if j.srv.Peers == nil || !j.req.Endpoint.IsChatOrCompletions() {
		return nil
	}
	staysInRegion := j.incoming.NeverForward // as the client has asked
	// The proxies of this region may share its decode groups. The request may then go to the owner of
	// a group.
	groupsHaveOwners := j.srv.Owner.Has(owner.Groups)
	staysHere := mustStay || staysInRegion && !groupsHaveOwners
	from := j.incoming.From // nil: a client sent it
	if from != nil && from.N >= from.Max {
		staysHere = true // forwarded as often as it may be
	}
	ask := geo.Ask{
		ID: j.id, Model: j.model.Name, Tenant: j.record.Key, InboundHop: from,
		LocalOnly: staysHere, RegionOnly: staysInRegion,
		PreferForward: j.life.TriedHere(),
		RingKey:       geo.RingKeyOf(j.incoming.Session, j.incoming.Address),
	}
	if from != nil {
		ask.ID = cmp.Or(from.RID, ask.ID) // the first proxy has given it
	}
	if !staysHere { // else the hashes are not needed here
		ask.Prompt = j.prefixKeys()
	}
	return j.srv.Peers.NewQuery(ask)
}

var errReturned = openai.NewError(http.StatusBadGateway, "peer_returned", "another proxy gave the request back")

// forwarded is an answer that another proxy gives. It outlives the handler, so it does not hold its
// context.
type forwarded struct {
	*geo.Forward
	job *job
}

// isFannedOut: this proxy would serve the request with legs, and only these have changes.
func (f *forwarded) isFannedOut() bool { return f.job.changes == nil }

// noteAnswerStarted frees the request's body.
func (f *forwarded) noteAnswerStarted(ctx *fasthttp.RequestCtx) {
	j := f.job
	j.enterPhase(journal.Streaming, "")
	j.record.Report(journal.Event{Kind: journal.First, At: f.FirstAt()})
	j.incoming.servedBy = servedByPeer
	j.record.PromptTokens = j.estimatedTokens()
	// No more than the prompt can be cached.
	j.record.CachedTokens = min(max(0, f.Cached()), j.record.PromptTokens)
	j.body = mooncake.Body{}
	j.incoming.Body.Release()
	j.srv.setServedByHeader(ctx, j.incoming)
}

// answerInOnePiece also concludes the request.
func (f *forwarded) answerInOnePiece(ctx *fasthttp.RequestCtx, whole *geo.Relay, memory *edge.Reservation) {
	j := f.job
	f.noteAnsweredWhole(ctx, whole)
	j.record.EndAttempt(nil)
	j.srv.Conclude(j.incoming, nil)
	ctx.SetStatusCode(whole.Status)
	edge.AnswerWhole(ctx, whole.ContentType, whole.Body, memory)
}

// noteAnsweredWhole ends the forward, and notes the answer's token counts.
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

// Close ends the forward of a streamed answer, and concludes the request.
func (f *forwarded) Close() {
	j := f.job
	j.client.OnGone(nil)
	var fail *openai.Error
	switch {
	case f.Lost():
		fail = openai.NewError(http.StatusBadGateway, "peer_lost", "the region that served the request was lost; send the request again")
	case !f.Whole(): // the client has left before the end
		fail = failure.ClientGone
	}
	tokens := f.Events()
	f.Forward.Close()
	if !f.Whole() {
		j.noteEnginesFreeIfLeft() // the forward has ended, so no engine works for it any more
	}
	j.record.Report(journal.Event{Kind: journal.Relayed, Took: time.Since(f.FirstAt()), Tokens: tokens})
	j.record.EndAttempt(fail)
	j.srv.Conclude(j.incoming, fail)
}

func (f *forwarded) Panicked(v any) { f.job.closeAfterPanic(v, f.Close) }

// maxRelayBytes is how many bytes the other proxy's answer may have, with the echo of the prompt.
func (f *forwarded) maxRelayBytes() int64 {
	j := f.job
	answers := 1
	if f.isFannedOut() { // all answers come in one stream or body
		answers = j.srv.Settings().Limits.Answers // the most that a request may ask for
	}
	tokensPerAnswer := j.maxEchoed() + j.maxAnswerTokens(j.model.MaxLen)
	bytesPerAnswer := maxStreamBytes(tokensPerAnswer, j.req.TopLogprobs, j.srv.Settings().Limits.EventBytes)
	if bytesPerAnswer > math.MaxInt64/int64(answers) { // the product would overflow
		return math.MaxInt64
	}
	return int64(answers) * bytesPerAnswer
}

// countsPossible: impossible token counts of another proxy do not enter the record.
func (f *forwarded) countsPossible(prompted, completion int) bool {
	j := f.job
	if f.isFannedOut() { // sums over several answers may be larger than one context
		const noContextLimit = 0
		return prompt.PlausibleCounts(prompted, completion, noContextLimit)
	}
	return prompt.PlausibleCounts(prompted, completion, j.model.MaxLen) && completion <= j.maxAnswerTokens(j.model.MaxLen)
}
