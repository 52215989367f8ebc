package lifecycle

import (
	"encoding/json"
	"slices"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A Tier says how an answer goes on that was lost in the middle, with a fresh prefill of the prompt and of what the client has. It
// labels metrics.
type Tier = string

// The tiers.
const (
	Repeated   Tier = "0"        // nothing of the answer is out: the same request again
	ByPrompt   Tier = "1"        // a completion: its token ids become the prompt
	ByIDs      Tier = "2"        // a chat: its token ids are sent beside the hand-off
	ByText     Tier = "3"        // the text so far: of a chat as a last message, of a completion behind the prompt. Not exact to the token
	Broken     Tier = "4"        // it ends with an error
	Concluding Tier = "finished" // only its end was missing, or it may have no more tokens: the proxy writes the end
)

// Tiers are all of them.
var Tiers = []Tier{Repeated, ByPrompt, ByIDs, ByText, Broken, Concluding}

// Keeping says what of a request stays in memory while its answer runs.
type Keeping uint8

// What may be kept.
const (
	KeepNothing Keeping = iota
	KeepStart           // the body until the first token: until then the request may begin anew
	KeepAll             // body, the prompt's token ids and the answer's
)

// A Loss has the facts about a lost answer that decide how it goes on.
type Loss struct {
	Said     *sse.Trail // what came of it
	Finished bool       // only its end is missing
	May      bool       // it has not been lost too often, and its endpoint has answers that go on
	Keeping  Keeping
	Streamed bool
	Seen     bool // the client gets more of a token than its text, e.g. its id or logprobs, so that no token it has may be made anew
	Plain    bool // nothing in the request hinders that its answer becomes a part of the prompt
	Tools    bool // it has tools, which only token ids can repeat

	How      string          // a value of chat_resume, mooncake.ResumePrompt or mooncake.ResumeText; empty: the answer can only begin anew
	IDs      json.RawMessage // of the prompt
	Text     []byte          // of the prompt, as a JSON string, for mooncake.ResumeText
	Alone    int             // tokens of the client's prompt, without a part of the answer
	Most     int             // tokens that the whole answer may have
	Limit    int             // tokens that the client allows; 0: any number
	LimitKey string
}

// A Plan is how a lost answer goes on.
type Plan struct {
	Tier   Tier
	Said   *sse.Trail       // the answer so far, behind which it goes on
	Resume *mooncake.Resume // what of it becomes a part of the prompt; nil: nothing
	Unseen bool             // the client has seen nothing of it, so that the answer is put together from the beginning
	Seam   *sse.Seam        // where the next part is joined
	AtP    int              // prompt tokens that the prefill engine has to count now; 0: any number
	AtD    int              // the same of the decode engine
}

// Plan says how the answer goes on: it is concluded if only its end is missing, begun anew if the client can see no difference, continued
// behind the part that the client has, or broken off. It does not change l.Said.
func (l *Loss) Plan() Plan {
	said := *l.Said
	nothing := &sse.Trail{Head: said.Head, Prompt: said.Prompt} // for an answer that begins anew: none of it is there yet
	switch {
	case l.Finished && said.Head.ID != nil:
		return Plan{Tier: Concluding, Said: &said}
	case l.Keeping == KeepNothing || !l.May: // the request is not in memory any more, or never was, or may not go on again
		return Plan{Tier: Broken}
	case !said.Content && !said.Unread && (len(said.IDs) == 0 || !l.Seen):
		return l.behind(nothing, Repeated, nil)
	case l.Keeping == KeepAll && l.resumable(&said) && (said.Completed >= l.Most || l.whole(&said)):
		// the answer goes on behind what the client has: see below
	case l.Keeping == KeepAll && !l.Streamed:
		nothing.Head = sse.Head{}
		p := l.behind(nothing, Repeated, nil)
		p.Unseen = true
		return p
	default:
		return Plan{Tier: Broken}
	}
	if !l.Seen && !mooncake.ByText(l.How) {
		said.Cut()
	}
	// This count is a guess. The engine would have ended an answer that has no token left, so at least one is left. Where all ids are known,
	// the count is exact.
	if said.Guessed && mooncake.ByText(l.How) {
		said.Completed = min(said.Completed, max(0, l.Most-1))
	}
	if said.Completed >= l.Most {
		return l.behind(&said, Concluding, nil)
	}
	resume := &mooncake.Resume{How: l.How, Tokens: said.Completed}
	if l.Limit > 0 {
		resume.Limit, resume.LimitKey = l.Limit-said.Completed, l.LimitKey
	}
	tier := ByText
	switch l.How {
	case mooncake.ChatResumeContinue:
		resume.Text = slices.Concat([]byte{'"'}, said.Text, []byte{'"'})
	case mooncake.ResumeText:
		resume.Text = slices.Concat(l.Text[:len(l.Text)-1], said.Text, []byte{'"'})
	default:
		resume.IDs = mooncake.JoinIDs(l.IDs, said.IDs)
		if tier = ByIDs; l.How == mooncake.ResumePrompt {
			tier = ByPrompt
		}
	}
	return l.behind(&said, tier, resume)
}

// behind is the plan in which the answer goes on behind said, with resume as a part of the prompt. resume is nil if no part of the answer
// becomes a part of the prompt.
func (l *Loss) behind(said *sse.Trail, tier Tier, resume *mooncake.Resume) Plan {
	p := Plan{Tier: tier, Said: said, Resume: resume}
	if resume != nil && !mooncake.ByText(resume.How) {
		p.AtP = l.Alone + said.Completed
		if said.Prompt > 0 {
			p.AtD = said.Prompt + said.Completed
		}
	}
	if said.Head.ID != nil {
		p.Seam = &sse.Seam{Head: said.Head, Prompt: said.Prompt, Tokens: said.Completed, Runes: said.Runes, Last: said.Last, Grows: said.Grows}
		if said.Prompt == 0 {
			p.Seam.Prompt = l.Alone
		}
	}
	return p
}

// whole says whether what goes on behind the answer so far joins it without a break within a character: it ends at the end of a character,
// or can be cut there, or goes on by its text. If a token ends within a character, its
// text comes with the next token, and if a prompt ends like that, vLLM 0.32 writes all the text into the answer. A client that already
// has such a token must not get it again.
func (l *Loss) whole(said *sse.Trail) bool {
	return !l.Seen || mooncake.ByText(l.How) || said.Shown == len(said.IDs)
}

// resumable tells whether the answer so far can become part of the prompt.
func (l *Loss) resumable(said *sse.Trail) bool {
	switch {
	case said.Last != nil && (said.Grows == sse.GrowthUnknown || said.Completed >= l.Most): // its last event ends an answer of /generate
		return false
	case l.How == "", said.Head.ID == nil, said.MoreThan, said.Unread, !l.Plain:
		return false
	case mooncake.ByText(l.How): // then tokens that the client has may be made anew, and tools cannot be repeated
		return !l.Seen && !l.Tools
	}
	return said.Exact() && (said.Prompt == 0 || said.Prompt == mooncake.CountIDs(l.IDs))
}
