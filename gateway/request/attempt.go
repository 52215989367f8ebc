package request

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/prefill"
)

// anotherRankTakes says whether the engine refused the request (fault) while another rank can take it: one that the request does not avoid,
// and that does not share its queue with the refusing rank. It is false for a caller that named its rank, because such a request goes to no
// other rank.
func anotherRankTakes(j *job, fault *failure.Fault) bool {
	return fault.DecodeRefused() && j.avoid.othersAvailable && j.incoming.ToDecode == nil
}

// awaitRetry asks the retry budget for another attempt, and waits for the pause before it. It returns false if the budget grants none, if
// the client leaves, or if the client's own time limit would end before the attempt could begin.
func (j *job) awaitRetry(retry lifecycle.Retry, fault *failure.Fault) bool {
	wait, granted := j.askRetryBudget(retry, fault)
	if !anotherRankTakes(j, fault) { // if another rank can take the request, the refusing engine's Retry-After does not matter
		wait = max(wait, min(fault.RetryAfter, maxRetryAfter))
	}
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.record.Attempts), zap.Int("status", fault.Status), zap.Error(fault.Err))
	// A client may have sent its own time limit (ClientGivesUpAt). The limit no longer counts once the answer has begun.
	limit := j.incoming.ClientGivesUpAt
	limitCounts := !j.life.Resumed() && !limit.IsZero()
	tooLate := limitCounts && time.Now().Add(wait).After(limit)
	if !granted || tooLate {
		log.Warn("a request failed, and no retry is left")
		return false
	}
	log.Info("an attempt failed, and the request is tried again")
	select {
	case <-time.After(wait):
		j.record.Report(journal.Event{Kind: journal.Retried})
		return true
	case <-j.client.Gone():
		return false
	}
}

// askRetryBudget asks the budget that retry names for another attempt. granted says whether the attempt may be made, and wait how long to
// pause before it: a random time. It grows with retry.Pause, or, if Pause is 0, with the number of attempts that the budget has counted
// (retry.N). If both are 0, there is no pause.
func (j *job) askRetryBudget(retry lifecycle.Retry, fault *failure.Fault) (wait time.Duration, granted bool) {
	switch retry.Budget {
	case lifecycle.NoMore: // granted stays false
	case lifecycle.Freely:
		granted = true
	case lifecycle.OfUnsent:
		wait, granted = j.srv.Prefill.RetryUnsent(retry.N)
	case lifecycle.Counted:
		wait, granted = askCountedBudget(j, retry, fault)
	}
	if retry.Pause > 0 { // at most the base pause, doubled this often; Backoff doubles it once less than its argument says
		wait = prefill.Backoff(j.srv.Settings().Prefill.Retry.Base, retry.Pause+1)
	}
	return wait, granted
}

// askCountedBudget asks the budget that all requests share, which keeps failures from multiplying. There are two exceptions. A request that
// an engine refused has run on no engine, so if another rank can take it, the budget is not asked. And if the client has a part of the
// answer (retry.Despite), and no engine answered this attempt, an empty budget does not end the answer. In both cases the attempts that
// count (retry.N) must still be fewer than prefill.retry allows.
func askCountedBudget(j *job, retry lifecycle.Retry, fault *failure.Fault) (wait time.Duration, granted bool) {
	conf := &j.srv.Settings().Prefill.Retry
	attemptsLeft := retry.N < conf.Attempts
	wasRefused := retry.Pause > 0 // with this budget, the lifecycle sets Pause only after the first refusals of a request
	if wasRefused && anotherRankTakes(j, fault) {
		return 0, attemptsLeft // retry.Pause says how long to wait
	}
	wait, granted = j.srv.Prefill.Retry(retry.N, fault.Status, fault.Err)
	noEngineAnswered := fault.Status == 0
	if !granted && retry.Despite && noEngineAnswered && attemptsLeft {
		return prefill.Backoff(conf.Base, retry.N+1), true // the budget names no pause for this; it doubles with each attempt
	}
	return wait, granted
}

