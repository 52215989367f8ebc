package sse

import (
	"errors"
	"math"

	"evenkeel/internal/rawjson"
)

// Options holds what the client asked for where the decode engine got another request. A client's request with n > 1, or with a list of
// prompts, is a fan-out: it becomes several engine requests. Options also says how the events of one such request change so that all of
// them share the client's stream.
type Options struct {
	Form Form // the format of the engine's events

	Usage           bool // the client set stream_options.include_usage
	ContinuousUsage bool // the client set stream_options.continuous_usage_stats; ignored without Usage
	TokenIDs        bool // the client set return_token_ids
	Unstreamed      bool // the engine does not stream: its whole answer is one event

	Model string // replaces the model in each event, because the engine got another name for it; empty: the engine's stays

	// Cached is the prefill engine's cached_tokens. It replaces the count of the decode engine, which is wrong, because that engine
	// counts the KV that it pulled as cached. If it is -1, the number is not known, and the decode engine's count is removed. If it is
	// OwnCached, the decode engine computed the prompt itself, so its count is right.
	Cached int

	// TokensPerChunk is the average number of tokens in a chunk of this decode engine. It estimates the
	// tokens of chunks for which the engine reports no count. 0: not known, taken as 1.
	TokensPerChunk float64

	// MaxTokens bounds the tokens of the answer, and Context those of the prompt and the answer together. An event that
	// exceeds a bound is the engine's fault and is not counted. 0: no bound.
	MaxTokens, Context int

	// The following fields are for one engine request of a fan-out, whose answers share the client's stream:
	ID             []byte // replaces the id in each event; nil: the engine's id stays
	Created        int64  // replaces created in each event, in seconds since 1970; 0: the engine's value stays
	Choice         int    // replaces choices[].index; -1: the engine's index stays
	DropFinalUsage bool   // leave out the final usage: the fan-out sends one UsageEvent for all its streams
	DropDone       bool   // leave out [DONE]: the fan-out sends one for all its streams

	// Aborted says whether the finish_reason abort is the end of the answer, because the client has aborted it. If it is not, the answer
	// ends with End Aborted. nil: clients cannot abort the answer, so that an abort is a failure of the engine.
	Aborted func() bool

	Transcript   *Transcript   // records what another engine needs to continue the answer; nil: nothing is recorded
	Continuation *Continuation // set if this engine continues an interrupted answer; nil: this engine begins the answer
}

// SetCached sets Options.Cached, in tokens, for a decode stream that begins before the prefill engine has reported how much of the prompt
// it found in its prefix cache.
func (f *Filter) SetCached(cached int) { f.options.Cached = cached }

// OwnCached as the value of Options.Cached leaves the decode engine's cached_tokens unchanged.
const OwnCached = -2

const unknownCached = -1 // as the value of Options.Cached: cached_tokens is removed

// End says whether and how an engine's answer has ended.
type End uint8

// The possible ends of an answer. With NotEnded, the zero value, the answer goes on.
const (
	NotEnded  End = iota // the engine may send more events
	Complete             // the engine sent the whole answer
	Short                // [DONE] or the end of the body came before a finish_reason
	Refused              // the engine reported an error: see Filter.Failure
	Aborted              // finish_reason abort, without an abort by the client: see Answer.AcceptAbort and Filter.Failure
	Preempted            // the engine ran out of KV memory and wants a new prefill
	Broken               // the answer exceeds a limit, or its events cannot be joined: see Filter.Fault and Answer.Err
	Garbled              // an event cannot be read; another engine may send the answer intact: see Filter.Fault and Answer.Err
)

const (
	usualMarks   = 16  // initial capacity for marks, the members of one event that may have to change: enough for most events
	maxKeptMarks = 256 // largest capacity for marks that a filter keeps for its next stream: 7 KiB of memory, more only for a rare event

	// maxDetails bounds the prompt_tokens_details, in bytes, that a filter keeps until its stream ends. Engines send a few counts.
	maxDetails = 1 << 10
)

// NewFilter returns a filter for one stream of a decode engine.
func NewFilter(o Options) *Filter {
	f := &Filter{marks: make([]mark, 0, usualMarks)}
	f.Reset(o)
	return f
}

