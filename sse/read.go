package sse

import (
	"bytes"

	"evenkeel/internal/rawjson"
)

// Filter follows the stream of one decode engine. It counts the tokens, edits the events for the
// client, and finds out whether the answer ended as it should. evenkeel never asks an engine for
// more than one choice.
type Filter struct {
	options Options
	id      []byte // as JSON; empty: the client gets the engine's own id
	model   []byte

	facts facts  // of the current event
	marks []mark // members of the current event that may have to change

	tokens        int
	ids           int
	chunks        int // with content
	idsAtUsage    int // value of ids at the last usage; later tokens are counted by ids
	chunksAtUsage int // value of chunks at the last usage; later tokens may be estimated
	finishReason  string
	usage         Usage
	// prompt_tokens_details of the last usage; empty: none, or more than maxDetails
	details       []byte
	drift         int
	promptIDs     int // of the prompt; 0: not known
	failure       Failure
	fault         error
	preparedUsage []byte // the final usage as an event of its own; empty: there is none

	// Only for forms that are not chunked, such as that of /v1/responses:
	heldEvents []byte // held back until the first event with a token
	heldCount  int    // at most maxHeldEvents
	eventCount int    // for the client, including those held back

	// Between other fields, each flag would take eight bytes, and every stream has a filter.

	continuousUsage bool
	isTokensForm    bool
	tokensEstimated bool // from the number of chunks
	idsSeen         bool
	usageSeen       bool
	usageSent       bool
	finalUsageCame  bool // see Answer.FinalUsageCame
	started         bool
	endedByStopText bool
	keepsKV         bool
	reconciled      bool // drift is set
	streamEnded     bool // with or without [DONE]; for forms that are not chunked
}

// facts is what one event contains.
type facts struct {
	choices               int // noChoiceList: there is no list
	hasUsage              bool
	detailsAt, detailsEnd int // offsets of prompt_tokens_details; 0: there are none
	usage                 Usage
	ids                   int // generated token ids
	hasIDs                bool
	isEmpty               bool // a ping, or without data
	content               bool // text, reasoning or a part of a tool call
	emptyChoice           bool // an empty delta, no finish_reason, no logprobs

	finishAt, finishEnd int  // offsets without the quotes; 0: there is none
	recomputed          bool // stop_reason "recomputed": the engine has preempted the request
	stopText            bool // the stop_reason is a string, so a stop text may have ended the answer
	keepsKV             bool // kv_transfer_params, in which vLLM says where it keeps the answer's KV
	spansAt, spansEnd   int  // offsets of weight_versions; 0: there is none
	isError             bool

	textAt, textEnd int // offsets of the member text or content, with its quotes
	hasNonText      bool
	hasRole         bool
	idsAt           int // offset of the list of generated token ids; 0: there is none
	promptIDs       int

	promptAt, promptEnd int // offsets of the prompt's token ids; 0: there are none
}

const noChoiceList = -1

type valueKind uint8

const (
	usageValue valueKind = iota
	detailsValue
	cachedValue
	engineOnlyValue // token ids and hand-off parameters that this client must not get
	idValue
	createdValue
	indexValue
	endValue // finish_reason or stop_reason, which becomes null after a preemption

	// Marked only if this engine continues an answer:
	modelValue
	fingerprintValue
	roleValue
	promptValue
	completionValue
	totalValue
	offsetsValue
	spansValue

	// Where the prefill engine's cached_tokens must be inserted:
	missingDetails // at the end of a usage without prompt_tokens_details
	nullDetails    // in place of null
	missingCached  // at the end of prompt_tokens_details without cached_tokens
)

// mark is a member of an event that may have to change. Marks are in the order of their keys, so
// the mark of a member comes before those inside its value. Offsets are int32 to save memory: every
// stream keeps its marks, and no event has more than 1 GiB.
type mark struct {
	kind              valueKind
	level             uint8
	hasOnlyCached     bool  // of prompt_tokens_details: they have no other member
	needsComma        bool  // of a new member: the object has members already
	openAt            int32 // offset of the opening brace of the object that has the member
	membersBefore     int32 // members of this object before this one
	comma, quote, val int32 // offsets of the comma before the member, of its key and its value
	end               int32 // of the value
}

const (
	topLevel    uint8 = iota
	secondLevel       // in a choice, or in the usage
	thirdLevel        // in a delta, in logprobs, or in the details of the usage
)

