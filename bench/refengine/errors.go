package refengine

import (
	"fmt"
	"strconv"

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

var errorTypes = map[int][2]string{ // Python's type, RUST's code
	400: {"BadRequestError", "invalid_request_error"},
	401: {"Unauthorized", "unauthorized"},
	404: {"NotFoundError", "model_not_found"},
	413: {"PayloadTooLargeError", "payload_too_large"},
	429: {"RateLimitError", "rate_limit_exceeded"},
	500: {"InternalServerError", "server_error"},
	503: {"ServiceUnavailable", "service_unavailable"},
}

func errorType(status int) (python, rust string) {
	if t, ok := errorTypes[status]; ok {
		return t[0], t[1]
	}
	return "InternalServerError", "server_error"
}

func (e *apiError) body(shape ErrorShape) (body []byte, contentType string) {
	python, rust := errorType(e.status)
	switch shape {
	case ShapeOld:
		body = append(body, `{"object":"error","message":"`...)
		body = rawjson.AppendEscaped(body, e.message)
		return append(e.appendRest(body, python), '}'), typeJSON
	case ShapeRust:
		body = append(body, `{"error":{"message":"`...)
		body = rawjson.AppendEscaped(body, e.message)
		kind := "invalid_request_error"
		if e.status >= 500 {
			kind = "server_error"
		}
		body = append(append(append(body, `","type":"`...), kind...), `","param":null,"code":"`...)
		return append(append(body, rust...), `"}}`...), typeJSON
	case ShapeFastAPI:
		return append(rawjson.AppendEscaped(append(body, `{"detail":"`...), e.message), `"}`...), typeJSON
	case ShapeText:
		return append(body, e.message...), "text/plain; charset=utf-8"
	case ShapeHTML:
		return append(append(append(body, "<html><body><h1>"...), e.message...), "</h1></body></html>\n"...), "text/html"
	}
	body = append(body, `{"error":{"message":"`...)
	body = rawjson.AppendEscaped(body, e.message)
	return append(e.appendRest(body, python), "}}"...), typeJSON
}

// appendRest appends what follows the message in Python's shapes.
func (e *apiError) appendRest(dst []byte, kind string) []byte {
	dst = append(append(append(dst, `","type":"`...), kind...), `","param":`...)
	if e.param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = append(rawjson.AppendEscaped(append(dst, '"'), e.param), '"')
	}
	return strconv.AppendInt(append(dst, `,"code":`...), int64(e.status), 10)
}