// Reset makes the filter ready for another stream and reuses its memory, except for what a rare large event made large.
func (f *Filter) Reset(o Options) {
	marks := f.marks[:0]
	if cap(marks) > maxKeptMarks {
		marks = make([]mark, 0, usualMarks)
	}
	id := emptied(f.id) // if it stays empty, the client gets the engine's own id
	switch {
	case o.ID != nil: // the caller chose the id, so it stays the same if another engine continues the answer
		id = rawjson.AppendString(id, o.ID)
	case o.Continuation != nil: // the client already got events with the first engine's id, which is already JSON
		id = append(id, o.Continuation.Head.ID...)
	}
	model := emptied(f.model)
	if o.Model != "" {
		model = rawjson.AppendString(model, o.Model)
	}
	*f = Filter{options: o, model: model, isTokensForm: o.Form == Tokens, continuousUsage: o.Usage && o.ContinuousUsage, id: id, marks: marks,
		preparedUsage: emptied(f.preparedUsage), details: emptied(f.details), heldEvents: emptied(f.heldEvents)}
}

// Event takes the next event of the stream and returns the client's bytes for it: e.Raw itself if the event does not
// change, dst with the edited event appended if it does, nil if the client gets nothing. With Refused, out is the engine's
// error event. With Preempted, out is the event if it has content, else nil. Event does not allocate if dst has room.
//
// Some forms have no [DONE]. For their last event, Event returns NotEnded and sets streamEnded, by which Answer.Event, its caller, finds
// the end.
func (f *Filter) Event(e Event, dst []byte) (out []byte, end End) {
	f.facts.isEmpty = false // Answer.Event then asks whether the event had nothing of the answer; not all cases below set it
	switch {
	case e.Kind == KindComment:
		return AppendComments(dst, e), NotEnded
	case e.Kind == KindDone:
		return takeDone(f, e)
	// The answer is one of a fan-out, so the id and the index in its events must be replaced. This event is too large to be read.
	case e.Kind == KindOpaque && f.options.DropDone:
		f.fault = ErrLargeEvent
		return nil, Broken
	case !f.options.Form.chunked(): // the events have no choices, as those of /v1/responses
		return f.takeFormEvent(e, dst)
	}
	return takeChunk(f, e, dst)
}

// appendEvent does what Event does, and appends to dst what the client gets, even if the event does not change.
func appendEvent(f *Filter, e Event, dst []byte) ([]byte, End) {
	out, end := f.Event(e, dst)
	isInDst := len(out) > 0 && &out[0] != &e.Raw[0] // Event has appended to dst; else out is e.Raw or nil
	if isInDst {
		return out, end
	}
	return append(dst, out...), end
}

// takeChunk takes the next event of a form whose events have choices. It reads the event into f.facts and f.marks, counts its tokens,
// decides what the client gets of it, and adds it to the transcript, if there is one. The results are those of Event.
func takeChunk(f *Filter, e Event, dst []byte) (out []byte, end End) {
	f.facts = facts{choices: noChoiceList}
	f.marks = f.marks[:0]
	if e.Kind == KindOpaque { // the event is larger than the reader's limit, so it is forwarded without being read
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
	finish := e.Data[f.facts.finishAt:f.facts.finishEnd] // empty: the event has no finish_reason
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
	if f.options.Transcript != nil && end != Refused { // an error event is no part of the answer to continue
		f.options.Transcript.record(f, e.Data)
	}
	return out, end
}

// mayAcceptAbort says whether the caller decides whether an abort is the end of the answer, because the client has not aborted it.
func mayAcceptAbort(f *Filter) bool { return f.options.Aborted != nil && !f.options.Aborted() }

// takeDone takes [DONE]. The answer is Complete if a finish_reason came before it, else Short.
func takeDone(f *Filter, e Event) (out []byte, end End) {
	end = Short
	if f.Finished() {
		end = Complete
	}
	switch {
	case f.options.DropDone: // the fan-out sends one [DONE] for all its streams
		return nil, end
	case f.options.Form == Verbatim: // a Verbatim answer is complete at [DONE], even without a finish_reason
		return f.forwardVerbatim(e)
	}
	return e.Raw, end
}

// markUnread notes that the client gets an event that was not read, because it is too large. No other engine can then continue the answer,
// because the transcript lacks this part of it.
func markUnread(f *Filter) {
	f.started = true
	if f.options.Transcript != nil {
		f.options.Transcript.Unread = true
	}
}

// handleNonJSON decides about an event that is not a JSON object. The client gets nothing for it. The event is ignored if it is empty, or
// if a finish_reason has come already. Otherwise the answer was damaged on its way, and handleNonJSON returns Garbled.
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
	// allowedExtraTokens is how many tokens an answer may have beyond its limit, because an engine with speculative decoding may stop a
	// few tokens late.
	allowedExtraTokens = 32
	// chunksPerToken bounds how many chunks an engine's parsers of tool calls and reasoning may make of one token.
	chunksPerToken = 4
)

