package openai

import (
	"encoding/json"
	"math"

	"evenkeel/mooncake"
)

// Limits are what the operator allows and what the engines accept.
type Limits struct {
	MaxDepth     int      // levels of nested JSON; 0: 64
	VocabSize    int      // token ids are below this number; 0: unknown
	MediaHosts   []string // host or host:port, as a media URL must write it; empty: only data: URLs are allowed
	ChatTemplate bool     // clients may send their own chat_template

	Sole func() string // the model of a request that names none, if there is only one; empty, or nil: the request must name one

	// 0: no limit.
	Answers          int // that a request may ask for: each answer takes a place in the pool
	AnswersPerPrompt int
	StopStrings      int
}

// unbounded returns limit, or for 0 a number that no request reaches.
func unbounded(limit int) int {
	if limit <= 0 {
		return math.MaxInt32
	}
	return limit
}

// AllTokens as Likeliest means all tokens that the model knows, as in vLLM.
const AllTokens = -1

// Request is a client's request that was checked and may go to the engines.
type Request struct {
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Model    string

	Stream          bool
	IncludeUsage    bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats; false without IncludeUsage
	ReturnTokenIDs  bool

	N int // answers for each prompt, 1 or more
	// how many likeliest tokens, with their probabilities, are asked for at each token of the answer; AllTokens: all that the model knows
	Likeliest    int
	Prompts      []json.RawMessage // the prompts of a list; nil: there is one prompt, in the body
	MaxTokens    int               // 0: not given
	MaxTokensKey string            // the key that MaxTokens came from; empty: not given
	Limit        int               // tokens of the answer: MaxTokens, or the engines' default; 0: only the context limits it
	Passthrough  bool              // the engine must answer in one piece, because its stream would have less, or have it in another form
	PromptRows   bool              // an engine of vLLM must compute logprobs of the prompt's tokens for it, even if the answer has none
	Beams        int               // beams of a beam search; 0: there is none
	PrefillOnly  bool              // a prefill engine alone answers it, because the answer has at most one token
	PromptBytes  int               // bytes of prompt or messages and tools, without inline media; for estimates of its tokens
	Listed       bool              // of /generate: the answer is a list
	Names        [][]byte          // ids of its answers, if the client has named each; nil: they are named after the request
	PromptTokens int               // exact if the prompts are token ids without media; else 0
}

// A Part is one of the requests for a single answer into which a client's request is split.
type Part struct {
	mooncake.Changes
	Choice int // index of its answer: prompt * n + sample
	Prompt int // index of its prompt; usage counts the tokens of each prompt once
}

// Parts returns the parts in the order of their choices. The single part
// of a plain request changes nothing in the body.
func (r *Request) Parts() []Part {
	prompts := max(1, len(r.Prompts))
	legs := make([]Part, 0, prompts*r.N)
	for p := range prompts {
		for sample := range r.N {
			leg := Part{Choice: p*r.N + sample, Prompt: p}
			leg.SeedOffset = sample
			if r.Prompts != nil {
				leg.Changes.Prompt = r.Prompts[p]
			}
			legs = append(legs, leg)
		}
	}
	return legs
}

