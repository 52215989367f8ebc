package request

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"

	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// A recognizer turns prompts into what the prefix index knows them by.
type recognizer struct {
	hashers sync.Pool // of *index.Hasher: a prompt is hashed outside of every lock
	mu      sync.Mutex
	salts   index.Salts
}

// hashPrompt hashes a job's prompt. One that no other will ever share has no keys:
// its salt was made for it alone, or it is several prompts.
func (srv *Server) hashPrompt(j *job) prefill.Prompt {
	r, size := &srv.recognizer, srv.Settings().Prefill.Index.BlockBytes
	body := &j.body
	scope := index.Scope{Model: j.model.Board}
	if j.model.Name != j.model.Board {
		scope.LoRA = j.model.Name
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
	h.BlockBytes = size
	defer r.hashers.Put(h)
	ids, bytes := srv.Tier.BlockTokens(j.model.Name), scope.Root(index.Bytes, size)
	tokens := scope.Root(index.Tokens, ids)
	salted := scope.Salt != ""
	var text index.Text
	if j.req.Endpoint == mooncake.Completions {
		written, _ := body.Get("prompt")
		if j.leg != nil && j.leg.Prompt != nil {
			written = j.leg.Prompt
		}
		if list, ok := index.PromptTokens(nil, written); ok {
			return prefill.Prompt{Keys: h.Tokens(nil, tokens, list, ids), BlockTokens: ids, Tokens: len(list), Salted: salted}
		}
		text = h.Prompt(nil, bytes, written)
	} else {
		messages, _ := body.Get("messages")
		listed, _ := body.Get("tools")
		text = h.Chat(nil, bytes, messages, listed)
	}
	if srv.Settings().Prefill.Index.Tokenize == prefill.TokenizeEngine && !text.Media && j.resume.times == 0 && text.Bytes > 0 {
		if keys, n, ok := srv.tokenize(j, h, tokens, ids); ok {
			return prefill.Prompt{Keys: keys, BlockTokens: ids, Tokens: n, Salted: salted}
		}
	}
	// What a resumed answer adds to the prompt is not in its text.
	return prefill.Prompt{Keys: text.Keys, Bytes: text.Bytes, BlockBytes: size, Salted: salted, Media: text.Media || j.resume.times > 0}
}

// promptHash is the keyed hash of the prompt's bytes as the client sent them: equal
// for prompts that recur, and nothing to anybody without the secret. 0 where
// nobody tells prompts apart. The request log has it for `evenkeel fit`.
func (j *job) promptHash() uint64 {
	key := j.srv.PromptKey()
	if key == nil {
		return 0
	}
	mac := hmac.New(sha256.New, *key)
	if j.leg != nil && j.leg.Prompt != nil {
		mac.Write(j.leg.Prompt)
	} else {
		prompt, _ := j.body.Get(openai.PromptKey(j.req.Endpoint))
		mac.Write(prompt)
	}
	hash := max(1, binary.BigEndian.Uint64(mac.Sum(nil)))
	if !j.isLeg() { // the legs of one request have one line, and their prompts one by one
		j.told.PromptKey = fmt.Sprintf("%016x", hash)
	}
	return hash
}
