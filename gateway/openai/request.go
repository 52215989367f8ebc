package openai

import (
	"encoding/json"
	"math"

	"evenkeel/mooncake"
)

// Limits are what the operator allows, and what engines accept.
type Limits struct {
	MaxDepth     int      // levels of nested JSON; 0: 64
	VocabSize    int      // token ids are below this number; 0: unknown
	MediaHosts   []string // host or host:port, as a media URL must write it; empty: only data: URLs are allowed
	ChatTemplate bool     // clients may send their own chat_template

	OnlyModel func() string // returns the only model, which a request without a model gets; nil or empty: a request must name one

	// In the fields below, 0 means no limit.
	Answers          int // per request; each answer becomes a request of its own (see Part)
	AnswersPerPrompt int
	StopStrings      int
}

// limitOrInfinite returns limit or, for 0, a number that no request reaches.
func limitOrInfinite(limit int) int {
	if limit <= 0 {
		return math.MaxInt32
	}
	return limit
}

// AllTokens is the TopLogprobs that asks for all tokens of the vocabulary, as in vLLM.
const AllTokens = -1

// Request is a checked client's request, ready for the engines.
type Request struct {
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Model    string

	Stream          bool
	IncludeUsage    bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats; false without IncludeUsage
	ReturnTokenIDs  bool

	N int // answers for each prompt, 1 or more
	// How many of the likeliest tokens the client wants to see at each position of the answer. AllTokens: the whole vocabulary.
	TopLogprobs    int
	Prompts        []json.RawMessage // the prompts of a list; nil: there is one prompt, in the body
	MaxTokens      int               // 0: not given
	MaxTokensKey   string            // the key that MaxTokens came from; empty: not given
	Limit          int               // tokens of the answer: MaxTokens, or the engines' default; 0: only the context limits it
	Passthrough    bool              // the engine must not stream: its stream lacks parts of the answer, or has them in another form
	PromptLogprobs bool              // vLLM must compute logprobs of the prompt's tokens for the request, even if the answer shows none
	Beams          int               // beams of a beam search; 0: there is none
	PrefillOnly    bool              // a prefill engine alone answers it, because the answer has at most one token
	PromptBytes    int               // bytes of prompt or messages and tools, without inline media; for estimates of its tokens
	AnswerIsList   bool              // for /generate only: the answer is a list
	Names          [][]byte          // one id per answer, given by the client; nil: the ids are made from the id of the request
	PromptTokens   int               // exact if the prompts are token ids without media; else 0
}

// A SubRequest is the part of a client's request that asks for one of its answers.
type SubRequest struct {
	mooncake.Patch
	Choice int // index of its answer: prompt * n + sample
	Prompt int // index of its prompt; usage counts the tokens of each prompt once
}

// Parts splits the request into one part for each answer, in the order of their choices. If there is one answer, its part changes nothing
// in the body.
func (r *Request) Parts() []SubRequest {
	prompts := max(1, len(r.Prompts))
	parts := make([]SubRequest, 0, prompts*r.N)
	for prompt := range prompts {
		for sample := range r.N {
			part := SubRequest{Choice: prompt*r.N + sample, Prompt: prompt}
			part.SeedOffset = sample
			if r.Prompts != nil {
				part.Patch.Prompt = r.Prompts[prompt]
			}
			parts = append(parts, part)
		}
	}
	return parts
}

