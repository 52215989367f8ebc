package request

import (
	"errors"
	"math/rand/v2"
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

// othersTake says whether an engine has refused the request, and a rank that is neither avoided nor in the same group could take it. It is
// false for a caller that named its decode rank, because such a request must not go to another rank.
func othersTake(j *job, fault *failure.Fault) bool {
	return fault.Refused() && j.avoid.othersTake && j.incoming.ToDecode == nil
}

// again asks the retry budget for another attempt, and waits for the pause before that attempt. It returns false if the budget grants none,
// or if the client has left or will have left after the pause.
func (j *job) again(retry lifecycle.Retry, fault *failure.Fault) bool {
	wait, ok := j.backoff(retry, fault)
	if !othersTake(j, fault) { // else another rank gets the request, and the Retry-After of the refusing engine does not apply to it
		wait = max(wait, min(fault.RetryAfter, maxRetryAfter))
	}
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.record.Attempts), zap.Int("status", fault.Status), zap.Error(fault.Err))
	// The client may give up before another attempt could begin. Its time limit does not bound an answer that has begun.
	late := !j.life.Resumed() && !j.incoming.Patience.IsZero() && time.Now().Add(wait).After(j.incoming.Patience)
	if !ok || late {
		log.Warn("a request failed, and no retry is left")
		return false
	}
	log.Info("an attempt failed, and the request is tried again")
	select {
	case <-time.After(wait):
		j.record.Report(journal.Event{What: journal.Retried})
		return true
	case <-j.client.Gone():
		return false
	}
}

// backoff asks the retry budget for another attempt. wait is how long to pause before it, and again says whether it may be made.
func (j *job) backoff(retry lifecycle.Retry, fault *failure.Fault) (wait time.Duration, again bool) {
	conf, pause := &j.srv.Settings().Prefill.Retry, retry.Pause
	switch retry.Budget {
	case lifecycle.NoMore:
	case lifecycle.Freely:
		again = true
	case lifecycle.OfUnsent:
		wait, again = j.srv.Tier.RetryUnsent(retry.N)
	case lifecycle.Counted:
		if othersTake(j, fault) && pause > 0 {
			again = retry.N < conf.Attempts // the budget limits work that is repeated in vain, but a refused request cost no work
			break
		}
		wait, again = j.srv.Tier.Retry(retry.N, fault.Status, fault.Err)
		if !again && retry.Despite && fault.Status == 0 && retry.N < conf.Attempts {
			again, pause = true, min(retry.N, 8) // the base pause is doubled 8 times at most
		}
	}
	if pause > 0 {
		wait = rand.N(conf.Base<<pause + 1)
	}
	return wait, again
}

// maxRetryAfter bounds how long an engine's Retry-After delays a retry, because another engine may take the request.
const maxRetryAfter = 5 * time.Second

// legID returns the request id that an engine gets for a call. Each attempt has a new id, because the request of the attempt before may
// still run on the engine. leg is a letter for the kind of call.
func (j *job) legID(leg string, attempt int) string {
	return "ek-" + j.id + "-" + leg + strconv.Itoa(attempt)
}

// estimate is the prompt's length in tokens: as an engine counted it, or else as estimated.
func (j *job) estimate() int {
	if j.promptTokens > 0 {
		return j.promptTokens
	}
	return prompt.Tokens(j.req, j.changes)
}

// A leaving ends a call when its client has been gone for the time grace, but not before earliest. Each probe has a leaving, so it is made
// with two allocations only: the struct, and the method value for OnGone.
type leaving struct {
	client   reader
	call     *engine.Call
	grace    time.Duration
	earliest time.Time   // the call is not ended before this
	timer    *time.Timer // ends the call; set by departed, and read by stop after OnGone(nil), when departed no longer runs
}

// leaveAfter ends the call when the client has been gone for the time grace, but not before earliest. The caller must call stop when the
// call is over.
func (r reader) leaveAfter(call *engine.Call, grace time.Duration, earliest time.Time) *leaving {
	l := &leaving{client: r, call: call, grace: grace, earliest: earliest}
	r.OnGone(l.departed)
	return l
}

// departed is called when the client has left, and starts the timer that ends the call.
func (l *leaving) departed() {
	l.timer = time.AfterFunc(max(l.grace, time.Until(l.earliest)), func() { l.call.Leave(upstream.Notice) })
}

// stop undoes leaveAfter: the client no longer ends the call by leaving.
func (l *leaving) stop() {
	l.client.OnGone(nil)
	if l.timer != nil {
		l.timer.Stop()
	}
}

// fell makes the event that reports the failure of a leg (a request to the prefill or the decode engine) to the request's lifecycle. The
// event says whether the engine itself is at fault, and which engines went down after their connections broke during this request.
func (j *job) fell(fault *failure.Fault) lifecycle.Event {
	event := lifecycle.Event{What: lifecycle.Fell, End: fault.Ended, MostLosses: fault.MostLosses}
	switch arrived := !errors.Is(fault.Err, failure.ErrUndelivered); {
	case fault.Status == http.StatusInternalServerError:
		event.Faulty = arrived && !fault.Moved
	case fault.Status == 0 && fault.Engine != "" && arrived && prefill.Broke(fault.Err):
		event.Breach = lifecycle.Breach{Engine: fault.Engine, At: time.Now()}
		for _, breach := range j.life.Breaches() {
			if j.srv.Fleet.DownSince(breach.Engine, breach.At) {
				event.Down = append(event.Down, breach.Engine)
			}
		}
	}
	return event
}

