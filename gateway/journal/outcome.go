package journal

import (
	"slices"

	"evenkeel/gateway/openai"
	"evenkeel/geo"
)

// StatusClientClosed is the status of a request whose client has left. nginx uses the same status.
const StatusClientClosed = 499

// Outcome names how a request ended, for metrics and the request log. The names are a fixed set,
// because text from an engine or a client must not become a label of a metric.
func Outcome(e *openai.Error) string {
	switch {
	case e == nil:
		return "ok"
	case slices.Contains(outcomes, e.Code):
		return e.Code
	}
	return "engine_error"
}

// outcomes are the codes of the proxy's own errors, and the codes that stand for an engine's error.
var outcomes = []string{
	"client_closed", "invalid_api_key", "bad_priority", "bad_policy", "bad_target", "bad_session_end", "bad_class", "bad_deadline",
	"rate_limit_exceeded", "queue_full", "too_many_answers", "queue_timeout", "deadline_unmet", "prefill_kv_exhausted", "pool_timeout",
	"draining",
	openai.CodeInvalidJSON, openai.CodeInvalidType, openai.CodeInvalidValue, openai.CodeDuplicateKey, openai.CodeMissing,
	openai.CodeUnsupported,
	"model_not_found", "prompt_too_long", "context_length_exceeded", "engine_refused",
	"prefill_unavailable", "prefill_failed", "prefill_timeout", "decode_unavailable", "decode_failed", "decode_timeout",
	"engine_unavailable", "group_incomplete", "engine_failed", "engine_timeout", "no_such_route",
	"bad_request_head", "bad_request", "unsupported_encoding", "bad_encoding", "head_too_large", "body_too_large", "request_timeout",
	"overloaded",
	"peer_busy", "peer_lost", "no_region_available", "residency_forbids", geo.RejectOwner, "owner_lost",
	"upstream_broken", "upstream_incomplete", "engine_drained", "recompute_unresumable", "internal_error",
}
