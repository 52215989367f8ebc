package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
)

// Kind says how a request ended. A refusal by status is one of its own for
// each status and error code: http_429, http_404/model_not_found.
type Kind string

// The kinds. OK, Cancelled and Stopped are no failures; those marked wrong are
// answers that a correct server never gives, whatever its load.
const (
	OK        Kind = "ok"
	Cancelled Kind = "cancelled" // by us, as planned
	Stopped   Kind = "stopped"   // by us, because the run was ended

	WrongText     Kind = "wrong_text"     // wrong: text that differs, or goes on beyond the end
	MissingTokens Kind = "missing_tokens" // wrong: ended as if whole, with fewer tokens than asked
	NoFinish      Kind = "no_finish"      // wrong: [DONE] without a finish_reason
	NoDone        Kind = "no_done"        // wrong: finished, but no [DONE]
	BadFinish     Kind = "bad_finish"     // wrong: another finish_reason than the request calls for
	BadJSON       Kind = "bad_json"       // wrong: an event or answer that is no JSON object of the API's shape
	BadShape      Kind = "bad_shape"      // wrong: id changes, index is not 0, events after [DONE], no Content-Length, wrong type
	BadUsage      Kind = "bad_usage"      // wrong: usage missing, not asked for, or with wrong counts
	Truncated     Kind = "truncated"      // the body broke off, or ended without a word
	ErrorEvent    Kind = "error_event"    // an error inside a stream, or with status 200
	Connect       Kind = "connect"
	Timeout       Kind = "timeout" // Config.Timeout
	Reset         Kind = "reset"   // the connection was closed under us
	BadHTTP       Kind = "bad_http"
)

// Wrong tells answers that are wrong from requests that only failed.
func (k Kind) Wrong() bool {
	switch k {
	case WrongText, MissingTokens, NoFinish, NoDone, BadFinish, BadJSON, BadShape, BadUsage:
		return true
	}
	return false
}

// Refused is true for a refusal by status.
func (k Kind) Refused() bool { return strings.HasPrefix(string(k), "http_") }

// Failed is true for all but OK, Cancelled and Stopped.
func (k Kind) Failed() bool { return k != OK && k != Cancelled && k != Stopped }

// fault is why a request did not end well.
type fault struct {
	kind   Kind
	detail string
}

func (f *fault) Error() string { return string(f.kind) + ": " + f.detail }

func faultf(kind Kind, format string, args ...any) *fault {
	return &fault{kind, fmt.Sprintf(format, args...)}
}

// Causes with which a request's context ends.
var (
	errCancel  = errors.New("cancelled as planned")
	errTimeout = errors.New("request timeout")
)

// transportFault names an error of net/http: of sending, of waiting for the
// response head, or of reading the body.
func transportFault(ctx context.Context, err error) *fault {
	switch cause := context.Cause(ctx); {
	case cause == nil:
	case errors.Is(cause, errCancel):
		return &fault{Cancelled, ""}
	case errors.Is(cause, errTimeout):
		return &fault{Timeout, err.Error()}
	default:
		return &fault{Stopped, cause.Error()}
	}
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		return &fault{Connect, err.Error()}
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &fault{Truncated, "the body broke off"}
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		return &fault{Reset, err.Error()}
	}
	return &fault{BadHTTP, err.Error()}
}

// statusFault names an answer other than 200 by status and error code.
func statusFault(resp *http.Response, body []byte) *fault {
	kind := "http_" + strconv.Itoa(resp.StatusCode)
	var c chunk
	if c.scan(body) != nil {
		return &fault{Kind(kind), clip(body)}
	}
	if code := string(c.code); code != "" && code != strconv.Itoa(resp.StatusCode) {
		kind += "/" + code
	}
	if len(c.message) == 0 {
		return &fault{Kind(kind), clip(body)}
	}
	return &fault{Kind(kind), clip(c.message)}
}

// clip shortens what a server sent for a report.
func clip(b []byte) string {
	const most = 200
	if len(b) > most {
		return fmt.Sprintf("%q...", b[:most])
	}
	return fmt.Sprintf("%q", b)
}
