// Package prompt turns prompts of requests into what prefix caches know them by, and
// finds out how long they are.
package prompt

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// Parts are what of a request make its prompt.
type Parts struct {
	Req     *openai.Request
	Body    *mooncake.Body // the request's own may be gone
	Leg     *mooncake.Leg  // which prompt of several; nil: the body's one
	Model   fleet.Route
	Resumed bool // it ends with an answer so far, which is not in its text
}

// written is the prompt of a completion as the client sent it.
func (p *Parts) written() json.RawMessage {
	if p.Leg != nil && p.Leg.Prompt != nil {
		return p.Leg.Prompt
	}
	prompt, _ := p.Body.Get(openai.PromptKey(p.Req.Endpoint))
	return prompt
}

// Text is a completion's prompt as a JSON string; nil for one of token ids, which no text
// can follow, or one that the engine cuts, which it would cut again.
func (p *Parts) Text() json.RawMessage {
	written := p.written()
	if cut, ok := p.Body.Get("truncate_prompt_tokens"); ok && string(cut) != "null" || len(written) == 0 || written[0] != '"' {
		return nil
	}
	return written
}

// IDs are those of a prompt of token ids, and how it is written; nil for one of text.
func (p *Parts) IDs() (ids []int32, written json.RawMessage) {
	written = p.written()
	ids, ok := index.PromptTokens(nil, written)
	if !ok {
		return nil, nil
	}
	return ids, written
}

// Config is what a reader needs of the proxy.
type Config struct {
	Client *engine.Client
	Fleet  interface {
		AnyPrefill(model string) *engine.Target // that may tokenize; nil: none
	}
	Tier       *prefill.Tier
	Settings   func() *fleet.Settings // in force now
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// A Reader recognizes prompts.
type Reader struct {
	Config
	asked     *prometheus.CounterVec
	tokenizer tokenizer
	hashers   sync.Pool // of *index.Hasher: a prompt is hashed outside of every lock
	mu        sync.Mutex
	salts     index.Salts
}

// NewReader makes a reader.
func NewReader(c Config) *Reader {
	r := &Reader{Config: c, asked: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_prefix_tokenize_total", Help: "Prompts whose token ids were needed. cached: an engine had told them before. engine: an " +
			"engine was asked. failed: no engine answered, so the prompt is looked up by its bytes.",
	}, []string{"outcome"})}
	for _, outcome := range []string{tokenizeKnown, tokenizeAsked, tokenizeFailed} {
		r.asked.WithLabelValues(outcome)
	}
	c.Registerer.MustRegister(r.asked)
	return r
}

// Recognize hashes a prompt. One that no other will ever share has no keys: its salt
// was made for it alone, or it is several prompts.
func (r *Reader) Recognize(p *Parts) prefill.Prompt {
	conf, body := &r.Settings().Prefill.Index, p.Body
	scope := index.Scope{Model: p.Model.Board}
	if p.Model.Name != p.Model.Board {
		scope.LoRA = p.Model.Name
	}
	if salt, ok := body.Get("cache_salt"); ok {
		scope.Salt = string(salt)
		r.mu.Lock()
		shared := r.salts.Shared(scope.Salt)
		r.mu.Unlock()
		if !shared {
			return prefill.Prompt{}
		}
	}
	h, _ := r.hashers.Get().(*index.Hasher)
	if h == nil {
		h = new(index.Hasher)
	}
	defer r.hashers.Put(h)
	ids, bytes := r.Tier.BlockTokens(p.Model.Name), scope.Root(index.Bytes, index.BlockBytes)
	tokens := scope.Root(index.Tokens, ids)
	salted := scope.Salt != ""
	var text index.Text
	switch written := p.written(); {
	case p.Req.Endpoint == mooncake.Tokens && openai.HasMedia(body, p.Req.Endpoint):
		return prefill.Prompt{Bytes: len(written), Salted: salted, Media: true}
	case p.Req.Endpoint == mooncake.Completions, p.Req.Endpoint == mooncake.Tokens, p.Req.Endpoint == mooncake.Generate:
		if list, ok := index.PromptTokens(nil, written); ok {
			return prefill.Prompt{Keys: h.Tokens(nil, tokens, list, ids), BlockTokens: ids, Tokens: len(list), Salted: salted}
		}
		text = h.Prompt(nil, bytes, written)
	case !p.Req.Endpoint.Common():
		if lead := openai.Lead(body, p.Req.Endpoint); lead != "" {
			scope.Salt += lead
			bytes = scope.Root(index.Bytes, index.BlockBytes)
		}
		if len(written) > 0 && written[0] == '"' {
			text = h.Prompt(nil, bytes, written)
			break
		}
		listed, _ := body.Get("tools")
		text = h.Chat(nil, bytes, written, listed)
	default:
		listed, _ := body.Get("tools")
		text = h.Chat(nil, bytes, written, listed)
	}
	if conf.Tokenize == prefill.TokenizeEngine && p.Req.Endpoint.Common() && !text.Media && !p.Resumed && text.Bytes > 0 {
		if keys, n, ok := r.tokenize(p, h, tokens, ids); ok {
			return prefill.Prompt{Keys: keys, BlockTokens: ids, Tokens: n, Salted: salted}
		}
	}
	// What a resumed answer adds to the prompt is not in its text.
	return prefill.Prompt{Keys: text.Keys, Bytes: text.Bytes, Salted: salted, Media: text.Media || p.Resumed}
}

// length returns how many tokens a prompt has, if that is known. ok is false for a
// prompt that has no more bytes than it may have tokens: it fits, because a token has
// at least one byte.
func (r *Reader) length(p *Parts, room int) (tokens int, ok bool) {
	if ids, ok := index.PromptTokens(nil, p.written()); ok && (p.Req.Endpoint == mooncake.Completions || p.Req.PromptTokens > 0) {
		return len(ids), true
	}
	// engines count the tokens of the others
	if Bytes(p.Req, p.Leg) <= room || !p.Req.Endpoint.Common() || openai.HasMedia(p.Body, p.Req.Endpoint) {
		return 0, false
	}
	body, _ := p.templated(index.Key{})
	ids, err := r.askForIDs(p.Model.Name, body)
	return len(ids), err == nil
}

// Hash is the keyed hash of the prompt's bytes as the client sent them: equal for
// prompts that recur, and nothing to anybody without the secret. It is never 0.
func (p *Parts) Hash(key []byte) uint64 {
	mac := hmac.New(sha256.New, key)
	mac.Write(p.written())
	return max(1, binary.BigEndian.Uint64(mac.Sum(nil)))
}

// Bytes is how long a prompt is as it was sent.
func Bytes(req *openai.Request, leg *mooncake.Leg) int {
	if leg != nil && leg.Prompt != nil {
		return len(leg.Prompt)
	}
	return req.PromptBytes
}

// Tokens is a prompt's length before anyone counted it.
func Tokens(req *openai.Request, leg *mooncake.Leg) int {
	if (leg == nil || leg.Prompt == nil) && req.PromptTokens > 0 {
		return req.PromptTokens
	}
	return Bytes(req, leg) / bytesPerToken
}

// AllTokens is the sum over the prompts; a prompt of several answers counts for each,
// as each is prefilled.
func AllTokens(req *openai.Request, legs []openai.Leg) (tokens int) {
	for i := range legs {
		tokens += Tokens(req, &legs[i].Leg)
	}
	return tokens
}

// bytesPerToken is the usual length of a token of English text.
const bytesPerToken = 4