// exceededLimit returns ErrBadCount if the event claims more tokens than Options.Context or Options.MaxTokens allows, and ErrTooManyTokens
// if the answer with this event has more than MaxTokens allows; nil: it exceeds no bound. The event is not counted yet.
func (f *Filter) exceededLimit() error {
	facts := &f.facts
	if f.options.Context > 0 { // 0: Context sets no bound
		maxContext := f.options.Context + allowedExtraTokens
		usageTooLarge := facts.hasUsage && facts.usage.Prompt+facts.usage.Completion > maxContext
		if usageTooLarge || facts.promptIDs > maxContext {
			return ErrBadCount
		}
	}
	if f.options.MaxTokens <= 0 { // MaxTokens sets no bound
		return nil
	}
	maxAnswer := f.options.MaxTokens + allowedExtraTokens
	switch {
	case facts.hasUsage && facts.usage.Completion > maxAnswer:
		return ErrBadCount
	case f.ids+facts.ids > maxAnswer:
		return ErrTooManyTokens
	case facts.content && f.chunks >= chunksPerToken*maxAnswer: // bounds an engine that sends no token ids
		return ErrTooManyTokens
	}
	return nil
}

// countTokens updates the number of tokens by the event that was read, whose data is data. The number is the engine's count in its last
// usage plus the tokens that came after this usage: the number of their ids or, if the engine sends no ids, an estimate from the number of
// chunks. countTokens also stores the usage itself. When the final usage comes, it sets drift, by how much the number before was too high.
func (f *Filter) countTokens(data []byte) {
	facts := &f.facts
	before := f.tokens // the number without this event, for drift
	if facts.content {
		f.chunks++
	}
	if facts.hasIDs {
		f.idsSeen = true
		f.ids += facts.ids
	}
	if facts.hasUsage {
		storeUsage(f, data) // sets f.usage; idsAtUsage and chunksAtUsage become the present ids and chunks
	}
	f.tokens, f.tokensEstimated = f.usage.Completion, false // of the last usage; 0 before the first one
	if f.idsSeen {
		f.tokens += f.ids - f.idsAtUsage
	} else {
		sinceUsage := f.chunks - f.chunksAtUsage
		f.tokens += int(math.Round(float64(sinceUsage) * f.assumedPerChunk()))
		f.tokensEstimated = sinceUsage > 0
	}
	if facts.hasUsage && facts.choices == 0 { // a usage in an event without choices is the final one
		f.reconciled, f.drift = true, before-facts.usage.Completion
	}
}

// storeUsage stores the usage of the event that was read, whose data is data.
func storeUsage(f *Filter, data []byte) {
	facts := &f.facts
	f.usageSeen = true
	f.usage = facts.usage
	f.idsAtUsage, f.chunksAtUsage = f.ids, f.chunks // countTokens adds the ids or chunks that come from here on to the usage
	f.details = f.details[:0]
	if facts.detailsEnd-facts.detailsAt <= maxDetails {
		f.details = append(f.details, data[facts.detailsAt:facts.detailsEnd]...)
	}
	switch {
	case f.options.Cached != OwnCached: // another engine computed the prompt, so this engine's count of cached tokens is wrong
		f.usage.Cached = f.options.Cached
	case f.usage.Cached > f.usage.Prompt: // no more than the prompt can be cached, so the count is wrong
		f.usage.Cached = unknownCached
	}
}

