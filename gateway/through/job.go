package through

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
)

// A job is one request.
type job struct {
	srv   *Server
	in    *request.Incoming
	req   *openai.Request
	path  string
	conn  *edge.Conn
	raw   []byte
	kind  string // Content-Type of a form
	tried []string
	place *edge.Charge
}

// maxTries is how many engines may fail a request before its client gets an error. What an
// engine has computed can be computed again: nothing of it is left there.
const maxTries = 3

// maxAsked is how many engines are asked for one request, those included that do not have its
// endpoint. The next request asks others.
const maxAsked = 8

// notice is how long an engine may take to notice that we left.
const notice = 250 * time.Millisecond

// fault is a failed attempt.
type fault struct {
	answer *openai.Error
	status int // the engine's answer, 0: none
	err    error
	again  bool // another engine may answer otherwise
	lacks  bool // the engine does not have the endpoint
	stale  bool // a connection that had been kept alive ended under the request
}

// serve tries engines until one answers.
func (j *job) serve() (*answer, *openai.Error) {
	told := j.in.Told
	var last *openai.Error
	for failed, asked := 0, 0; failed < maxTries; asked++ {
		if asked == maxAsked {
			return nil, cmp.Or(last, errNoRoute)
		}
		to, none := j.srv.choose(j.req.Model, j.path, j.tried)
		if none != nil {
			if last != nil && none != errNoRoute {
				return nil, last
			}
			return nil, none
		}
		a, f := j.offer(to)
		if f == nil {
			return a, nil
		}
		j.tried = append(j.tried, to.Instance)
		switch {
		case j.left():
			told.EndAttempt(failure.Gone())
			return nil, failure.Gone()
		case f.lacks:
			j.srv.without(to.Instance, j.path)
			told.Retries()
			continue
		case f.answer.Status/100 == 4 && !f.again: // the request's fault
			return nil, f.answer
		default:
			failed++
			j.srv.Log.Warn("an engine did not answer a request that is passed through", zap.String("request_id", told.ID), zap.String("endpoint", j.path),
				zap.String("engine", to.Instance), zap.Int("attempt", told.Attempts), zap.Int("status", f.status), zap.Error(f.err))
		}
		last = f.answer
		if !f.again {
			break
		}
		told.Retries()
	}
	return nil, last
}

func cause(f *fault) string {
	if f.err == nil {
		return f.answer.Code
	}
	return f.err.Error()
}

// left says whether nobody reads any more.
func (j *job) left() bool {
	select {
	case <-j.conn.Gone():
		return true
	default:
		return false
	}
}

// reach begins a phase. A client that has left stays in the phase in which it left.
func (j *job) reach(p journal.Phase) {
	told := j.in.Told
	told.Enter(p)
	if told.Reached == "" || !j.left() {
		told.Reached = p
	}
}

// offer sends the request to one engine. If the engine ends a connection that was kept alive, it
// most likely did so before it saw the request, and gets it once more. If it does not answer then,
// it may have died of the request, which goes to no other engine.
func (j *job) offer(to fleet.Whole) (*answer, *fault) {
	a, f := j.attempt(to, false)
	if f == nil || !f.stale || j.left() {
		return a, f
	}
	j.in.Told.Retries()
	j.srv.take(to.Instance)
	a, second := j.attempt(to, true)
	if second != nil && second.status == 0 && !errors.Is(second.err, errMoved) {
		f.again = false
		return nil, f
	}
	return a, second
}

// attempt sends the request to one engine, over a new connection if fresh is set. Without a
// fault, the call counts for the engine until the answer is closed.
func (j *job) attempt(to fleet.Whole, fresh bool) (_ *answer, f *fault) {
	j.in.Told.Attempt()
	defer func() {
		if f != nil {
			j.in.Told.Fails(cause(f), f.status, f.answer)
		}
	}()
	j.in.Told.Calls("pass")
	j.reach(journal.Transfer)
	j.in.Told.PassedTo(to.ID)
	a := &answer{job: j, to: to, call: j.srv.Client.NewCall(to.Target), began: time.Now()}
	if fresh {
		a.call = a.call.Fresh()
	}
	a.run = j.srv.Fleet.Track(fleet.Place{Instance: to.Instance, Rank: -1}, a.call, notice, true)
	if computes(j.path) {
		a.expects = int64(len(j.raw)) // no token has less than a byte
		to.Traffic.Beyond(1)
		to.Traffic.Sends(a.expects)
	}
	done := false
	defer func() {
		if !done {
			a.release()
		}
	}()
	j.conn.OnGone(func() { a.call.Leave(notice) })
	if f = a.open(); f == nil {
		done = a.whole == nil
		return a, nil
	}
	if a.run.Moved() && !j.left() {
		return nil, &fault{answer: j.drained(), err: errMoved, again: true}
	}
	return nil, f
}

// drained is the answer to a request whose engine was taken out of service.
func (j *job) drained() *openai.Error {
	if j.srv.Serving().Err() != nil {
		return failure.Leaving()
	}
	return openai.Unavailable("engine_drained", "its engine was taken out of service; send the request again", 1)
}

