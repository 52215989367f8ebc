package request

import (
	"math/rand/v2"
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
)

// othersTake says whether an engine has refused the request, and it goes to ranks that are beside none which has.
func othersTake(j *job, f *failure.Fault) bool {
	return f.Refused() && j.avoid.others && j.in.ToDecode == nil
}

// again asks for another attempt and waits the pause. The client that
// left ends it, and so does one that will have left by then.
func (j *job) again(retry lifecycle.Retry, f *failure.Fault) bool {
	wait, ok := j.backoff(retry, f)
	if !othersTake(j, f) { // else nobody there said anything of a wait
		wait = max(wait, min(f.RetryAfter, maxRetryAfter))
	}
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.record.Attempts), zap.Int("status", f.Status), zap.Error(f.Err))
	// The client's own time limit, if it told one, may be over before another attempt could begin. An answer that
	// has begun has none.
	late := !j.life.Resumed() && !j.in.Patience.IsZero() && time.Now().Add(wait).After(j.in.Patience)
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

// backoff asks the budget of another attempt, and says how long to wait before it.
func (j *job) backoff(retry lifecycle.Retry, f *failure.Fault) (wait time.Duration, again bool) {
	conf, pause := &j.srv.Settings().Prefill.Retry, retry.Pause
	switch retry.Budget {
	case lifecycle.NoMore:
	case lifecycle.Freely:
		again = true
	case lifecycle.OfUnsent:
		wait, again = j.srv.Tier.RetryUnsent(retry.N)
	case lifecycle.Counted:
		if othersTake(j, f) && pause > 0 {
			again = retry.N < conf.Attempts // the budget keeps failures from multiplying, and nothing was run
			break
		}
		wait, again = j.srv.Tier.Retry(retry.N, f.Status, f.Err)
		if !again && retry.Despite && f.Status == 0 && retry.N < conf.Attempts {
			again, pause = true, retry.N
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

// legID is new for every leg and attempt, so that a retried probe never meets its own
// first attempt.
func (j *job) legID(leg string, attempt int) string {
	return "ek-" + j.id + "-" + leg + strconv.Itoa(attempt)
}

// estimate is the prompt's length before anyone counted it.
func (j *job) estimate() int {
	if j.prompt > 0 {
		return j.prompt
	}
	return prompt.Tokens(j.req, j.leg)
}

// leaveAfter has a call end when its client has left, and from then on for so long, and a moment has come.
// After stop it goes on, whatever becomes of the client.
func (r reader) leaveAfter(call *engine.Call, grace time.Duration, moment time.Time) (stop func()) {
	var later *time.Timer // belongs to the callback, which no longer runs once OnGone(nil) has returned
	r.OnGone(func() {
		later = time.AfterFunc(max(grace, time.Until(moment)), func() { call.Leave(upstream.Notice) })
	})
	return func() {
		r.OnGone(nil)
		if later != nil {
			later.Stop()
		}
	}
}
