package refengine

import (
	"fmt"
	"strconv"

	"evenkeel/bench/lab/refengine/refusal"
	"evenkeel/bench/lab/refengine/wire"
)

// ErrorShape is how an error body looks.
type ErrorShape = refusal.Shape

// The shapes. The last three occur in rules only.
const (
	ShapeNew     = refusal.New
	ShapeOld     = refusal.Old
	ShapeRust    = refusal.Rust
	ShapeFastAPI = refusal.FastAPI
	ShapeText    = refusal.Text
	ShapeHTML    = refusal.HTML
)

// apiError is an answer other than 200.
type apiError struct {
	status     int
	message    string
	param      string // the member at fault, empty: null
	retryAfter int    // seconds, 0 = no header
}

func (e *apiError) Error() string { return fmt.Sprintf("%d: %s", e.status, e.message) }

func refuse(status int, format string, args ...any) *apiError {
	return &apiError{status: status, message: fmt.Sprintf(format, args...)}
}

// of names the member at fault.
func (e *apiError) of(param string) *apiError {
	e.param = param
	return e
}

func (e *apiError) body(shape ErrorShape) (body []byte, contentType string) {
	return refusal.Body(shape, e.status, e.message, e.param)
}

// exchange is a request on a connection, and how its errors look.
type exchange struct {
	*wire.Exchange
	shape ErrorShape
	words words // of its endpoint; nil: those of a chat or a completion
	late  bool  // its head goes out before anything can be refused
}

// words turn what a chat is answered into the answer of another endpoint.
type words interface {
	Begin(id string) (events []byte)                         // what comes before anything is computed
	Events(chat []byte) (events []byte)                      // for some of the chat's
	Whole(id string, chat []byte) (whole []byte, status int) // status is 0 for what is no chat
	Error(status int, chat []byte) (body []byte, now int)
}

// Answer, Stream and Event are those of the wire, in the words of the endpoint.
func (x *exchange) Answer(status int, contentType string, body []byte, extra ...string) bool {
	if x.words != nil && status == 200 {
		if whole, now := x.words.Whole(x.Req.Header.Get("X-Request-Id"), body); now != 0 {
			body, status = whole, now
		}
	} else if x.words != nil {
		body, status = x.words.Error(status, body)
	}
	return x.Exchange.Answer(status, contentType, body, extra...)
}

func (x *exchange) Stream(contentType string) bool {
	if !x.Exchange.Stream(contentType) {
		return false
	}
	if x.words == nil {
		return true
	}
	events := x.words.Begin(x.Req.Header.Get("X-Request-Id"))
	return len(events) == 0 || x.Exchange.Event(func(dst []byte) []byte { return append(dst, events...) })
}

func (x *exchange) Event(build func(dst []byte) []byte) bool {
	if x.words == nil {
		return x.Exchange.Event(build)
	}
	events := x.words.Events(build(nil))
	return len(events) == 0 || x.Exchange.Event(func(dst []byte) []byte { return append(dst, events...) })
}

const (
	typeJSON   = refusal.JSON
	typeEvents = "text/event-stream; charset=utf-8"
)

func (x *exchange) fail(e *apiError) bool { return x.failAs(e, x.shape) }

func (x *exchange) failAs(e *apiError, shape ErrorShape) bool {
	if x.late {
		body, _ := e.body(ShapeNew)
		return x.Stream(typeEvents) && x.Event(func(dst []byte) []byte { return append(append(append(dst, "data: "...), body...), "\n\n"...) }) &&
			x.EndStream()
	}
	body, contentType := e.body(shape)
	var extra []string
	if e.retryAfter > 0 {
		extra = []string{"retry-after", strconv.Itoa(e.retryAfter)}
	}
	return x.Answer(e.status, contentType, body, extra...)
}