// judge tells the monitor whether the decode engine did well or failed. It also notes a rank that failed or refused the request, so that
// the next attempts avoid it.
func (s *stream) judge(effect lifecycle.Effect) {
	monitor, id, blame := s.job.srv.Monitor, s.from.rank.Instance, effect.Blame
	full := s.from.rank.Group != "" && s.from.fault != nil && s.from.fault.Refused()
	switch {
	case full && effect.Do == lifecycle.Shun: // the queue of this rank is full, or a queue that it shares with the ranks of its group
		around, others := s.job.srv.Engines().Around(s.from.rank.Worker, slices.Concat(s.job.avoid.ranks(), s.job.avoid.lastChoice))
		s.job.avoid.refuse(s.from.rank.Worker, around, others)
	case effect.Do == lifecycle.Shun && s.from.fault != nil && s.from.fault.Why == lifecycle.Stuck: // its core stalls its whole group
		engines := s.job.srv.Engines()
		around, _ := engines.Around(s.from.rank.Worker, nil)
		s.job.avoid.decode = append(engines.Beside(s.from.rank.Worker, false, s.job.avoid.decode), around...)
		s.job.avoid.haltedCores++
	case full:
	case effect.Do == lifecycle.Acclaim:
		monitor.Judge(id, engine.Served, nil)
	case effect.Do == lifecycle.Shun:
		answered := s.from.fault != nil && s.from.fault.Why == lifecycle.Failed // a crash says nothing about the other engines of the host
		s.job.avoid.decode = s.job.srv.Engines().Beside(s.from.rank.Worker, answered, s.job.avoid.decode)
	case blame == lifecycle.Disputed:
		err, settle := s.from.fault.Err, monitor.Accuse(id)
		s.job.accused = append(s.job.accused, func(finding lifecycle.Finding) {
			settle()
			switch finding {
			case lifecycle.Guilty:
				monitor.Judge(id, engine.Faulted, err)
			case lifecycle.Unclear:
				monitor.Judge(id, engine.Unclear, err)
			case lifecycle.Innocent:
			}
		})
	case blame == lifecycle.Wedged:
		monitor.Judge(id, engine.Silent, s.from.fault.Err)
	case blame == lifecycle.Engine:
		monitor.Judge(id, engine.Faulted, s.from.fault.Err)
	}
}

// failedOn is the name of the engine or rank that failed; empty: none did, or it is not known which.
func (s *source) failedOn() string {
	switch {
	case !s.fault.OfEngine():
	case s.fault.Leg != lifecycle.Prefill:
		return s.rank.Target.ID
	case s.partner != nil:
		return s.partner.prefiller().ID
	}
	return ""
}

// settleAccused reports the engines that have answered 500 to the monitor, now that finding says whether the engines or the request is to
// blame.
func (j *job) settleAccused(finding lifecycle.Finding) {
	for _, settle := range j.accused {
		settle(finding)
	}
	j.accused = nil
}

// outcome returns what the dispatcher learns about the request when it gets the slot back. kind is how the request ended.
func (s *stream) outcome(kind board.Kind) board.Outcome {
	unheard := s.from.fault != nil && s.firstAt.IsZero() && s.from.fault.Unheard()
	mirror := &s.from.answer.Mirror
	empty := kind == board.Finished && mirror.Empty() && mirror.FinishReason() == "stop" && !s.job.life.Resumed()
	refused := s.from.fault != nil && s.firstAt.IsZero() && s.from.fault.Refused()
	_, told := mirror.Usage()
	unsaid := kind == board.Finished && (s.from.noUsage || !told)
	return board.Outcome{Kind: kind, Generated: mirror.Tokens(), Empty: empty, Unsaid: unsaid, Refused: refused, Lost: unheard,
		Orphaned: s.from.stranded, Kept: kind == board.Finished && !s.from.local && mirror.Kept()}
}

// avoided has the engines and ranks that the next attempts of a request avoid, because these failed or refused the request.
type avoided struct {
	prefill     []string // prefill candidates that were tried since the request last started from the beginning
	decode      []int32  // workers that failed, and workers on the same host or in the same group that may fail with them
	refused     []int32  // workers that refused the request; after two refusals in a group, all workers of the group
	lastChoice  []int32  // other workers in the group of one that refused: they get the request only if no other worker can take it at once
	haltedCores int      // how many times the request was taken from a rank whose core stood still
	othersTake  bool     // a rank that is in none of these lists could take the request when the last rank refused it
}

// ranks are the workers that get the request only if there is no other worker.
func (a *avoided) ranks() []int32 { return slices.Concat(a.decode, a.refused) }

// refuse notes that a worker refused the request: its own queue is full, or a queue that it shares with the workers around it. After the
// first refusal, the next attempt avoids this worker, and takes a worker around it only as the last choice. After a second refusal, all
// workers around count as full, and the request waits for workers elsewhere. If there are none elsewhere (others is false), only the
// workers around are avoided, and earlier refusals are forgotten.
func (a *avoided) refuse(worker int32, around []int32, others bool) {
	refusedAround := slices.ContainsFunc(around, func(id int32) bool { return id != worker && slices.Contains(a.refused, id) })
	a.othersTake = others
	switch {
	case !refusedAround:
		a.refused = append(a.refused, worker)
		a.lastChoice = append(a.lastChoice, around...)
	case others:
		a.refused = append(a.refused, around...)
	default:
		a.refused, a.lastChoice = around, nil
	}
}