// assumedPerChunk returns how many tokens a chunk is assumed to have if the engine sent no exact count. Without an average of earlier
// streams it is 1.
func (f *Filter) assumedPerChunk() float64 {
	if f.options.TokensPerChunk <= 0 {
		return 1
	}
	return f.options.TokensPerChunk
}

// decide decides what the client gets of the event. First it looks for a bad end of the answer. Otherwise it stores what the event says of
// the answer, and drops an event that the client has not asked for or has already (isDropped). An event that is no failure sets started,
// because it shows that the engine has the KV. finish is the event's finish_reason; empty: the event has none. The end that decide returns
// is Preempted, Refused or NotEnded.
func (f *Filter) decide(e Event, finish, dst []byte) ([]byte, End) {
	facts := &f.facts
	end := badEnd(f, finish)
	if end == Refused {
		return f.editMarked(e, dst), Refused // the event is for callers of Event; Answer.Event does not pass it on to the client
	}
	f.started = true
	if end == Preempted {
		if !facts.content { // the event only reports the preemption
			return nil, Preempted
		}
		return f.editMarked(e, dst), Preempted
	}
	recordEnd(f, finish, e.Data)
	if isDropped(f, finish) {
		return nil, NotEnded
	}
	keepsUsage := facts.choices == 0 || f.continuousUsage // editMarked removes the usage from all other events, or sets it to null
	f.usageSent = f.usageSent || facts.hasUsage && keepsUsage
	return f.editMarked(e, dst), NotEnded
}

// badEnd returns Preempted if the engine gives up the answer because it ran out of KV memory, and Refused, with f.failure set, if the
// engine reports an error; NotEnded: neither. finish is the event's finish_reason; empty: the event has none.
func badEnd(f *Filter, finish []byte) End {
	switch {
	case f.facts.recomputed: // checked first: a stop_reason recomputed is a preemption, whatever the finish_reason is
		return Preempted
	case string(finish) == "error", string(finish) == "abort" && f.options.Aborted == nil: // else the client itself aborted the answer
		f.failure = finishFailure(string(finish))
		return Refused
	}
	return NotEnded
}

// recordEnd stores what the event, whose data is data, says of the prompt's length and of the end of the answer: the finish_reason and the
// final usage. finish is the event's finish_reason; empty: the event has none.
func recordEnd(f *Filter, finish, data []byte) {
	facts := &f.facts
	if facts.promptIDs > 0 {
		f.promptIDs = facts.promptIDs
	}
	if len(finish) > 0 {
		f.finishReason, f.endedByStopText = finishReason(finish), facts.stopText
		f.keepsKV = facts.keepsKV
	}
	if f.finishReason != "" && facts.hasUsage { // the usage is the final one
		f.finalUsageCame = facts.choices == 0 || !f.continuousUsage // a continuous usage also comes in an event of its own
		f.deferUsage(data)
	}
}

// isDropped says whether the client must not get the event, because only evenkeel asked for it, or because the client already has what
// the event says, or will get it with another event. finish is the event's finish_reason; empty: the event has none.
func isDropped(f *Filter, finish []byte) bool {
	facts := &f.facts
	onlyUsage := facts.choices == 0 && facts.hasUsage
	onlyIDs := facts.choices == 1 && facts.emptyChoice && facts.hasIDs
	onlyRole := facts.choices == 1 && facts.hasRole && !facts.content && facts.ids == 0 && len(finish) == 0
	switch {
	case onlyUsage && (!f.options.Usage || f.options.DropFinalUsage): // the client wants no usage, or the fan-out sends the sum
		return true
	// No finish_reason has come, so another engine will continue the answer and send the final usage.
	case onlyUsage && f.options.Transcript != nil && f.finishReason == "":
		return true
	// The engine sends the event only because evenkeel asked for token ids. With continuous usage, the client still gets its usage.
	case onlyIDs && !f.options.TokenIDs && !f.continuousUsage:
		return true
	case onlyRole && f.options.Continuation != nil: // the client has the role from an earlier engine
		return true
	}
	return false
}

