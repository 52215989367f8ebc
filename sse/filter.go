package sse

import (
	"errors"
	"math"

	"evenkeel/internal/rawjson"
)

// Options holds what the client asked for where the decode engine got another request, and how the
// events of one engine request of a fan-out (n > 1, or a list of prompts) share the client's
// stream.
type Options struct {
	Form Form

	Usage           bool // the client set stream_options.include_usage
	ContinuousUsage bool // the client set stream_options.continuous_usage_stats; ignored without Usage
	TokenIDs        bool // the client set return_token_ids
	Unstreamed      bool // the engine does not stream: its whole answer is one event

	// replaces the model in each event, because the engine got another name for it; empty: it stays
	Model string

	// Cached is the prefill engine's cached_tokens, in place of the decode engine's, which counts the
	// KV that it pulled as cached. -1: not known, so the count is removed. OwnCached: the decode
	// engine computed the prompt itself, so its count is right.
	Cached int

	// TokensPerChunk is the average number of tokens in a chunk of this engine, for chunks without a
	// count; 0: not known, taken as 1.
	TokensPerChunk float64

	// MaxTokens bounds the tokens of the answer, and Context those of prompt and answer together. An
	// event that exceeds a bound is the engine's fault and is not counted. 0: no bound.
	MaxTokens, Context int

	// Only for one engine request of a fan-out:
	ID             []byte // replaces the id in each event; nil: it stays
	Created        int64  // replaces created in each event, in seconds since 1970; 0: it stays
	Choice         int    // replaces choices[].index; -1: it stays
	DropFinalUsage bool   // the fan-out sends one UsageEvent for all its streams
	DropDone       bool   // the fan-out sends one [DONE] for all its streams

	// Aborted: the client has aborted the answer, so that the finish_reason abort ends it. Otherwise
	// it ends with End Aborted. nil: clients cannot abort, so an abort is a failure of the engine.
	Aborted func() bool

	Transcript   *Transcript
	Continuation *Continuation // set if this engine continues an interrupted answer
}

// SetCached is for a decode stream that begins before the prefill engine has reported its cached
// tokens.
func (f *Filter) SetCached(cached int) { f.options.Cached = cached }

// OwnCached as the value of Options.Cached leaves the decode engine's cached_tokens unchanged.
const OwnCached = -2

const unknownCached = -1

// End says whether and how an engine's answer has ended.
type End uint8

// The possible ends of an answer.
const (
	NotEnded End = iota
	Complete
	Short   // [DONE] or the end of the body came before a finish_reason
	Refused // the engine reported an error: see Filter.Failure
	// finish_reason abort, without an abort by the client: see Answer.AcceptAbort and Filter.Failure
	Aborted
	Preempted // the engine ran out of KV memory and wants a new prefill
	Broken    // the answer exceeds a limit, or its events cannot be joined
	Garbled   // an event cannot be read; another engine may send the answer intact
)

const (
	usualMarks   = 16  // enough for the marks of most events
	maxKeptMarks = 256 // 7 KiB of memory; only a rare event needs more

	// maxDetails bounds the prompt_tokens_details, in bytes, that a filter keeps. Engines send a few
	// counts.
	maxDetails = 1 << 10
)

// NewFilter returns a filter for one stream of a decode engine.
func NewFilter(o Options) *Filter {
	f := &Filter{marks: make([]mark, 0, usualMarks)}
	f.Reset(o)
	return f
}

// Reset reuses the memory, except for what a rare large event made large.
func (f *Filter) Reset(o Options) {
	marks := f.marks[:0]
	if cap(marks) > maxKeptMarks {
		marks = make([]mark, 0, usualMarks)
	}
	id := emptied(f.id)
	switch {
	case o.ID != nil: // stays the same if another engine continues the answer
		id = rawjson.AppendString(id, o.ID)
	case o.Continuation != nil: // the client already got events with the first engine's id
		id = append(id, o.Continuation.Head.ID...)
	}
	model := emptied(f.model)
	if o.Model != "" {
		model = rawjson.AppendString(model, o.Model)
	}
	*f = Filter{options: o, model: model, isTokensForm: o.Form == Tokens, continuousUsage: o.Usage && o.ContinuousUsage, id: id, marks: marks,
		preparedUsage: emptied(f.preparedUsage), details: emptied(f.details), heldEvents: emptied(f.heldEvents)}
}

