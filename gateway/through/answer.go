package through

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// An answer is what an engine answers: whole, or event by event. The connection's own
// goroutine reads it, so that a slow client slows its engine down.
type answer struct {
	job     *job
	to      fleet.Whole
	call    *engine.Call
	run     *fleet.Run
	resp    *engine.Response
	began   time.Time
	expects int64 // tokens that the engine computes at most
	prompt  int64 // tokens of the prompt, as the engine counted them; 0: it did not
	taken   bool  // the engine may have computed it

	kind     string // Content-Type
	metadata string
	whole    []byte       // nil: it is a stream
	room     *edge.Charge // of whole

	reader sse.Reader
	out    []byte // for the client
	unread []byte // of it what the client has not taken yet
	begun  bool   // an event is for the client, which so has a 200
	ended  bool   // nothing more comes from the engine
	fail   *openai.Error
	closed bool
}

// Why a stream is not whole.
var (
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errTold   = errors.New("the engine sent an event that says it failed")
	errNoData = errors.New("the engine's stream ended without an event")
)

// begin reads a stream up to its first event. Until then nothing is promised to the client.
func (a *answer) begin() *fault {
	limits := &a.job.srv.Settings().Limits
	a.reader.Reset(sse.Limits{Event: limits.EventBytes, Bytes: int64(limits.AnswerBytes), First: limits.ProbeTimeout, Gap: limits.EventTimeout})
	for !a.begun && !a.ended {
		if err := a.fill(); err != nil {
			return a.broke(err)
		}
	}
	if a.fail != nil && !a.begun {
		return &fault{answer: a.fail, status: http.StatusOK, err: errTold}
	}
	a.job.reach(journal.Streaming)
	a.job.srv.Monitor.Heard(a.to.Instance)
	return nil
}

// fill reads one arrival. Its error is returned only before the first event; afterwards it
// becomes the stream's last event.
func (a *answer) fill() error {
	a.resp.SetIdle(max(a.reader.Wait(time.Now()), 1))
	var read [4 << 10]byte
	n, err := a.resp.Read(read[:])
	a.reader.Feed(read[:n], time.Now())
	for !a.ended {
		e, ok := a.reader.Next()
		if !ok {
			break
		}
		a.event(e)
	}
	if over := a.reader.Err(); over != nil {
		err = over // whatever else came, not all of it was read
	}
	switch {
	case err == nil || a.ended:
		return nil
	case errors.Is(err, io.EOF) && a.reader.Buffered() > 0:
		err = errCut
	case errors.Is(err, io.EOF) && a.begun:
		a.end(nil) // engines differ in whether they send [DONE]
		return nil
	case errors.Is(err, io.EOF):
		err = errNoData
	}
	if !a.begun {
		return err
	}
	switch {
	case a.job.left():
		a.end(failure.Gone())
	case a.run.Moved():
		a.end(a.job.drained())
	default:
		a.job.srv.Monitor.Report(a.to.Instance, err)
		a.end(openai.NewError(http.StatusBadGateway, "upstream_broken", failure.Transport(failure.Engine, err).Message))
	}
	return nil
}

// event takes in one event, which goes to the client as it came.
func (a *answer) event(e sse.Event) {
	if e.Kind == sse.KindComment && !a.begun {
		return // it would commit us to a 200
	}
	if e.Kind == sse.KindDone {
		a.begun = true
		a.out = append(a.out, e.Raw...)
		a.ended = true
		return
	}
	if body, err := mooncake.ScanBody(e.Data, 0); e.Kind == sse.KindData && err == nil {
		if said, failed := body.Get("error"); failed && string(said) != "null" {
			a.end(openai.NewError(http.StatusBadGateway, "engine_failed", "the engine ended its answer with an error; its log says why"))
			return
		}
		a.counted(usageOf(&body))
	}
	a.begun = true
	a.out = append(a.out, e.Raw...)
}

// counted takes note of the tokens that the engine counted, if it did.
func (a *answer) counted(prompt, output int) {
	if prompt+output > 0 {
		a.prompt = int64(prompt)
		a.job.in.Told.Counted(prompt, output)
	}
}

// end closes the stream: as whole when fail is nil, else with an error event, never as if
// whole.
func (a *answer) end(fail *openai.Error) {
	a.ended, a.fail = true, fail
	if fail == nil {
		return
	}
	if a.reader.Torn() {
		a.out = append(a.out, sse.BlankLine...)
	}
	if a.begun { // else the error has a status
		a.out = append(sse.ErrorEvent(a.out, fail.Message, fail.Type, fail.Code), sse.Done...)
	}
}

// Read hands out what has arrived, waiting for the first bytes only.
func (a *answer) Read(p []byte) (int, error) {
	if len(a.unread) == 0 {
		for len(a.out) == 0 {
			if a.ended {
				return 0, io.EOF
			}
			if err := a.fill(); err != nil {
				return 0, err
			}
		}
		a.unread, a.out = a.out, nil
	}
	n := copy(p, a.unread)
	a.unread = a.unread[n:]
	return n, nil
}

// Pending is how much more Read has without waiting.
func (a *answer) Pending() int { return len(a.unread) + len(a.out) }

// Ended says that behind what Read has nothing comes.
func (a *answer) Ended() bool { return a.ended }

// close settles a request whose answer was a stream, however it ended.
func (a *answer) close(error) {
	if a.closed {
		return
	}
	a.closed = true
	if !a.ended { // the client's side ended first
		a.ended, a.fail = true, failure.Gone()
	}
	a.release()
	a.job.settle(a.fail)
	a.job.place.Give()
}

// release gives back what the call took.
func (a *answer) release() {
	j := a.job
	j.conn.OnGone(nil)
	if a.resp != nil {
		a.resp.Close()
	}
	j.srv.Fleet.Untrack(a.run)
	told := j.in.Told
	if a.taken && told.PromptTokens+told.OutputTokens == 0 { // what no engine counts is not free
		told.Counted(Estimate(j.path, j.req), 0)
	}
	if computes(j.path) {
		computed := cmp.Or(a.prompt, a.expects)
		if !a.taken {
			computed = 0
		}
		a.to.Traffic.Settles(a.expects, computed)
		a.to.Traffic.Beyond(-1)
	}
	if a.whole == nil {
		a.room.Give()
	}
	j.srv.giveBack(a.to.Instance)
	if j.left() {
		told.Freed(j.conn.GoneAt())
	}
}