// maxRetryAfter bounds how long an engine's Retry-After delays a request, because another engine may be free earlier.
const maxRetryAfter = 5 * time.Second

// The letters for kinds of calls, and for a transfer of KV, in the ids that engines get.
const (
	idOfPrefill     = "p"
	idOfDecode      = "d"
	idOfPassthrough = "x"
	idOfTransfer    = "t"
)

// callID returns the id under which an engine gets a call. Every attempt has a new id, because the engine may still hold the call of an
// earlier attempt. kind is one of the letters above.
func (j *job) callID(kind string, attempt int) string {
	return "ek-" + j.id + "-" + kind + strconv.Itoa(attempt)
}

// estimatedTokens returns the prompt's length in tokens: the count of an engine if one has counted it, else an estimate from the text.
func (j *job) estimatedTokens() int {
	if j.promptTokens > 0 {
		return j.promptTokens
	}
	return prompt.Tokens(j.req, j.changes)
}

// endAfterClientLeft makes the call end once the client has left and grace has passed since then, but not before earliest. After the
// returned function was called, the call goes on even if the client leaves.
func endAfterClientLeft(c client, call *engine.Call, grace time.Duration, earliest time.Time) (cancel func()) {
	var timer *time.Timer // set by the callback, which does not run any more once OnGone(nil) has returned
	c.OnGone(func() {
		timer = time.AfterFunc(max(grace, time.Until(earliest)), func() { call.Disconnect(upstream.NoticeTimeout) })
	})
	return func() {
		c.OnGone(nil)
		if timer != nil {
			timer.Stop()
		}
	}
}

// callFailedEvent makes the event that reports a failed call to the request's lifecycle. Besides the failure, the event has what may show
// that the request itself makes engines fail: the engine says that it has failed (Faulty), or its connection broke (BrokenConn). After a
// break, Down names the engines whose connections broke earlier under this request, and that are down since: if another engine of the same
// role is among them, the lifecycle makes no further attempt. MostLosses is how often engines may give this request back for want of KV
// memory. s is the stream of the call; nil: it had none.
func (j *job) callFailedEvent(fault *failure.Fault, s *stream) lifecycle.Event {
	event := lifecycle.Event{Kind: lifecycle.CallFailed, End: fault.CallEnd, MostLosses: fault.MostLosses}
	if errors.Is(fault.Err, failure.ErrUndelivered) { // lost KV is never the fault of the request, however many engines report it
		if fault.Call == lifecycle.Prefill && s != nil && s.upstream.rank != nil { // either of the two engines may be to blame
			j.avoid.noteFailure(j.srv.Engines(), s.upstream.rank.Worker, fault, false)
		}
		return event
	}
	connectionBroke := fault.Status == 0 && fault.BlamedEngine != "" && prefill.Broke(fault.Err)
	switch {
	case fault.Status == http.StatusInternalServerError:
		event.Faulty = !fault.Moved // an engine that was taken out of service has not failed, whatever it answered
		if event.Faulty && s != nil && s.firstAt.IsZero() && s.upstream.handsOver() && fault.Call == lifecycle.Decode {
			event.Faulty = note500(j).confirm(j.srv.Dispatcher, s.upstream.slot, s.upstream.handoffLink())
		}
	case connectionBroke:
		event.BrokenConn = lifecycle.BrokenConn{Engine: fault.BlamedEngine, At: time.Now()}
		event.Down = enginesDownAfterBreak(j)
	}
	return event
}

// enginesDownAfterBreak returns the engines whose connections broke earlier under this request, and that have gone down after that. The
// request may have killed them.
func enginesDownAfterBreak(j *job) (down []string) {
	for _, broken := range j.life.BrokenConns() {
		if j.srv.Fleet.DownSince(broken.Engine, broken.At) {
			down = append(down, broken.Engine)
		}
	}
	return down
}

