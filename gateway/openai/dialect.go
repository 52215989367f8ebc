package openai

import (
	"bytes"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// schema has an endpoint's rules for the keys of a body, and its names for keys that exist at every
// endpoint.
type schema struct {
	rules             map[string]rule
	promptKey         string                 // key of the body that holds the prompt
	leadKey           string                 // of the text before the prompt; empty: none
	maxTokensKey      string                 // the key of the limit of the answer, in tokens
	checkCombinations func(p *parser) *Error // of keys that depend on each other; nil: none
}

var schemas = [mooncake.Endpoints]schema{
	mooncake.Chat:        {rules: rules, promptKey: "messages", maxTokensKey: "max_tokens"},
	mooncake.Completions: {rules: rules, promptKey: "prompt", maxTokensKey: "max_tokens"},
	mooncake.Responses:   {rules: responsesRules, promptKey: "input", leadKey: "instructions", maxTokensKey: "max_output_tokens"},
	mooncake.Messages: {rules: messagesRules, promptKey: "messages", leadKey: "system", maxTokensKey: "max_tokens",
		checkCombinations: (*parser).checkMessageKeys},
	mooncake.Tokens: {rules: tokensRules, promptKey: "prompt", maxTokensKey: "max_tokens", checkCombinations: (*parser).checkTokensKeys},
	mooncake.Generate: {rules: generateRules, promptKey: "prompt", maxTokensKey: "max_tokens",
		checkCombinations: (*parser).checkGenerateKeys},
}

// PromptKey is the key of the body that holds the prompt, such as messages for a chat.
func PromptKey(endpoint mooncake.Endpoint) string { return schemas[endpoint].promptKey }

// TextBeforePrompt returns the text before the prompt as JSON, for example the system message of
// Anthropic's API. The engines compute KV for it, too, so equal prompts behind different texts
// share no KV.
func TextBeforePrompt(body *mooncake.Body, endpoint mooncake.Endpoint) string {
	value, _ := body.Get(schemas[endpoint].leadKey)
	if len(value) == 0 || value[0] != '[' { // one string, or absent
		return string(value)
	}
	var text strings.Builder
	for block := range rawjson.Elements(value) {
		for key, v := range rawjson.Members(block) {
			isBilling := bytes.HasPrefix(v, []byte(billingBlock)) // not in the prompt
			if key == "text" && !isBilling {
				text.Write(v)
			}
		}
	}
	return text.String()
}

// billingBlock begins a block of system text that changes with each request of Claude Code. vLLM
// leaves it out of the prompt.
const billingBlock = `"x-anthropic-billing-header`
