package selftest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"evenkeel/mooncake"
)

// soFar is the part of an answer that the engines must continue. A way that uses token ids sends
// soFarTokens tokens instead.
const (
	soFar       = `"So far"`
	soFarTokens = 2
)

// tryResumes finds out in which way (chat_resume) engines can continue a chat whose answer broke
// off. Each engine gets a partner, and the pair has to continue a part of an answer. An engine that
// does not know this way begins the answer again, which its count of prompt tokens shows.
func (t *tester) tryResumes(ctx context.Context, prefills, decodes []testedRank) {
	for id, p := range t.healthyPairs(ctx, prefills, decodes, "r") { // a rank that fails with a completion would fail with a chat, too
		t.findResumeMethod(ctx, p.prefill, p.decode, id)
	}
}

// findResumeMethod sends a chat through a pair, and then the chat with a part of its answer, in one
// way after the other until one works. It reports whether the way in the decode engine's profile
// works.
func (t *tester) findResumeMethod(ctx context.Context, p, d testedRank, id string) {
	configured := d.profile.ChatResume
	model, _ := commonModel(p, d)
	q := newQuery(mooncake.Chat, model, id, shortPrompt)
	first, prefillErr, decodeErr := t.sendThroughPair(ctx, p, d, q, id+"-0")
	if err := cmp.Or(prefillErr, decodeErr); err != nil {
		t.report(d.name, OK, "does not answer a chat (%v), so chat_resume was not tried", err)
		return
	}
	works := ""             // the first method that works for the pair; empty: none does
	var configuredErr error // why the method in the profile does not work; nil: it works, or the profile has none
	for i, method := range resumeMethods(d.profile) {
		err := t.tryContinue(ctx, p, d, q, method, first, fmt.Sprintf("%s-%d", id, i+1))
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			works = method
			break
		}
		if method == configured {
			configuredErr = err
		}
	}
	switch {
	case works == configured:
		t.report(d.name, OK, "a chat that breaks off goes on (chat_resume: %s)", configured)
	case works == "" && configuredErr == nil:
		t.report(d.name, OK, "a chat that breaks off ends with an error: it goes on in no way that chat_resume has")
	case works == "":
		t.report(d.name, Warn,
			"a chat that breaks off ends with an error: chat_resume is %s, and with it %v. No other way works either; upgrade the engines",
			configured, configuredErr)
	case configured == mooncake.ChatResumeNone:
		t.report(d.name, OK, "a chat that breaks off ends with an error, because chat_resume is none; these engines go on with chat_resume: %s",
			works)
	default:
		t.report(d.name, Warn, "a chat that breaks off ends with an error: chat_resume is %s, and with it %v; set chat_resume: %s in its profile",
			configured, configuredErr, works)
	}
}

// resumeMethods lists the ways that an engine may know, the profile's own first.
func resumeMethods(p *mooncake.Profile) (list []string) {
	byIDs := mooncake.ChatResumeVLLM
	switch {
	case p.Ascend():
		byIDs = mooncake.ChatResumeAscend
	case p.Connector == mooncake.SGLang: // SGLang cannot continue a chat from token ids
		byIDs = mooncake.ChatResumeNone
	}
	for _, method := range []string{p.ChatResume, byIDs, mooncake.ChatResumeContinue} {
		if method != mooncake.ChatResumeNone && !slices.Contains(list, method) {
			list = append(list, method)
		}
	}
	return list
}

// tryContinue sends the chat with a part of its answer, in the way that method names. The error
// says that an engine failed, or did not continue the part, as its count of prompt tokens shows.
// first is the engines' answer to the chat without the part.
func (t *tester) tryContinue(ctx context.Context, p, d testedRank, q *query, method string, first pairAnswer, id string) error {
	longer := *q
	resume := &mooncake.Resume{Method: method, Text: json.RawMessage(soFar), Tokens: soFarTokens}
	longer.changes = &mooncake.Patch{Resume: resume}
	byIDs := !mooncake.ByText(method)
	if byIDs { // the first tokens of the prompt serve as the answer so far
		var promptIDs []int32
		if json.Unmarshal(first.PromptTokenIDs, &promptIDs) != nil || len(promptIDs) < soFarTokens {
			return errors.New("the prefill engine does not tell the prompt's token ids (vLLM has them since 0.10.2)")
		}
		resume.IDs = mooncake.JoinIDs(first.PromptTokenIDs, promptIDs[:soFarTokens])
	}
	second, prefillErr, decodeErr := t.sendThroughPair(ctx, p, d, &longer, id)
	if err := cmp.Or(prefillErr, decodeErr); err != nil {
		return err
	}
	for _, side := range []struct {
		name          string
		before, after int // prompt tokens without and with the part of the answer; 0: the engine does not report them
	}{{"prefill", first.PromptTokens, second.PromptTokens}, {"decode", first.decodeCount, second.decodeCount}} {
		counted := side.before > 0 && side.after > 0
		added := side.after - side.before
		overlooked := added <= 0 || byIDs && added != soFarTokens // as text, the part may have any number of tokens
		if counted && overlooked {
			return fmt.Errorf("the %s engine overlooked the answer so far: it counted %d prompt tokens, and %d without it", side.name, side.after,
				side.before)
		}
	}
	return nil
}
