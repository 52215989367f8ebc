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

// anotherRankTakes: a refused request can go to a rank that it does not avoid, and that does not
// share its queue with the refusing rank. Not if the caller named its rank.
func anotherRankTakes(j *job, fault *failure.Fault) bool {
	return fault.DecodeRefused() && j.avoid.othersAvailable && j.incoming.ToDecode == nil
}

// awaitRetry asks the retry budget for another attempt, and waits for the pause before it.
func (j *job) awaitRetry(retry lifecycle.Retry, fault *failure.Fault) bool {
	wait, granted := j.askRetryBudget(retry, fault)
	if !anotherRankTakes(j, fault) { // else the refusing engine's Retry-After does not matter
		wait = max(wait, min(fault.RetryAfter, maxRetryAfter))
	}
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.record.Attempts), zap.Int("status", fault.Status), zap.Error(fault.Err))
	// A client's own time limit no longer counts once the answer has begun.
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

// askRetryBudget: wait is random, and grows with retry.Pause, or, if that is 0, with retry.N.
func (j *job) askRetryBudget(retry lifecycle.Retry, fault *failure.Fault) (wait time.Duration, granted bool) {
	switch retry.Budget {
	case lifecycle.NoMore:
	case lifecycle.Freely:
		granted = true
	case lifecycle.OfUnsent:
		wait, granted = j.srv.Prefill.RetryUnsent(retry.N)
	case lifecycle.Counted:
		wait, granted = askCountedBudget(j, retry, fault)
	}
	if retry.Pause > 0 { // Backoff doubles the base pause once less than its argument says
		wait = prefill.Backoff(j.srv.Settings().Prefill.Retry.Base, retry.Pause+1)
	}
	return wait, granted
}

// askCountedBudget asks the budget that all requests share, which keeps failures from multiplying,
// except in two cases: another rank can take a refused request, which has run on no engine; and an
// empty budget does not end an answer of which the client has a part (retry.Despite), if no engine
// answered. In both, retry.N must be below the attempts of prefill.retry.
func askCountedBudget(j *job, retry lifecycle.Retry, fault *failure.Fault) (wait time.Duration, granted bool) {
	conf := &j.srv.Settings().Prefill.Retry
	attemptsLeft := retry.N < conf.Attempts
	wasRefused := retry.Pause > 0 // with this budget, only after the first refusals of a request
	if wasRefused && anotherRankTakes(j, fault) {
		return 0, attemptsLeft // retry.Pause says how long to wait
	}
	wait, granted = j.srv.Prefill.Retry(retry.N, fault.Status, fault.Err)
	noEngineAnswered := fault.Status == 0
	if !granted && retry.Despite && noEngineAnswered && attemptsLeft {
		return prefill.Backoff(conf.Base, retry.N+1), true // the budget names no pause for this
	}
	return wait, granted
}

// maxRetryAfter bounds an engine's Retry-After, because another engine may be free earlier.
const maxRetryAfter = 5 * time.Second

// The letters for kinds of calls, and for a transfer of KV, in the ids that engines get.
const (
	idOfPrefill     = "p"
	idOfDecode      = "d"
	idOfPassthrough = "x"
	idOfTransfer    = "t"
)

// callID: every attempt has a new id, because the engine may still hold the call of an earlier one.
func (j *job) callID(kind string, attempt int) string {
	return "ek-" + j.id + "-" + kind + strconv.Itoa(attempt)
}

// estimatedTokens is the count of an engine, or else an estimate from the text.
func (j *job) estimatedTokens() int {
	if j.promptTokens > 0 {
		return j.promptTokens
	}
	return prompt.Tokens(j.req, j.changes)
}

// endAfterClientLeft makes the call end once the client has left and grace has passed, but not
// before earliest, and not after cancel.
func endAfterClientLeft(c client, call *engine.Call, grace time.Duration, earliest time.Time) (cancel func()) {
	// The function below sets timer. It does not run any more once OnGone(nil) has returned.
	var timer *time.Timer
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

// callFailedEvent adds to the failure what may show that the request itself makes engines fail
// (Faulty, BrokenConn, Down). s may be nil.
func (j *job) callFailedEvent(fault *failure.Fault, s *stream) lifecycle.Event {
	event := lifecycle.Event{Kind: lifecycle.CallFailed, End: fault.CallEnd, MostLosses: fault.MostLosses}
	// Lost KV is never the fault of the request, however many engines report it.
	if errors.Is(fault.Err, failure.ErrUndelivered) {
		// Either of the two engines may be to blame.
		if fault.Call == lifecycle.Prefill && s != nil && s.upstream.rank != nil {
			j.avoid.noteFailure(j.srv.Engines(), s.upstream.rank.Worker, fault, false)
		}
		return event
	}
	connectionBroke := fault.Status == 0 && fault.BlamedEngine != "" && prefill.Broke(fault.Err)
	switch {
	case fault.Status == http.StatusInternalServerError:
		event.Faulty = !fault.Moved // an engine that was taken out of service has not failed
		if event.Faulty && s != nil && s.firstAt.IsZero() && s.upstream.handsOver() && fault.Call == lifecycle.Decode {
			event.Faulty = note500(j).confirm(j.srv.Dispatcher, s.upstream.slot, s.upstream.handoffLink())
		}
	case connectionBroke:
		event.BrokenConn = lifecycle.BrokenConn{Engine: fault.BlamedEngine, At: time.Now()}
		event.Down = enginesDownAfterBreak(j)
	}
	return event
}

// enginesDownAfterBreak returns the engines whose connections broke earlier under this request, and
// that have gone down since. The request may have killed them.
func enginesDownAfterBreak(j *job) (down []string) {
	for _, broken := range j.life.BrokenConns() {
		if j.srv.Fleet.DownSince(broken.Engine, broken.At) {
			down = append(down, broken.Engine)
		}
	}
	return down
}

// reportDecodeOutcome reports to the monitor how the decode engine did, or notes the rank to avoid.
func (s *stream) reportDecodeOutcome(effect lifecycle.Effect) {
	monitor, id, blame, fault := s.job.srv.Monitor, s.upstream.rank.Instance, effect.Blame, s.upstream.fault
	// A rank that also prefills answers 429 or 503 if its queue is full. For a hand-off, Blame judges
	// such an answer.
	queueFull := s.upstream.alsoPrefills() && fault != nil && fault.DecodeRefused()
	switch {
	case effect.Kind == lifecycle.Avoid:
		s.job.avoid.noteFailure(s.job.srv.Engines(), s.upstream.rank.Worker, fault, queueFull)
	case queueFull: // neither a failure nor a success
	case effect.Kind == lifecycle.ReportSuccess:
		monitor.RecordOutcome(id, engine.Served, nil)
	case s.firstAt.IsZero() && s.upstream.handsOver() && fault.LosesHandoff():
		// The dispatcher finds out who is to blame, when the slot is released. A canary shows whether the
		// decode engine computes at all.
		monitor.RecordOutcome(id, engine.Unclear, fault.Err)
	case blame == lifecycle.Disputed: // a 500
		accuseUntilExplained(s)
	case blame == lifecycle.Wedged: // it may have stopped working without closing its connections
		monitor.RecordOutcome(id, engine.Silent, fault.Err)
	case blame == lifecycle.Engine:
		monitor.RecordOutcome(id, engine.Faulted, fault.Err)
	}
}

// accuseUntilExplained counts a 500 as an accusation, until the effect Resolve says whether the
// engine or the request has caused it.
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
		case lifecycle.Nobody: // the request is at fault
		}
	})
}

