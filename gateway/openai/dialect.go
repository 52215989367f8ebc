package openai

import (
	"bytes"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// schema has the rules of an endpoint, and its names for keys that all endpoints have.
type schema struct {
	rules  map[string]rule
	prompt string                 // the key of the prompt
	lead   string                 // the key of the text before the prompt; empty: there is none
	length string                 // the key of the limit of the answer, in tokens
	check  func(p *parser) *Error // further checks of keys that depend on each other; nil: none
}

var dialects = [mooncake.Endpoints]schema{
	mooncake.Chat:        {rules: rules, prompt: "messages", length: "max_tokens"},
	mooncake.Completions: {rules: rules, prompt: "prompt", length: "max_tokens"},
	mooncake.Responses:   {rules: responsesRules, prompt: "input", lead: "instructions", length: "max_output_tokens"},
	mooncake.Messages:    {rules: messagesRules, prompt: "messages", lead: "system", length: "max_tokens", check: (*parser).messageTogether},
	mooncake.Tokens:      {rules: tokensRules, prompt: "prompt", length: "max_tokens", check: (*parser).tokensTogether},
	mooncake.Generate:    {rules: generateRules, prompt: "prompt", length: "max_tokens", check: (*parser).generateTogether},
}

// PromptKey is the key of the body that holds the prompt.
func PromptKey(endpoint mooncake.Endpoint) string { return dialects[endpoint].prompt }

// Lead returns the text before the prompt, for example the system message of Anthropic's API, as JSON; empty: there is none. Of a list of
// blocks, it joins the texts. The lead is a part of what the engines compute, so two requests with equal prompts but different leads share
// no KV.
func Lead(body *mooncake.Body, endpoint mooncake.Endpoint) string {
	lead, _ := body.Get(dialects[endpoint].lead)
	if len(lead) == 0 || lead[0] != '[' { // one text, or none
		return string(lead)
	}
	var text strings.Builder
	for block := range rawjson.Elements(lead) {
		for key, v := range rawjson.Members(block) {
			if key == "text" && !bytes.HasPrefix(v, []byte(billing)) {
				text.Write(v)
			}
		}
	}
	return text.String()
}

// billing is the beginning of a block of system text that changes with each request of Claude Code. vLLM leaves this block out of the
// prompt.
const billing = `"x-anthropic-billing-header`
