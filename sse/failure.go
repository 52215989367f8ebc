package sse

import (
	"encoding/json"
	"strconv"

	"evenkeel/internal/rawjson"
)

// Failure is an engine's error as its stream reported it. Fields that the engine did not send are
// empty. Status is always set: it is the HTTP status for a client that has received no byte yet.
type Failure struct {
	Message string
	Type    string
	Code    string
	Status  int
}

// finishFailure returns the failure of a choice whose finish_reason is error or abort.
func finishFailure(reason string) Failure {
	return Failure{
		Message: "the decode engine ended the answer with finish_reason " + strconv.Quote(reason),
		Type:    "server_error",
		Code:    "finish_" + reason,
		Status:  500,
	}
}

// ReadFailure reads an error event. The error is the member "error", an object or a string;
// old engines put the fields of the error at the top level instead.
func ReadFailure(data []byte) Failure {
	var top struct {
		errorFields
		Error json.RawMessage `json:"error"`
	}
	_ = json.Unmarshal(data, &top) // a field that cannot be read stays empty
	fields := top.errorFields
	if len(top.Error) > 0 && !rawjson.IsNull(top.Error) {
		fields = errorFields{}
		if json.Unmarshal(top.Error, &fields) != nil { // the error may be a string instead of an object
			_ = json.Unmarshal(top.Error, &fields.Message)
		}
	}
	f := Failure{Message: fields.Message, Type: fields.Type}
	f.Code, f.Status = errorCode(fields.Code, fields.Type)
	if f.Message == "" {
		f.Message = "the decode engine failed and did not say why"
	}
	return f
}

type errorFields struct {
	Message string          `json:"message"`
	Type    string          `json:"type"`
	Code    json.RawMessage `json:"code"` // a number; vLLM's Rust front end sends a name
}

// statusClientGone is the status with which proxies log that a client disconnected. In an engine's
// answer, this client is evenkeel. evenkeel's own client is still there and must get a real error
// status.
const statusClientGone = 499

// errorCode returns the error's code as text, and the HTTP status for the client. raw is the code:
// a number, a name or nothing. If it is no error status, the name in typ or in the code decides the
// status, which is 500 if the name is unknown.
func errorCode(raw json.RawMessage, typ string) (code string, status int) {
	if json.Unmarshal(raw, &code) != nil && !rawjson.IsNull(raw) { // raw is no string: a number, or empty
		code = string(raw)
	}
	if n, err := strconv.Atoi(code); err == nil && n >= 400 && n <= 599 && n != statusClientGone {
		return code, n
	}
	for _, name := range []string{typ, code} { // some engines send the name as the code
		switch name {
		case "BadRequestError", "invalid_request_error":
			return code, 400
		case "NotFoundError", "model_not_found", "not_found_error":
			return code, 404
		case "rate_limit_error":
			return code, 429
		case "overloaded_error":
			return code, 503
		}
	}
	return code, 500
}
