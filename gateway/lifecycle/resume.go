package lifecycle

import (
	"encoding/json"
	"slices"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A Tier says how an answer that was lost in the middle goes on. Metrics have it as a label.
type Tier = string

// The tiers.
const (
	Repeated   Tier = "0" // the same request is sent again
	ByPrompt   Tier = "1" // a completion: token ids of prompt and answer become the prompt
	ByIDs      Tier = "2" // a chat: the ids are sent beside the hand-off
	ByText     Tier = "3" // from its text; not exact to the token
	Broken     Tier = "4"
	Concluding Tier = "finished" // only the end is missing: the proxy writes it
)

// Tiers lets metrics begin each tier at 0.
var Tiers = []Tier{Repeated, ByPrompt, ByIDs, ByText, Broken, Concluding}

// Retention says which parts of a request stay in memory while its answer runs.
type Retention uint8

// Each level also keeps what the levels before it keep.
const (
	KeepNothing Retention = iota
	KeepStart             // the body, until the first token
	KeepAll               // body and token ids, until the answer has ended
)

// A Loss has the facts that decide how a lost answer goes on.
type Loss struct {
	AnswerSoFar     *sse.Transcript // the part that came
	Finished        bool            // only the end of the answer is missing
	MayResume       bool            // it was not lost too often, and its endpoint supports going on
	Retention       Retention
	Streamed        bool
	TokensVisible   bool // the client gets ids or logprobs: no token may come twice
	MayExtendPrompt bool // the request lets the answer become a part of the prompt
	HasTools        bool

	Method          string // chat_resume, mooncake.ResumePrompt or ResumeText; empty: none
	PromptIDs       json.RawMessage
	PromptText      []byte
	PromptTokens    int // of the client's own prompt
	MaxAnswerTokens int // of the whole answer
	TokenLimit      int // the client's own, for the whole answer; 0: none
	TokenLimitKey   string
}

// A Plan says how a lost answer goes on.
type Plan struct {
	Tier             Tier
	AnswerSoFar      *sse.Transcript   // after which it goes on
	Resume           *mooncake.Resume  // the part of the answer that joins the prompt; nil: none
	ClientHasNothing bool              // the answer is put together from its start
	Continuation     *sse.Continuation // nil: the client has no event yet
	PrefillCount     int               // that the prefill engine must count; 0: any number
	DecodeCount      int               // that the decode engine must count; 0: any number
}

// Plan does not change l.AnswerSoFar.
func (l *Loss) Plan() Plan {
	soFar := *l.AnswerSoFar
	// The client may have the head (the id, for example) of the lost answer, so one that begins again
	// gets the same.
	fromStart := &sse.Transcript{Head: soFar.Head, Prompt: soFar.Prompt}
	// Unread: an event that could not be read may have had content. IDs: the client may have seen
	// tokens that have no text yet.
	clientSawTokens := soFar.Content || soFar.Unread || len(soFar.IDs) > 0 && l.TokensVisible
	var noResume *mooncake.Resume
	switch {
	case l.Finished && soFar.Head.ID != nil: // with the head the proxy can write the end
		return Plan{Tier: Concluding, AnswerSoFar: &soFar}
	case l.Retention == KeepNothing || !l.MayResume:
		return Plan{Tier: Broken}
	case !clientSawTokens:
		return l.planAfter(fromStart, Repeated, noResume)
	case l.canContinue(&soFar):
		return l.continuePlan(&soFar)
	// The client gets the answer in one piece, so it has nothing yet, not even the head.
	case l.Retention == KeepAll && !l.Streamed:
		fromStart.Head = sse.Head{}
		p := l.planAfter(fromStart, Repeated, noResume)
		p.ClientHasNothing = true
		return p
	}
	return Plan{Tier: Broken}
}

func (l *Loss) canContinue(soFar *sse.Transcript) bool {
	if l.Retention != KeepAll || !l.resumable(soFar) {
		return false
	}
	hasAllTokens := soFar.Completed >= l.MaxAnswerTokens // it may end within a character
	return hasAllTokens || l.cutsNoCharacter(soFar)
}

func (l *Loss) continuePlan(soFar *sse.Transcript) Plan {
	l.fitToMethod(soFar)
	if soFar.Completed >= l.MaxAnswerTokens {
		return l.planAfter(soFar, Concluding, nil)
	}
	tier, resume := l.resumeAfter(soFar)
	return l.planAfter(soFar, tier, resume)
}

// fitToMethod drops tokens whose text the client does not have yet, so that they are generated
// again, if it does not see the tokens themselves. A guessed count stays below the limit, at which
// the engine would have ended the answer.
func (l *Loss) fitToMethod(soFar *sse.Transcript) {
	goesOnByText := mooncake.ByText(l.Method)
	switch {
	case goesOnByText && soFar.Guessed:
		soFar.Completed = min(soFar.Completed, max(0, l.MaxAnswerTokens-1))
	case !goesOnByText && !l.TokensVisible:
		soFar.Cut()
	}
}

func (l *Loss) resumeAfter(soFar *sse.Transcript) (Tier, *mooncake.Resume) {
	resume := &mooncake.Resume{Method: l.Method, Tokens: soFar.Completed}
	if l.TokenLimit > 0 {
		resume.Limit, resume.LimitKey = l.TokenLimit-soFar.Completed, l.TokenLimitKey
	}
	switch l.Method {
	case mooncake.ChatResumeContinue: // soFar.Text is JSON without its quotes
		resume.Text = slices.Concat([]byte{'"'}, soFar.Text, []byte{'"'})
		return ByText, resume
	case mooncake.ResumeText: // the closing quote moves behind the answer so far
		resume.Text = slices.Concat(l.PromptText[:len(l.PromptText)-1], soFar.Text, []byte{'"'})
		return ByText, resume
	}
	resume.IDs = mooncake.JoinIDs(l.PromptIDs, soFar.IDs)
	if l.Method == mooncake.ResumePrompt {
		return ByPrompt, resume
	}
	return ByIDs, resume
}

func (l *Loss) planAfter(soFar *sse.Transcript, tier Tier, resume *mooncake.Resume) Plan {
	p := Plan{Tier: tier, AnswerSoFar: soFar, Resume: resume, Continuation: l.continuationOf(soFar)}
	if resume != nil && !mooncake.ByText(resume.Method) { // only ids give a known length
		p.PrefillCount, p.DecodeCount = l.promptCounts(soFar)
	}
	return p
}

// promptCounts returns how many prompt tokens the engines must count: those that the same role
// counted for the client's prompt, and the answer so far. An engine that counts fewer has ignored
// the answer so far, and would begin it again.
func (l *Loss) promptCounts(soFar *sse.Transcript) (byPrefill, byDecode int) {
	byPrefill = l.PromptTokens + soFar.Completed
	if soFar.Prompt > 0 { // 0: no decode engine has counted the prompt
		byDecode = soFar.Prompt + soFar.Completed
	}
	return byPrefill, byDecode
}

// The next events must have the id of the first event, and go on with its counts.
func (l *Loss) continuationOf(soFar *sse.Transcript) *sse.Continuation {
	if soFar.Head.ID == nil {
		return nil
	}
	c := &sse.Continuation{Head: soFar.Head, Prompt: soFar.Prompt, Tokens: soFar.Completed, Runes: soFar.Runes, Last: soFar.Last,
		Grows: soFar.Grows, Spans: soFar.Spans}
	if soFar.Prompt == 0 {
		c.Prompt = l.PromptTokens
	}
	return c
}

// cutsNoCharacter says whether the answer can go on without a break within a character. If a prompt
// ends with a token that ends within a character, vLLM 0.32 writes all the text of the token into
// the answer, but a client that has the token must not get it again.
func (l *Loss) cutsNoCharacter(soFar *sse.Transcript) bool {
	return !l.TokensVisible || mooncake.ByText(l.Method) || soFar.Shown == len(soFar.IDs)
}

func (l *Loss) resumable(soFar *sse.Transcript) bool {
	isGenerate := soFar.Last != nil                      // only /generate keeps its last event
	growthUnknown := soFar.Grows == sse.GrowthUnknown    // each event may repeat all of the answer
	hasAllTokens := soFar.Completed >= l.MaxAnswerTokens // an answer of /generate is then at its end
	firstEventUnseen := soFar.Head.ID == nil             // the answer would have to go on with its id
	hasMoreThanText := soFar.MoreThan                    // reasoning or a tool call
	switch {
	case isGenerate && (growthUnknown || hasAllTokens):
		return false
	case l.Method == "", !l.MayExtendPrompt:
		return false
	case firstEventUnseen, hasMoreThanText, soFar.Unread: // Unread: a part of the answer is missing
		return false
	// The next engine makes its own tokens of the text, perhaps others than the client sees. And the
	// text does not have the request's tools.
	case mooncake.ByText(l.Method):
		return !l.TokensVisible && !l.HasTools
	}
	// The ids must be all those of the answer so far, and the prompt's as many as the engine counted
	// (0: not counted), or the answer would go on from another text than the client's.
	return soFar.Exact() && (soFar.Prompt == 0 || soFar.Prompt == mooncake.CountIDs(l.PromptIDs))
}