// Event takes the next event and returns the client's bytes for it: e.Raw itself if nothing
// changes, dst with the edited event appended if something does, nil if the client gets nothing.
// With Refused, out is the engine's error event. With Preempted, out is the event if it has
// content. Event does not allocate if dst has room.
//
// Some forms have no [DONE]. For their last event, Event returns NotEnded and sets streamEnded.
func (f *Filter) Event(e Event, dst []byte) (out []byte, end End) {
	f.facts.isEmpty = false // not all cases below set it
	switch {
	case e.Kind == KindComment:
		return AppendComments(dst, e), NotEnded
	case e.Kind == KindDone:
		return takeDone(f, e)
	// The id and the index in this event must be replaced, but it is too large to be read.
	case e.Kind == KindOpaque && f.options.DropDone:
		f.fault = ErrLargeEvent
		return nil, Broken
	case !f.options.Form.chunked(): // as those of /v1/responses
		return f.takeFormEvent(e, dst)
	}
	return takeChunk(f, e, dst)
}

// appendEvent is Event, but always appends.
func appendEvent(f *Filter, e Event, dst []byte) ([]byte, End) {
	out, end := f.Event(e, dst)
	isInDst := len(out) > 0 && &out[0] != &e.Raw[0]
	if isInDst {
		return out, end
	}
	return append(dst, out...), end
}

func takeChunk(f *Filter, e Event, dst []byte) (out []byte, end End) {
	f.facts = facts{choices: noChoiceList}
	f.marks = f.marks[:0]
	if e.Kind == KindOpaque { // too large to be read
		markUnread(f)
		return e.Raw, NotEnded
	}
	if !f.read(e.Data) {
		return f.handleNonJSON(e.Data)
	}
	if f.facts.isError {
		f.failure = ReadFailure(e.Data)
		return e.Raw, Refused
	}
	finish := e.Data[f.facts.finishAt:f.facts.finishEnd] // empty: the event has none
	if string(finish) == "abort" && !f.facts.recomputed && mayAcceptAbort(f) {
		f.failure = finishFailure("abort")
		if t := f.options.Transcript; t != nil && f.facts.spansAt > 0 {
			t.Spans = append(t.Spans[:0], e.Data[f.facts.spansAt:f.facts.spansEnd]...)
		}
		return nil, Aborted // before the event counts, because it comes again if the abort is accepted
	}
	if fault := f.exceededLimit(); fault != nil {
		f.fault = fault
		return nil, Broken
	}
	f.countTokens(e.Data)
	out, end = f.decide(e, finish, dst)
	if f.options.Transcript != nil && end != Refused {
		f.options.Transcript.record(f, e.Data)
	}
	return out, end
}

func mayAcceptAbort(f *Filter) bool { return f.options.Aborted != nil && !f.options.Aborted() }

func takeDone(f *Filter, e Event) (out []byte, end End) {
	end = Short
	if f.Finished() {
		end = Complete
	}
	switch {
	case f.options.DropDone:
		return nil, end
	case f.options.Form == Verbatim: // complete at [DONE], even without a finish_reason
		return f.forwardVerbatim(e)
	}
	return e.Raw, end
}

// markUnread: no other engine can continue the answer, because the transcript lacks this event.
func markUnread(f *Filter) {
	f.started = true
	if f.options.Transcript != nil {
		f.options.Transcript.Unread = true
	}
}

// handleNonJSON ignores the event if it is empty or a finish_reason has come. Otherwise the answer
// was damaged on its way.
func (f *Filter) handleNonJSON(data []byte) ([]byte, End) {
	empty := rawjson.Space(data, 0) == len(data)
	f.facts.isEmpty = empty
	if empty || f.finishReason != "" {
		return nil, NotEnded
	}
	f.fault = ErrNotJSON
	return nil, Garbled
}

// These errors say why a filter refuses an event.
var (
	ErrTooManyTokens = errors.New("the engine sent more tokens than were asked for")
	ErrBadCount      = errors.New("the engine counts more tokens than there can be")
	ErrNotJSON       = errors.New("the engine sent an event that is not a JSON object")
	ErrLargeEvent    = errors.New("the engine sent an event that is larger than limits.event_bytes")
)

const (
	// allowedExtraTokens: an engine with speculative decoding may stop a few tokens late.
	allowedExtraTokens = 32
	// chunksPerToken: an engine's parsers of tool calls and reasoning may make several chunks of one
	// token.
	chunksPerToken = 4
)

