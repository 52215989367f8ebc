package sse

import (
	"bytes"

	"evenkeel/internal/rawjson"
)

// Filter follows the stream of one decode engine. It counts the tokens, edits the events for the client, and finds out whether
// the answer ended as it should. evenkeel never asks an engine for more than one choice, so all choices count as one answer.
type Filter struct {
	options Options
	id      []byte // the id that the client gets, as JSON; empty: it gets the engine's own id
	model   []byte // Options.Model as JSON

	facts facts  // what the current event contains
	marks []mark // members of the current event that may have to change

	tokens        int // tokens that this engine generated so far
	ids           int // token ids that came from this engine so far
	chunks        int // chunks with content that came so far
	idsAtUsage    int // the value of ids when the last usage came; tokens after it are counted by ids
	chunksAtUsage int // the value of chunks when the last usage came; tokens after it may be estimated
	finishReason  string
	usage         Usage
	details       []byte // the JSON of prompt_tokens_details in the last usage; empty: it had none, or more than maxDetails
	drift         int    // tokens that were counted, minus those of the final usage; see Drift
	promptIDs     int    // how many token ids the prompt has; 0: not known
	failure       Failure
	fault         error
	preparedUsage []byte // the final usage as an event of its own, which MissingUsage appends; empty: there is none

	// The following fields are only for forms that are not chunked, such as that of /v1/responses:
	heldEvents []byte // events that are held back until the first event with a token
	heldCount  int    // events that were held back so far, at most maxHeldEvents
	eventCount int    // events for the client so far, including those that are held back

	// The flags stand together to save memory: between other fields, each would take eight bytes, and every stream has a filter.

	continuousUsage bool // the client gets the usage of every chunk
	isTokensForm    bool // the answer is one of /inference/v1/generate
	tokensEstimated bool // some of the tokens are estimated from the number of chunks
	idsSeen         bool
	usageSeen       bool
	usageSent       bool // the client has the usage that it asked for
	finalUsageCame  bool // see Answer.FinalUsageCame
	started         bool
	endedByStopText bool // the answer ended at a stop text of the request
	keepsKV         bool // the event with the finish_reason had kv_transfer_params: the engine keeps the KV
	reconciled      bool // the final usage has come, so drift is set
	streamEnded     bool // the stream has ended, with or without [DONE]; for forms that are not chunked
}

// facts is what one event contains. read finds all of it in one pass over the bytes.
type facts struct {
	choices               int // how many choices the event has; noChoiceList: it has no list of choices
	hasUsage              bool
	detailsAt, detailsEnd int // the offsets of the usage's prompt_tokens_details in the event's data; 0: there are none
	usage                 Usage
	ids                   int // number of generated token ids in this event
	hasIDs                bool
	isEmpty               bool // the event has nothing of the answer: it is a ping, or its data is empty
	content               bool // the event has text, reasoning or a part of a tool call
	emptyChoice           bool // the last choice is empty: an empty delta, no finish_reason, no logprobs

	finishAt, finishEnd int  // the offsets of the finish_reason, without its quotes; both 0: there is none
	recomputed          bool // the stop_reason is "recomputed": the engine has preempted the request
	stopText            bool // the stop_reason is a string, so a stop text of the request may have ended the answer
	keepsKV             bool // the event has kv_transfer_params, in which vLLM says where it keeps the answer's KV
	spansAt, spansEnd   int  // the offsets of weight_versions, a list of spans; 0: there is none
	isError             bool

	textAt, textEnd int  // the offsets of the member text or content, with its quotes
	hasNonText      bool // the event has content other than this text
	hasRole         bool // the delta has a role, such as assistant
	idsAt           int  // the offset of the list of generated token ids; 0: there is none
	promptIDs       int  // how many token ids of the prompt the event has

	promptAt, promptEnd int // the offsets of the list of the prompt's token ids; 0: there is none
}

const noChoiceList = -1 // as the value of facts.choices

// valueKind names a member of an event that may have to change before the client gets the event.
type valueKind uint8

const (
	usageValue valueKind = iota
	detailsValue
	cachedValue
	engineOnlyValue // token ids and hand-off parameters that this client must not get
	idValue
	createdValue
	indexValue
	endValue // a finish_reason or stop_reason, which becomes null after a preemption

	// These members are marked only if this engine continues an answer that another engine began:
	modelValue
	fingerprintValue
	roleValue
	promptValue
	completionValue
	totalValue
	offsetsValue
	spansValue

	// These marks say where the prefill engine's cached_tokens must be inserted, because the decode engine's usage lacks this member:
	missingDetails // a usage without prompt_tokens_details: insert them at its end
	nullDetails    // prompt_tokens_details is null: replace the null
	missingCached  // prompt_tokens_details without cached_tokens: insert it at their end
)

