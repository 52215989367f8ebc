package edge

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// Options are the handler and the limits of a server. A field that is zero gets the default in its
// comment.
type Options struct {
	// If Handler panics, the client gets a 500, and the stack is logged.
	Handler fasthttp.RequestHandler
	// Answer writes a refusal (default: AnswerJSON). ctx.Request may be empty or half read.
	Answer func(ctx *fasthttp.RequestCtx, r Refusal)
	Log    *zap.Logger // nil: nothing is logged

	// Authenticate, if set, returns the refusal of a request that is not allowed by its head alone. It
	// is called once for each request whose body may be large. After a refusal, a body of more than 4
	// KiB is not read, because otherwise any unknown caller could take MaxBody of memory per
	// connection. A smaller body is read before the handler refuses the request, so that the
	// connection stays open.
	Authenticate func(h *fasthttp.RequestHeader) *Refusal
	// Caller, if set, returns who is charged for the body's memory; empty: the client's address.
	Caller func(h *fasthttp.RequestHeader) string

	// Bodies, if set, bounds the memory of all request bodies together, and the share of each caller.
	Bodies *Quota
	// Refused, if set, is called for every refusal before the handler. The head is empty if it could
	// not be read.
	Refused func(h *fasthttp.RequestHeader, r Refusal)

	MaxHead int // most bytes of request line and headers (default 16 KiB); a longer head gets 431
	MaxBody int // most bytes of a body (default 32 MiB); a longer body gets 413

	// ReadTimeout bounds a request's time from its first to its last byte (default 30 s); a slower
	// client gets 408. A large body gets more, as long as it arrives at MinUploadRate (default 256 KiB
	// per second): 32 MiB may take 128 s more.
	ReadTimeout   time.Duration
	MinUploadRate int
	// IdleTimeout is the time between requests (default 120 s, because common clients close an idle
	// connection earlier).
	IdleTimeout time.Duration

	// Concurrency is how many connections are served at once (default 65,536). Keep the listener's
	// MaxConns below it, because only the listener refuses connections without blocking accept.
	Concurrency int
}

// Refusal is an error answer without the handler.
type Refusal struct {
	Status  int
	Code    string // the error.code of the answer, such as request_timeout or body_too_large
	Message string // says what was wrong and what to do, without text from the request
}

var (
	// Its Message is the rule that the head breaks.
	refusedHead    = Refusal{fasthttp.StatusBadRequest, "bad_request_head", ""}
	refusedRequest = Refusal{fasthttp.StatusBadRequest, "bad_request", "the request is not valid HTTP/1.1, or ended too early"}
	refusedSlow    = Refusal{fasthttp.StatusRequestTimeout, "request_timeout",
		"the request did not arrive in time; send it faster, or in smaller parts"}
	noRoomForBody = Refusal{fasthttp.StatusServiceUnavailable, "overloaded",
		"request bodies, of all callers or of you alone, take all the memory that they may use; retry later"}
	refusedPanic = Refusal{fasthttp.StatusInternalServerError, "internal_error", "internal error; the request may be tried again"}
)

// maxHead is for the message.
func refusalOf(ctx *fasthttp.RequestCtx, err error, maxHead int) Refusal {
	var (
		small   *fasthttp.ErrSmallBuffer
		timeout net.Error
	)
	switch {
	case errors.As(err, &small), errors.Is(err, fasthttp.ErrSmallReadBuffer):
		return Refusal{fasthttp.StatusRequestHeaderFieldsTooLarge, "head_too_large",
			"request line and headers are limited to " + strconv.Itoa(maxHead) + " bytes; send fewer or shorter headers"}
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return refusedSlow
	}
	if c, ok := ConnOf(ctx); ok && c.readTimedOut.Load() { // the timeout may have come before err
		return refusedSlow
	}
	return refusedRequest
}

func (o *Options) tooLarge() *Refusal {
	return &Refusal{fasthttp.StatusRequestEntityTooLarge, "body_too_large",
		"the request body is limited to " + strconv.Itoa(o.MaxBody) + " bytes; send less"}
}

// AnswerJSON writes OpenAI's error object. It is the default of Options.Answer.
func AnswerJSON(ctx *fasthttp.RequestCtx, r Refusal) {
	if r.Status == fasthttp.StatusUnauthorized {
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	}
	if r.Status == fasthttp.StatusServiceUnavailable {
		ctx.Response.Header.Set("Retry-After", "1")
	}
	ctx.SetStatusCode(r.Status)
	ctx.SetContentType("application/json")
	ctx.SetBody(errorJSON(r))
}

func errorJSON(r Refusal) []byte {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}
	kind := "invalid_request_error"
	switch {
	case r.Status == fasthttp.StatusUnauthorized:
		kind = "authentication_error"
	case r.Status >= 500:
		kind = "server_error"
	}
	b, err := json.Marshal(struct {
		Error detail `json:"error"`
	}{detail{Message: r.Message, Type: kind, Code: r.Code}})
	if err != nil {
		panic(err)
	}
	return b
}

// The complete answers to connections that exceed a limit, from which no request is read.
var (
	busyAnswer = rawAnswer("503 Service Unavailable", Refusal{503, "too_many_connections",
		"the server has as many connections as it may; try again later"})
	perIPAnswer = rawAnswer("429 Too Many Requests", Refusal{429, "too_many_connections",
		"too many connections from your address; reuse the ones you have"})
)

func rawAnswer(status string, r Refusal) string {
	body := errorJSON(r)
	return "HTTP/1.1 " + status + "\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n" + string(body)
}
