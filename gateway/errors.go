package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// unavailable is a 503 that says when to come back.
func unavailable(code, message string, retryAfter int) *openai.Error {
	e := openai.NewError(http.StatusServiceUnavailable, code, message)
	e.RetryAfter = retryAfter
	return e
}

// badGateway says that an engine failed and no retry is left.
func badGateway(side, id string, err error) *openai.Error {
	return openai.NewError(http.StatusBadGateway, side+"_failed", fmt.Sprintf("%s engine %s failed: %v", side, id, err))
}

// transportError is badGateway, or 504 where the engine was silent.
func transportError(side, id string, err error) *openai.Error {
	e := badGateway(side, id, err)
	var ee *engine.Error
	if errors.As(err, &ee) && ee.Timeout {
		e.Status, e.Code = http.StatusGatewayTimeout, side+"_timeout"
	}
	return e
}

// relayed is an engine's own answer, byte for byte.
func relayed(status int, resp *engine.Response, body []byte) *openai.Error {
	e := &openai.Error{Status: status, Code: "engine_refused", Raw: body, ContentType: string(resp.ContentType())}
	if e.Raw == nil { // an empty answer is still an answer
		e.Raw = []byte{}
	}
	if status == http.StatusTooManyRequests {
		e.RetryAfter = max(1, retryAfter(resp))
	}
	return e
}

// chooseError maps what the prefill tier says (prefill 9).
func (g *Gateway) chooseError(err error, model string) *openai.Error {
	switch {
	case errors.Is(err, prefill.ErrQueueFull):
		return &openai.Error{Status: http.StatusTooManyRequests, Code: "queue_full", Message: "too many requests wait already; retry later", RetryAfter: 1}
	case errors.Is(err, prefill.ErrKVExhausted):
		return unavailable("prefill_kv_exhausted", "every prefill engine's KV memory is taken; retry later", 2)
	case errors.Is(err, prefill.ErrQueueTimeout):
		return unavailable("queue_timeout", "the request waited too long for a prefill engine; retry later", 2)
	case errors.Is(err, prefill.ErrModelNotFound):
		return &openai.Error{Status: http.StatusNotFound, Code: "model_not_found", Param: "model", Message: fmt.Sprintf("no prefill engine serves %q", model)}
	case errors.Is(err, context.Canceled):
		return unavailable("draining", "this proxy is shutting down; use another", 1)
	}
	return unavailable("prefill_unavailable", "no healthy prefill engine serves the model", 1)
}

// waitError maps what the dispatcher says of an entry it could not place.
func (g *Gateway) waitError(err error, prompt int) *openai.Error {
	switch {
	case errors.Is(err, dispatcher.ErrTooLarge):
		return &openai.Error{
			Status: http.StatusBadRequest, Code: "prompt_too_long",
			Message: fmt.Sprintf("the prompt's %d tokens are more than any decode rank's whole KV memory", prompt),
		}
	case errors.Is(err, pool.ErrTimeout), errors.Is(err, pool.ErrExpired):
		return unavailable("pool_timeout", "no decode rank had room in time; retry later", 2)
	case errors.Is(err, dispatcher.ErrDraining):
		return unavailable("draining", "this proxy is shutting down; use another", 1)
	}
	return unavailable("decode_unavailable", "no healthy decode engine serves the model", 1)
}

// retryAfter reads an engine's Retry-After in seconds; a date counts as none.
func retryAfter(resp *engine.Response) int {
	n, err := strconv.Atoi(string(resp.Header("Retry-After")))
	if err != nil || n < 0 {
		return 0
	}
	return n
}
