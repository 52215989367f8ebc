package passthrough

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// An answer is what one engine answers: whole, or event by event.
type answer struct {
	job     *job
	call    upstream.Call
	run     *fleet.Run
	resp    *engine.Response
	expects int64 // tokens that the engine computes at most
	prompt  int64 // tokens of the prompt, as the engine counted them; 0: it did not

	kind     string // Content-Type
	metadata string
	whole    []byte       // nil: it is a stream
	room     *edge.Charge // of whole

	reader sse.Reader
	out    []byte // that the client has not taken yet
	begun  bool   // an event is for the client, which so has a 200
	ended  bool   // nothing more comes from the engine
	fail   *openai.Error
}

// Why an answer is of no use, or not whole.
var (
	errNoRoom = errors.New("the caller's requests and answers take all the memory that it may use")
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errTold   = errors.New("the engine sent an event that says it failed")
	errNoData = errors.New("the engine's stream ended without an event")
)

// broke is the end of a call that broke, of which the monitor is told.
func (a *answer) broke(f *failure.Fault) *failure.Fault {
	if !a.job.conn.Left() {
		a.job.srv.Monitor.Report(f.Engine, f.Err)
	}
	return f
}

// refused says more of an error status than that it is one.
func (a *answer) refused(f *failure.Fault) *failure.Fault {
	if f.Engine != "" {
		return a.broke(f)
	}
	f.Why = lifecycle.ByStatus(f.Answer.Status) // a refusal of our own credential is not the request's fault
	switch {
	case lacksRoute(f.Status, a.call.Refusal):
		f.Why = lifecycle.Lacks
	case f.Status == http.StatusNotImplemented: // its model cannot do what this one asks for
		f.Why, f.Answer = lifecycle.Unable, failure.Relayed(f.Status, a.resp, a.call.Refusal)
	}
	return f
}

// read reads an answer that comes in one piece, or of a stream the first event.
func (a *answer) read(began time.Time) (f *failure.Fault) {
	limits := &a.job.srv.Settings().Limits
	a.kind = string(a.resp.ContentType())
	if strings.HasPrefix(a.kind, "text/event-stream") {
		a.reader.Reset(sse.Limits{Event: limits.EventBytes, Bytes: int64(limits.AnswerBytes), First: limits.ProbeTimeout, Gap: limits.EventTimeout})
		f = a.begin()
	} else {
		a.metadata = string(a.resp.Header(metadataHeader))
		a.resp.SetDeadline(began.Add(limits.ProbeTimeout))
		f = a.readWhole(limits.AnswerBytes, strings.HasPrefix(a.kind, "application/json"))
	}
	if f == nil {
		a.job.srv.Monitor.Answered(a.call.Engine)
	}
	return f
}

func (a *answer) readWhole(limit int, isJSON bool) *failure.Fault {
	whole, err := a.readAll(limit)
	switch {
	case errors.Is(err, errNoRoom):
		full := openai.Unavailable("overloaded", "requests and answers, of all callers or of you alone, take all the memory that they may use; retry later", 1)
		return failure.Useless(lifecycle.Sole, lifecycle.TooLarge, full, err)
	case errors.Is(err, engine.ErrTooLarge):
		large := failure.BadGateway(failure.Engine, "its answer is larger than limits.answer_bytes, or than the room in limits.bodies_bytes; ask for less at once")
		return failure.Useless(lifecycle.Sole, lifecycle.TooLarge, large, err)
	case err != nil:
		return a.broke(a.call.Broke(err))
	}
	a.whole = whole
	says := whole // how many tokens it has
	if !isJSON {
		says = []byte(a.metadata)
	}
	body, err := mooncake.ScanBody(says, 0)
	switch {
	case err == nil:
		a.counted(&body)
	case isJSON && !json.Valid(whole):
		return failure.Useless(lifecycle.Sole, lifecycle.Garbled, failure.BadGateway(failure.Engine, "its answer is not JSON"), err)
	}
	return nil
}

// firstRoom is what every caller may have.
const firstRoom = 4 << 10