// reportDecodeOutcome reports to the monitor how the decode engine did with this request (ReportSuccess, ReportFailure), or notes the rank,
// so that the next attempts avoid it (Avoid). effect.Blame says against which component a failure is counted.
func (s *stream) reportDecodeOutcome(effect lifecycle.Effect) {
	monitor, id, blame, fault := s.job.srv.Monitor, s.upstream.rank.Instance, effect.Blame, s.upstream.fault
	// A rank that also prefills answers 429 or 503 if its queue is full. Blame judges a decode engine that answers so to a hand-off.
	queueFull := s.upstream.alsoPrefills() && fault != nil && fault.DecodeRefused()
	switch {
	case effect.Kind == lifecycle.Avoid:
		s.job.avoid.noteFailure(s.job.srv.Engines(), s.upstream.rank.Worker, fault, queueFull)
	case queueFull: // the engine refused the request, which is neither a failure nor a success
	case effect.Kind == lifecycle.ReportSuccess:
		monitor.RecordOutcome(id, engine.Served, nil)
	case s.firstAt.IsZero() && s.upstream.handsOver() && fault.LosesHandoff():
		// The dispatcher finds out who is to blame, when the slot is released. A canary shows whether the decode engine computes at all.
		monitor.RecordOutcome(id, engine.Unclear, fault.Err)
	case blame == lifecycle.Disputed: // the engine or the request has caused a 500
		accuseUntilExplained(s)
	case blame == lifecycle.Wedged: // the engine may have stopped working without closing its connections
		monitor.RecordOutcome(id, engine.Silent, fault.Err)
	case blame == lifecycle.Engine:
		monitor.RecordOutcome(id, engine.Faulted, fault.Err)
	}
}

// accuseUntilExplained counts a 500 against the decode engine as an accusation, as long as it is not known whether the engine or the
// request has caused it. The lifecycle reports the cause by the effect Resolve, once another engine has answered the request or its
// attempts are over. Resolve calls the function that is noted here, which puts the outcome in the place of the accusation.
func accuseUntilExplained(s *stream) {
	monitor, id, err := s.job.srv.Monitor, s.upstream.rank.Instance, s.upstream.fault.Err
	withdrawAccusation := monitor.Accuse(id)
	unexplained := note500(s.job)
	unexplained.settle = append(unexplained.settle, func(cause lifecycle.Blame) {
		withdrawAccusation()
		switch cause {
		case lifecycle.Engine:
			monitor.RecordOutcome(id, engine.Faulted, err)
		case lifecycle.Disputed: // the cause will not become known
			monitor.RecordOutcome(id, engine.Unclear, err)
		case lifecycle.Nobody: // the request is at fault, so nothing counts against the engine
		}
	})
}

// failedEngine is the name of the engine or rank that failed. It is empty if none failed, or if it is not known which one did.
func (u *upstreamCall) failedEngine() string {
	switch {
	case !u.fault.EngineFailed():
	case u.fault.Call != lifecycle.Prefill:
		return u.rank.Target.ID
	case u.prefillCall != nil: // the prefill call beside this call failed
		return u.prefillCall.prefillEngine().ID
	}
	return ""
}

// slotOutcome returns the report that the dispatcher gets when the slot is released. kind is how the request ended. An answer without
// tokens is reported as Empty only if its engine ended it with stop, and if no earlier engine had sent a part of it. Orphaned says that the
// engine may keep the request's KV blocks for ever. Kept says that the engine keeps the KV for the next turn of the chat. Engines do so
// only if a prefill engine has handed the KV over.
func (s *stream) slotOutcome(kind board.Kind) board.Outcome {
	filter, finished := &s.upstream.answer.Filter, kind == board.Finished
	failedBeforeFirst := s.upstream.fault != nil && s.firstAt.IsZero() // before the first event
	_, hasUsage := filter.Usage()
	return board.Outcome{
		Kind:      kind,
		Generated: filter.Tokens(),
		Empty:     finished && filter.Empty() && filter.FinishReason() == "stop" && !s.job.life.Resumed(),
		NoUsage:   finished && (s.upstream.noUsage || !hasUsage),
		Refused:   failedBeforeFirst && s.upstream.fault.DecodeRefused(),
		Lost:      failedBeforeFirst && s.upstream.fault.LosesHandoff() && !s.job.answered500.causes500(),
		Orphaned:  s.upstream.blocksMayLeak,
		Kept:      finished && !s.upstream.computesPrompt && filter.Kept(),
	}
}

