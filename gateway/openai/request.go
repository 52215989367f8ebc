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
	MediaHosts   []string // host or host:port, as in the URL; empty: only data: URLs
	ChatTemplate bool     // clients may send their own chat_template

	OnlyModel func() string // for a request without a model; nil or empty: it must name one

	// In the fields below, 0 means no limit.
	Answers          int // over all prompts of a request
	AnswersPerPrompt int
	StopStrings      int
}

func limitOrInfinite(limit int) int {
	if limit <= 0 {
		return math.MaxInt32
	}
	return limit
}

// AllTokens as Request.TopLogprobs asks for the whole vocabulary, as in vLLM.
const AllTokens = -1

// Request is a checked client's request, ready for the engines.
type Request struct {
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Model    string

	Stream          bool
	IncludeUsage    bool // the stream ends with its usage
	ContinuousUsage bool // stream_options.continuous_usage_stats; false without IncludeUsage
	ReturnTokenIDs  bool

	N int // answers for each prompt, 1 or more
	// TopLogprobs is how many of the likeliest tokens are shown at each position, or AllTokens.
	TopLogprobs  int
	Prompts      []json.RawMessage // if there are several; nil: one, in the body
	MaxTokens    int               // of the client; 0: not given
	MaxTokensKey string            // empty: not given
	// Limit is MaxTokens, or the engines' default; 0: only the context limits the answer.
	Limit int
	// Passthrough says that the engine must not stream: its stream lacks parts of the answer, or has
	// them in another form.
	Passthrough bool
	// PromptLogprobs says that vLLM must compute logprobs of the prompt's tokens, even if the answer
	// shows none.
	PromptLogprobs bool
	Beams          int      // beams of a beam search; 0: there is none
	PrefillOnly    bool     // the answer has at most one token
	PromptBytes    int      // without inline media; for estimates of tokens
	AnswerIsList   bool     // for /generate only: the answer is a list
	Names          [][]byte // one id per answer; nil: made from the id of the request
	// PromptTokens is of all prompts, if they are token ids without media; 0: not known.
	PromptTokens int
}

// A SubRequest asks for one of a request's answers.
type SubRequest struct {
	mooncake.Patch
	Choice int // index of the answer among all answers of the request: prompt * n + sample
	Prompt int // index of the answer's prompt; usage counts the tokens of each prompt once
}

// Parts has one part for each answer, ordered by Choice.
func (r *Request) Parts() []SubRequest {
	prompts := max(1, len(r.Prompts))
	parts := make([]SubRequest, 0, prompts*r.N)
	for prompt := range prompts {
		for sample := range r.N {
			part := SubRequest{Choice: prompt*r.N + sample, Prompt: prompt}
			part.SeedOffset = sample // answers to one prompt differ although the request has a seed
			if r.Prompts != nil {
				part.Patch.Prompt = r.Prompts[prompt]
			}
			parts = append(parts, part)
		}
	}
	return parts
}

