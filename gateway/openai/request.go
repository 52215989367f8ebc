package openai

import (
	"encoding/json"
	"math"

	"evenkeel/mooncake"
)

// Limits are what the operator allows and what the engines can take.
type Limits struct {
	MaxDepth     int      // of nested JSON; 0: 64
	VocabSize    int      // token ids are below it; 0: unknown
	MediaHosts   []string // host or host:port that a media URL may name, as it writes them; none: data: URLs only
	ChatTemplate bool     // clients may send their own chat_template

	Sole func() string // the model of a request that names none, if it can only be one; empty, or nil: it must name one

	// Zero is no bound.
	Answers          int // that a request may ask for: every one takes a place in the pool
	AnswersPerPrompt int
	StopStrings      int
}

// unbounded is a limit, or one that nothing reaches for zero.
func unbounded(limit int) int {
	if limit <= 0 {
		return math.MaxInt32
	}
	return limit
}

// AllTokens is a Likeliest of all tokens that the model knows, as in vLLM.
const AllTokens = -1

// Request is a client's request that may go to the engines.
type Request struct {
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Model    string

	Stream          bool
	IncludeUsage    bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats, which counts only with the former
	ReturnTokenIDs  bool

	N int // answers for each prompt, 1 or more
	// how many tokens beside each of the answer it has, with their probabilities; AllTokens: as many as the model knows
	Likeliest    int
	Prompts      []json.RawMessage // of a list of several prompts; nil: one prompt, in the body
	MaxTokens    int               // 0: not given
	MaxTokensKey string            // the key it came from
	Limit        int               // of the answer: MaxTokens, or what engines take if no key is there; 0: what the context leaves
	Passthrough  bool              // its answer is to be the engine's own one in one piece, because a stream says less, or says it otherwise
	PromptRows   bool              // an engine of vLLM has to compute logprobs of the prompt's tokens for it
	Beams        int               // of a beam search; 0: there is none
	PrefillOnly  bool              // a prefill engine answers it alone, because its answer has one token at most
	PromptBytes  int               // text of prompt or messages and tools, without inline media: an estimate's input
	Listed       bool              // its answer is a list, at /generate
	Names        [][]byte          // of its answers, if the client has named each; nil: they are named after the request
	PromptTokens int               // exact where the prompts are token ids, else 0
}

// Leg is one of the PD requests that a client's request becomes.
type Leg struct {
	mooncake.Leg
	Choice int // index of its answer: prompt * n + sample
	Prompt int // index of its prompt: prompt tokens count once for each prompt
}

// Legs returns the PD requests, in the order of their choices. The single leg
// of a plain request differs in nothing from the body.
func (r *Request) Legs() []Leg {
	prompts := max(1, len(r.Prompts))
	legs := make([]Leg, 0, prompts*r.N)
	for p := range prompts {
		for sample := range r.N {
			leg := Leg{Choice: p*r.N + sample, Prompt: p}
			leg.SeedOffset = sample
			if r.Prompts != nil {
				leg.Leg.Prompt = r.Prompts[p]
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
		if body.Count(key) > 1 { // the engines would take the last, others the first
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

// parser holds what the rules learn about a request and need for each other.
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
	rowsInStream                   bool // so few logprobs of the prompt are asked for that engines take a stream
	derender                       bool // engines parse the answer when they have all of it
	mediaBytes                     int
	thinking                       int // tokens that the answer may think for
}

// DefaultCompletionTokens is what a completion without the key max_tokens gets, as in
// OpenAI's API and vLLM.
// One with null there gets what the context leaves.
const DefaultCompletionTokens = 16

// together checks what no key can tell by itself, and completes the request.
func (p *parser) together() *Error {
	r, d := p.req, &dialects[p.req.Endpoint]
	if e := p.named(); e != nil {
		return e
	}
	if !p.hasPrompt {
		return bad(CodeMissing, d.prompt, "the request has no %q", d.prompt)
	}
	if p.streamOptions && !r.Stream && r.Endpoint != mooncake.Tokens { // there engines pass over them (vLLM 0.32.0)
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
		r.Beams, r.N = r.N, 1 // one engine makes all of them
	}
	r.Passthrough = !r.Stream && (r.PromptRows || p.beams || p.derender || !r.Endpoint.Assembles() || HasTools(&r.Body) || asksBeside(&r.Body))
	tools, _ := r.Body.Get("tools")
	r.PromptBytes += len(tools) - p.mediaBytes
	return nil
}
