package openai

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// Values of Error.Code for requests that this package refuses. Its callers have further codes, such
// as queue_full.
const (
	CodeInvalidJSON  = "invalid_json"
	CodeInvalidType  = "invalid_type"
	CodeInvalidValue = "invalid_value"
	CodeDuplicateKey = "duplicate_key"
	CodeMissing      = "missing_required_parameter"
	CodeUnsupported  = "unsupported_parameter"
)

// Error is an error answer in OpenAI's shape.
type Error struct {
	Status     int
	Type       string // empty: the type follows from the status
	Code       string
	Param      string // key of the request body at fault; empty: the answer has null
	Message    string
	RetryAfter int // seconds for the header Retry-After; 0: the answer has no such header
	// Why is for operators, and never sent to clients: what was full, its limit, and the config key
	// that sets the limit; empty: nothing was full.
	Why        string
	ByKeyLimit bool // the limit in Why belongs to the caller's API key only, so other callers are still served

	// Raw is the body of an engine's own error. It is sent unchanged, with ContentType, in place of
	// the fields above.
	Raw         []byte
	ContentType string
}

// NewError sets the type that OpenAI's API has for this status.
func NewError(status int, code, message string) *Error {
	return &Error{Status: status, Type: typeOfStatus(status), Code: code, Message: message}
}

// Unavailable returns a 503. retryAfter is in seconds.
func Unavailable(code, message string, retryAfter int) *Error {
	e := NewError(http.StatusServiceUnavailable, code, message)
	e.RetryAfter = retryAfter
	return e
}

func typeOfStatus(status int) string {
	switch {
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

func (e *Error) Error() string {
	if e.Param == "" {
		return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message)
	}
	return fmt.Sprintf("%d %s: %s: %s", e.Status, e.Code, e.Param, e.Message)
}

// JSON returns the engine's own body if there is one, otherwise OpenAI's shape.
func (e *Error) JSON() []byte {
	if e.Raw != nil {
		return e.Raw
	}
	type inner struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	in := inner{Message: e.Message, Type: e.Type}
	if in.Type == "" {
		in.Type = typeOfStatus(e.Status)
	}
	if e.Param != "" {
		in.Param = &e.Param
	}
	if e.Code != "" {
		in.Code = &e.Code
	}
	body, _ := json.Marshal(struct {
		Error inner `json:"error"`
	}{in})
	return body
}

// param is the key at fault; empty: no single one is.
func badRequest(code, param, format string, args ...any) *Error {
	for i := range args { // a client's may have megabytes
		if s, ok := args[i].(string); ok {
			args[i] = limitText(s)
		}
	}
	e := NewError(http.StatusBadRequest, code, fmt.Sprintf(format, args...))
	e.Param = limitText(param)
	return e
}

func (e *Error) prefixParam(path string) *Error {
	e.Param = path + e.Param
	return e
}

// prefixMember puts a name, or an index such as "[3]", before Param, and a dot if a name follows.
func (e *Error) prefixMember(name string) *Error {
	if e.Param != "" && e.Param[0] != '[' {
		name += "."
	}
	return e.prefixParam(name)
}

// limitText cuts a client's text that an error repeats.
func limitText(s string) string {
	const maxBytes = 512
	if len(s) > maxBytes {
		return strings.ToValidUTF8(s[:maxBytes], "") + "..."
	}
	return s
}