// Parse reads and checks a body. Every refusal has status 400 and names the key at fault by the
// client's name for it (withClientKey). The request points into raw.
func Parse(endpoint mooncake.Endpoint, raw []byte, limits Limits) (*Request, *Error) {
	body, err := mooncake.ScanFor(endpoint, raw, limits.MaxDepth)
	if err != nil {
		return nil, badRequest(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p, s := parser{limits: limits, req: &Request{Endpoint: endpoint, Body: body, N: 1}}, &schemas[endpoint]
	for key, v := range body.All() {
		rule, hasRule := s.rules[key]
		isReserved := mooncake.Reserved(key)
		if !hasRule && !isReserved {
			continue // only for the engines
		}
		if body.Count(key) > 1 { // engines take the last value, some other parsers the first
			return nil, badRequest(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key).withClientKey(&body, key)
		}
		if rule != nil { // else it must only not be repeated
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

// parser has the request that the rules fill in, and values for checkCombinations.
type parser struct {
	limits Limits
	req    *Request

	maxTokens, maxCompletionTokens int  // values of max_tokens and max_completion_tokens; 0: not given
	minTokens                      int  // value of min_tokens; 0: not given
	hasPrompt                      bool // messages or a prompt, whichever the endpoint reads
	hasStreamOptions               bool
	hasStopTokenIDs                bool
	echo, logprobs                 bool
	promptLogprobs, wantsBeams     bool
	promptLogprobsMayStream        bool // the requested logprobs of the prompt are allowed in a stream
	wantsDerender                  bool // engines parse the answer after all of it is generated
	mediaBytes                     int  // of inline media, which are no text of the prompt
	thinkingBudget                 int  // thinking.budget_tokens of /v1/messages; 0: not given
}

// DefaultCompletionTokens is as in OpenAI's API and vLLM. If max_tokens is null, only the context
// limits the answer.
const DefaultCompletionTokens = 16

// MaxTokens is the client's limit, and Limit the one that counts: without a client's, engines give
// a completion their default, and at the other endpoints only the context limits the answer (0).
func (p *parser) setLimit() {
	req := p.req
	req.MaxTokens, req.MaxTokensKey = p.maxTokens, schemas[req.Endpoint].maxTokensKey
	if req.Endpoint == mooncake.Chat && p.maxCompletionTokens > 0 { // engines prefer this key
		req.MaxTokens, req.MaxTokensKey = p.maxCompletionTokens, "max_completion_tokens"
	}
	req.Limit = req.MaxTokens
	if req.MaxTokens == 0 {
		req.MaxTokensKey = ""
		if req.Endpoint == mooncake.Completions && req.Body.Count("max_tokens") == 0 {
			// A max_tokens of null would ask for no limit.
			req.Limit = DefaultCompletionTokens
		}
	}
}

func (p *parser) checkCombinations() *Error {
	if refusal := p.requireModel(); refusal != nil {
		return refusal
	}
	if refusal := p.checkNeededKeys(); refusal != nil {
		return refusal
	}
	p.setLimit()
	// They may set another limit, which checkCounts needs.
	if ofEndpoint := schemas[p.req.Endpoint].checkCombinations; ofEndpoint != nil {
		if refusal := ofEndpoint(p); refusal != nil {
			return refusal
		}
	}
	if refusal := p.checkCounts(); refusal != nil {
		return refusal
	}
	if refusal := p.checkStream(); refusal != nil {
		return refusal
	}
	p.complete()
	return nil
}

func (p *parser) checkNeededKeys() *Error {
	req, s := p.req, &schemas[p.req.Endpoint]
	if !p.hasPrompt {
		return badRequest(CodeMissing, s.promptKey, "the request has no %q", s.promptKey)
	}
	if p.hasStreamOptions && !req.Stream && req.Endpoint != mooncake.Tokens {
		// At Tokens, engines ignore stream_options (vLLM 0.32.0).
		return badRequest(CodeInvalidValue, "stream_options", "\"stream_options\" is only allowed when \"stream\" is true")
	}
	// Responses and Generate have no key "logprobs".
	hasLogprobsKey := req.Endpoint != mooncake.Responses && req.Endpoint != mooncake.Generate
	if req.TopLogprobs != 0 && hasLogprobsKey && !p.logprobs {
		return badRequest(CodeInvalidValue, "top_logprobs", "\"top_logprobs\" needs \"logprobs\" to be true")
	}
	return nil
}

func (p *parser) complete() {
	req := p.req
	req.ContinuousUsage = req.ContinuousUsage && req.IncludeUsage
	// vLLM computes logprobs for each echo of a chat.
	echoHasLogprobs := p.logprobs || req.Endpoint == mooncake.Chat
	req.PromptLogprobs = p.promptLogprobs || p.echo && echoHasLogprobs
	if p.wantsBeams {
		req.Beams, req.N = req.N, 1 // one request to one engine computes all beams
	}
	if !req.Stream { // the engine may stream all the same
		req.Passthrough = !p.canJoinStream()
	}
	tools, _ := req.Body.Get("tools")
	req.PromptBytes += len(tools) - p.mediaBytes // engines render the tools into the prompt
}

// canJoinStream says whether evenkeel can join a stream to the answer that the engine would give in
// one piece.
func (p *parser) canJoinStream() bool {
	req := p.req
	switch {
	case !req.Endpoint.Assembles():
	case req.PromptLogprobs: // a stream lacks them, or has them in another form
	case p.wantsBeams: // the best answer is known at the end only
	case p.wantsDerender: // engines parse the whole answer at its end, and refuse to stream it
	case HasTools(&req.Body): // engines parse tool calls in a whole text differently than in a stream
	case asksForExtras(&req.Body): // such as return_meta_info: engines send only some in a stream
	default:
		return true
	}
	return false
}

// checkCounts is called after setLimit.
func (p *parser) checkCounts() *Error {
	req := p.req
	if req.Limit > 0 && p.minTokens > req.Limit {
		// The decode engine would refuse it, after a whole prefill.
		return badRequest(CodeInvalidValue, "min_tokens", "\"min_tokens\" is %d, above the %d tokens the answer may have",
			p.minTokens, req.Limit)
	}
	// With min_tokens, an engine crashes at a stop token outside of the vocabulary, whose size must be
	// known to check the ids.
	if p.hasStopTokenIDs && p.minTokens > 0 && p.limits.VocabSize <= 0 {
		return badRequest(CodeUnsupported, "stop_token_ids",
			"\"stop_token_ids\" together with \"min_tokens\" needs a model whose vocabulary size is configured here")
	}
	// prompts*req.N could overflow.
	if prompts, maxAnswers := max(1, len(req.Prompts)), limitOrInfinite(p.limits.Answers); req.N > maxAnswers/prompts {
		return badRequest(CodeInvalidValue, schemas[req.Endpoint].promptKey,
			"%d prompts with %d answers each are more than %d answers; send fewer prompts, or a lower \"n\"",
			prompts, req.N, maxAnswers)
	}
	return nil
}

func (p *parser) checkStream() *Error {
	switch {
	case !p.req.Stream:
	case p.promptLogprobs && !p.promptLogprobsMayStream:
		// The decode engine would refuse it, after a whole prefill.
		return badRequest(CodeInvalidValue, "prompt_logprobs", "\"prompt_logprobs\" is not available in a stream; send \"stream\": false")
	case p.wantsBeams:
		return badRequest(CodeUnsupported, "use_beam_search",
			"\"use_beam_search\" cannot be streamed, because the best answer is known at the end only; send \"stream\": false")
	}
	return nil
}
