package request

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A fannedOut is a client's request with n above 1 or with a list of prompts. It becomes several
// requests to engines, the legs, because an engine's answer carries only one hand-off. evenkeel
// renumbers their choices. The first failure ends all legs. For a streamed answer, a fannedOut is
// the body, with one common end.
type fannedOut struct {
	srv        *Server
	conn       client
	req        *openai.Request
	in         *Incoming
	id         []byte // as the client sees it
	outputMode []byte // of a request to /inference/v1/generate, which the usage event repeats
	legs       []fanOutLeg
	wg         sync.WaitGroup
	stopOnce   sync.Once
	stop       chan struct{} // closed by endLegs; ends all waits of the legs

	memory     *edge.Reservation // for answers that are ready; nil: another owner gives it back
	pieces     chan piece        // from the legs to the client
	pending    []byte            // bytes that Read can return without waiting
	endedCount int               // legs that have ended
	allEnded   bool              // no leg has anything more for the client
	endError   *openai.Error     // the error that ended the whole answer; nil: none did
}

type fanOutLeg struct {
	job         *job
	clientShare *edge.CloseNotifier // gone when the client has left, or when another leg failed
	prompt      int                 // index of the prompt in the request

	// The leg writes these before it sends its last piece, and others read them only after it.
	answer  []byte // whole, if it is not streamed
	usage   sse.Usage
	details map[string]int // of prompt_tokens_details, by their names
}

// A piece has whole events, or reports the end of a leg.
type piece struct {
	contentType []byte
	events      []byte
	done        bool
	fail        *openai.Error
}

// fanOut enters one job per answer into the arrival queue, where it is decided whether another
// proxy answers the whole request, and otherwise runs them. whole is not run. After an error, the
// client has no answer yet.
func (srv *Server) fanOut(ctx *fasthttp.RequestCtx, conn client, whole *job, legs []openai.SubRequest) *openai.Error {
	req, in := whole.req, whole.incoming
	prefix := "chatcmpl-ek-"
	if req.Endpoint == mooncake.Completions {
		prefix = "cmpl-ek-"
	}
	f := &fannedOut{srv: srv, conn: conn, req: req, in: in, id: []byte(prefix + in.Record.ID), outputMode: openai.OutputMode(&whole.body),
		stop: make(chan struct{})}
	// At some endpoints the client can end the request by the id of its answer. newJob has then chosen
	// it.
	if chosenID := whole.filterOptions.ID; chosenID != nil {
		f.id = chosenID
	}
	for i := range legs {
		f.legs = append(f.legs, f.newLeg(whole, i, &legs[i]))
	}
	f.allowCancelByName(whole)
	if answered, fail := f.queueOrForward(ctx, whole); answered || fail != nil { // another proxy answers
		return fail
	}
	conn.OnGone(f.endLegs) // the legs are served here
	f.memory = edge.NewAnswer(ctx)
	if req.Stream {
		f.stream(ctx)
	} else {
		f.collect(ctx)
	}
	return nil
}

func (f *fannedOut) newLeg(whole *job, i int, part *openai.SubRequest) fanOutLeg {
	// Each leg has a notifier of its own, so that endLegs can end a leg as if the client had left.
	legClient, name := edge.NewCloseNotifier(f.srv.Log), legName(i)
	leg := fanOutLeg{clientShare: legClient, prompt: part.Prompt, job: &job{
		srv: f.srv, req: f.req, body: whole.body, changes: &part.Patch, client: legClient, isLeg: true, id: f.in.Record.ID + "-" + name,
		model: whole.model, incoming: f.in, record: f.in.Record.Leg(name), filterOptions: whole.filterOptions,
	}}
	options := &leg.job.filterOptions
	options.ID, options.Created = f.answerName(i), f.in.Record.Arrival.Unix()
	options.Choice = part.Choice // the number of the answer among all answers
	// takePiece writes one end for all legs. In one piece, merge adds up the usages.
	options.DropFinalUsage, options.DropDone = f.req.Stream, true
	return leg
}