// Parse reads and checks the body of a request to endpoint. Every refusal has status 400 and, if one key is at fault, the name of that
// key. The request points into raw.
func Parse(endpoint mooncake.Endpoint, raw []byte, limits Limits) (*Request, *Error) {
	body, err := mooncake.ScanFor(endpoint, raw, limits.MaxDepth)
	if err != nil {
		return nil, badRequest(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p, s := parser{limits: limits, req: &Request{Endpoint: endpoint, Body: body, N: 1}}, &schemas[endpoint]
	for key, v := range body.All() {
		rule, ok := s.rules[key]
		if !ok && !mooncake.Reserved(key) {
			continue // only the engines use it
		}
		if body.Count(key) > 1 { // engines take the last value, some other parsers the first
			return nil, badRequest(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key).withClientKey(&body, key)
		}
		if rule != nil {
			if refusal := rule(&p, key, v); refusal != nil {
				return nil, refusal.withClientKey(&body, key)
			}
		}
	}
	if refusal := p.checkCombinations(); refusal != nil {
		return nil, refusal.withClientKey(&body, refusal.Param)
	}
	return p.req, nil
}

// parser holds the request that the rules fill in, and values that they have read for checkCombinations.
type parser struct {
	limits Limits
	req    *Request

	maxTokens, maxCompletionTokens int  // 0: not given
	minTokens                      int  // 0: not given
	hasPrompt                      bool // messages or prompt, whichever the endpoint reads
	hasStreamOptions               bool // the request has stream_options
	hasStopTokenIDs                bool // the request has stop_token_ids
	echo, logprobs                 bool
	promptLogprobs, wantsBeams     bool
	promptLogprobsMayStream        bool // the requested logprobs of the prompt are allowed in a stream
	wantsDerender                  bool // engines parse the answer after all of it is generated
	mediaBytes                     int  // bytes of inline media, which do not count as text of the prompt
	thinkingBudget                 int  // budget of tokens for thinking
}

// DefaultCompletionTokens limits the answer of a completion without max_tokens, as in OpenAI's API and vLLM. If max_tokens is null, only
// the context limits the answer.
const DefaultCompletionTokens = 16

// setLimit sets MaxTokens, MaxTokensKey and Limit of the request by the keys that were read.
func (p *parser) setLimit() {
	req := p.req
	req.MaxTokens, req.MaxTokensKey = p.maxTokens, schemas[req.Endpoint].maxTokensKey
	if req.Endpoint == mooncake.Chat && p.maxCompletionTokens > 0 { // engines prefer this key to max_tokens
		req.MaxTokens, req.MaxTokensKey = p.maxCompletionTokens, "max_completion_tokens"
	}
	req.Limit = req.MaxTokens
	if req.MaxTokens == 0 {
		req.MaxTokensKey = ""
		if req.Endpoint == mooncake.Completions && req.Body.Count("max_tokens") == 0 {
			req.Limit = DefaultCompletionTokens
		}
	}
}

// checkCombinations checks conditions between several keys, after all of them were read, and completes the request.
func (p *parser) checkCombinations() *Error {
	req, s := p.req, &schemas[p.req.Endpoint]
	if refusal := p.requireModel(); refusal != nil {
		return refusal
	}
	if !p.hasPrompt {
		return badRequest(CodeMissing, s.promptKey, "the request has no %q", s.promptKey)
	}
	if p.hasStreamOptions && !req.Stream && req.Endpoint != mooncake.Tokens { // engines ignore them at Tokens (vLLM 0.32.0)
		return badRequest(CodeInvalidValue, "stream_options", "\"stream_options\" is only allowed when \"stream\" is true")
	}
	hasLogprobsKey := req.Endpoint != mooncake.Responses && req.Endpoint != mooncake.Generate // these two have no key "logprobs"
	if req.TopLogprobs != 0 && hasLogprobsKey && !p.logprobs {
		return badRequest(CodeInvalidValue, "top_logprobs", "\"top_logprobs\" needs \"logprobs\" to be true")
	}
	p.setLimit()
	if s.checkCombinations != nil {
		if refusal := s.checkCombinations(p); refusal != nil {
			return refusal
		}
	}
	if refusal := p.checkCounts(); refusal != nil {
		return refusal
	}
	req.ContinuousUsage = req.ContinuousUsage && req.IncludeUsage
	echoHasLogprobs := p.logprobs || req.Endpoint == mooncake.Chat // vLLM computes them for each echo of a chat
	req.PromptLogprobs = p.promptLogprobs || p.echo && echoHasLogprobs
	if refusal := p.checkStream(); refusal != nil {
		return refusal
	}
	if p.wantsBeams {
		req.Beams, req.N = req.N, 1 // one engine computes all beams
	}
	if !req.Stream { // evenkeel joins an answer in one piece from a stream, unless one of these features is used
		req.Passthrough = req.PromptLogprobs || p.wantsBeams || p.wantsDerender || !req.Endpoint.Assembles() ||
			HasTools(&req.Body) || asksForExtras(&req.Body)
	}
	tools, _ := req.Body.Get("tools")
	req.PromptBytes += len(tools) - p.mediaBytes // engines render the tools into the prompt, but inline media are no text
	return nil
}

// checkCounts checks how many tokens the answer must have at least, and how many answers the request asks for. The limit of the answer is
// set already.
func (p *parser) checkCounts() *Error {
	req := p.req
	if req.Limit > 0 && p.minTokens > req.Limit { // the decode engine would refuse it, after a whole prefill
		return badRequest(CodeInvalidValue, "min_tokens", "\"min_tokens\" is %d, above the %d tokens the answer may have",
			p.minTokens, req.Limit)
	}
	// With min_tokens, an engine crashes at a stop token outside of the vocabulary. Only with a known size can the ids be checked.
	if p.hasStopTokenIDs && p.minTokens > 0 && p.limits.VocabSize <= 0 {
		return badRequest(CodeUnsupported, "stop_token_ids",
			"\"stop_token_ids\" together with \"min_tokens\" needs a model whose vocabulary size is configured here")
	}
	if prompts, most := max(1, len(req.Prompts)), limitOrInfinite(p.limits.Answers); req.N > most/prompts { // a product could overflow
		return badRequest(CodeInvalidValue, schemas[req.Endpoint].promptKey,
			"%d prompts with %d answers each are more than %d answers; send fewer prompts, or a lower \"n\"",
			prompts, req.N, most)
	}
	return nil
}

// checkStream refuses features that are not available in a stream.
func (p *parser) checkStream() *Error {
	switch {
	case !p.req.Stream:
	case p.promptLogprobs && !p.promptLogprobsMayStream: // the decode engine would refuse it, after a whole prefill
		return badRequest(CodeInvalidValue, "prompt_logprobs", "\"prompt_logprobs\" is not available in a stream; send \"stream\": false")
	case p.wantsBeams:
		return badRequest(CodeUnsupported, "use_beam_search",
			"\"use_beam_search\" cannot be streamed, because the best answer is known at the end only; send \"stream\": false")
	}
	return nil
}