// markMember: if o.Pos is not yet the end of the value, the caller must set end later.
func (f *Filter) markMember(kind valueKind, level uint8, o *rawjson.Object) {
	f.marks = append(f.marks, mark{kind: kind, level: level, openAt: int32(o.Open), membersBefore: int32(o.N - 1),
		comma: int32(o.Comma), quote: int32(o.Quote), val: int32(o.Val), end: int32(o.Pos)})
}

func (f *Filter) markWholeMember(kind valueKind, level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	f.markMember(kind, level, o)
}

// markInsertion marks the end of an object whose members were all read.
func (f *Filter) markInsertion(kind valueKind, o *rawjson.Object) {
	at := int32(o.Pos - 1)
	f.marks = append(f.marks, mark{kind: kind, openAt: int32(o.Open), val: at, end: at, needsComma: o.N > 0})
}

// read fills f.facts and f.marks; ok is false if b is not exactly one JSON object. Some members are
// marked only if Options may change them.
func (f *Filter) read(b []byte) (ok bool) {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.Next() {
		switch string(o.Key) {
		case "choices":
			f.readChoices(&o)
		case "usage":
			f.readUsage(&o)
		case "prompt_token_ids":
			f.readPromptIDs(topLevel, &o)
		case "kv_transfer_params":
			f.facts.keepsKV = f.facts.keepsKV || b[o.Val] == '{'
			f.markWholeMember(engineOnlyValue, topLevel, &o) // always: no client may get it
		case "id":
			if len(f.id) > 0 {
				f.markWholeMember(idValue, topLevel, &o)
			}
		case "request_id": // of /inference/v1/generate
			if f.isTokensForm && len(f.id) > 0 {
				f.markWholeMember(idValue, topLevel, &o)
			}
		case "created":
			if f.options.Created != 0 || f.options.Continuation != nil {
				f.markWholeMember(createdValue, topLevel, &o)
			}
		case "model":
			if len(f.model) > 0 || f.options.Continuation != nil {
				f.markWholeMember(modelValue, topLevel, &o)
			}
		case "system_fingerprint":
			f.markIfContinued(fingerprintValue, topLevel, &o)
		case "error":
			f.facts.isError = f.facts.isError || !rawjson.IsNull(b[o.Val:])
		case "object": // old engines mark an error by this value
			f.facts.isError = f.facts.isError || bytes.HasPrefix(b[o.Val:], []byte(`"error"`))
		}
	}
	return isWhole(&o)
}

func isWhole(o *rawjson.Object) bool {
	// Pos is -1 if the object is malformed; white space may follow it
	return o.Pos > 0 && rawjson.Space(o.Text, o.Pos) == len(o.Text)
}

// readPromptIDs reads the token ids of the prompt, which another engine needs to continue the
// answer.
func (f *Filter) readPromptIDs(level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	if !f.options.TokenIDs || f.options.Continuation != nil {
		f.markMember(engineOnlyValue, level, o)
	}
	listed := o.Text[o.Val] == '[' && o.Pos-o.Val > len("[]") // null after the first event
	if listed && (f.options.Transcript != nil || f.options.Continuation != nil) {
		f.facts.promptIDs = bytes.Count(o.Text[o.Val:o.Pos], []byte{','}) + 1
		f.facts.promptAt, f.facts.promptEnd = o.Val, o.Pos
	}
}

func (f *Filter) markIfContinued(kind valueKind, level uint8, o *rawjson.Object) {
	if f.options.Continuation != nil {
		f.markWholeMember(kind, level, o)
	}
}

// readChoices moves top.Pos to the end of the list.
func (f *Filter) readChoices(top *rawjson.Object) {
	if top.Text[top.Val] != '[' { // such as null
		return
	}
	a := rawjson.ArrayAt(top.Text, top.Val)
	for a.Next() {
		if a.Text[a.Val] == '{' {
			a.Pos = f.readChoice(a.Text, a.Val)
		}
	}
	f.facts.choices, top.Pos = a.N, a.Pos
}