// Parse reads and checks a request body; every refusal has status 400 and, if
// one key is at fault, its name. The request points into raw.
func Parse(ep mooncake.Endpoint, raw []byte, lim Limits) (*Request, *Error) {
	body, err := mooncake.ScanFor(ep, raw, lim.MaxDepth)
	if err != nil {
		return nil, bad(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p, d := parser{lim: lim, req: &Request{Endpoint: ep, Body: body, N: 1}}, &dialects[ep]
	for key, v := range body.All() {
		rule, ok := d.rules[key]
		if !ok && !mooncake.Reserved(key) {
			continue
		}
		if body.Count(key) > 1 { // engines would take the last value, other parsers the first
			return nil, bad(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key).asCalled(&body, key)
		}
		if rule != nil {
			if e := rule(&p, key, v); e != nil {
				return nil, e.asCalled(&body, key)
			}
		}
	}
	if e := p.together(); e != nil {
		return nil, e.asCalled(&body, e.Param)
	}
	return p.req, nil
}

// parser holds what the rules find in a request, and what one rule needs from another.
type parser struct {
	lim Limits
	req *Request

	maxTokens, maxCompletionTokens int
	minTokens                      int
	hasPrompt                      bool // messages or prompt, whichever the endpoint reads
	streamOptions                  bool
	stopTokens                     bool
	echo, logprobs                 bool
	promptLogprobs, beams          bool
	rowsInStream                   bool // the logprobs of the prompt that are asked for are allowed in a stream
	derender                       bool // engines parse the answer after all of it is generated
	mediaBytes                     int
	thinking                       int // tokens of the answer that may be thinking
}

// DefaultCompletionTokens is the most tokens of a completion whose request lacks the key max_tokens, as in
// OpenAI's API and vLLM. If max_tokens is null, only the context limits the completion.
const DefaultCompletionTokens = 16

// together checks what depends on several keys, and completes the request.
func (p *parser) together() *Error {
	r, d := p.req, &dialects[p.req.Endpoint]
	if e := p.named(); e != nil {
		return e
	}
	if !p.hasPrompt {
		return bad(CodeMissing, d.prompt, "the request has no %q", d.prompt)
	}
	if p.streamOptions && !r.Stream && r.Endpoint != mooncake.Tokens { // engines ignore them at Tokens (vLLM 0.32.0)
		return bad(CodeInvalidValue, "stream_options", "\"stream_options\" is only allowed when \"stream\" is true")
	}
	if r.Likeliest != 0 && !p.logprobs && r.Endpoint != mooncake.Responses && r.Endpoint != mooncake.Generate {
		return bad(CodeInvalidValue, "top_logprobs", "\"top_logprobs\" needs \"logprobs\" to be true")
	}
	r.MaxTokens, r.MaxTokensKey = p.maxTokens, d.length
	if r.Endpoint == mooncake.Chat && p.maxCompletionTokens > 0 {
		r.MaxTokens, r.MaxTokensKey = p.maxCompletionTokens, "max_completion_tokens"
	}
	r.Limit = r.MaxTokens
	if r.MaxTokens == 0 {
		r.MaxTokensKey = ""
		if r.Endpoint == mooncake.Completions && r.Body.Count("max_tokens") == 0 {
			r.Limit = DefaultCompletionTokens
		}
	}
	if d.check != nil {
		if e := d.check(p); e != nil {
			return e
		}
	}
	if r.Limit > 0 && p.minTokens > r.Limit { // the decode engine would refuse it, after a whole prefill
		return bad(CodeInvalidValue, "min_tokens", "\"min_tokens\" is %d, above the %d tokens the answer may have", p.minTokens, r.Limit)
	}
	if p.stopTokens && p.minTokens > 0 && p.lim.VocabSize <= 0 {
		return bad(CodeUnsupported, "stop_token_ids",
			"\"stop_token_ids\" together with \"min_tokens\" needs a model whose vocabulary size is configured here")
	}
	if prompts, most := max(1, len(r.Prompts)), unbounded(p.lim.Answers); r.N > most/prompts { // a product could overflow
		return bad(CodeInvalidValue, d.prompt, "%d prompts with %d answers each are more than %d answers; send fewer prompts, or a lower \"n\"",
			prompts, r.N, most)
	}
	r.ContinuousUsage = r.ContinuousUsage && r.IncludeUsage
	r.PromptRows = p.promptLogprobs || p.echo && (p.logprobs || r.Endpoint == mooncake.Chat)
	if r.Stream && p.promptLogprobs && !p.rowsInStream { // the decode engine would refuse it, after a whole prefill
		return bad(CodeInvalidValue, "prompt_logprobs", "\"prompt_logprobs\" is not available in a stream; send \"stream\": false")
	}
	if p.beams {
		if r.Stream {
			return bad(CodeUnsupported, "use_beam_search",
				"\"use_beam_search\" cannot be streamed, because the best answer is known at the end only; send \"stream\": false")
		}
		r.Beams, r.N = r.N, 1 // one engine computes all beams
	}
	r.Passthrough = !r.Stream && (r.PromptRows || p.beams || p.derender || !r.Endpoint.Assembles() || HasTools(&r.Body) || asksBeside(&r.Body))
	tools, _ := r.Body.Get("tools")
	r.PromptBytes += len(tools) - p.mediaBytes
	return nil
}