// avoided are the engines and ranks that a request avoids, because they failed at it or refused it.
type avoided struct {
	prefill         []string // ids of the prefill engines that were tried since the request last began from its start
	decode          []int32  // decode workers that failed, and workers that may fail with them
	refused         []int32  // decode workers that refused the request; if two of one queue did, all workers of that queue
	lastChoice      []int32  // workers that share the queue of one that refused: used only if no other worker takes the request at once
	haltedCores     int      // how often the request was taken from a rank whose core stood still
	othersAvailable bool     // some rank that is in none of these lists takes requests
}

// ranks are the workers that an attempt goes to only if there are no others.
func (a *avoided) ranks() []int32 { return slices.Concat(a.decode, a.refused) }

// forgetLastPrefill lets the next attempt use the prefill engine of this attempt again, which queue has put at the end of the list.
func (a *avoided) forgetLastPrefill() { a.prefill = a.prefill[:len(a.prefill)-1] }

// noteFailure notes that a worker did not serve the request, because of fault, so that the next attempts avoid it and the workers that may
// fail with it. queueFull says that the queue of the worker is full, or the queue that it shares with other workers.
func (a *avoided) noteFailure(engines Engines, worker int32, fault *failure.Fault, queueFull bool) {
	switch {
	case queueFull:
		avoidedSoFar := slices.Concat(a.decode, a.refused, a.lastChoice)
		// othersExist says whether a worker that is neither in this queue nor avoided so far takes requests.
		sameQueue, othersExist := engines.SharingQueueWith(worker, avoidedSoFar)
		a.noteRefusal(worker, sameQueue, othersExist)
	case fault.Reason == lifecycle.Stuck: // the worker's core stood still, and so did its whole group, whose workers step together
		const wholeHost = false // other engines on the host go on
		// The workers that share a queue with this one are those of its group, or of its engine if no other group takes requests.
		group, _ := engines.SharingQueueWith(worker, nil)
		a.decode = append(engines.FailingWith(worker, wholeHost, a.decode), group...)
		a.haltedCores++ // watchCore counts its retries by this number
	default:
		wholeHost := fault.Reason == lifecycle.Failed // a 500 may come from a broken driver or disk; a crash concerns one engine
		a.decode = engines.FailingWith(worker, wholeHost, a.decode)
	}
}

// noteRefusal notes that a worker refused the request: its own queue is full, or a queue that it shares with others. sameQueue has all
// workers that may share this queue, with the worker itself. othersExist says whether a worker outside of it, which is not avoided yet,
// takes requests.
//
// One refusal does not show which queue is full. So the next attempt avoids the worker (refused), and goes to the rest of its queue only if
// no other worker can take it at once (lastChoice). If a second worker of the same queue refuses, the shared queue is full: the request
// avoids all its workers, and waits for others. If there are none, workers of other queues that refused earlier may be tried again.
func (a *avoided) noteRefusal(worker int32, sameQueue []int32, othersExist bool) {
	secondOfQueue := slices.ContainsFunc(sameQueue, func(id int32) bool { return id != worker && slices.Contains(a.refused, id) })
	a.othersAvailable = othersExist
	switch {
	case !secondOfQueue:
		a.refused = append(a.refused, worker)
		a.lastChoice = append(a.lastChoice, sameQueue...)
	case othersExist: // avoid the whole queue
		a.refused = append(a.refused, sameQueue...)
	default: // no other worker is left, so forget the earlier refusals, and avoid only this queue
		a.refused, a.lastChoice = sameQueue, nil
	}
}
