package lifecycle

import (
	"encoding/json"
	"slices"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A Tier says how an answer that was lost in the middle goes on: another engine prefills the prompt and the part that the client has. It is
// a label of metrics.
type Tier = string

// The tiers. The values are labels of metrics.
const (
	Repeated   Tier = "0"        // the client has nothing of the answer: the same request is sent again
	ByPrompt   Tier = "1"        // a completion goes on: the ids of its prompt and answer tokens become the prompt
	ByIDs      Tier = "2"        // a chat goes on: the token ids of prompt and answer are sent beside the hand-off
	ByText     Tier = "3"        // the answer goes on from its text, as the last message or after the prompt; not exact to the token
	Broken     Tier = "4"        // the answer cannot go on, and ends with an error
	Concluding Tier = "finished" // only the end is missing, or no more tokens are allowed: the proxy writes the end
)

// Tiers lists all tiers, so that metrics can begin each of them at 0.
var Tiers = []Tier{Repeated, ByPrompt, ByIDs, ByText, Broken, Concluding}

// Retention says which parts of a request stay in memory while its answer runs.
type Retention uint8

// Each level also keeps what the levels before it keep.
const (
	KeepNothing Retention = iota
	KeepStart             // the body, kept until the first token, so that the same request can be sent again before it
	KeepAll               // the body and the token ids of prompt and answer, kept until the answer has ended
)

// A Loss has the facts about a lost answer that decide how it goes on.
type Loss struct {
	AnswerSoFar     *sse.Transcript // the part of the answer that came
	Finished        bool            // only the end of the answer is missing
	MayResume       bool            // the answer may go on: it was not lost too often, and its endpoint supports going on
	Retention       Retention
	Streamed        bool
	TokensVisible   bool // the client gets ids or logprobs of tokens, not only text: no token that the client has may be generated again
	MayExtendPrompt bool // nothing in the request forbids that the answer becomes a part of the prompt
	HasTools        bool // the request has tools, which only token ids can repeat

	Method          string          // how the answer can go on: chat_resume, mooncake.ResumePrompt or ResumeText; empty: it can only restart
	PromptIDs       json.RawMessage // token ids of the prompt
	PromptText      []byte          // text of the prompt, as a JSON string, for mooncake.ResumeText
	PromptTokens    int             // number of tokens of the client's own prompt, without any part of the answer
	MaxAnswerTokens int             // largest number of tokens of the whole answer
	TokenLimit      int             // the client's own limit of answer tokens; 0: none
	TokenLimitKey   string
}

// A Plan says how a lost answer goes on.
type Plan struct {
	Tier             Tier
	AnswerSoFar      *sse.Transcript   // the part of the answer so far, after which it goes on
	Resume           *mooncake.Resume  // the part of the answer that becomes a part of the prompt; nil: none
	ClientHasNothing bool              // the client has nothing of the answer yet, so that the answer is put together from its start
	Continuation     *sse.Continuation // where the next part is joined to the answer so far; nil: the client has no event yet
	PrefillCount     int               // prompt tokens that the prefill engine must count; 0: any number
	DecodeCount      int               // prompt tokens that the decode engine must count; 0: any number
}

// Plan decides how a lost answer goes on. If only its end is missing, the proxy writes the end. If the client can see no difference, the
// answer begins again. Otherwise it goes on after the part that the client has, or is broken off if it cannot. l.Retention says what is
// still in memory for this: nothing (KeepNothing), the body until the first token (KeepStart), or the body and all token ids (KeepAll).
// Plan does not change l.AnswerSoFar.
func (l *Loss) Plan() Plan {
	soFar := *l.AnswerSoFar
	// fromStart is a transcript without any part of the answer, for an answer that begins again. The client may have the head of the
	// lost answer (the id, for example) from its first events, so the new answer gets the same head.
	fromStart := &sse.Transcript{Head: soFar.Head, Prompt: soFar.Prompt}
	// Unread: an event that could not be read may have had content. IDs: the client may have seen tokens that have no text yet.
	clientSawTokens := soFar.Content || soFar.Unread || len(soFar.IDs) > 0 && l.TokensVisible
	var noResume *mooncake.Resume // nil: no part of the answer becomes a part of the prompt
	switch {
	case l.Finished && soFar.Head.ID != nil: // the head is known, with which the proxy writes the end
		return Plan{Tier: Concluding, AnswerSoFar: &soFar}
	case l.Retention == KeepNothing || !l.MayResume: // the request is not in memory, or its answer may not go on again
		return Plan{Tier: Broken}
	case !clientSawTokens: // the client has nothing that a new answer could contradict
		return l.planAfter(fromStart, Repeated, noResume)
	case l.canContinue(&soFar):
		return l.continuePlan(&soFar)
	// The client gets the answer in one piece, so it has nothing yet, not even the head. After the first token, only KeepAll still has
	// the body, with which the answer begins again.
	case l.Retention == KeepAll && !l.Streamed:
		fromStart.Head = sse.Head{}
		p := l.planAfter(fromStart, Repeated, noResume)
		p.ClientHasNothing = true
		return p
	}
	return Plan{Tier: Broken}
}

// canContinue says whether the answer can go on after soFar, the part that the client has.
func (l *Loss) canContinue(soFar *sse.Transcript) bool {
	if l.Retention != KeepAll || !l.resumable(soFar) {
		return false
	}
	hasAllTokens := soFar.Completed >= l.MaxAnswerTokens // no token follows, so the part need not end with a whole character
	return hasAllTokens || l.cutsNoCharacter(soFar)
}

// continuePlan is the plan in which the answer goes on after soFar, the part that the client has: by its text or by its token ids, as
// l.Method says. It first makes soFar fit the method (fitToMethod). If the answer may have no more tokens, the plan is only to write its
// end (Concluding).
func (l *Loss) continuePlan(soFar *sse.Transcript) Plan {
	l.fitToMethod(soFar)
	if soFar.Completed >= l.MaxAnswerTokens {
		return l.planAfter(soFar, Concluding, nil) // nil: no engine gets the request again
	}
	tier, resume := l.resumeAfter(soFar)
	return l.planAfter(soFar, tier, resume)
}

// fitToMethod changes soFar before the answer goes on after it.
//   - By token ids: tokens at its end whose text the client does not have yet are dropped, and generated again. If the client gets the
//     tokens themselves (TokensVisible), it has these tokens already, and they stay.
//   - By text: an estimated number of tokens is kept below the limit of the answer. The engine would have ended the answer at that limit,
//     so at least one token is left.
func (l *Loss) fitToMethod(soFar *sse.Transcript) {
	goesOnByText := mooncake.ByText(l.Method)
	switch {
	case goesOnByText && soFar.Guessed: // Guessed: the engine did not count all tokens
		soFar.Completed = min(soFar.Completed, max(0, l.MaxAnswerTokens-1))
	case !goesOnByText && !l.TokensVisible:
		soFar.Cut()
	}
}

// resumeAfter returns how the answer so far becomes a part of the prompt, and the tier that metrics show for it. By text (ByText), the text
// of the answer follows the prompt's text, or is the last message of the chat. By token ids, the ids of prompt and answer become the prompt
// of a completion (mooncake.ResumePrompt, ByPrompt), or are sent beside the hand-off of a chat (ByIDs).
func (l *Loss) resumeAfter(soFar *sse.Transcript) (Tier, *mooncake.Resume) {
	resume := &mooncake.Resume{Method: l.Method, Tokens: soFar.Completed}
	if l.TokenLimit > 0 {
		// The client's limit counts the tokens so far, too.
		resume.Limit, resume.LimitKey = l.TokenLimit-soFar.Completed, l.TokenLimitKey
	}
	switch l.Method {
	case mooncake.ChatResumeContinue: // soFar.Text is JSON without its quotes
		resume.Text = slices.Concat([]byte{'"'}, soFar.Text, []byte{'"'})
		return ByText, resume
	case mooncake.ResumeText: // the closing quote of the prompt moves behind the answer so far
		resume.Text = slices.Concat(l.PromptText[:len(l.PromptText)-1], soFar.Text, []byte{'"'})
		return ByText, resume
	}
	resume.IDs = mooncake.JoinIDs(l.PromptIDs, soFar.IDs)
	if l.Method == mooncake.ResumePrompt {
		return ByPrompt, resume
	}
	return ByIDs, resume
}

// planAfter is the plan in which the answer goes on after soFar, the part of the answer so far. resume is the part of the answer that
// becomes a part of the prompt; nil: none does.
func (l *Loss) planAfter(soFar *sse.Transcript, tier Tier, resume *mooncake.Resume) Plan {
	p := Plan{Tier: tier, AnswerSoFar: soFar, Resume: resume, Continuation: l.continuationOf(soFar)}
	if resume != nil && !mooncake.ByText(resume.Method) { // only token ids give a prompt of a known length
		p.PrefillCount, p.DecodeCount = l.promptCounts(soFar)
	}
	return p
}

// promptCounts returns how many prompt tokens the engines of each role must count: as many as the engine of the same role counted for the
// client's prompt, and those of the answer so far. An engine that counts fewer has ignored the answer so far, and would begin it again.
func (l *Loss) promptCounts(soFar *sse.Transcript) (byPrefill, byDecode int) {
	byPrefill = l.PromptTokens + soFar.Completed
	if soFar.Prompt > 0 { // 0: no decode engine has counted the prompt, so there is no count to compare with
		byDecode = soFar.Prompt + soFar.Completed
	}
	return byPrefill, byDecode
}

// continuationOf says where the next part of the answer is joined to soFar: its events must have the id of the first event, and go on with
// its counts. It is nil if the client has no event yet.
func (l *Loss) continuationOf(soFar *sse.Transcript) *sse.Continuation {
	if soFar.Head.ID == nil {
		return nil
	}
	c := &sse.Continuation{Head: soFar.Head, Prompt: soFar.Prompt, Tokens: soFar.Completed, Runes: soFar.Runes, Last: soFar.Last,
		Grows: soFar.Grows, Spans: soFar.Spans}
	if soFar.Prompt == 0 { // the engine reported no count
		c.Prompt = l.PromptTokens
	}
	return c
}

// cutsNoCharacter says whether the answer can go on without a break within a character: the part so far ends at the end of a character, or
// can be cut there, or goes on by its text. If a token ends within a character, its text comes with the next token. If a prompt ends with
// such a token, vLLM 0.32 writes all the text of the token into the answer, but a client that has the token already must not get it again.
func (l *Loss) cutsNoCharacter(soFar *sse.Transcript) bool {
	return !l.TokensVisible || mooncake.ByText(l.Method) || soFar.Shown == len(soFar.IDs)
}

// resumable says whether the answer so far can become a part of the prompt.
func (l *Loss) resumable(soFar *sse.Transcript) bool {
	isGenerate := soFar.Last != nil // only streams of /generate keep their last event
	// It is not known whether each event of /generate has the whole answer so far or only the new part.
	growthUnknown := soFar.Grows == sse.GrowthUnknown
	hasAllTokens := soFar.Completed >= l.MaxAnswerTokens // an answer of /generate is then at its end
	firstEventUnseen := soFar.Head.ID == nil             // its id is not known, with which the answer would have to go on
	hasMoreThanText := soFar.MoreThan                    // reasoning or a tool call, which the transcript does not have
	switch {
	case isGenerate && (growthUnknown || hasAllTokens):
		return false
	case l.Method == "", !l.MayExtendPrompt: // the engine or the request does not allow that an answer goes on
		return false
	case firstEventUnseen, hasMoreThanText, soFar.Unread: // Unread: an event could not be read, so its part of the answer is missing
		return false
	// The next engine makes its own tokens of the text, which may differ from those that the client sees. And the text does not have
	// the request's tools.
	case mooncake.ByText(l.Method):
		return !l.TokensVisible && !l.HasTools
	}
	// The answer goes on by its token ids. They must be all those of the answer so far, and the prompt's must be as many as the engine
	// counted (0: it has not counted them), or the answer would go on from another text than the client's.
	return soFar.Exact() && (soFar.Prompt == 0 || soFar.Prompt == mooncake.CountIDs(l.PromptIDs))
}
