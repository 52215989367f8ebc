package selftest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"evenkeel/mooncake"
)

// soFar is the part of an answer that the engines must continue. A way that uses token ids sends soFarTokens tokens instead.
const (
	soFar       = `"So far"`
	soFarTokens = 2
)

// resumes finds out in which way (chat_resume) engines can continue a chat whose answer broke off. Each engine gets a partner, and the pair
// has to continue a part of an answer. An engine that does not know the way begins the answer again, which its count of prompt tokens
// shows.
func (t *tester) resumes(ctx context.Context, prefills, decodes []testedRank) {
	for id, p := range t.sound(ctx, prefills, decodes, "r") { // a rank that fails with a completion would fail with a chat, too
		t.resume(ctx, p.prefill, p.decode, id)
	}
}

// resume sends a chat through a pair, and then the chat with a part of its answer, in one way after the other until one works. It reports
// whether the way in the decode engine's profile works.
func (t *tester) resume(ctx context.Context, p, d testedRank, id string) {
	configured := d.profile.ChatResume
	model, _ := common(p, d)
	q := ask(mooncake.Chat, model, id)
	first, prefill, decode := t.through(ctx, p, d, q, id+"-0")
	if err := cmp.Or(prefill, decode); err != nil {
		t.report(d.name, OK, "does not answer a chat (%v), so chat_resume was not tried", err)
		return
	}
	works := ""     // the first way that works for the pair
	var wrong error // why the way in the profile does not work
	for i, how := range ways(d.profile) {
		err := t.goesOn(ctx, p, d, q, how, first, fmt.Sprintf("%s-%d", id, i+1))
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			works = how
			break
		}
		if how == configured {
			wrong = err
		}
	}
	switch {
	case works == configured:
		t.report(d.name, OK, "a chat that breaks off goes on (chat_resume: %s)", configured)
	case works == "" && wrong == nil:
		t.report(d.name, OK, "a chat that breaks off ends with an error: it goes on in no way that chat_resume has")
	case works == "":
		t.report(d.name, Warn,
			"a chat that breaks off ends with an error: chat_resume is %s, and with it %v. No other way works either; upgrade the engines",
			configured, wrong)
	case configured == mooncake.ChatResumeNone:
		t.report(d.name, OK, "a chat that breaks off ends with an error, because chat_resume is none; these engines go on with chat_resume: %s",
			works)
	default:
		t.report(d.name, Warn, "a chat that breaks off ends with an error: chat_resume is %s, and with it %v; set chat_resume: %s in its profile",
			configured, wrong, works)
	}
}

// ways lists the ways that an engine may know, the profile's own first.
func ways(p *mooncake.Profile) (list []string) {
	byIDs := mooncake.ChatResumeVLLM
	switch {
	case p.Ascend():
		byIDs = mooncake.ChatResumeAscend
	case p.Connector == mooncake.SGLang: // it has no way by token ids
		byIDs = mooncake.ChatResumeNone
	}
	for _, how := range []string{p.ChatResume, byIDs, mooncake.ChatResumeContinue} {
		if how != mooncake.ChatResumeNone && (len(list) == 0 || list[0] != how) {
			list = append(list, how)
		}
	}
	return list
}

// goesOn sends the chat with a part of its answer, in the way how. The error says that an engine failed, or did not continue the part, as
// its count of prompt tokens shows. first is the engines' answer to the chat without the part.
func (t *tester) goesOn(ctx context.Context, p, d testedRank, q *query, how string, first pairAnswer, id string) error {
	longer := *q
	resume := &mooncake.Resume{How: how, Text: json.RawMessage(soFar), Tokens: soFarTokens}
	longer.changes = &mooncake.Patch{Resume: resume}
	byIDs := !mooncake.ByText(how)
	if byIDs {
		var own []int32
		if json.Unmarshal(first.PromptTokenIDs, &own) != nil || len(own) < soFarTokens {
			return errors.New("the prefill engine does not tell the prompt's token ids (vLLM has them since 0.10.2)")
		}
		resume.IDs = mooncake.JoinIDs(first.PromptTokenIDs, own[:soFarTokens])
	}
	continued, prefill, decode := t.through(ctx, p, d, &longer, id)
	if err := cmp.Or(prefill, decode); err != nil {
		return err
	}
	for _, side := range []struct {
		name             string
		alone, continued int // prompt tokens without and with the part of the answer; 0: the engine does not report them
	}{{"prefill", first.PromptTokens, continued.PromptTokens}, {"decode", first.decoded, continued.decoded}} {
		counted := side.alone > 0 && side.continued > 0
		more := side.continued - side.alone
		overlooked := more <= 0 || byIDs && more != soFarTokens // as text, the part may have any number of tokens
		if counted && overlooked {
			return fmt.Errorf("the %s engine overlooked the answer so far: it counted %d prompt tokens, and %d without it", side.name,
				side.continued, side.alone)
		}
	}
	return nil
}
