package openai

import (
	"bytes"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// dialect is what the bodies of an endpoint say in words of their own.
type dialect struct {
	rules  map[string]rule
	prompt string                 // the key of the prompt
	lead   string                 // the key of what stands before it; empty: nothing does
	length string                 // the key of how long the answer may be
	check  func(p *parser) *Error // what the keys mean for each other besides; nil: no more than elsewhere
}

var dialects = [mooncake.Endpoints]dialect{
	mooncake.Chat:        {rules: rules, prompt: "messages", length: "max_tokens"},
	mooncake.Completions: {rules: rules, prompt: "prompt", length: "max_tokens"},
	mooncake.Responses:   {rules: responsesRules, prompt: "input", lead: "instructions", length: "max_output_tokens"},
	mooncake.Messages:    {rules: messagesRules, prompt: "messages", lead: "system", length: "max_tokens", check: (*parser).message},
	mooncake.Tokens:      {rules: tokensRules, prompt: "prompt", length: "max_tokens", check: (*parser).tokensTogether},
	mooncake.Generate:    {rules: generateRules, prompt: "prompt", length: "max_tokens", check: (*parser).generateTogether},
}

// PromptKey is the key of the body that holds the prompt.
func PromptKey(ep mooncake.Endpoint) string { return dialects[ep].prompt }

// Lead is what stands before the prompt of an endpoint and tells it from others; empty: nothing does.
func Lead(b *mooncake.Body, ep mooncake.Endpoint) string {
	said, _ := b.Get(dialects[ep].lead)
	if len(said) == 0 || said[0] != '[' {
		return string(said)
	}
	var text strings.Builder
	for block := range rawjson.Elements(said) {
		for key, v := range rawjson.Members(block) {
			if key == "text" && !bytes.HasPrefix(v, []byte(billing)) {
				text.Write(v)
			}
		}
	}
	return text.String()
}

// billing begins a block in which Claude Code sends something new each time. vLLM leaves it out of the prompt.
const billing = `"x-anthropic-billing-header`
