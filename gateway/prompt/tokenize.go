package prompt

import (
	"container/list"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/mooncake"
	"evenkeel/prefill/index"
)

// A tokenizer remembers the cache keys of prompts whose token ids prefill engines have returned. Asking for ids must not delay a request
// for long: if no ids come in time, the prompt is looked up by its bytes, as without a tokenizer.
type tokenizer struct {
	mu     sync.Mutex
	known  map[promptDigest]*list.Element
	recent list.List // of tokenized, the last used one first
	keys   int       // number of keys in all of them
	asked  uint64
	trust  circuit.Circuit // after one failure, engines are asked only from time to time, for one prompt at a time
}

// promptDigest is a digest, of 128 bits, of everything that a prompt depends on.
type promptDigest [2]uint64

type tokenized struct {
	of     promptDigest
	block  int
	keys   []index.Key
	tokens int
}

const (
	tokenizeAnswer = 16 << 20 // bytes of an answer
	mostTokenized  = 512      // prompts
	mostKeys       = 1 << 20  // keys in all of them: 16 MiB, as for 512 prompts of 32k tokens
)

// Outcomes of asking for token ids, as metrics name them.
const (
	tokenizeKnown  = "cached"
	tokenizeAsked  = "engine"
	tokenizeFailed = "failed"
)

// templated lists the keys of a body that its prompt depends on.
var templated = map[mooncake.Endpoint][]string{
	mooncake.Chat: {"messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
		"continue_final_message", "add_special_tokens", "reasoning_effort", "documents", "tool_choice"},
	mooncake.Completions: {"prompt", "add_special_tokens"},
}

// tokenize returns the keys of a prompt in blocks of token ids, and its length in tokens; ok is false if no engine returned its ids.
func (r *Reader) tokenize(s *Source, h *index.Hasher, root index.Key, block int) (keys []index.Key, tokens int, ok bool) {
	body, digest := s.templated(root)
	if t, ok := r.tokenizer.find(digest, block); ok {
		r.asked.WithLabelValues(tokenizeKnown).Inc()
		return t.keys, t.tokens, true
	}
	ids, err := r.askForIDs(s.Model.Name, body)
	if err != nil {
		r.asked.WithLabelValues(tokenizeFailed).Inc()
		return nil, 0, false
	}
	r.asked.WithLabelValues(tokenizeAsked).Inc()
	keys = h.Tokens(nil, root, ids, block)
	r.tokenizer.remember(tokenized{of: digest, block: block, keys: keys, tokens: len(ids)})
	return keys, len(ids), true
}

// templated returns the body that asks for a prompt's token ids, and its digest.
func (s *Source) templated(root index.Key) ([]byte, promptDigest) {
	out := []byte(`{"model":`)
	name, _ := json.Marshal(s.Model.Name)
	out = append(out, name...)
	for _, key := range templated[s.Req.Endpoint] {
		value, ok := s.Body.Get(key)
		if key == "prompt" && s.Changes != nil && s.Changes.Prompt != nil {
			value, ok = s.Changes.Prompt, true
		}
		if ok {
			out = append(out, `,"`...)
			out = append(out, key...)
			out = append(out, `":`...)
			out = append(out, value...)
		}
	}
	out = append(out, '}')
	return out, promptDigest{xxhash.Sum64(out) ^ root.Hash, index.Fingerprint(out) ^ root.Check}
}

// askForIDs asks a prefill engine for the token ids of a prompt; errQuiet: engines failed a moment ago and are not asked now. It logs when
// engines stop and when they begin to answer.
func (r *Reader) askForIDs(model string, body []byte) ([]int32, error) {
	target := r.Fleet.AnyPrefill(model)
	if target == nil {
		return nil, fmt.Errorf("no engine that answers can be asked for the token ids of a prompt for %s", model)
	}
	turn, ok := r.tokenizer.mayAsk(time.Now())
	if !ok {
		return nil, errQuiet
	}
	ids, err := r.postTokenize(target, body)
	switch began, ended := r.tokenizer.answered(turn, time.Now(), err); {
	case began:
		r.Log.Warn("an engine did not answer with the token ids of a prompt; engines are asked only from time to time until one answers again",
			zap.String("engine", target.ID), zap.Error(err))
	case ended:
		r.Log.Info("an engine answers with token ids again; engines are asked for every prompt again", zap.String("engine", target.ID))
	}
	return ids, err
}