// readChoice returns where the choice ends; -1: it cannot be read. An empty choice matters, because
// an event that an engine sends only for its token ids may be dropped.
func (f *Filter) readChoice(b []byte, i int) (end int) {
	bare := true // no text, finish_reason, logprobs or member of a delta so far
	hasDelta, hasText := false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "delta":
			hasMembers := f.readDelta(&o)
			hasDelta, bare = true, bare && !hasMembers
		case "text":
			hasText, bare = true, false
			readText(f, &o)
		case "finish_reason":
			hasReason := readFinishReason(f, &o)
			bare = bare && !hasReason
		case "stop_reason":
			readStopReason(f, &o)
		case "token_ids":
			f.readIDs(&o)
		case "prompt_token_ids":
			f.readPromptIDs(secondLevel, &o)
		case "logprobs":
			bare = bare && rawjson.IsNull(b[o.Val:])
			// text_offset must count it
			textBefore := f.options.Continuation != nil && f.options.Continuation.Runes > 0
			if textBefore && b[o.Val] == '{' {
				o.Pos = f.readOffsets(b, o.Val)
			}
		default:
			markChoiceMember(f, &o)
		}
	}
	if f.isTokensForm && !hasText { // token ids may come alone, and then are the content
		f.facts.content = f.facts.content || f.facts.ids > 0
	}
	f.facts.emptyChoice = bare && hasDelta
	return o.Pos
}

func markChoiceMember(f *Filter, choice *rawjson.Object) {
	switch string(choice.Key) {
	case "index":
		if f.options.Choice >= 0 {
			f.markWholeMember(indexValue, secondLevel, choice)
		}
	case "kv_transfer_params":
		f.markWholeMember(engineOnlyValue, secondLevel, choice)
	case "weight_versions": // the engine counts the tokens from the start of its own part
		isList := choice.Text[choice.Val] == '['
		if c := f.options.Continuation; c != nil && (isList || len(c.Spans) > 0) {
			f.markWholeMember(spansValue, secondLevel, choice)
		}
		if isList {
			f.facts.spansAt, f.facts.spansEnd = choice.Val, rawjson.ValueEnd(choice.Text, choice.Val)
		}
	}
}

func readText(f *Filter, choice *rawjson.Object) {
	choice.Pos = rawjson.ValueEnd(choice.Text, choice.Val)
	isEmpty := choice.Pos-choice.Val <= len(`""`)
	if isString := choice.Text[choice.Val] == '"'; isString && !isEmpty {
		f.facts.content, f.facts.textAt, f.facts.textEnd = true, choice.Val, choice.Pos
	}
}

func readFinishReason(f *Filter, choice *rawjson.Object) (found bool) {
	f.markWholeMember(endValue, secondLevel, choice)
	if choice.Text[choice.Val] != '"' {
		return false
	}
	f.facts.finishAt, f.facts.finishEnd = choice.Val+1, choice.Pos-1 // without the quotes
	return true
}

// readStopReason: a stop text, the id of a stop token, or "recomputed" after a preemption.
func readStopReason(f *Filter, choice *rawjson.Object) {
	f.markWholeMember(endValue, secondLevel, choice)
	value := choice.Text[choice.Val:]
	f.facts.stopText = f.facts.stopText || value[0] == '"'
	f.facts.recomputed = f.facts.recomputed || bytes.HasPrefix(value, []byte(`"recomputed"`))
}

// readDelta: reasoning, a refusal and tool calls are content that is not text. hasMembers is false
// only if the delta is null or {}.
func (f *Filter) readDelta(choice *rawjson.Object) (hasMembers bool) {
	b := choice.Text
	if b[choice.Val] != '{' {
		return !rawjson.IsNull(b[choice.Val:])
	}
	o := rawjson.ObjectAt(b, choice.Val)
	for o.Next() {
		if string(o.Key) == "role" {
			f.facts.hasRole = true
			// the client has the role from the first engine
			f.markIfContinued(roleValue, thirdLevel, &o)
			continue
		}
		first := b[o.Val]
		if first != '"' && first != '[' && first != '{' {
			continue
		}
		o.Pos = rawjson.ValueEnd(b, o.Val)
		if isEmpty := o.Pos-o.Val <= len(`""`); isEmpty {
			continue
		}
		f.facts.content = true
		if string(o.Key) == "content" && first == '"' {
			f.facts.textAt, f.facts.textEnd = o.Val, o.Pos
		} else {
			f.facts.hasNonText = true
		}
	}
	choice.Pos = o.Pos
	return o.N > 0
}

// readOffsets marks text_offset, to which the length of the text of earlier engines must be added.
func (f *Filter) readOffsets(b []byte, i int) int {
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "text_offset" && b[o.Val] == '[' {
			f.markWholeMember(offsetsValue, thirdLevel, &o)
		}
	}
	return o.Pos
}

