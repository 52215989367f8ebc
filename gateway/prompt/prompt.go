// Package prompt computes the keys by which prompts are looked up in prefix caches, and the lengths
// of prompts.
package prompt

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// Source is all that a prompt depends on.
type Source struct {
	Req     *openai.Request
	Body    *mooncake.Body  // the body to read, because Req.Body may not be valid any more
	Changes *mooncake.Patch // Changes.Prompt is one of several prompts; nil: it is in the body
	Model   roster.Route
	Resumed bool // the prompt ends with the answer so far, which the body does not contain
}

// clientPrompt is without the answer so far of a resumed request.
func (s *Source) clientPrompt() json.RawMessage {
	if s.Changes != nil && s.Changes.Prompt != nil {
		return s.Changes.Prompt
	}
	prompt, _ := s.Body.Get(openai.PromptKey(s.Req.Endpoint))
	return prompt
}

// Text returns a completion's prompt as a JSON string, to which the answer so far can be added;
// nil: token ids, or the engine truncates, which would cut the longer text at another point.
func (s *Source) Text() json.RawMessage {
	prompt := s.clientPrompt()
	limit, ok := s.Body.Get("truncate_prompt_tokens")
	truncates := ok && string(limit) != "null"
	isText := len(prompt) > 0 && prompt[0] == '"'
	if !isText || truncates {
		return nil
	}
	return prompt
}

// IDs is nil if the prompt is text.
func (s *Source) IDs() (ids []int32, written json.RawMessage) {
	written = s.clientPrompt()
	ids, ok := index.PromptTokens(nil, written)
	if !ok {
		return nil, nil
	}
	return ids, written
}

// Config is what a Reader needs of the proxy.
type Config struct {
	Client *engine.Client
	Fleet  interface {
		AnyPrefill(model string) *engine.Target // an engine that may tokenize prompts; nil: there is none
	}
	Prefill    *prefill.Scheduler
	Settings   func() *fleet.Settings
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// A Reader computes the prefix-cache keys and the lengths of prompts.
type Reader struct {
	Config
	tokenizedPrompts *prometheus.CounterVec
	tokenizer        tokenizer
	hashers          sync.Pool // pool of *index.Hasher, so that prompts are hashed without a lock
	mu               sync.Mutex
	salts            index.Salts
}

// NewReader also registers the Reader's metric.
func NewReader(c Config) *Reader {
	r := &Reader{Config: c, tokenizedPrompts: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_prefix_tokenize_total", Help: "Prompts whose token ids were needed. cached: an engine had told them before. engine: an " +
			"engine was asked. failed: no engine answered, so the prompt is looked up by its bytes.",
	}, []string{"outcome"})}
	for _, outcome := range []string{tokenizeKnown, tokenizeAsked, tokenizeFailed} {
		r.tokenizedPrompts.WithLabelValues(outcome)
	}
	c.Registerer.MustRegister(r.tokenizedPrompts)
	return r
}

// CacheKeys hashes a prompt's blocks to the keys for prefix caches, and measures its length. It
// hashes token ids if they are known or an engine returns them, and otherwise bytes. There are no
// keys if no other request can share the prompt: its cache_salt is used only once, or there are
// several prompts.
func (r *Reader) CacheKeys(s *Source) prefill.Prompt {
	scope, canBeShared := r.scopeOf(s)
	if !canBeShared {
		return prefill.Prompt{}
	}
	h, _ := r.hashers.Get().(*index.Hasher)
	if h == nil {
		h = new(index.Hasher)
	}
	defer r.hashers.Put(h)
	blockTokens := r.Prefill.BlockTokens(s.Model.Name)
	tokenRoot := scope.Root(index.Tokens, blockTokens)
	salted, clientPrompt := scope.Salt != "", s.clientPrompt()
	// Different pictures may have the same token ids.
	if s.Req.Endpoint == mooncake.Tokens && openai.HasMedia(s.Body, s.Req.Endpoint) {
		return prefill.Prompt{Bytes: len(clientPrompt), Salted: salted, Media: true}
	}
	if takesTextOrIDs(s.Req.Endpoint) {
		ids, isIDs := index.PromptTokens(nil, clientPrompt)
		if isIDs {
			keys := h.Tokens(nil, tokenRoot, ids, blockTokens)
			return prefill.Prompt{Keys: keys, BlockTokens: blockTokens, Tokens: len(ids), Salted: salted}
		}
	}
	// A text with pictures, sound or an answer so far is only a part of the prompt: its token ids
	// cannot be asked for.
	text := s.hashText(h, scope, clientPrompt)
	textIsPart := text.Media || s.Resumed
	tokenizable := s.Req.Endpoint.IsChatOrCompletions() && !textIsPart && text.Bytes > 0
	if r.Settings().Prefill.Index.Tokenize == prefill.TokenizeEngine && tokenizable {
		if keys, n, ok := r.tokenize(s, h, tokenRoot, blockTokens); ok {
			return prefill.Prompt{Keys: keys, BlockTokens: blockTokens, Tokens: n, Salted: salted}
		}
	}
	// Media: the number of bytes does not tell the length in tokens.
	return prefill.Prompt{Keys: text.Keys, Bytes: text.Bytes, Salted: salted, Media: textIsPart}
}

