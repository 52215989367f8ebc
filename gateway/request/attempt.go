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

// othersTake says whether an engine has refused the request while a rank takes requests that is neither around the refusing rank nor
// avoided. A caller that named its rank gets no other one.
func othersTake(j *job, fault *failure.Fault) bool {
	return fault.Refused() && j.avoid.othersTake && j.incoming.ToDecode == nil
}

// again asks for another attempt and waits the pause before it. It returns false if the
// budget grants none, or if the client has left, or will have left by then.
func (j *job) again(retry lifecycle.Retry, fault *failure.Fault) bool {
	wait, ok := j.backoff(retry, fault)
	if !othersTake(j, fault) { // the other ranks have not asked for a wait
		wait = max(wait, min(fault.RetryAfter, maxRetryAfter))
	}
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.record.Attempts), zap.Int("status", fault.Status), zap.Error(fault.Err))
	// The client's own time limit, if it told one, may be over before another attempt could begin. An answer that
	// has begun has none.
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
			again = retry.N < conf.Attempts // no budget is asked: it keeps failures from multiplying, and here no engine ran anything
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

// maxRetryAfter bounds how long an engine's Retry-After holds up a request that
// another engine may take.
const maxRetryAfter = 5 * time.Second

// legID returns the id that an engine gets for a call. It is new for every attempt, so that a repeated probe never meets the first one
// on the engine. leg is a letter for the kind of the call.
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

// A leaving ends a call after its client has left: grace after that, but not before moment. Each probe has a leaving, so it is only
// one allocation with what its callback needs, and one for the callback.
type leaving struct {
	client   reader
	call     *engine.Call
	grace    time.Duration
	earliest time.Time   // the call is not ended before this
	timer    *time.Timer // ends the call; it belongs to departed, which no longer runs once OnGone(nil) has returned
}

// leaveAfter has the call end some time after the client has left: grace after that, but not before earliest. It is in force until stop
// is called.
func (r reader) leaveAfter(call *engine.Call, grace time.Duration, moment time.Time) *leaving {
	l := &leaving{client: r, call: call, grace: grace, earliest: moment}
	r.OnGone(l.departed)
	return l
}

// departed is called when the client has left, and starts the timer that ends the call.
func (l *leaving) departed() {
	l.timer = time.AfterFunc(max(l.grace, time.Until(l.earliest)), func() { l.call.Leave(upstream.Notice) })
}

// stop takes leaveAfter back: the call goes on, whatever becomes of the client.
func (l *leaving) stop() {
	l.client.OnGone(nil)
	if l.timer != nil {
		l.timer.Stop()
	}
}

// fell makes the event that reports the end of a leg to the request's lifecycle. The event says whether the engine itself is at fault, and
// which engines went down after their connections broke under this request.
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

// judge tells the monitor what an answer, or the lack of one, says about the decode engine. A rank that failed or refused is noted so
// that the next attempts avoid it.
func (s *stream) judge(effect lifecycle.Effect) {
	monitor, id, blame := s.job.srv.Monitor, s.from.rank.Instance, effect.Blame
	full := s.from.rank.Group != "" && s.from.fault != nil && s.from.fault.Refused()
	switch {
	case full && effect.Do == lifecycle.Shun: // the queue of this rank is full, or that of all ranks around it
		around, others := s.job.srv.Engines().Around(s.from.rank.Worker, slices.Concat(s.job.avoid.ranks(), s.job.avoid.lastChoice))
		s.job.avoid.refuse(s.from.rank.Worker, around, others)
	case effect.Do == lifecycle.Shun && s.from.fault != nil && s.from.fault.Why == lifecycle.Stuck: // the ranks that step with it, too
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

// failedOn is the name of the engine or rank that its source failed on; empty: none did, or it is not known which.
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

// settleAccused does what was put off until the cause of the engines' failures was known; finding is that cause.
func (j *job) settleAccused(finding lifecycle.Finding) {
	for _, settle := range j.accused {
		settle(finding)
	}
	j.accused = nil
}

// outcome returns what the dispatcher learns with the slot that comes back. kind is how the request ended.
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

// avoided are the engines and ranks that a request avoids, because they failed at it or refused it.
type avoided struct {
	prefill     []string // candidates tried since the last start
	decode      []int32  // workers that failed, and workers that may fail with them
	refused     []int32  // workers that refused it; once a second worker around the same one refuses it, all workers around
	lastChoice  []int32  // workers around one that refused it: the request goes there if no other worker can take it at once
	haltedCores int      // how often the request was taken from a rank whose core stood still
	othersTake  bool     // a rank takes requests that is in none of these lists
}

// ranks are the workers that no attempt should go to while there are others.
func (a *avoided) ranks() []int32 { return slices.Concat(a.decode, a.refused) }

// refuse notes that a worker refused the request. Its queue may be full, or one limit that stands before it and the workers around it.
// The next attempt goes to other workers if one of these can take it at once. If a second worker around refuses it, this counts for all
// of them, and the request waits for others. If there are no others, the workers that refused it earlier may be tried again.
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