// readIDs counts the token ids, which are those since the last event.
func (f *Filter) readIDs(choice *rawjson.Object) {
	if choice.Text[choice.Val] == '[' {
		a := rawjson.ArrayAt(choice.Text, choice.Val)
		for a.Next() {
			f.facts.ids++
		}
		f.facts.hasIDs, f.facts.idsAt = true, choice.Val
		choice.Pos = a.Pos
	} else {
		choice.Pos = rawjson.ValueEnd(choice.Text, choice.Val)
	}
	if !f.options.TokenIDs {
		f.markMember(engineOnlyValue, secondLevel, choice)
	}
}

func (f *Filter) readUsage(top *rawjson.Object) {
	at := len(f.marks) // marks of the members inside the usage come after it
	f.markMember(usageValue, topLevel, top)
	if top.Text[top.Val] == '{' {
		top.Pos = f.readCounts(top.Text, top.Val)
	} else {
		top.Pos = rawjson.ValueEnd(top.Text, top.Val)
	}
	f.marks[at].end = int32(top.Pos)
}

// readCounts returns where the usage ends; -1: it is malformed. A usage without completion_tokens
// is ignored.
func (f *Filter) readCounts(b []byte, i int) int {
	u := Usage{Cached: -1}
	hasCompletion, hasTotal, hasDetails := false, false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "prompt_tokens_details":
			hasDetails = true
			f.readDetails(&o, &u)
		case "prompt_tokens":
			u.Prompt, _ = f.readCount(promptValue, &o)
		case "completion_tokens":
			u.Completion, hasCompletion = f.readCount(completionValue, &o)
		case "total_tokens":
			u.Total, hasTotal = f.readCount(totalValue, &o)
		}
	}
	if !hasCompletion {
		return o.Pos
	}
	cachedKnown := f.options.Cached >= 0 // the client must get the prefill engine's count
	if !hasDetails && cachedKnown && o.Pos > 0 {
		f.markInsertion(missingDetails, &o)
	}
	if !hasTotal {
		u.Total = u.Prompt + u.Completion
	}
	f.facts.hasUsage, f.facts.usage = true, u
	return o.Pos
}

func (f *Filter) readCount(kind valueKind, usage *rawjson.Object) (n int, ok bool) {
	usage.Pos = rawjson.ValueEnd(usage.Text, usage.Val)
	if f.options.Continuation != nil {
		f.markMember(kind, secondLevel, usage)
	}
	return tokenCount(usage)
}

// readDetails reads prompt_tokens_details. Its mark must come before those of its members, so it is
// made first and completed at the end.
func (f *Filter) readDetails(usage *rawjson.Object, u *Usage) {
	b := usage.Text
	prefillCountKnown := f.options.Cached >= 0
	if b[usage.Val] != '{' {
		if prefillCountKnown && b[usage.Val] == 'n' { // null is replaced
			f.markWholeMember(nullDetails, secondLevel, usage)
		}
		return
	}
	at := len(f.marks)
	f.markMember(detailsValue, secondLevel, usage)
	o := rawjson.ObjectAt(b, usage.Val)
	found := 0
	for o.Next() {
		if string(o.Key) == "cached_tokens" {
			found++
			f.markWholeMember(cachedValue, thirdLevel, &o)
			if n, ok := rawjson.Int(b, o.Val, o.Pos); ok {
				u.Cached = n
			}
		}
	}
	usage.Pos = o.Pos
	f.facts.detailsAt, f.facts.detailsEnd = usage.Val, o.Pos
	f.marks[at].end = int32(o.Pos)
	if found > 0 {
		f.marks[at].hasOnlyCached = o.N == found
		return
	}
	if prefillCountKnown && o.Pos > 0 {
		f.markInsertion(missingCached, &o)
	}
}

// tooManyDigits stands for a count that rawjson.Int cannot read. No limit of an answer allows it,
// and two of them can be added.
const tooManyDigits = 1 << 53

func tokenCount(o *rawjson.Object) (n int, ok bool) {
	if n, ok = rawjson.Int(o.Text, o.Val, o.Pos); ok {
		return n, true
	}
	for i := o.Val; i < o.Pos; i++ {
		if digit := o.Text[i]; digit < '0' || digit > '9' {
			return 0, false
		}
	}
	return tooManyDigits, o.Pos > o.Val
}