// queueOrForward enters all legs into the arrival queue, and sends the whole request to another
// proxy if the queue decides so. If that one gives it back, the legs take their old places again.
// After an error it gives back the slots that enterQueue has bound.
func (f *fannedOut) queueOrForward(ctx *fasthttp.RequestCtx, whole *job) (answered bool, fail *openai.Error) {
	defer func() {
		if fail != nil {
			f.abandon(ctx, whole, fail)
		}
	}()
	whole.record.Reached = journal.Queued // the whole request enters a phase only when it is forwarded
	for {
		forward, noPlace := f.enterQueue()
		switch {
		case forward != nil:
		case noPlace != nil: // no place in the queue
			return false, whole.leaseError(noPlace)
		default:
			return false, nil
		}
		whole.record.Report(journal.Event{Kind: journal.Attempted})
		outcome, forwardError := whole.forwardToPeer(ctx, forward)
		if outcome == lifecycle.PeerAnswers || forwardError != nil {
			return forwardError == nil, forwardError
		}
		whole.life.NoteGivenBack(outcome)
		for _, l := range f.legs { // each leg knows where the request may still go
			l.job.life.CopyRouting(&whole.life)
		}
	}
}

// abandon gives back the slots that enterQueue has bound.
func (f *fannedOut) abandon(ctx *fasthttp.RequestCtx, whole *job, fail *openai.Error) {
	for _, l := range f.legs {
		if slot := l.job.local.boundSlot; slot != nil {
			f.srv.Dispatcher.Release(slot, board.Outcome{Kind: board.Cancelled})
		}
	}
	whole.record.EndAttempt(fail)
	edge.StopKeepAlive(ctx)
	f.srv.setServedByHeader(ctx, f.in)
}

// enterQueue puts the legs into the arrival queue together, except those that a decode rank
// computes itself, which keep their slots in boundSlot. If such a slot is held, the request cannot
// go to another proxy.
func (f *fannedOut) enterQueue() (forward *geo.Forward, err error) {
	queued := f.bindLocalLegs()
	if len(queued) == 0 || f.in.NoHandOff { // no leg may take a prefill engine
		return nil, nil
	}
	query := f.routingQuery(queued)
	arrivals := make([]prefill.Request, len(queued))
	for i, l := range queued {
		arrivals[i] = l.job.arrivalRequest()
	}
	tickets, err := f.srv.Prefill.EnterAll(arrivals)
	if f.goesElsewhere(query, tickets, err) {
		if forward = query.Forward(); forward != nil {
			return forward, nil
		}
		return nil, prefill.ErrElsewhere // the request came from another proxy, which must ask again
	}
	for i := range tickets {
		queued[i].job.ticket = &tickets[i]
	}
	return nil, err
}

// goesElsewhere: the decision about the first leg counts for all. If it sends the request away, the
// queue has taken the legs out.
func (f *fannedOut) goesElsewhere(query *geo.RoutingQuery, tickets []prefill.Ticket, err error) bool {
	if mayBeDecidedLater := err == nil && query != nil; mayBeDecidedLater {
		return f.awaitForwarding(&tickets[0])
	}
	return errors.Is(err, prefill.ErrElsewhere)
}

// bindLocalLegs returns the legs that no decode rank computes itself. If a central proxy decides
// where requests are served, it must be asked first, so no leg is bound.
func (f *fannedOut) bindLocalLegs() (others []fanOutLeg) {
	if f.srv.Settings().Geo.Follows() {
		return f.legs
	}
	return slices.DeleteFunc(slices.Clone(f.legs), func(l fanOutLeg) bool {
		l.job.local.boundSlot = l.job.bindLocal()
		return l.job.local.boundSlot != nil
	})
}

// routingQuery makes one question for all legs.
func (f *fannedOut) routingQuery(legs []fanOutLeg) (query *geo.RoutingQuery) {
	first := legs[0]
	someServedHere := len(legs) < len(f.legs) // so these stay, too
	if query = first.job.newRoutingQuery(first.job.life.StaysForGood() || someServedHere); query == nil {
		return nil
	}
	query.SetLegs(len(legs))
	first.job.query = query
	for _, l := range legs[1:] {
		l.job.query = query.NewLeg(l.job.id, l.job.prefixKeys())
	}
	return query
}