// mark is a member of an event that may have to change before the client gets the event. Marks are in the order of their keys in the event,
// so the mark of a member comes before those of the members inside its value. Offsets are int32 to save memory: every stream keeps its
// marks, and no event has more than 1 GiB.
type mark struct {
	kind              valueKind
	level             uint8 // nesting depth: topLevel, secondLevel or thirdLevel
	hasOnlyCached     bool  // of prompt_tokens_details: they have cached_tokens and no other member
	needsComma        bool  // of the place for a new member: the object has members, after which a comma must come
	openAt            int32 // offset of the opening brace of the object that has the member
	membersBefore     int32 // number of members of this object that come before the member
	comma, quote, val int32 // offsets of the comma before the member, of its key and of its value
	end               int32 // offset of the end of the member's value
}

// These levels say how deep in an event a member is.
const (
	topLevel    uint8 = iota
	secondLevel       // the member is in a choice, or in the usage
	thirdLevel        // the member is in a delta, in logprobs, or in the details of the usage
)

// markMember records the current member of o. If o.Pos is not yet the end of the value, the caller must set end later.
func (f *Filter) markMember(kind valueKind, level uint8, o *rawjson.Object) {
	f.marks = append(f.marks, mark{kind: kind, level: level, openAt: int32(o.Open), membersBefore: int32(o.N - 1),
		comma: int32(o.Comma), quote: int32(o.Quote), val: int32(o.Val), end: int32(o.Pos)})
}

// markWholeMember finds the end of the current member's value and records the member.
func (f *Filter) markWholeMember(kind valueKind, level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	f.markMember(kind, level, o)
}

// markInsertion records where a new last member of an object could be inserted: before its closing brace, the byte before o.Pos. All
// members of the object were read.
func (f *Filter) markInsertion(kind valueKind, o *rawjson.Object) {
	at := int32(o.Pos - 1)
	f.marks = append(f.marks, mark{kind: kind, openAt: int32(o.Open), val: at, end: at, needsComma: o.N > 0})
}

// read scans an event's JSON and fills f.facts and f.marks; ok is false if b is not exactly one JSON object. Some members are marked
// only if Options may change them for this client. editMarked later decides about each mark.
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
			f.facts.keepsKV = f.facts.keepsKV || b[o.Val] == '{' // not null
			f.markWholeMember(engineOnlyValue, topLevel, &o)     // always: no client may get it
		case "id":
			if len(f.id) > 0 { // the client gets this id instead
				f.markWholeMember(idValue, topLevel, &o)
			}
		case "request_id": // events of /inference/v1/generate have their id here
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

// isWhole says whether the text of o is this object and no more. o was read to its end.
func isWhole(o *rawjson.Object) bool {
	return o.Pos > 0 && rawjson.Space(o.Text, o.Pos) == len(o.Text) // Pos is -1 if the object is malformed; white space may follow it
}

// readPromptIDs reads the current member of o, the token ids of the prompt, which another engine needs to continue the answer. It marks
// them for removal if the client did not ask for them, or got them already from an earlier engine. For an answer that has a transcript or
// continues another, it also counts the ids and records the offsets of their list.
func (f *Filter) readPromptIDs(level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	if !f.options.TokenIDs || f.options.Continuation != nil {
		f.markMember(engineOnlyValue, level, o)
	}
	listed := o.Text[o.Val] == '[' && o.Pos-o.Val > len("[]") // true for the first event; later events have null here
	if listed && (f.options.Transcript != nil || f.options.Continuation != nil) {
		f.facts.promptIDs = bytes.Count(o.Text[o.Val:o.Pos], []byte{','}) + 1
		f.facts.promptAt, f.facts.promptEnd = o.Val, o.Pos
	}
}

// markIfContinued marks a member that must be replaced or removed if this engine continues an answer that another engine began.
func (f *Filter) markIfContinued(kind valueKind, level uint8, o *rawjson.Object) {
	if f.options.Continuation != nil {
		f.markWholeMember(kind, level, o)
	}
}

// readChoices reads the choices of an event, and moves top.Pos to the end of their list.
func (f *Filter) readChoices(top *rawjson.Object) {
	if top.Text[top.Val] != '[' { // such as null; facts.choices stays noChoiceList
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

// readChoice reads the choice at i in b into f.facts, and returns where it ends; -1: it cannot be read. It marks the members that may have
// to change for the client; editMarked later decides about each mark. It also finds out whether the choice is empty, because an event that
// an engine sends only for its token ids may be dropped. Each function that reads a member may move o.Pos to the end of its value, where
// o.Next then goes on.
func (f *Filter) readChoice(b []byte, i int) (end int) {
	bare := true // so far the choice has no text, no finish_reason, no logprobs and no member of a delta
	hasDelta, hasText := false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "delta": // of a chat
			hasMembers := f.readDelta(&o)
			hasDelta, bare = true, bare && !hasMembers
		case "text": // of a completion
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
			textBefore := f.options.Continuation != nil && f.options.Continuation.Runes > 0 // text_offset must also count this earlier text
			if textBefore && b[o.Val] == '{' {
				o.Pos = f.readOffsets(b, o.Val)
			}
		default:
			markChoiceMember(f, &o)
		}
	}
	if f.isTokensForm && !hasText { // at /inference/v1/generate a choice may have token ids alone, which then are its content
		f.facts.content = f.facts.content || f.facts.ids > 0
	}
	f.facts.emptyChoice = bare && hasDelta
	return o.Pos
}