// deferUsage stores the final usage as an event of its own, preparedUsage, which MissingUsage appends at the end of the answer. It is
// needed if the engine sends the usage only with the finish_reason, where OpenAI's clients do not look for it. data is the data of the
// event, which has a usage. deferUsage drops preparedUsage if the engine itself sends an event with only the usage.
func (f *Filter) deferUsage(data []byte) {
	needsFinalUsage := f.options.Usage && !f.continuousUsage && !f.options.DropFinalUsage
	switch {
	case !needsFinalUsage: // the client wants no usage, gets that of every event, or gets the fan-out's sum
	case f.facts.choices == 0: // this event has only the usage
		f.preparedUsage = f.preparedUsage[:0]
	default:
		prepareUsage(f, data)
	}
}

// prepareUsage sets preparedUsage to the event that MissingUsage appends at the end of the answer: a copy of the event whose data is data,
// with an empty list of choices. The list and the usage come last in it.
func prepareUsage(f *Filter, data []byte) {
	var usage []byte // the last one in the event, which has at least one
	f.preparedUsage = append(f.preparedUsage[:0], "data: {"...)
	o := rawjson.ObjectAt(data, rawjson.Space(data, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "choices": // left out: an empty list is written below
		case "usage": // written below
			usage = o.Value()
		default:
			keyAndValue := data[o.Quote:o.Pos]
			f.preparedUsage = append(append(f.preparedUsage, keyAndValue...), ',')
		}
	}
	f.preparedUsage = append(append(append(f.preparedUsage, `"choices":[],"usage":`...), usage...), "}\n\n"...)
}

// MissingUsage appends the event with only the final usage that deferUsage has prepared. It appends nothing if there is none, as when the
// client did not ask for the usage or the engine itself has sent such an event. The caller calls it before [DONE]. The event is a copy of
// the engine's, so it is filtered as an event of the engine would be: the client's id replaces the engine's, and so on.
func (f *Filter) MissingUsage(dst []byte) []byte {
	if len(f.preparedUsage) == 0 {
		return dst
	}
	const head = len("data: ")
	data := f.preparedUsage[head : len(f.preparedUsage)-len(BlankLine)]
	e := Event{Raw: f.preparedUsage, Data: data, Kind: KindData, dataAt: head}
	dst, _ = appendEvent(f, e, dst) // the End is NotEnded, as it was for the engine's own event
	return dst
}

// LacksUsage says that the client asked for the usage, and that neither the engine has sent the final usage nor MissingUsage can append it.
// At the end of the answer, a caller then makes an event with the usage from the filter's own counts. LacksUsage is always false for an
// answer that another engine began.
func (f *Filter) LacksUsage() bool {
	willAppendIt := len(f.preparedUsage) > 0               // MissingUsage appends it at the end
	fanOutHasIt := f.options.DropFinalUsage && f.usageSeen // the fan-out reads the usage by the method Usage and sends it itself
	hasUsage := f.usageSent || willAppendIt || fanOutHasIt
	return f.options.Usage && !hasUsage && f.options.Continuation == nil
}

// Untrack stops adding events to Options.Transcript, so that from now on no other engine can continue the answer.
func (f *Filter) Untrack() { f.options.Transcript = nil }

// Tokens returns how many tokens this engine generated so far. The number falls if the engine's
// usage is lower than the estimate from its chunks was.
func (f *Filter) Tokens() int { return f.tokens }

// Empty says whether the engine has sent no content so far: no text, no reasoning, no tool call.
func (f *Filter) Empty() bool { return f.chunks == 0 }

// Started says whether a data event came that is not a failure. If so, the decode engine has pulled the KV,
// and the prefill engine frees its copy.
func (f *Filter) Started() bool { return f.started }

// Finished says whether a finish_reason came that ends the answer without a failure.
func (f *Filter) Finished() bool { return f.finishReason != "" }

