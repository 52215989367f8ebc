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

// A tokenizer remembers the cache keys of prompts whose token ids prefill engines have returned.
// Asking must not delay a request for long: if no ids come in time, the prompt is looked up by its
// bytes.
type tokenizer struct {
	mu       sync.Mutex
	known    map[promptDigest]*list.Element
	recent   list.List // values of type tokenized, the last used one first
	keys     int       // number of cache keys of all prompts together
	lastCall uint64
	circuit  circuit.Circuit // after a failure, engines are asked only from time to time
}

// promptDigest has 128 bits of all that a prompt depends on.
type promptDigest [2]uint64

type tokenized struct {
	of     promptDigest
	block  int
	keys   []index.Key
	tokens int
}

const (
	maxAnswerBytes = 16 << 20 // largest answer of an engine, in bytes
	maxTokenized   = 512      // prompts whose cache keys are remembered
	maxKeys        = 1 << 20  // of all prompts: 16 MiB, as for 512 prompts of 32k tokens
)

// Outcomes of asking for token ids, as metrics name them.
const (
	tokenizeKnown  = "cached"
	tokenizeAsked  = "engine"
	tokenizeFailed = "failed"
)

// templateKeys are the keys on which the prompt depends.
var templateKeys = map[mooncake.Endpoint][]string{
	mooncake.Chat: {"messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
		"continue_final_message", "add_special_tokens", "reasoning_effort", "documents", "tool_choice"},
	mooncake.Completions: {"prompt", "add_special_tokens"},
}

func (r *Reader) tokenize(s *Source, h *index.Hasher, root index.Key, block int) (keys []index.Key, tokens int, ok bool) {
	body, digest := s.tokenizeBody(root)
	if t, ok := r.tokenizer.lookup(digest, block); ok {
		r.tokenizedPrompts.WithLabelValues(tokenizeKnown).Inc()
		return t.keys, t.tokens, true
	}
	ids, err := r.askForIDs(s.Model.Name, body)
	if err != nil {
		r.tokenizedPrompts.WithLabelValues(tokenizeFailed).Inc()
		return nil, 0, false
	}
	r.tokenizedPrompts.WithLabelValues(tokenizeAsked).Inc()
	keys = h.Tokens(nil, root, ids, block)
	r.tokenizer.remember(tokenized{of: digest, block: block, keys: keys, tokens: len(ids)})
	return keys, len(ids), true
}

// root distinguishes prompts that share no KV.
func (s *Source) tokenizeBody(root index.Key) (body []byte, digest promptDigest) {
	out := []byte(`{"model":`)
	name, _ := json.Marshal(s.Model.Name)
	out = append(out, name...)
	for _, key := range templateKeys[s.Req.Endpoint] {
		value, ok := s.Body.Get(key)
		if key == "prompt" && s.Changes != nil && s.Changes.Prompt != nil { // one of several
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

// While engines fail, askForIDs returns errNotAsked for most prompts.
func (r *Reader) askForIDs(model string, body []byte) ([]int32, error) {
	target := r.Fleet.AnyPrefill(model)
	if target == nil {
		return nil, fmt.Errorf("no engine that answers can be asked for the token ids of a prompt for %s", model)
	}
	call, ok := r.tokenizer.beginCall(time.Now())
	if !ok {
		return nil, errNotAsked
	}
	ids, err := r.postTokenize(target, body)
	switch stopped, resumed := r.tokenizer.endCall(call, time.Now(), err); {
	case stopped:
		r.Log.Warn("an engine did not answer with the token ids of a prompt; engines are asked only from time to time until one answers again",
			zap.String("engine", target.ID), zap.Error(err))
	case resumed:
		r.Log.Info("an engine answers with token ids again; engines are asked for every prompt again", zap.String("engine", target.ID))
	}
	return ids, err
}

// The whole call must end within prefill.index.tokenize_timeout.
func (r *Reader) postTokenize(target *engine.Target, body []byte) ([]int32, error) {
	call := r.Client.NewCall(target).Repeat() // does no harm twice
	timeout := r.Settings().Prefill.Index.TokenizeTimeout
	timer := time.AfterFunc(timeout, call.Abort)
	defer timer.Stop()
	resp, err := call.Do(http.MethodPost, "/tokenize", []engine.Header{{Name: "Content-Type", Value: "application/json"}}, [][]byte{body},
		engine.Deadlines{Connect: timeout, FirstByte: timeout, Idle: timeout})
	if err != nil {
		return nil, err
	}
	defer resp.Close()
	answer, err := resp.ReadAll(maxAnswerBytes)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode() != http.StatusOK:
		return nil, &engine.StatusError{Target: target.ID, Method: http.MethodPost, Path: "/tokenize", Status: resp.StatusCode()}
	}
	var reply struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := json.Unmarshal(answer, &reply); err != nil {
		return nil, fmt.Errorf("engine %s: /tokenize: its answer cannot be read: %w", target.ID, err)
	}
	if len(reply.Tokens) == 0 {
		return nil, fmt.Errorf("engine %s: /tokenize: no tokens in its answer", target.ID)
	}
	return reply.Tokens, nil
}

// The size of blocks may change with the engines.
func (t *tokenizer) lookup(of promptDigest, block int) (known tokenized, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.known[of]
	if e == nil || e.Value.(tokenized).block != block {
		return tokenized{}, false
	}
	t.recent.MoveToFront(e)
	return e.Value.(tokenized), true
}

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
	for t.recent.Len() > maxTokenized || t.keys > maxKeys {
		t.drop(t.recent.Back())
	}
}

// The caller holds t.mu.
func (t *tokenizer) drop(e *list.Element) {
	k := t.recent.Remove(e).(tokenized)
	delete(t.known, k.of)
	t.keys -= len(k.keys)
}

// If ok, the caller must report the outcome of this call to endCall.
func (t *tokenizer) beginCall(now time.Time) (call uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.circuit.Allows(now) {
		return 0, false
	}
	t.lastCall++
	t.circuit.Send(t.lastCall, now)
	return t.lastCall, true
}

// After a failure, the circuit lets only one call through from time to time. stopped and resumed
// say what this outcome changes. A refused prompt counts neither way, because it may be at fault.
func (t *tokenizer) endCall(call uint64, now time.Time, err error) (stopped, resumed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wasInService := t.circuit.InService()
	t.circuit.Limit = 1 // here, so that a tokenizer needs no constructor
	var status *engine.StatusError
	refusesPrompt := errors.As(err, &status) && (status.Status == http.StatusBadRequest || status.Status == http.StatusUnprocessableEntity)
	switch {
	case err == nil:
		t.circuit.Succeed()
		return false, !wasInService
	case refusesPrompt:
		t.circuit.Neutral(call) // the next call becomes the trial
		return false, false
	}
	takenOut := t.circuit.Fail(call, now) // also if a trial has failed
	return takenOut && wasInService, false
}

var errNotAsked = errors.New("engines did not tell token ids a moment ago")
