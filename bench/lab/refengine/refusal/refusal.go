// Package refusal is how engines word an error: their versions and front ends differ in it.
package refusal

import (
	"fmt"

	"evenkeel/internal/rawjson"
)

// Shape is how an error body looks.
type Shape string

// The shapes. The last three are those of what stands in front of an engine.
const (
	New     Shape = "new"
	Old     Shape = "old"
	Rust    Shape = "rust"
	FastAPI Shape = "fastapi"
	Text    Shape = "text"
	HTML    Shape = "html"
)

// JSON is the content type of most bodies.
const JSON = "application/json"

var types = map[int]struct{ python, rust string }{ // the type that Python names, the code that Rust does
	400: {"BadRequestError", "invalid_request_error"},
	401: {"Unauthorized", "unauthorized"},
	404: {"NotFoundError", "model_not_found"},
	413: {"PayloadTooLargeError", "payload_too_large"},
	429: {"RateLimitError", "rate_limit_exceeded"},
	500: {"InternalServerError", "server_error"},
	503: {"ServiceUnavailable", "service_unavailable"},
}

// Body is the body of an error, and its content type. member is the one at fault; empty: null.
func Body(shape Shape, status int, text, member string) (body []byte, contentType string) {
	kinds, ok := types[status]
	if !ok {
		kinds = types[500]
	}
	message, param := rawjson.AppendString(nil, text), []byte("null")
	if member != "" {
		param = rawjson.AppendString(nil, member)
	}
	switch shape {
	case Old:
		return fmt.Appendf(nil, `{"object":"error","message":%s,"type":%q,"param":%s,"code":%d}`, message, kinds.python, param, status), JSON
	case Rust:
		kind := "invalid_request_error"
		if status >= 500 {
			kind = "server_error"
		}
		return fmt.Appendf(nil, `{"error":{"message":%s,"type":%q,"param":null,"code":%q}}`, message, kind, kinds.rust), JSON
	case FastAPI:
		return fmt.Appendf(nil, `{"detail":%s}`, message), JSON
	case Text:
		return []byte(text), "text/plain; charset=utf-8"
	case HTML:
		return fmt.Appendf(nil, "<html><body><h1>%s</h1></body></html>\n", text), "text/html"
	}
	return fmt.Appendf(nil, `{"error":{"message":%s,"type":%q,"param":%s,"code":%d}}`, message, kinds.python, param, status), JSON
}