// failedEngine is empty if no engine failed, or if it is not known which one did.
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

// slotOutcome is the report for the dispatcher. Empty: the engine ended the answer with stop, and
// no earlier engine had sent a part. Orphaned: the engine may keep KV blocks for ever. Kept: the
// engine keeps the KV for the next turn, as engines do only after a hand-off.
func (s *stream) slotOutcome(kind board.Kind) board.Outcome {
	filter, finished := &s.upstream.answer.Filter, kind == board.Finished
	failedBeforeFirst := s.upstream.fault != nil && s.firstAt.IsZero()
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

// avoided are the engines and ranks that failed at the request or refused it.
type avoided struct {
	prefill         []string  // ids of those tried since the request last began from its start
	decode          []int32   // workers that failed, and workers that may fail with them
	refused         []int32   // workers that refused; if two of one queue did, all of that queue
	lastChoice      []int32   // of a refusing worker's queue; only if no other takes the request at once
	haltedCores     int       // how often the request was taken from a core that stood still
	othersAvailable bool      // some rank in none of these lists takes requests
	firstPrefill    [1]string // memory of prefill: most requests have one attempt, and need no allocation
}

// ranks are the workers that an attempt goes to only if there are no others.
func (a *avoided) ranks() []int32 { return slices.Concat(a.decode, a.refused) }

// forgetLastPrefill: queue has put this attempt's engine at the end.
func (a *avoided) forgetLastPrefill() { a.prefill = a.prefill[:len(a.prefill)-1] }

// noteFailure makes the next attempts avoid the worker, and those that may fail with it.
func (a *avoided) noteFailure(engines Engines, worker int32, fault *failure.Fault, queueFull bool) {
	switch {
	case queueFull:
		avoidedSoFar := slices.Concat(a.decode, a.refused, a.lastChoice)
		// othersExist: a worker that is neither in this queue nor avoided so far.
		sameQueue, othersExist := engines.SharingQueueWith(worker, avoidedSoFar)
		a.noteRefusal(worker, sameQueue, othersExist)
	case fault.Reason == lifecycle.Stuck: // its whole group, whose workers step together, stood still
		const wholeHost = false // other engines on the host go on
		// Those of its group, or of its engine if no other group takes requests.
		group, _ := engines.SharingQueueWith(worker, nil)
		a.decode = append(engines.FailingWith(worker, wholeHost, a.decode), group...)
		a.haltedCores++ // watchCore counts its retries by this number
	default:
		// A 500 may come from a broken driver or disk. A crash concerns one engine.
		wholeHost := fault.Reason == lifecycle.Failed
		a.decode = engines.FailingWith(worker, wholeHost, a.decode)
	}
}

// noteRefusal: sameQueue has all workers that may share the refusing worker's queue.
//
// One refusal does not show which queue is full. So the next attempt avoids the worker, and goes to
// the rest of its queue only if no other can take it at once (lastChoice). If a second worker
// refuses, the shared queue is full: the request avoids all its workers. If there are no others,
// those that refused earlier may be tried again.
func (a *avoided) noteRefusal(worker int32, sameQueue []int32, othersExist bool) {
	secondOfQueue := slices.ContainsFunc(sameQueue, func(id int32) bool { return id != worker && slices.Contains(a.refused, id) })
	a.othersAvailable = othersExist
	switch {
	case !secondOfQueue:
		a.refused = append(a.refused, worker)
		a.lastChoice = append(a.lastChoice, sameQueue...)
	case othersExist: // avoid the whole queue
		a.refused = append(a.refused, sameQueue...)
	default: // avoid only this queue
		a.refused, a.lastChoice = sameQueue, nil
	}
}