// exceededLimit: the event is not counted yet.
func (f *Filter) exceededLimit() error {
	facts := &f.facts
	if f.options.Context > 0 {
		maxContext := f.options.Context + allowedExtraTokens
		usageTooLarge := facts.hasUsage && facts.usage.Prompt+facts.usage.Completion > maxContext
		if usageTooLarge || facts.promptIDs > maxContext {
			return ErrBadCount
		}
	}
	if f.options.MaxTokens <= 0 {
		return nil
	}
	maxAnswer := f.options.MaxTokens + allowedExtraTokens
	switch {
	case facts.hasUsage && facts.usage.Completion > maxAnswer:
		return ErrBadCount
	case f.ids+facts.ids > maxAnswer:
		return ErrTooManyTokens
	// bounds an engine that sends no token ids
	case facts.content && f.chunks >= chunksPerToken*maxAnswer:
		return ErrTooManyTokens
	}
	return nil
}

// countTokens counts the engine's last usage plus the tokens since: the number of their ids or,
// without ids, an estimate from the number of chunks.
func (f *Filter) countTokens(data []byte) {
	facts := &f.facts
	before := f.tokens
	if facts.content {
		f.chunks++
	}
	if facts.hasIDs {
		f.idsSeen = true
		f.ids += facts.ids
	}
	if facts.hasUsage {
		storeUsage(f, data)
	}
	f.tokens, f.tokensEstimated = f.usage.Completion, false
	if f.idsSeen {
		f.tokens += f.ids - f.idsAtUsage
	} else {
		sinceUsage := f.chunks - f.chunksAtUsage
		f.tokens += int(math.Round(float64(sinceUsage) * f.assumedPerChunk()))
		f.tokensEstimated = sinceUsage > 0
	}
	if facts.hasUsage && facts.choices == 0 { // this is the final usage
		f.reconciled, f.drift = true, before-facts.usage.Completion
	}
}

func storeUsage(f *Filter, data []byte) {
	facts := &f.facts
	f.usageSeen = true
	f.usage = facts.usage
	f.idsAtUsage, f.chunksAtUsage = f.ids, f.chunks
	f.details = f.details[:0]
	if facts.detailsEnd-facts.detailsAt <= maxDetails {
		f.details = append(f.details, data[facts.detailsAt:facts.detailsEnd]...)
	}
	switch {
	case f.options.Cached != OwnCached: // another engine computed the prompt
		f.usage.Cached = f.options.Cached
	case f.usage.Cached > f.usage.Prompt: // wrong: no more than the prompt can be cached
		f.usage.Cached = unknownCached
	}
}

func (f *Filter) assumedPerChunk() float64 {
	if f.options.TokensPerChunk <= 0 {
		return 1
	}
	return f.options.TokensPerChunk
}

// decide decides what the client gets of the event. An event that is no failure shows that the
// engine has the KV (started).
func (f *Filter) decide(e Event, finish, dst []byte) ([]byte, End) {
	facts := &f.facts
	end := badEnd(f, finish)
	if end == Refused {
		return f.editMarked(e, dst), Refused // for callers of Event; Answer.Event does not pass it on
	}
	f.started = true
	if end == Preempted {
		if !facts.content {
			return nil, Preempted
		}
		return f.editMarked(e, dst), Preempted
	}
	recordEnd(f, finish, e.Data)
	if isDropped(f, finish) {
		return nil, NotEnded
	}
	// editMarked removes the usage from all other events, or sets it to null
	keepsUsage := facts.choices == 0 || f.continuousUsage
	f.usageSent = f.usageSent || facts.hasUsage && keepsUsage
	return f.editMarked(e, dst), NotEnded
}

func badEnd(f *Filter, finish []byte) End {
	switch {
	case f.facts.recomputed: // first, because then the finish_reason does not matter
		return Preempted
	// else the client itself aborted the answer
	case string(finish) == "error", string(finish) == "abort" && f.options.Aborted == nil:
		f.failure = finishFailure(string(finish))
		return Refused
	}
	return NotEnded
}

func recordEnd(f *Filter, finish, data []byte) {
	facts := &f.facts
	if facts.promptIDs > 0 {
		f.promptIDs = facts.promptIDs
	}
	if len(finish) > 0 {
		f.finishReason, f.endedByStopText = finishReason(finish), facts.stopText
		f.keepsKV = facts.keepsKV
	}
	if f.finishReason != "" && facts.hasUsage {
		// a continuous usage also comes in an event of its own
		f.finalUsageCame = facts.choices == 0 || !f.continuousUsage
		f.deferUsage(data)
	}
}

