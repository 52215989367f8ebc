package engine

import (
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"sync"
	"time"

	"go.uber.org/zap"
)

// ErrUnlisted is what an engine says that does not have the model, or the LoRA adapter, that a request names. Requests go only to engines
// that list their name: so its list has changed since it was read.
var ErrUnlisted = errors.New("it does not have the model, or the LoRA adapter, that the request names")

// noModel is the whole message with which engines say so: vLLM 0.31 in entrypoints/openai/models/serving.py and
// entrypoints/serve/engine/serving.py, SGLang 0.5.23 in entrypoints/openai/serving_responses.py. Only a whole message counts, because
// others may quote a client.
var noModel = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile("(?s)^(?:The model [`'].*[`']|LoRA adapter .*) does not exist\\.?$")
})

// Unlisted reads a refusal: ErrUnlisted, or nil where it says something else.
func Unlisted(status int, body []byte) error {
	var told struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"` // of vLLM before 0.11, whose error is the whole body
	}
	if status != http.StatusNotFound || json.Unmarshal(body, &told) != nil {
		return nil
	}
	var inner struct {
		Message string          `json:"message"`
		Code    json.RawMessage `json:"code"` // a number, or a word of vLLM's Rust front end and of SGLang
	}
	_ = json.Unmarshal(told.Error, &inner) // what is no object has no message
	if noModel().MatchString(inner.Message) || noModel().MatchString(told.Message) || string(inner.Code) == `"model_not_found"` {
		return ErrUnlisted
	}
	return nil
}

// relistEvery is the least time between two readings of an engine's list because of what it answered to requests.
const relistEvery = time.Second

// unlisted has the engine's list read again, now if that was not done a moment ago, else with the next check. It needs m.mu.
func (w *watch) unlisted(err error) {
	w.relist = true
	if time.Since(w.relisted) < relistEvery {
		return
	}
	w.relisted = time.Now()
	w.m.cfg.Log.Info("an engine answered that it does not have a model that its list has; the list is read again", zap.String("engine", w.in.ID), zap.Error(err))
	w.checkNow()
}
