package prefill

import (
	"errors"
	"fmt"
)

// The errors of Acquire, in addition to the error of its context. The gateway answers each with the status and code beside
// it.
var (
	ErrQueueFull     = errors.New("prefill: arrival queue full")                             // 429 queue_full
	ErrQueueTimeout  = errors.New("prefill: arrival queue timeout")                          // 503 queue_timeout
	ErrDeadline      = errors.New("prefill: the deadline of the request cannot be met")      // 503 deadline_unmet
	ErrKVExhausted   = errors.New("prefill: the KV gates of all prefill engines are closed") // 503 prefill_kv_exhausted
	ErrUnavailable   = errors.New("prefill: no prefill engine is up")                        // 503 prefill_unavailable
	ErrModelNotFound = errors.New("prefill: no configured prefill engine serves the model")  // 404 model_not_found
	ErrBadTarget     = errors.New("prefill: no such candidate")                              // 400 bad_target
	ErrBadPolicy     = errors.New("prefill")                                                 // 400 bad_policy; policy.Parse says what is wrong
)

// FullError is an ErrQueueFull with details.
type FullError struct {
	Model string
	Max   int    // most requests that may wait for the model
	Key   string // the config key that sets Max
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%v: %d requests wait for model %q; send fewer, or raise %s", ErrQueueFull, e.Max, e.Model, e.Key)
}

// Unwrap makes errors.Is(e, ErrQueueFull) true.
func (e *FullError) Unwrap() error { return ErrQueueFull }