// isDropped: only evenkeel asked for the event, or the client has what it says, or gets it with
// another event.
func isDropped(f *Filter, finish []byte) bool {
	facts := &f.facts
	onlyUsage := facts.choices == 0 && facts.hasUsage
	onlyIDs := facts.choices == 1 && facts.emptyChoice && facts.hasIDs
	onlyRole := facts.choices == 1 && facts.hasRole && !facts.content && facts.ids == 0 && len(finish) == 0
	switch {
	case onlyUsage && (!f.options.Usage || f.options.DropFinalUsage):
		return true
	// Another engine will continue the answer and send the final usage.
	case onlyUsage && f.options.Transcript != nil && f.finishReason == "":
		return true
	// With continuous usage, the client still gets its usage.
	case onlyIDs && !f.options.TokenIDs && !f.continuousUsage:
		return true
	case onlyRole && f.options.Continuation != nil:
		return true
	}
	return false
}

// deferUsage keeps the final usage as an event of its own (preparedUsage) if the engine sends it
// only with the finish_reason, where OpenAI's clients do not look for it.
func (f *Filter) deferUsage(data []byte) {
	needsFinalUsage := f.options.Usage && !f.continuousUsage && !f.options.DropFinalUsage
	switch {
	case !needsFinalUsage: // the client wants none, gets it in every event, or gets the fan-out's sum
	case f.facts.choices == 0: // the engine itself sends such an event
		f.preparedUsage = f.preparedUsage[:0]
	default:
		prepareUsage(f, data)
	}
}

// prepareUsage copies the event with an empty list of choices.
func prepareUsage(f *Filter, data []byte) {
	var usage []byte
	f.preparedUsage = append(f.preparedUsage[:0], "data: {"...)
	o := rawjson.ObjectAt(data, rawjson.Space(data, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "choices":
		case "usage":
			usage = o.Value()
		default:
			keyAndValue := data[o.Quote:o.Pos]
			f.preparedUsage = append(append(f.preparedUsage, keyAndValue...), ',')
		}
	}
	f.preparedUsage = append(append(append(f.preparedUsage, `"choices":[],"usage":`...), usage...), "}\n\n"...)
}

// MissingUsage appends the event that deferUsage has prepared, if any. It must come before [DONE].
// It is filtered as an event of the engine would be.
func (f *Filter) MissingUsage(dst []byte) []byte {
	if len(f.preparedUsage) == 0 {
		return dst
	}
	const head = len("data: ")
	data := f.preparedUsage[head : len(f.preparedUsage)-len(BlankLine)]
	e := Event{Raw: f.preparedUsage, Data: data, Kind: KindData, dataAt: head}
	dst, _ = appendEvent(f, e, dst)
	return dst
}

// LacksUsage says that the client waits for a usage that neither the engine has sent nor
// MissingUsage can append. The caller then makes one from the filter's counts. It is false for an
// answer that another engine began.
func (f *Filter) LacksUsage() bool {
	willAppendIt := len(f.preparedUsage) > 0
	// the fan-out reads Usage and sends it itself
	fanOutHasIt := f.options.DropFinalUsage && f.usageSeen
	hasUsage := f.usageSent || willAppendIt || fanOutHasIt
	return f.options.Usage && !hasUsage && f.options.Continuation == nil
}

// Untrack stops the transcript, so that no other engine can continue the answer.
func (f *Filter) Untrack() { f.options.Transcript = nil }

// Tokens returns how many tokens this engine generated so far. The number falls if the engine's
// usage is lower than the estimate was.
func (f *Filter) Tokens() int { return f.tokens }

// Empty says whether no content came so far: no text, reasoning or tool call.
func (f *Filter) Empty() bool { return f.chunks == 0 }

// Started says whether a data event came that is not a failure: then the decode engine has pulled
// the KV, and the prefill engine frees its copy.
func (f *Filter) Started() bool { return f.started }

// Finished says whether a finish_reason came that is no failure.
func (f *Filter) Finished() bool { return f.finishReason != "" }

// Kept says whether a vLLM engine may keep the answer's KV. From 0.33 on, the last chunk then has
// kv_transfer_params. vLLM keeps no KV if the answer ended at a stop text of the request (0.33,
// process_outputs in v1/engine/output_processor.py) or for repetition (request_finished in
// nixl/pull_scheduler.py).
func (f *Filter) Kept() bool {
	reasonKeepsKV := f.finishReason == "stop" || f.finishReason == "length" || f.finishReason == "tool_calls"
	return f.keepsKV || reasonKeepsKV && !f.endedByStopText
}