// markChoiceMember marks the current member of a choice, from which readChoice reads nothing, if it may have to change for the client.
func markChoiceMember(f *Filter, choice *rawjson.Object) {
	switch string(choice.Key) {
	case "index":
		if f.options.Choice >= 0 { // the client gets this index instead
			f.markWholeMember(indexValue, secondLevel, choice)
		}
	case "kv_transfer_params": // no client may get it
		f.markWholeMember(engineOnlyValue, secondLevel, choice)
	case "weight_versions": // which model weights made which tokens: the engine counts the tokens from the start of its own part
		isList := choice.Text[choice.Val] == '['
		if c := f.options.Continuation; c != nil && (isList || len(c.Spans) > 0) {
			f.markWholeMember(spansValue, secondLevel, choice)
		}
		if isList {
			f.facts.spansAt, f.facts.spansEnd = choice.Val, rawjson.ValueEnd(choice.Text, choice.Val)
		}
	}
}

// readText reads the text of a completion's choice, and moves choice.Pos to its end.
func readText(f *Filter, choice *rawjson.Object) {
	choice.Pos = rawjson.ValueEnd(choice.Text, choice.Val)
	isEmpty := choice.Pos-choice.Val <= len(`""`)
	if isString := choice.Text[choice.Val] == '"'; isString && !isEmpty {
		f.facts.content, f.facts.textAt, f.facts.textEnd = true, choice.Val, choice.Pos
	}
}

// readFinishReason reads the finish_reason of a choice. It also marks it, so that editMarked can later replace it by null: it does so if
// the engine has preempted the request. found is false for null, which the finish_reason is until the answer ends.
func readFinishReason(f *Filter, choice *rawjson.Object) (found bool) {
	f.markWholeMember(endValue, secondLevel, choice) // second level: a member of a choice
	if choice.Text[choice.Val] != '"' {
		return false
	}
	f.facts.finishAt, f.facts.finishEnd = choice.Val+1, choice.Pos-1 // without the quotes
	return true
}

// readStopReason reads the stop_reason of a choice: the stop text or the id of the stop token that ended the answer, or "recomputed" if the
// engine has preempted the request. It marks the stop_reason, because it becomes null after a preemption.
func readStopReason(f *Filter, choice *rawjson.Object) {
	f.markWholeMember(endValue, secondLevel, choice)
	value := choice.Text[choice.Val:]
	f.facts.stopText = f.facts.stopText || value[0] == '"'
	f.facts.recomputed = f.facts.recomputed || bytes.HasPrefix(value, []byte(`"recomputed"`))
}

