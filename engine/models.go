package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"sync"

	"evenkeel/internal/words"
)

// mostModels bounds the models and LoRA adapters of one engine. modelsLimit alone would allow a
// million with short names.
const mostModels = 1 << 16

// Models reads GET /v1/models, bounded by ctx. With a PageError it still returns the models, but at
// least one of them has no context length, or is left out because of its name.
func Models(ctx context.Context, c *Client, t *Target) ([]Model, error) {
	body, err := c.read(ctx, t, "/v1/models", modelsLimit)
	if err != nil {
		return nil, err
	}
	models, err := parseModels(body)
	if err != nil {
		return models, fmt.Errorf("engine %s: GET /v1/models: %w", t.ID, err)
	}
	return models, nil
}

// parseModels reads an answer of GET /v1/models. It leaves out each context length that cannot be
// right, and each model whose name or whose parent's name is not one by words.IsName. It returns
// the first PageError about one together with the models.
func parseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			Parent      string `json:"parent"`
			MaxModelLen Number `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil || list.Data == nil {
		return nil, ErrNotAnEngine
	}
	if len(list.Data) > mostModels {
		return nil, fmt.Errorf("%w: it lists %d models, and %d are read at most", ErrTooLarge, len(list.Data), mostModels)
	}
	models := make([]Model, 0, len(list.Data))
	var bad error // the first name or context length that cannot be right; nil: all are right
	for _, d := range list.Data {
		names := []string{d.ID, cmp.Or(d.Parent, d.ID)} // only LoRA adapters have a parent
		if i := slices.IndexFunc(names, func(s string) bool { return !words.IsName(s) }); i >= 0 {
			bad = cmp.Or[error](bad, &PageError{"the name of a model that is left out", quotedShort(names[i])})
			continue
		}
		longest, err := d.MaxModelLen.Whole("max_model_len", MostContext)
		bad = cmp.Or(bad, err)
		models = append(models, Model{ID: d.ID, Parent: d.Parent, MaxModelLen: longest})
	}
	return models, bad
}

// ErrUnlisted says that an engine refused a request because it does not have the model, or the LoRA
// adapter, that the request names. Requests go only to engines that list the name, so the engine's
// list has changed since it was read.
var ErrUnlisted = errors.New("it does not have the model, or the LoRA adapter, that the request names")

// noModelMessages match, by status, the message by which engines say that they do not have a model:
// vLLM 0.31 in entrypoints/openai/models/serving.py and entrypoints/serve/engine/serving.py, SGLang
// 0.5.23 in entrypoints/openai/serving_responses.py and, of a LoRA adapter,
// managers/tokenizer_manager.py. They match only whole messages, because a message with another
// meaning may quote a client's text.
var noModelMessages = sync.OnceValue(func() map[int]*regexp.Regexp {
	return map[int]*regexp.Regexp{
		http.StatusNotFound:   regexp.MustCompile("(?s)^(?:The model [`'].*[`']|LoRA adapter .*) does not exist\\.?$"),
		http.StatusBadRequest: regexp.MustCompile(`(?s)^Got LoRA adapter that has never been loaded: .*\nAll loaded adapters: .*$`),
	}
})

// Unlisted returns ErrUnlisted if an answer says that the engine does not have the model; nil: it
// says something else.
func Unlisted(status int, body []byte) error {
	message := noModelMessages()[status]
	if message == nil {
		return nil
	}
	var answer struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"` // in vLLM before 0.11, the whole body is the error
	}
	_ = json.Unmarshal(body, &answer) // an answer that is not an object has no message
	var inner struct {
		Message string          `json:"message"`
		Code    json.RawMessage `json:"code"` // a number; vLLM's Rust front end and SGLang send a word
	}
	_ = json.Unmarshal(answer.Error, &inner) // an error that is not an object has no message
	saysNoModel := message.MatchString(inner.Message) || message.MatchString(answer.Message)
	if saysNoModel || status == http.StatusNotFound && string(inner.Code) == `"model_not_found"` {
		return ErrUnlisted
	}
	return nil
}

// ErrNotAnEngine is in Status.Err if the address answers, but not as an engine does: for example,
// it may be a web server that returns a page for every path.
var ErrNotAnEngine = errors.New("the answer is not a list of models; check that the address is an engine's")