func (f *fannedOut) awaitForwarding(first *prefill.Ticket) bool {
	ctx, cancel := context.WithCancel(f.srv.Serving())
	defer cancel()
	f.conn.OnGone(cancel)
	defer f.conn.OnGone(nil)
	return first.AwaitRegionDecision(ctx)
}

// startLegs runs each leg on a goroutine of its own. It recovers a panic itself: the recovery of
// the HTTP server does not cover these goroutines, so it would end the process.
func (f *fannedOut) startLegs(run func(l *fanOutLeg) *openai.Error) {
	f.pieces = make(chan piece, len(f.legs))
	for i := range f.legs {
		f.wg.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					f.srv.Log.Error("a leg of a request ended with a panic, which is a bug", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
					f.sendPiece(piece{fail: failure.InternalError, done: true})
				}
			}()
			if fail := run(&f.legs[i]); fail != nil {
				f.sendPiece(piece{fail: fail, done: true})
			}
		})
	}
}

// sendPiece returns false if no goroutine reads pieces any more.
func (f *fannedOut) sendPiece(p piece) bool {
	select {
	case f.pieces <- p:
		return true
	case <-f.stop:
		return false
	}
}

// nextPiece returns false if the client has left.
func (f *fannedOut) nextPiece() (piece, bool) {
	select {
	case p := <-f.pieces:
		return p, true
	case <-f.stop:
		return piece{fail: failure.ClientGone}, false
	}
}

func (f *fannedOut) collect(ctx *fasthttp.RequestCtx) {
	defer onPanic(func() { f.endAndConclude(failure.InternalError) })
	f.startLegs(f.collectLeg)
	answer, fail := f.mergeLegs()
	if fail != nil {
		f.answerError(ctx, fail)
		return
	}
	memory := f.memory
	f.memory = nil // AnswerWhole gives it back
	f.endAndConclude(nil)
	f.srv.setServedByHeader(ctx, f.in)
	f.srv.setPeerHeaders(ctx, f.in, nil)
	edge.AnswerWhole(ctx, "application/json", answer, memory)
}

// collectLeg: after an error, its caller sends the piece that ends the leg.
func (f *fannedOut) collectLeg(l *fanOutLeg) *openai.Error {
	s, fail := l.job.serve(nil)
	switch {
	case fail == nil:
		l.answer, fail = s.collect(f.memory)
	case failedOnlyByAbort(l.job, f.conn, fail):
		// The client has ended this leg by its id before a rank began the answer, and still waits.
		l.answer, fail = emptyAnswer(l.job), nil
	}
	if fail == nil {
		f.sendPiece(piece{done: true})
	}
	return fail
}

// mergeLegs waits for all legs, but not after a failure.
func (f *fannedOut) mergeLegs() ([]byte, *openai.Error) {
	for range f.legs { // each leg sends one piece, at its end
		if ended, _ := f.nextPiece(); ended.fail != nil {
			return nil, ended.fail
		}
	}
	parts := make([]sse.Part, len(f.legs))
	for i, l := range f.legs {
		parts[i] = sse.Part{PromptIndex: l.prompt, JSON: l.answer}
	}
	answer, err := f.merge(parts)
	if err != nil {
		return nil, failure.StreamBroke("upstream_broken", err)
	}
	if !f.memory.ReplaceAnswer(len(answer)) {
		return nil, failure.NoRoomForAnswer
	}
	return answer, nil
}

// stream: the first leg that has an event or fails decides the status.
func (f *fannedOut) stream(ctx *fasthttp.RequestCtx) {
	f.startLegs(f.relayLeg)
	first, _ := f.nextPiece() // if the client has left, first has that error
	edge.StopKeepAlive(ctx)   // no more comments keep the connection alive
	if first.fail != nil {
		f.answerError(ctx, first.fail)
		return
	}
	f.takePiece(first)
	f.srv.setServedByHeader(ctx, f.in)
	// An event loop reads from one engine, and the legs run on several.
	f.srv.Stream(ctx, first.contentType, f, withoutLoop)
}