// readDelta reads the delta of a choice into f.facts: whether it has a role, text or other content. Reasoning, a refusal and tool calls are
// content that is not text. If the delta is an object, readDelta also moves choice.Pos to its end, so that the next call of choice.Next
// need not search for it. hasMembers is false only if the delta is null or {}.
func (f *Filter) readDelta(choice *rawjson.Object) (hasMembers bool) {
	b := choice.Text
	if b[choice.Val] != '{' {
		return !rawjson.IsNull(b[choice.Val:])
	}
	o := rawjson.ObjectAt(b, choice.Val)
	for o.Next() {
		if string(o.Key) == "role" {
			f.facts.hasRole = true
			// The mark lets editMarked remove the role, because the client has it from the first engine. Third level: a member
			// of a delta.
			f.markIfContinued(roleValue, thirdLevel, &o)
			continue
		}
		first := b[o.Val]
		if first != '"' && first != '[' && first != '{' { // null, a number or a boolean is no content
			continue
		}
		o.Pos = rawjson.ValueEnd(b, o.Val)
		if isEmpty := o.Pos-o.Val <= len(`""`); isEmpty { // only two quotes or brackets
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
	return o.N > 0 // N counts the members
}

// readOffsets reads the logprobs of a completion, which start at i in b, and returns where they end; -1: they are malformed. It marks
// text_offset, the list of where each token begins in the text of this engine, because editMarked must add the length of the text that
// earlier engines of this answer sent.
func (f *Filter) readOffsets(b []byte, i int) int {
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "text_offset" && b[o.Val] == '[' {
			f.markWholeMember(offsetsValue, thirdLevel, &o) // third level: a member of the logprobs
		}
	}
	return o.Pos
}

// readIDs counts the token ids of a choice, which are the tokens generated since the last event, and moves choice.Pos to the end of their
// list. It marks them for removal if the client did not ask for them.
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

// readUsage reads the usage of an event, which may be null, and moves top.Pos to the end of its value.
func (f *Filter) readUsage(top *rawjson.Object) {
	at := len(f.marks) // index of the mark that is added here; those of the members inside the usage come after it
	f.markMember(usageValue, topLevel, top)
	if top.Text[top.Val] == '{' {
		top.Pos = f.readCounts(top.Text, top.Val)
	} else {
		top.Pos = rawjson.ValueEnd(top.Text, top.Val)
	}
	f.marks[at].end = int32(top.Pos)
}

// readCounts reads the usage at i in b into f.facts, and returns where it ends; -1: it is malformed. On the way it marks what editMarked
// may have to change in the usage: the counts that must include the tokens of earlier engines, and the place for the prefill engine's count
// of cached tokens. The counts of a usage without completion_tokens are ignored: facts.hasUsage stays as it is, and if it is false,
// actionFor keeps the marked counts, except cached_tokens.
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
	cachedKnown := f.options.Cached >= 0         // the prefill engine's count, which the client must get
	if !hasDetails && cachedKnown && o.Pos > 0 { // Pos is -1 if the usage is malformed
		f.markInsertion(missingDetails, &o)
	}
	if !hasTotal {
		u.Total = u.Prompt + u.Completion
	}
	f.facts.hasUsage, f.facts.usage = true, u
	return o.Pos
}

// readCount reads the current member of a usage as a number of tokens; ok is false if it is no such number. It marks the member if the
// count must include the tokens of earlier engines.
func (f *Filter) readCount(kind valueKind, usage *rawjson.Object) (n int, ok bool) {
	usage.Pos = rawjson.ValueEnd(usage.Text, usage.Val)
	if f.options.Continuation != nil {
		f.markMember(kind, secondLevel, usage)
	}
	return tokenCount(usage)
}

// readDetails reads prompt_tokens_details, the current member of a usage, into u, and moves usage.Pos to their end. It marks the details
// and their cached_tokens, which actionFor may have to replace or remove. If the prefill engine's cached_tokens are known and the details
// lack this member, it marks where the count must be written. A mark must come before those of the members inside its value. The mark of
// the details is therefore made first, and gets its end and hasOnlyCached after the members were read.
func (f *Filter) readDetails(usage *rawjson.Object, u *Usage) {
	b := usage.Text
	prefillCountKnown := f.options.Cached >= 0
	if b[usage.Val] != '{' { // not an object
		if prefillCountKnown && b[usage.Val] == 'n' { // null is replaced by details with cached_tokens
			f.markWholeMember(nullDetails, secondLevel, usage)
		}
		return
	}
	at := len(f.marks)                             // index of the mark of the details
	f.markMember(detailsValue, secondLevel, usage) // second level: a member of the usage
	o := rawjson.ObjectAt(b, usage.Val)
	found := 0 // how many members cached_tokens the details have
	for o.Next() {
		if string(o.Key) == "cached_tokens" {
			found++
			f.markWholeMember(cachedValue, thirdLevel, &o) // third level: a member of the details
			if n, ok := rawjson.Int(b, o.Val, o.Pos); ok {
				u.Cached = n
			}
		}
	}
	usage.Pos = o.Pos
	f.facts.detailsAt, f.facts.detailsEnd = usage.Val, o.Pos
	f.marks[at].end = int32(o.Pos)
	if found > 0 {
		f.marks[at].hasOnlyCached = o.N == found // actionFor may then remove the details as a whole
		return
	}
	if prefillCountKnown && o.Pos > 0 { // the details lack cached_tokens; Pos is -1 if they are malformed
		f.markInsertion(missingCached, &o)
	}
}

// tooManyDigits stands for a count that rawjson.Int cannot read. No limit of an answer allows it, and two of them can be added.
const tooManyDigits = 1 << 53

// tokenCount reads the current member of an object as a number of tokens. ok is false if it is not a whole number.
func tokenCount(o *rawjson.Object) (n int, ok bool) {
	if n, ok = rawjson.Int(o.Text, o.Val, o.Pos); ok {
		return n, true
	}
	for i := o.Val; i < o.Pos; i++ { // Pos is -1 if the value has no end
		if digit := o.Text[i]; digit < '0' || digit > '9' {
			return 0, false
		}
	}
	return tooManyDigits, o.Pos > o.Val
}