// FinishReason is empty if none came so far.
func (f *Filter) FinishReason() string { return f.finishReason }

// Usage returns the engine's last usage with the tokens of earlier engines of this answer added.
func (f *Filter) Usage() (u Usage, ok bool) {
	if f.options.Continuation != nil && f.usageSeen {
		return f.options.Continuation.addEarlier(f.usage), true
	}
	return f.usage, f.usageSeen
}

// PromptDetails returns prompt_tokens_details of the last usage; nil: none, or more than
// maxDetails.
func (f *Filter) PromptDetails() (counts map[string]int) {
	addCounts(&counts, f.details)
	return counts
}

// Prompt returns the engine's count of the tokens in its prompt; 0: none came so far.
func (f *Filter) Prompt() int {
	if f.usageSeen {
		return f.usage.Prompt
	}
	return f.promptIDs
}

// Failure returns the engine's error after Event has returned Refused.
func (f *Filter) Failure() Failure { return f.failure }

// Fault returns the reason after Event has returned Broken or Garbled.
func (f *Filter) Fault() error { return f.fault }

// Drift returns the count of tokens before the final usage came, minus the one in that usage.
func (f *Filter) Drift() (tokens int, ok bool) { return f.drift, f.reconciled }

const (
	// minChunks: a parser of tool calls may hold back a whole call and send it as one chunk, so a
	// stream with fewer chunks does not count.
	minChunks = 4
	// maxPerChunk: speculative decoding makes about 8 tokens per step.
	maxPerChunk = 8
)

// TokensPerChunk returns the average for the Options of the next stream: a tenth of the way from
// before to the average of this stream. It is before if the true count is not known, or if the
// stream had few chunks.
func (f *Filter) TokensPerChunk(before float64) float64 {
	exact := f.ids // 0: not known
	if f.usageSeen {
		exact = f.usage.Completion
	}
	if f.chunks < minChunks || exact == 0 {
		return before
	}
	if before <= 0 {
		before = 1
	}
	average := min(float64(exact)/float64(f.chunks), maxPerChunk)
	return before + (average-before)/10
}

// finishReason is string(b), without an allocation for the reasons that engines use.
func finishReason(b []byte) string {
	switch string(b) {
	case "stop":
		return "stop"
	case "length":
		return "length"
	case "tool_calls":
		return "tool_calls"
	case "repetition":
		return "repetition"
	case "content_filter":
		return "content_filter"
	}
	return string(b)
}

func (t *Transcript) record(f *Filter, b []byte) {
	facts := &f.facts
	if t.Head.ID == nil {
		t.Head = readHead(b)
	}
	t.Completed, t.Guessed = f.tokens, f.tokensEstimated
	if f.usageSeen {
		t.Prompt = f.usage.Prompt
	} else if facts.promptIDs > 0 {
		t.Prompt = facts.promptIDs
	}
	if t.KeepPrompt && facts.promptEnd > 0 {
		t.PromptIDs = append(t.PromptIDs[:0], b[facts.promptAt:facts.promptEnd]...)
	}
	// The facts have only one choice's text and ids.
	t.Unread = t.Unread || facts.choices > 1
	if facts.idsAt > 0 {
		for ids := rawjson.ArrayAt(b, facts.idsAt); ids.Next(); {
			t.recordID(takeElement(&ids))
		}
	}
	if facts.content {
		t.recordContent(facts, b)
	}
}

// takeElement moves list.Pos to the end of the element; one without an end ends the iteration.
func takeElement(list *rawjson.Array) []byte {
	list.Pos = rawjson.ValueEnd(list.Text, list.Val)
	return list.Text[list.Val:max(list.Val, list.Pos)]
}

// recordID: an id that is no int32 is stored, too, because growthOf needs the number of ids; no
// engine gets the ids of an Unread transcript.
func (t *Transcript) recordID(idJSON []byte) {
	id, ok := rawjson.Int(idJSON, 0, len(idJSON))
	t.Unread = t.Unread || !ok || id > math.MaxInt32
	t.IDs = append(t.IDs, int32(id))
}

func (t *Transcript) recordContent(facts *facts, b []byte) {
	t.Content = true
	// earlier tokens without text count, too: their text came with this event
	t.Shown = len(t.IDs)
	t.MoreThan = t.MoreThan || facts.hasNonText // such as a tool call
	if facts.textEnd > facts.textAt {
		text := b[facts.textAt+1 : facts.textEnd-1]
		t.Runes += runes(text)
		if t.KeepText {
			t.Text = append(t.Text, text...)
		}
	}
}
