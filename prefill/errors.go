package prefill

import (
	"errors"
	"fmt"
)

// The errors of Acquire, beside that of its context. The gateway answers each with the status and
// code beside it.
var (
	ErrQueueFull     = errors.New("prefill: arrival queue full")                             // HTTP 429, code queue_full
	ErrQueueTimeout  = errors.New("prefill: arrival queue timeout")                          // HTTP 503, code queue_timeout
	ErrDeadline      = errors.New("prefill: the deadline of the request cannot be met")      // HTTP 503, code deadline_unmet
	ErrKVExhausted   = errors.New("prefill: the KV gates of all prefill engines are closed") // HTTP 503, code prefill_kv_exhausted
	ErrUnavailable   = errors.New("prefill: no prefill engine is up")                        // HTTP 503, code prefill_unavailable
	ErrModelNotFound = errors.New("prefill: no configured prefill engine serves the model")  // HTTP 404, code model_not_found
	ErrBadTarget     = errors.New("prefill: no such candidate")                              // HTTP 400, code bad_target
	// ErrBadPolicy is HTTP 400, code bad_policy. The wrapped error says what is wrong.
	ErrBadPolicy = errors.New("prefill")
)

// FullError is an ErrQueueFull with details.
type FullError struct {
	Model string
	Max   int    // requests that may wait for the model
	Key   string // sets Max
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%v: %d requests wait for model %q; send fewer, or raise %s", ErrQueueFull, e.Max, e.Model, e.Key)
}

func (e *FullError) Unwrap() error { return ErrQueueFull }
