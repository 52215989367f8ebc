package refengine

import (
	"fmt"
	"strconv"

	"evenkeel/bench/refengine/wire"
	"evenkeel/rawjson"
)

// ErrorShape is how an error body looks.
type ErrorShape string

// The shapes. The last three occur in rules only.
const (
	ShapeNew     ErrorShape = "new"
	ShapeOld     ErrorShape = "old"
	ShapeRust    ErrorShape = "rust"
	ShapeFastAPI ErrorShape = "fastapi"
	ShapeText    ErrorShape = "text"
	ShapeHTML    ErrorShape = "html"
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

var errorTypes = map[int]struct{ python, rust string }{ // the type that Python names, the code that Rust does
	400: {"BadRequestError", "invalid_request_error"},
	401: {"Unauthorized", "unauthorized"},
	404: {"NotFoundError", "model_not_found"},
	413: {"PayloadTooLargeError", "payload_too_large"},
	429: {"RateLimitError", "rate_limit_exceeded"},
	500: {"InternalServerError", "server_error"},
	503: {"ServiceUnavailable", "service_unavailable"},
}

func (e *apiError) body(shape ErrorShape) (body []byte, contentType string) {
	types, ok := errorTypes[e.status]
	if !ok {
		types = errorTypes[500]
	}
	message, param := rawjson.AppendString(nil, e.message), []byte("null")
	if e.param != "" {
		param = rawjson.AppendString(nil, e.param)
	}
	switch shape {
	case ShapeOld:
		return fmt.Appendf(nil, `{"object":"error","message":%s,"type":%q,"param":%s,"code":%d}`, message, types.python, param, e.status), typeJSON
	case ShapeRust:
		kind := "invalid_request_error"
		if e.status >= 500 {
			kind = "server_error"
		}
		return fmt.Appendf(nil, `{"error":{"message":%s,"type":%q,"param":null,"code":%q}}`, message, kind, types.rust), typeJSON
	case ShapeFastAPI:
		return fmt.Appendf(nil, `{"detail":%s}`, message), typeJSON
	case ShapeText:
		return []byte(e.message), "text/plain; charset=utf-8"
	case ShapeHTML:
		return fmt.Appendf(nil, "<html><body><h1>%s</h1></body></html>\n", e.message), "text/html"
	}
	return fmt.Appendf(nil, `{"error":{"message":%s,"type":%q,"param":%s,"code":%d}}`, message, types.python, param, e.status), typeJSON
}

// exchange is a request on a connection, and how its errors look.
type exchange struct {
	*wire.Exchange
	shape ErrorShape
	words words // of its endpoint; nil: those of a chat or a completion
}

// words turn what a chat is answered into the answer of another endpoint.
type words interface {
	Begin(id string) (events []byte)                         // what comes before anything is computed
	Events(chat []byte) (events []byte)                      // for some of the chat's
	Whole(id string, chat []byte) (whole []byte, status int) // status is 0 for what is no chat
	Error(chat []byte) []byte
}

// Answer, Stream and Event are those of the wire, in the words of the endpoint.
func (x *exchange) Answer(status int, contentType string, body []byte, extra ...string) bool {
	if x.words != nil && status == 200 {
		if whole, now := x.words.Whole(x.Req.Header.Get("X-Request-Id"), body); now != 0 {
			body, status = whole, now
		}
	} else if x.words != nil {
		body = x.words.Error(body)
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

const typeJSON = "application/json"

func (x *exchange) fail(e *apiError) bool { return x.failAs(e, x.shape) }

func (x *exchange) failAs(e *apiError, shape ErrorShape) bool {
	body, contentType := e.body(shape)
	var extra []string
	if e.retryAfter > 0 {
		extra = []string{"retry-after", strconv.Itoa(e.retryAfter)}
	}
	return x.Answer(e.status, contentType, body, extra...)
}