// relayLeg returns an error only if the leg has no answer.
func (f *fannedOut) relayLeg(l *fanOutLeg) *openai.Error {
	s, fail := l.job.serve(nil)
	// The client has ended the leg by name before its first event, and still waits.
	if fail != nil && failedOnlyByAbort(l.job, f.conn, fail) {
		kind := []byte("text/event-stream")
		// The same usage as in emptyAnswer, for the sum of all legs.
		l.usage = sse.Usage{Prompt: l.job.estimatedTokens(), Cached: -1}
		f.sendPiece(piece{contentType: kind, events: emptyAnswer(l.job)})
		f.sendPiece(piece{contentType: kind, done: true})
		return nil
	}
	if fail != nil {
		return fail
	}
	defer s.Close()
	// The whole answer came at once, and waits in pieces for the client.
	if s.state == ended && !f.memory.AcquireAnswer(s.Pending()) {
		s.endError = failure.NoRoomForAnswer
		return s.endError
	}
	contentType := bytes.Clone(s.upstream.contentType())
	for {
		events, err := s.Next()
		if len(events) > 0 && !f.sendPiece(piece{contentType: contentType, events: bytes.Clone(events)}) {
			return nil // the fan-out has ended
		}
		if err != nil { // io.EOF at any end of the answer; endError says whether it is whole
			l.usage, _ = s.upstream.answer.Filter.Usage()
			l.details = s.upstream.answer.Filter.PromptDetails()
			f.sendPiece(piece{contentType: contentType, fail: s.endError, done: true})
			return nil
		}
	}
}

// takePiece makes a piece available to Read. The last one gets the end of the whole answer: usage
// or error, and [DONE].
func (f *fannedOut) takePiece(p piece) {
	f.pending = p.events
	if !p.done {
		return
	}
	f.endedCount++
	f.endError = p.fail
	f.allEnded = f.endError != nil || f.endedCount == len(f.legs) // one failure ends all legs
	switch {
	case !f.allEnded:
		return
	case f.endError != nil: // the client gets the error as an event
		f.pending = sse.ErrorEvent(f.pending, f.endError.Message, cmp.Or(f.endError.Type, "server_error"), f.endError.Code)
	case f.req.IncludeUsage:
		if usage, details := f.sumUsage(); f.req.Endpoint == mooncake.Tokens {
			f.pending = sse.TokensUsage(f.pending, f.id, f.outputMode, usage, details)
		} else {
			isChat, created := f.req.Endpoint == mooncake.Chat, f.in.Record.Arrival.Unix()
			f.pending = sse.UsageEvent(f.pending, f.id, []byte(f.req.Model), created, isChat, usage, details)
		}
	}
	f.pending = append(f.pending, sse.Done...)
}

// sumUsage counts each prompt only once. Cached is -1 if no leg reported it.
func (f *fannedOut) sumUsage() (sum sse.Usage, details map[string]int) {
	sum, details = sse.Usage{Cached: -1}, map[string]int{}
	counted := map[int]bool{} // indexes of prompts
	for _, l := range f.legs {
		if !counted[l.prompt] {
			counted[l.prompt] = true
			sum.Prompt += l.usage.Prompt
			if l.usage.Cached >= 0 { // -1: not reported
				sum.Cached = max(0, sum.Cached) + l.usage.Cached
			}
			for name, tokens := range l.details {
				details[name] += tokens
			}
		}
		sum.Completion += l.usage.Completion
	}
	sum.Total = sum.Prompt + sum.Completion
	return sum, details
}

// Read waits only if no bytes have arrived.
func (f *fannedOut) Read(p []byte) (int, error) {
	for len(f.pending) == 0 {
		if f.allEnded {
			return 0, io.EOF
		}
		next, ok := f.nextPiece()
		if !ok { // the client has left
			return 0, io.ErrClosedPipe
		}
		f.takePiece(next)
	}
	n := copy(p, f.pending)
	f.pending = f.pending[n:]
	return n, nil
}

