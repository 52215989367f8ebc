package prompt

import (
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"fmt"
	"net/http"
)

// A prompt and the most tokens of its answer may exceed the model's context. vLLM from 0.32 on
// generates as many tokens as fit. Older decode engines answer 400, but only after a whole prefill:
// the prefill engine is asked for one token, and does not notice. evenkeel answers 400 earlier.

// CheckBeforePrefill refuses a request that is too long for its decode engines. If the length of a
// prompt is not known, CheckContext checks it later with the prefill engine's count.
func (r *Reader) CheckBeforePrefill(m roster.Route, req *openai.Request, legs []openai.SubRequest) *openai.Error {
	switch {
	case m.MaxLen == 0 || req.MaxTokensKey == "": // not known, or no limit: engines limit the answer
		return nil
	case req.MaxTokens > m.MaxLen: // no prompt leaves room
		return contextExceeded(req, fmt.Sprintf("the model's context is %d tokens; %q asks for %d", m.MaxLen, req.MaxTokensKey, req.MaxTokens))
	case m.Clamps: // a decode engine shortens the answer
		return nil
	}
	for i := range legs {
		if i > 0 && legs[i].Prompt == legs[i-1].Prompt { // checked already
			continue
		}
		source := &Source{Req: req, Body: &req.Body, Changes: &legs[i].Patch, Model: m}
		room := m.MaxLen - req.MaxTokens // for the prompt, in tokens
		// If ok is false, the prompt surely fits, or CheckContext is called after the prefill.
		if tokens, ok := r.countTokens(source, room); ok {
			const answered = 0 // the request is new
			if fail := CheckContext(m, req, tokens, answered); fail != nil {
				return fail
			}
		}
	}
	return nil
}

// CheckContext refuses a prompt that does not fit into the context with the largest answer. tokens
// is the engine's count of the prompt. Of a resumed request, answered of these tokens are the
// answer so far, which req.MaxTokens limits already.
func CheckContext(m roster.Route, req *openai.Request, tokens, answered int) *openai.Error {
	contextKnown, answerLimited := m.MaxLen != 0, req.MaxTokensKey != ""
	// With Clamps, or without a limit, engines shorten the answer.
	mustFit := contextKnown && answerLimited && !m.Clamps
	clientsPrompt := tokens - answered
	if !mustFit || clientsPrompt+req.MaxTokens <= m.MaxLen {
		return nil
	}
	// For a resumed request, the engine's count includes the answer so far.
	return contextExceeded(req, fmt.Sprintf("the model's context is %d tokens; the prompt has %d and %q asks for %d more", m.MaxLen, tokens,
		req.MaxTokensKey, req.MaxTokens))
}

func contextExceeded(req *openai.Request, message string) *openai.Error {
	return &openai.Error{Status: http.StatusBadRequest, Code: "context_length_exceeded", Param: req.MaxTokensKey, Message: message}
}

// maxTokensOfAnyModel is far above the context of any model.
const maxTokensOfAnyModel = 16 << 20

// ContextLimit bounds prompt and answer together, in tokens. reported is the engine's; 0: none.
func ContextLimit(reported int) int {
	if reported <= 0 {
		return maxTokensOfAnyModel
	}
	return reported
}

// PlausibleCounts says whether token counts from an engine or another proxy fit into the context
// (0: not known). It subtracts, because the sum of two untrusted numbers could overflow.
func PlausibleCounts(prompt, completion, context int) bool {
	limit := ContextLimit(context)
	return prompt >= 0 && prompt <= limit && completion >= 0 && completion <= limit-prompt
}