// readAll reads the body, and charges its caller for the memory as it grows.
func (a *answer) readAll(limit int) (whole []byte, err error) {
	a.room = a.job.srv.Bodies.For(a.job.in.Body)
	limit = a.room.Most(limit+1) - 1 // one byte more shows that the answer is too large
	for {
		if len(whole) == cap(whole) {
			more := min(max(firstRoom, cap(whole)), limit+1-cap(whole))
			if !a.room.Acquire(more) {
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

// begin reads a stream up to its first event. Until then nothing is promised to the client.
func (a *answer) begin() *failure.Fault {
	for !a.begun && !a.ended {
		if err := a.fill(); err != nil {
			return a.broke(a.call.Broke(err))
		}
	}
	if !a.begun {
		return failure.Useless(lifecycle.Sole, lifecycle.Erred, a.fail, errTold)
	}
	a.job.in.Record.Report(journal.Event{What: journal.Entered, Phase: journal.Streaming, Left: a.job.conn.Left()})
	return nil
}

// fill reads one arrival. Its error is returned only before the first event; afterwards it becomes the stream's last event.
func (a *answer) fill() error {
	a.resp.SetIdle(max(a.reader.Wait(time.Now()), 1))
	var read [4 << 10]byte
	n, err := a.resp.Read(read[:])
	a.reader.Feed(read[:n], time.Now())
	for e, ok := a.reader.Next(); ok && !a.ended; e, ok = a.reader.Next() {
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
	case errors.Is(err, io.EOF) && !a.begun:
		err = errNoData
	}
	switch {
	case !a.begun:
		return err
	case errors.Is(err, io.EOF): // engines differ in whether they send [DONE]
		a.ended = true
	case a.job.conn.Left():
		a.end(failure.Gone())
	case a.run.Moved():
		a.end(a.job.drained())
	default:
		a.job.srv.Monitor.Report(a.call.Engine, err)
		a.end(openai.NewError(http.StatusBadGateway, "upstream_broken", failure.Transport(failure.Engine, err).Message))
	}
	return nil
}

// event takes in one event, which goes to the client as it came.
func (a *answer) event(e sse.Event) {
	if e.Kind == sse.KindComment && !a.begun {
		return // it would commit us to a 200
	}
	if body, err := mooncake.ScanBody(e.Data, 0); e.Kind == sse.KindData && err == nil {
		if said, failed := body.Get("error"); failed && string(said) != "null" {
			a.end(openai.NewError(http.StatusBadGateway, "engine_failed", "the engine ended its answer with an error; its log says why"))
			return
		}
		a.counted(&body)
	}
	a.begun, a.ended = true, e.Kind == sse.KindDone
	a.out = append(a.out, e.Raw...)
}

// end closes a stream that is not whole with an error event, never as if it were.
func (a *answer) end(fail *openai.Error) {
	a.ended, a.fail = true, fail
	if a.reader.Torn() {
		a.out = append(a.out, sse.BlankLine...)
	}
	if a.begun { // else the error has a status
		a.out = append(sse.ErrorEvent(a.out, fail.Message, fail.Type, fail.Code), sse.Done...)
	}
}

// mostTokens bounds an engine's counts, because those that no model could have are not believed. A request may have many prompts,
// but not so many.
const mostTokens = 64 << 20

// counted takes note of the tokens that the engine counted, if it did.
func (a *answer) counted(body *mooncake.Body) {
	var usage struct {
		Prompt int `json:"prompt_tokens"`
		Output int `json:"completion_tokens"`
	}
	if raw, ok := body.Get("usage"); !ok || json.Unmarshal(raw, &usage) != nil {
		return
	}
	for _, n := range [...]*int{&usage.Prompt, &usage.Output} {
		if *n < 0 || *n > mostTokens {
			*n = 0
		}
	}
	if usage.Prompt+usage.Output > 0 {
		a.prompt = int64(usage.Prompt)
		a.job.in.Record.PromptTokens, a.job.in.Record.OutputTokens = usage.Prompt, usage.Output
	}
}

// Read hands out what has arrived, waiting for the first bytes only.
func (a *answer) Read(p []byte) (int, error) {
	for len(a.out) == 0 {
		if a.ended {
			return 0, io.EOF
		}
		a.out = nil
		if err := a.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, a.out)
	a.out = a.out[n:]
	return n, nil
}

// Pending is how much more Read has without waiting.
func (a *answer) Pending() int { return len(a.out) }

// Ended says that behind what Read has nothing comes.
func (a *answer) Ended() bool { return a.ended }

// Close settles the request of a stream, however it ended.
func (a *answer) Close() {
	e := lifecycle.Event{What: lifecycle.Ends}
	if !a.ended && a.whole == nil { // the client's side ended first
		a.fail = failure.Gone()
	}
	if a.fail != nil {
		e.What = lifecycle.Fell
	}
	_ = a.job.run(e)
}