// Pending is how many more bytes Read can return without waiting.
func (f *fannedOut) Pending() int { return len(f.pending) }

// Close ends every leg. If the answer is not whole and no leg has failed, the client has left.
func (f *fannedOut) Close() {
	if f.endError == nil && !f.allEnded {
		f.endError = failure.ClientGone
	}
	f.endAndConclude(f.endError)
}

func (f *fannedOut) answerError(ctx *fasthttp.RequestCtx, fail *openai.Error) {
	f.srv.setServedByHeader(ctx, f.in)
	f.srv.setPeerHeaders(ctx, f.in, fail)
	f.srv.Fail(ctx, fail)
	f.endAndConclude(fail)
}

// legName returns aa, ab, ..., zz, baa, ...: the number with base 26, the letters as digits, and at
// least two digits.
func legName(i int) string {
	name := string(rune('a' + i%26))
	for i /= 26; i >= 26; i /= 26 {
		name = string(rune('a'+i%26)) + name
	}
	return string(rune('a'+i)) + name
}

// endLegs must not block, because the watcher of the client's connection calls it.
func (f *fannedOut) endLegs() {
	f.stopOnce.Do(func() { close(f.stop) })
	for i := range f.legs { // a copy of the leg would race with its goroutine
		f.legs[i].clientShare.MarkGone()
	}
}

// endAndConclude concludes the request once each leg has ended its calls. After a failure it does
// so in the background: a decode call that fetches KV ends only with its first event, because a cut
// would leak KV.
func (f *fannedOut) endAndConclude(fail *openai.Error) {
	f.endLegs()
	f.conn.OnGone(nil)
	conclude := func() {
		f.wg.Wait()
		f.memory.Release()
		for _, l := range f.legs {
			f.in.Record.AddLeg(&l.job.record.LogEntry)
		}
		f.srv.Conclude(f.in, fail)
	}
	// Run fails if too many run already, or the proxy shuts down.
	if fail == nil || f.srv.finishing.Run(maxFinishers, conclude) != nil {
		conclude()
	}
}

// allowCancelByName lets the client end all legs by the id of the whole answer. With /generate,
// each leg's answer also has its own id.
func (f *fannedOut) allowCancelByName(whole *job) {
	if whole.filterOptions.ID == nil {
		return
	}
	caller, aborts := f.in.Record.Key, make([]*abortByName, len(f.legs))
	var forgets []func() // each ends the use of one id
	for i, l := range f.legs {
		abortLeg := letAbort(l.job, l.clientShare, f.outputMode)
		aborts[i] = abortLeg
		if f.req.Endpoint == mooncake.Generate { // answerName has given the leg an id of its own
			ownID := string(l.job.filterOptions.ID)
			forgets = append(forgets, f.srv.Running.Register(caller, ownID, func() { abortLeg.abort(f.srv) }))
		}
	}
	forgets = append(forgets, f.srv.Running.Register(caller, string(f.id), func() {
		var aborting sync.WaitGroup // all at the same time
		for _, abortLeg := range aborts {
			aborting.Go(func() { abortLeg.abort(f.srv) })
		}
		aborting.Wait()
	}))
	f.in.forgetName = func() {
		for _, forget := range forgets {
			forget()
		}
	}
}

// answerName is the id in the answer of a leg. At /generate it is the client's id of this prompt,
// or the request's id, "_" and the leg's number, as SGLang names it (0.5.23, normalize in
// managers/io_struct.py).
func (f *fannedOut) answerName(leg int) []byte {
	switch {
	case f.req.Endpoint != mooncake.Generate:
		return f.id
	case f.req.Names != nil:
		return f.req.Names[leg]
	}
	return fmt.Appendf(nil, "%s_%d", f.id, leg)
}

func (f *fannedOut) merge(parts []sse.Part) ([]byte, error) {
	if f.req.Endpoint == mooncake.Generate {
		return sse.MergeGenerated(parts), nil
	}
	return sse.MergeAnswers(parts)
}