// Kept says whether a vLLM engine may keep the answer's KV after its end. From 0.33 on, the last chunk of the stream has
// kv_transfer_params if the engine keeps the KV; older versions do not say it. vLLM keeps no KV if the answer ended at a stop text of the
// request (0.33, process_outputs in v1/engine/output_processor.py) or for repetition (request_finished in nixl/pull_scheduler.py).
func (f *Filter) Kept() bool {
	reasonKeepsKV := f.finishReason == "stop" || f.finishReason == "length" || f.finishReason == "tool_calls"
	return f.keepsKV || reasonKeepsKV && !f.endedByStopText
}

// FinishReason is the finish_reason that ended the answer; empty: none came so far.
func (f *Filter) FinishReason() string { return f.finishReason }

// Usage returns the last usage that the engine sent, with the tokens of earlier engines of this answer added, as the
// client gets it. ok is false if the engine has sent none so far.
func (f *Filter) Usage() (u Usage, ok bool) {
	if f.options.Continuation != nil && f.usageSeen {
		return f.options.Continuation.addEarlier(f.usage), true
	}
	return f.usage, f.usageSeen
}

// PromptDetails returns the counts in prompt_tokens_details of the engine's last usage, by name; nil: the engine sent none, or more than
// maxDetails.
func (f *Filter) PromptDetails() (counts map[string]int) {
	addCounts(&counts, f.details)
	return counts
}

// Prompt returns the engine's count of the tokens in the prompt that it was given; 0: it has sent none so far.
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

// Drift returns the filter's count of tokens before the engine's final usage came, minus the count in that usage.
// ok is false until the final usage has come.
func (f *Filter) Drift() (tokens int, ok bool) { return f.drift, f.reconciled }

const (
	// minChunks is the least number of chunks a stream must have for its average to count: a parser of
	// tool calls may hold back a whole call and send it as one chunk.
	minChunks = 4
	// maxPerChunk is the largest average of a stream, in tokens per chunk: speculative decoding makes about 8 tokens per step.
	maxPerChunk = 8
)

// TokensPerChunk returns the average number of tokens in a chunk, for the Options of the next stream. before is the average of
// earlier streams; 0: taken as 1. The result is a tenth of the way from before to the average of this stream. It is before if the
// true count of this stream is not known, or if the stream had few chunks.
func (f *Filter) TokensPerChunk(before float64) float64 {
	exact := f.ids // the true number of tokens; 0: not known
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

// finishReason returns string(b). For the reasons that engines use it returns a constant, so that it does not allocate.
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

// record adds the filter's current event, whose data is b, to the transcript: first what the event says of the answer as a whole, then
// the answer's tokens and content. f.countTokens has counted the event.
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
	// The facts have only one choice's text and ids, so the transcript would lack the others. An Unread transcript is not continued.
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

// takeElement returns the current element of a list, and sets the list's Pos to the end of it, as the next call of Next needs. It returns
// nothing for an element without an end, which also ends the iteration.
func takeElement(list *rawjson.Array) []byte {
	list.Pos = rawjson.ValueEnd(list.Text, list.Val) // -1: the element has no end
	return list.Text[list.Val:max(list.Val, list.Pos)]
}

// recordID adds the id of the answer's next token. An id that is no number, or does not fit into IDs, makes the transcript Unread. It is
// stored all the same: no engine gets the ids of an Unread transcript, but their number must stay right for growthOf.
func (t *Transcript) recordID(idJSON []byte) {
	id, ok := rawjson.Int(idJSON, 0, len(idJSON))
	t.Unread = t.Unread || !ok || id > math.MaxInt32
	t.IDs = append(t.IDs, int32(id))
}

// recordContent adds the content of an event, whose data is b. The transcript already has the event's ids.
func (t *Transcript) recordContent(facts *facts, b []byte) {
	t.Content = true
	t.Shown = len(t.IDs)                        // earlier tokens without text count, too: their text came with this event
	t.MoreThan = t.MoreThan || facts.hasNonText // more than Text and IDs can show, such as a tool call
	if facts.textEnd > facts.textAt {           // the event has text
		text := b[facts.textAt+1 : facts.textEnd-1] // the JSON string without its quotes
		t.Runes += runes(text)
		if t.KeepText {
			t.Text = append(t.Text, text...)
		}
	}
}