// scopeOf is within which equal prompts share KV. canBeShared is false if no other request has used
// the salt.
func (r *Reader) scopeOf(s *Source) (scope index.Scope, canBeShared bool) {
	scope = index.Scope{Model: s.Model.Board}
	if s.Model.Name != s.Model.Board {
		scope.LoRA = cmp.Or(s.Model.Adapter, s.Model.Name) // its own KV, whatever name the client used
		scope.Weights = s.Model.Weights
	}
	salt, ok := s.Body.Salt()
	if !ok {
		return scope, true
	}
	scope.Salt = string(salt)
	r.mu.Lock()
	defer r.mu.Unlock()
	return scope, r.salts.Shared(scope.Salt)
}

// hashText hashes a prompt that is not token ids: a text, or a chat with its tools. At Responses
// and Messages, another text comes before the prompt. KV is shared only if it is the same, too, so
// it is added to the salt of the scope, which is a copy.
func (s *Source) hashText(h *index.Hasher, scope index.Scope, written json.RawMessage) index.Text {
	endpoint := s.Req.Endpoint
	isText := takesTextOrIDs(endpoint) // the prompt is not token ids here
	if isResponsesOrMessages := !isText && !endpoint.IsChatOrCompletions(); isResponsesOrMessages {
		scope.Salt += openai.TextBeforePrompt(s.Body, endpoint)
		isText = len(written) > 0 && written[0] == '"' // the input of a response may be one string
	}
	root := scope.Root(index.Bytes, index.BlockBytes)
	if isText {
		return h.Prompt(nil, root, written)
	}
	tools, _ := s.Body.Get("tools")
	return h.Chat(nil, root, written, tools)
}

func takesTextOrIDs(endpoint mooncake.Endpoint) bool {
	return endpoint == mooncake.Completions || endpoint == mooncake.Tokens || endpoint == mooncake.Generate
}

// countTokens may wait for an engine. ok is false if the number cannot be found out before the
// prefill, or if the prompt surely fits: it has at most maxTokens bytes, and a token has at least
// one byte.
func (r *Reader) countTokens(s *Source, maxTokens int) (tokens int, ok bool) {
	if limit, has := s.Body.Get("truncate_prompt_tokens"); has && !rawjson.IsNull(limit) {
		return 0, false // only the engine knows the length then
	}
	ids, isIDs := index.PromptTokens(nil, s.clientPrompt())
	// At other endpoints, PromptTokens is set only for token ids without media, to which an engine
	// adds no tokens.
	withoutMedia := s.Req.Endpoint == mooncake.Completions || s.Req.PromptTokens > 0
	if isIDs && withoutMedia {
		return len(ids), true
	}
	if Bytes(s.Req, s.Changes) <= maxTokens {
		return 0, false // it fits in any case
	}
	if !s.Req.Endpoint.IsChatOrCompletions() || openai.HasMedia(s.Body, s.Req.Endpoint) {
		return 0, false // tokenizeBody knows no other endpoints, and does not count pictures or sound
	}
	body, _ := s.tokenizeBody(index.Key{}) // the digest is not used
	ids, err := r.askForIDs(s.Model.Name, body)
	return len(ids), err == nil
}

// Hash is a keyed hash of the client's prompt, which reveals nothing without the key. It is never
// 0.
func (s *Source) Hash(key []byte) uint64 {
	mac := hmac.New(sha256.New, key)
	mac.Write(s.clientPrompt())
	// These are the first 64 bits; 0 means elsewhere that there is no hash.
	return max(1, binary.BigEndian.Uint64(mac.Sum(nil)))
}

// Bytes is the length of the client's prompt. With several prompts, leg has the one of this call.
func Bytes(req *openai.Request, leg *mooncake.Patch) int {
	if leg != nil && leg.Prompt != nil {
		return len(leg.Prompt)
	}
	return req.PromptBytes
}

// Tokens is a prompt's length before an engine has counted it: exact for a single prompt of token
// ids, otherwise an estimate.
func Tokens(req *openai.Request, leg *mooncake.Patch) int {
	isOnlyPrompt := leg == nil || leg.Prompt == nil // PromptTokens is a sum over all prompts
	if isOnlyPrompt && req.PromptTokens > 0 {
		return req.PromptTokens
	}
	return Bytes(req, leg) / bytesPerToken
}

// AllTokens counts a prompt once per answer, because each is prefilled.
func AllTokens(req *openai.Request, legs []openai.SubRequest) (tokens int) {
	for i := range legs {
		tokens += Tokens(req, &legs[i].Patch)
	}
	return tokens
}

// bytesPerToken is usual for English text.
const bytesPerToken = 4
