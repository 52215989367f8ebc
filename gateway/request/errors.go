package request

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// errGone stands for an answer that no client reads any more.
func errGone() *openai.Error {
	return openai.NewError(journal.StatusClientClosed, "client_closed", "the client left")
}

// ErrLeaving ends what the proxy has no time for any more.
func ErrLeaving() *openai.Error {
	return openai.Unavailable("draining", "this proxy is shutting down; use another", 1)
}

// ErrNotOurs is the end of a request whose decode group another proxy has.
func ErrNotOurs() *openai.Error {
	return openai.Unavailable(geo.RejectOwner, "another proxy admits to the decode group now; send the request again", 1)
}

// movedOut is the end of an answer that a drain's deadline cut and that no other
// engine takes up.
func (srv *Server) movedOut() *openai.Error {
	if srv.Serving().Err() != nil {
		return ErrLeaving()
	}
	return openai.Unavailable("engine_drained", "its engine was taken out of service and the answer cannot go on elsewhere; send the request again", 1)
}

// errDrained ends an answer whose rank was drained and that no other can take up.
var errDrained = errors.New("the engine was taken out of service")

// badGateway says that an engine failed and no retry is left.
func badGateway(side, why string) *openai.Error {
	return openai.NewError(http.StatusBadGateway, side+"_failed", "the "+side+" engine failed: "+why)
}

// transportError is badGateway for a call that broke, 504 where the engine was
// silent and 503 where it could not be reached at all.
func transportError(side string, err error) *openai.Error {
	var ee *engine.Error
	switch isCall := errors.As(err, &ee); {
	case isCall && ee.Phase == engine.PhaseConnect:
		return openai.Unavailable(side+"_unavailable", "the "+side+" engine cannot be reached; retry later", 1)
	case isCall && ee.Timeout, errors.Is(err, sse.ErrSilent):
		return openai.NewError(http.StatusGatewayTimeout, side+"_timeout", "the "+side+" engine was silent for too long")
	}
	return badGateway(side, cause(err))
}

// streamError ends an answer whose engine broke it off.
func streamError(code string, err error) *openai.Error {
	return openai.NewError(http.StatusBadGateway, code, "the decode engine's answer broke off: "+cause(err))
}

// engineError is what an engine said in an event, as a client sees it in place
// of an answer: only a refusal of the request keeps its status.
func engineError(f sse.Failure) *openai.Error {
	e := &openai.Error{Status: f.Status, Type: f.Type, Code: f.Code, Message: f.Message}
	if f.Status/100 != 4 || f.Status == http.StatusUnauthorized || f.Status == http.StatusForbidden {
		e.Status = http.StatusBadGateway
	}
	if e.Status == http.StatusTooManyRequests {
		e.RetryAfter = 1
	}
	return e
}

// cause says how a call failed in words for a client; addresses stay in the
// log.
func cause(err error) string {
	var ee *engine.Error
	switch isCall := errors.As(err, &ee); {
	case !isCall:
		return err.Error()
	case ee.Timeout:
		return "silence for too long"
	case errors.Is(err, engine.ErrTooLarge):
		return "more bytes than allowed"
	case errors.Is(err, engine.ErrMalformed):
		return "not valid HTTP"
	}
	return "the connection was lost"
}

// relayed is an engine's own answer, byte for byte.
func relayed(status int, resp *engine.Response, body []byte) *openai.Error {
	e := &openai.Error{
		Status: status, Code: "engine_refused", Raw: body, ContentType: string(resp.ContentType()),
		Message: fmt.Sprintf("an engine refused the request with status %d", status), // for a stream that has begun
	}
	if e.Raw == nil { // an empty answer is still an answer
		e.Raw = []byte{}
	}
	if status == http.StatusTooManyRequests {
		e.RetryAfter = max(1, retryAfter(resp))
	}
	return e
}

// chooseError maps what the prefill tier says.
func chooseError(err error, model string) *openai.Error {
	switch {
	case errors.Is(err, prefill.ErrQueueFull):
		return &openai.Error{Status: http.StatusTooManyRequests, Code: "queue_full", Message: "too many requests wait already; retry later", RetryAfter: 1}
	case errors.Is(err, prefill.ErrKVExhausted):
		return openai.Unavailable("prefill_kv_exhausted", "every prefill engine's KV memory is taken; retry later", 2)
	case errors.Is(err, prefill.ErrQueueTimeout):
		return openai.Unavailable("queue_timeout", "the request waited too long for a prefill engine; retry later", 2)
	case errors.Is(err, prefill.ErrModelNotFound):
		return &openai.Error{Status: http.StatusNotFound, Code: "model_not_found", Param: "model", Message: fmt.Sprintf("no prefill engine serves %q", model)}
	case errors.Is(err, prefill.ErrBadPolicy): // a reload dropped it since it was checked
		return openai.NewError(http.StatusBadRequest, "bad_policy", err.Error())
	case errors.Is(err, context.Canceled):
		return ErrLeaving()
	case errors.Is(err, prefill.ErrElsewhere):
		return ErrNotOurs()
	}
	return openai.Unavailable("prefill_unavailable", "no healthy prefill engine serves the model", 1)
}

// waitError maps what the dispatcher says of an entry it could not place.
func waitError(err error, prompt int) *openai.Error {
	switch {
	case errors.Is(err, board.ErrTooLarge):
		return &openai.Error{
			Status: http.StatusBadRequest, Code: "prompt_too_long",
			Message: fmt.Sprintf("the prompt's %d tokens are more than any decode rank's whole KV memory", prompt),
		}
	case errors.Is(err, pool.ErrTimeout), errors.Is(err, pool.ErrExpired):
		return openai.Unavailable("pool_timeout", "no decode rank had room in time; retry later", 2)
	case errors.Is(err, board.ErrDraining):
		return ErrLeaving()
	}
	return openai.Unavailable("decode_unavailable", "no healthy decode engine serves the model", 1)
}

// retryAfter reads an engine's Retry-After in seconds; a date counts as none. A
// client that waited for more than an hour would be lost, and no engine can plan
// that far ahead.
func retryAfter(resp *engine.Response) int {
	n, err := strconv.Atoi(string(resp.Header("Retry-After")))
	if errors.Is(err, strconv.ErrSyntax) || n < 0 {
		return 0
	}
	return min(n, mostRetryAfter)
}

const mostRetryAfter = 3600

// errBroken is the end of a request that panicked.
func errBroken() *openai.Error {
	return openai.NewError(http.StatusInternalServerError, "internal_error", "internal error; the request may be tried again")
}