// settle ends a request that was answered. fail is nil for an answer that was whole.
func (j *job) settle(fail *openai.Error) {
	j.in.Told.EndAttempt(fail)
	j.srv.took.WithLabelValues(j.path).Observe(time.Since(j.in.Told.Arrival).Seconds())
	j.srv.Requests.Account(j.in, fail)
}

// send is the request as the engine gets it.
func (j *job) send() (headers []engine.Header, body [][]byte) {
	id := "ek-" + j.in.Told.ID + "-x" + strconv.Itoa(j.in.Told.Attempts)
	headers = engine.JSONHeaders(id)
	if j.path == Transcriptions {
		headers[0].Value = j.kind
		return headers, [][]byte{j.raw}
	}
	return headers, j.req.Body.Splice(nil, mooncake.Reserved, nil)
}

// open sends the request and reads its answer, or of a stream the first event.
func (a *answer) open() *fault {
	j, limits := a.job, &a.job.srv.Settings().Limits
	headers, body := j.send()
	resp, err := a.call.Do(http.MethodPost, j.path, j.in.Told.Carry(headers), body, engine.Deadlines{
		Connect: limits.ConnectTimeout, FirstByte: limits.ProbeTimeout, Idle: limits.EventTimeout,
	})
	if err != nil {
		f := a.broke(err)
		a.taken = !f.again && !f.stale
		return f
	}
	a.taken = true
	a.resp = resp
	if status := resp.StatusCode(); status != http.StatusOK {
		a.taken = false
		refusal := failure.Body(resp)
		f := &fault{status: status, err: fmt.Errorf("engine %s answered %d", a.to.ID, status)}
		f.lacks = lacksRoute(status, refusal)
		if f.answer = failure.Refused(j.srv.Log, failure.Engine, a.to.ID, resp, refusal); status == http.StatusNotImplemented { // its model cannot do what this one asks for
			f.answer = failure.Relayed(status, resp, refusal)
		}
		f.again = f.lacks || status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests
		return f
	}
	a.kind = string(resp.ContentType())
	if strings.HasPrefix(a.kind, "text/event-stream") {
		return a.begin()
	}
	return a.readWhole()
}

// broke is the fault of a call that broke.
func (a *answer) broke(err error) *fault {
	if !a.job.left() {
		a.job.srv.Monitor.Report(a.to.Instance, err)
	}
	var ee *engine.Error
	return &fault{answer: failure.Transport(failure.Engine, err), err: err, again: errors.As(err, &ee) && !ee.Sent, stale: ee != nil && ee.Stale()}
}

// drop lets go of the request's body, which no engine is sent any more.
func (j *job) drop() {
	j.raw, j.req.Body = nil, mooncake.Body{}
	j.in.Body.Give()
}

// readWhole reads an answer that comes in one piece.
func (a *answer) readWhole() *fault {
	limits := &a.job.srv.Settings().Limits
	a.metadata = string(a.resp.Header(metadataHeader))
	a.resp.SetDeadline(a.began.Add(limits.ProbeTimeout))
	whole, err := a.readAll(limits.AnswerBytes)
	switch {
	case errors.Is(err, errNoRoom):
		return &fault{answer: openai.Unavailable("overloaded", "the proxy holds as many bytes of requests and answers as it may, from all callers or from you; retry later", 1), err: err}
	case errors.Is(err, engine.ErrTooLarge):
		return &fault{answer: failure.BadGateway(failure.Engine, "its answer is larger than limits.answer_bytes, or than the room in limits.bodies_bytes; ask for less at once"), err: err}
	case err != nil:
		return a.broke(err)
	}
	if strings.HasPrefix(a.kind, "application/json") {
		body, err := mooncake.ScanBody(whole, 0)
		if err != nil && !json.Valid(whole) {
			return &fault{answer: failure.BadGateway(failure.Engine, "its answer is not JSON"), err: err, status: http.StatusOK}
		}
		if err == nil {
			a.counted(usageOf(&body))
		}
	} else if about, err := mooncake.ScanBody([]byte(a.metadata), 0); err == nil {
		a.counted(usageOf(&about))
	}
	a.whole = whole
	a.job.srv.Monitor.Heard(a.to.Instance)
	return nil
}

// errNoRoom is why an answer in one piece is not read any further.
var errNoRoom = errors.New("the caller has as many bytes of requests and answers in memory as it may")

// readAll reads the body, and charges its caller for the memory as it grows.
func (a *answer) readAll(limit int) (whole []byte, err error) {
	a.room = a.job.srv.Bodies.For(a.job.in.Body)
	limit = a.room.Most(limit+1) - 1 // one byte more shows that the answer is too large
	for {
		if len(whole) == cap(whole) {
			more := min(max(firstRoom, cap(whole)), limit+1-cap(whole))
			if !a.room.Take(more) {
				return nil, errNoRoom
			}
			larger := make([]byte, len(whole), cap(whole)+more) // exactly as many bytes as the charge has taken
			copy(larger, whole)
			whole = larger
		}
		n, err := a.resp.Read(whole[len(whole):cap(whole)])
		switch whole = whole[:len(whole)+n]; {
		case len(whole) > limit:
			return nil, engine.ErrTooLarge
		case errors.Is(err, io.EOF):
			return whole, nil
		case err != nil:
			return nil, err
		}
	}
}

// firstRoom is what every caller may have.
const firstRoom = 4 << 10
