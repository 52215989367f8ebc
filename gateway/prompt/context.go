package prompt

import (
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"fmt"
	"net/http"
)

// A prompt and the most tokens of its answer may together be longer than the model's context. vLLM from 0.32 on generates as many tokens
// as fit. Older decode engines answer 400, but only after a whole prefill: the prefill engine is asked for one token, and
// does not notice. evenkeel answers 400 earlier.

// CheckBeforePrefill refuses a request that is too long for the decode engines of its model. If the length of a prompt is not known before
// the prefill, it accepts the prompt, which CheckContext checks later with the prefill engine's count.
func (r *Reader) CheckBeforePrefill(m roster.Route, req *openai.Request, legs []openai.SubRequest) *openai.Error {
	switch {
	case m.MaxLen == 0 || req.MaxTokensKey == "": // the context is not known, or the request sets no limit, so engines limit the answer
		return nil
	case req.MaxTokens > m.MaxLen: // no prompt leaves room for so many tokens
		return contextExceeded(req, fmt.Sprintf("the model's context is %d tokens; %q asks for %d", m.MaxLen, req.MaxTokensKey, req.MaxTokens))
	case m.Clamps: // a decode engine shortens the answer instead
		return nil
	}
	for i := range legs {
		if i > 0 && legs[i].Prompt == legs[i-1].Prompt { // the same prompt, for another answer, is checked already
			continue
		}
		source := &Source{Req: req, Body: &req.Body, Changes: &legs[i].Patch, Model: m}
		room := m.MaxLen - req.MaxTokens // the most tokens that the prompt may have
		// ok is false if the prompt surely fits into this room, or if its length is not known. Then CheckContext is called after
		// the prefill.
		if tokens, ok := r.countTokens(source, room); ok {
			const answered = 0 // the request is new, so no tokens of the prompt belong to its answer
			if fail := CheckContext(m, req, tokens, answered); fail != nil {
				return fail
			}
		}
	}
	return nil
}

// CheckContext returns a refusal if a prompt and the largest answer that the request allows are together longer than the model's context;
// nil: they fit. tokens is the engine's count of the prompt. The prompt of a resumed request also has the answer so far; answered is how
// many of the tokens belong to it. They count only once, because req.MaxTokens limits the whole answer.
func CheckContext(m roster.Route, req *openai.Request, tokens, answered int) *openai.Error {
	contextKnown, answerLimited := m.MaxLen != 0, req.MaxTokensKey != ""
	// Where Clamps is set, a decode engine shortens the answer to what fits. Engines also limit an answer for which the request sets
	// no limit.
	mustFit := contextKnown && answerLimited && !m.Clamps
	clientsPrompt := tokens - answered
	if !mustFit || clientsPrompt+req.MaxTokens <= m.MaxLen {
		return nil
	}
	// The message has the engine's count: for a resumed request, it includes the answer so far.
	return contextExceeded(req, fmt.Sprintf("the model's context is %d tokens; the prompt has %d and %q asks for %d more", m.MaxLen, tokens,
		req.MaxTokensKey, req.MaxTokens))
}

// contextExceeded returns the refusal of a request that is too long for the model's context.
func contextExceeded(req *openai.Request, message string) *openai.Error {
	return &openai.Error{Status: http.StatusBadRequest, Code: "context_length_exceeded", Param: req.MaxTokensKey, Message: message}
}

// maxTokensOfAnyModel bounds an engine's token counts if the length of its context is not known. It is far above the context of any model.
const maxTokensOfAnyModel = 16 << 20

// ContextLimit returns how many tokens prompt and answer may have together. reported is the length of the context that the engine reports;
// 0: it reports none, so maxTokensOfAnyModel bounds them.
func ContextLimit(reported int) int {
	if reported <= 0 {
		return maxTokensOfAnyModel
	}
	return reported
}

// PlausibleCounts says whether the numbers of tokens of a prompt and its answer, from an engine or another proxy, are possible with this
// context: none is below 0, and together they fit. It subtracts, because the sum of two untrusted numbers could overflow. context is the
// length of the context in tokens; 0: not known.
func PlausibleCounts(prompt, completion, context int) bool {
	limit := ContextLimit(context)
	return prompt >= 0 && prompt <= limit && completion >= 0 && completion <= limit-prompt
}
