package request

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/suspect"
	"evenkeel/prefill"
)

// fault is a failed attempt: what the client sees if it is the last, whether
// the hand-off is spent, and what the retry rule looks at.
type fault struct {
	answer     *openai.Error
	status     int    // engine's answer, 0: none
	err        error  // what failed, for the log
	engine     string // the monitor's id, where a call to it broke
	retryAfter time.Duration
	spent      bool
	final      bool // no other engine would answer otherwise
	givenBack  bool // for want of KV memory, before a first event
	most       int  // recompute_max of the engine that did
	refusal    bool // a prefill engine took nothing of it: 503 or 429
	moved      bool // what it was at was taken out of service: an engine, or a region
	unowned    bool // its decode group is another proxy's now
	prefills   bool // the prefill leg of a request that was bound before it is why: the decode engine is not to blame
}

// cause is why it failed, for receipts and spans.
func (f *fault) cause() string {
	if f.err == nil {
		return f.answer.Code
	}
	return f.err.Error()
}

// again decides whether to try once more and waits the backoff. The client that
// left ends it, and so does one that will have left by then.
func (j *job) again(f *fault) bool {
	j.told.Fails(f.cause(), f.status, f.answer)
	if f.final || j.client.left() {
		return false
	}
	wait, ok := j.backoff(f)
	wait = max(wait, min(f.retryAfter, maxRetryAfter))
	log := j.srv.Log.With(zap.Inline(j), zap.Int("attempt", j.told.Attempts), zap.Int("status", f.status), zap.Error(f.err))
	// The client's own time limit, if it told one, may be over before another attempt could begin. An answer that
	// has begun has none.
	late := j.resume.times == 0 && !j.in.Patience.IsZero() && time.Now().Add(wait).After(j.in.Patience)
	if !ok || late {
		log.Warn("a request failed, and no retry is left")
		return false
	}
	log.Info("an attempt failed, and the request is tried again")
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		j.told.Retries()
		return true
	case <-j.client.Gone():
		return false
	}
}

// backoff says whether a failure is worth another attempt, and after what wait.
func (j *job) backoff(f *fault) (wait time.Duration, again bool) {
	retry, t := &j.srv.Settings().Prefill.Retry, &j.tries
	switch {
	case f.moved: // nothing failed; there are other engines
		return 0, true
	case f.givenBack: // nothing failed; the engine is full
		again = j.resume.times+j.resume.bounced < f.most
		j.resume.bounced++
		return rand.N(retry.Base<<min(j.resume.bounced, 8) + 1), again
	case f.status == 0 && prefill.Unsent(f.err): // nor did anything run
		t.Unsent++
		return j.srv.Tier.RetryUnsent(t.Unsent)
	}
	if f.refusal && t.Refused < suspect.MostRefused {
		t.Refused++
		_, again = j.srv.Tier.Retry(max(1, t.Count), f.status, f.err)
		return rand.N(retry.Base<<t.Refused + 1), again
	}
	t.Count++
	if t.Breaks(j.srv.Fleet, f.status, f.engine, f.err) {
		return 0, false
	}
	wait, again = j.srv.Tier.Retry(t.Count, f.status, f.err)
	if !again && j.resume.times > 0 && f.status == 0 && t.Count < retry.Attempts {
		// Half an answer is out, so the request is not turned away by the budget.
		return rand.N(retry.Base<<t.Count + 1), true
	}
	return wait, again
}

// maxRetryAfter bounds how long an engine's Retry-After holds up a request that
// another engine may take.
const maxRetryAfter = 5 * time.Second

// probeFailed settles a probe whose call broke.
func (j *job) probeFailed(lease *prefill.Lease, run *fleet.Run, err error) *fault {
	var ee *engine.Error
	sent := errors.As(err, &ee) && ee.Sent
	if aborted := !sent || ee.Aborted && !ee.Answered; aborted && (j.client.left() || run.Moved()) { // the engine aborts with the connection
		if j.client.left() {
			return j.drop(lease)
		}
		lease.Release()
		return &fault{answer: j.srv.movedOut(), err: errDrained, moved: true}
	}
	if ee != nil && ee.Aborted { // in the middle of its answer: the engine may hold a prefill, and has not failed
		lease.Orphan()
		return &fault{answer: j.srv.movedOut(), err: errDrained, moved: run.Moved()}
	}
	// Any other silence may hide a finished prefill and its KV.
	lease.Failed(sent, lease.Candidate.Profile.KVHoldTimeout)
	j.srv.Monitor.Report(lease.Candidate.Instance, err)
	return &fault{answer: failure.Transport("prefill", err), err: err, engine: lease.Candidate.Instance}
}

// movedOut is the end of an answer that a drain's deadline cut and that no other
// engine takes up.
func (srv *Server) movedOut() *openai.Error {
	if srv.Serving().Err() != nil {
		return failure.Leaving()
	}
	return openai.Unavailable("engine_drained", "its engine was taken out of service and the answer cannot go on elsewhere; send the request again", 1)
}

// errDrained ends an answer whose rank was drained and that no other can take up.
var errDrained = errors.New("the engine was taken out of service")

// unplaced is what becomes of a request whose hand-off got no rank. KV does not cross
// regions. So a hand-off in a region whose ranks are gone, most often because the
// region was handed back, is spent: the prompt is prefilled again elsewhere, once.
func (j *job) unplaced(err error, region string, unowned bool) *fault {
	if unowned {
		return &fault{answer: failure.NotOurs(), err: owner.ErrNotOwner, spent: true, final: true, unowned: true}
	}
	f := &fault{answer: failure.Pool(err, j.prompt), err: err, spent: true, final: true}
	if gone := errors.Is(err, board.ErrNoWorkers) || errors.Is(err, board.ErrWithdrawn); gone && region != "" && j.history.moves(lostRanks) {
		f.final, f.moved = false, true
	}
	return f
}

// drop settles a probe that its client's leaving ended.
func (j *job) drop(lease *prefill.Lease) *fault {
	lease.Release()
	j.freed()
	return &fault{answer: failure.Gone(), final: true}
}

// decodeRefused settles an error status from the decode engine. The hand-off is
// spent, for a status may also come from something in between or after the pull;
// where the engine is known to tell the prefiller to free it, it need not be discarded.
func (j *job) decodeRefused(h *handoff.Handoff, s *stream) *fault {
	s.rank.Area.Refused(string(s.resp.Header(owner.EpochHeader)))
	f := j.srv.refused("decode", s.rank.Target.ID, s.resp, failure.Body(s.resp))
	f.spent = true
	if f.status == http.StatusNotFound && h != nil {
		j.srv.Fleet.Differ(h.Lease.Candidate.Instance, s.rank.Instance, j.model.Name)
	}
	if j.srv.Fleet.RejectionFrees(s.rank) {
		h.Release()
	} else {
		j.doubts.add(h, false)
	}
	return f
}

// refused maps an engine's error status: its 4xx reach the client as they came,
// our own credential's failure and its 5xx do not.
func (srv *Server) refused(side, id string, resp *engine.Response, body []byte) *fault {
	status := resp.StatusCode()
	f := &fault{
		status: status, err: failure.Undelivered(fmt.Errorf("%s engine %s answered %d", side, id, status), string(body)),
		retryAfter: time.Duration(failure.RetryAfter(resp)) * time.Second,
	}
	f.answer, f.final = failure.Refused(srv.Log, side, id, resp, body)
	return f
}

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

// wholeCharge bounds what is charged in advance for an answer that comes in one
// piece, in tokens: a client that asks for millions must not make its rank look
// full to all others.
const wholeCharge = 1024