// postTokenize sends a body of templated to an engine and returns the token ids of its answer. The call takes at most TokenizeTimeout.
func (r *Reader) postTokenize(target *engine.Target, body []byte) ([]int32, error) {
	call, patience := r.Client.NewCall(target).Repeat(), r.Settings().Prefill.Index.TokenizeTimeout
	timer := time.AfterFunc(patience, call.Abort)
	defer timer.Stop()
	resp, err := call.Do(http.MethodPost, "/tokenize", []engine.Header{{Name: "Content-Type", Value: "application/json"}}, [][]byte{body},
		engine.Deadlines{Connect: patience, FirstByte: patience, Idle: patience})
	if err != nil {
		return nil, err
	}
	defer resp.Close()
	answer, err := resp.ReadAll(tokenizeAnswer)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode() != http.StatusOK:
		return nil, &engine.StatusError{Target: target.ID, Method: http.MethodPost, Path: "/tokenize", Status: resp.StatusCode()}
	}
	var said struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := json.Unmarshal(answer, &said); err != nil {
		return nil, fmt.Errorf("engine %s: /tokenize: its answer cannot be read: %w", target.ID, err)
	}
	if len(said.Tokens) == 0 {
		return nil, fmt.Errorf("engine %s: /tokenize: no tokens in its answer", target.ID)
	}
	return said.Tokens, nil
}

// find returns the keys of a prompt, and marks them as used. The keys must be of blocks of this size, which may change with the engines.
func (t *tokenizer) find(of promptDigest, block int) (tokenized, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.known[of]
	if e == nil || e.Value.(tokenized).block != block {
		return tokenized{}, false
	}
	t.recent.MoveToFront(e)
	return e.Value.(tokenized), true
}

// remember keeps the keys of a prompt, and drops those that were not used for longest if there are too many.
func (t *tokenizer) remember(k tokenized) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known == nil {
		t.known = map[promptDigest]*list.Element{}
	}
	if e := t.known[k.of]; e != nil {
		t.drop(e)
	}
	t.known[k.of] = t.recent.PushFront(k)
	t.keys += len(k.keys)
	for t.recent.Len() > mostTokenized || t.keys > mostKeys {
		t.drop(t.recent.Back())
	}
}

func (t *tokenizer) drop(e *list.Element) {
	k := t.recent.Remove(e).(tokenized)
	delete(t.known, k.of)
	t.keys -= len(k.keys)
}

// mayAsk says whether an engine may be asked now. turn identifies the question for answered.
func (t *tokenizer) mayAsk(now time.Time) (turn uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.trust.Allows(now) {
		return 0, false
	}
	t.asked++
	t.trust.Send(t.asked, now)
	return t.asked, true
}

// answered records the outcome of a question. began says that engines will not be asked for a while from now on, ended that they will be
// asked again. If an engine refuses a prompt, nothing changes.
func (t *tokenizer) answered(turn uint64, now time.Time, err error) (began, ended bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wasTrusted := t.trust.InService()
	t.trust.Limit = 1 // failures
	var status *engine.StatusError
	switch {
	case err == nil:
		t.trust.Succeed()
		return false, !wasTrusted
	case errors.As(err, &status) && (status.Status == http.StatusBadRequest || status.Status == http.StatusUnprocessableEntity):
		t.trust.Neutral(turn)
		return false, false
	}
	return t.trust.Fail(turn, now) && wasTrusted, false // a trial that fails begins nothing new
}

var errQuiet = errors.New("engines did not tell token ids a moment ago")
