package sse

import (
	"errors"
	"math"

	"evenkeel/internal/rawjson"
)

// Options says how a client's request differs from the request that the decode engine got. For one request of a fan-out,
// it also says how the events must change so that all requests of the fan-out share one stream.
type Options struct {
	Form Form // the form of the engine's events

	Usage           bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats; ignored without Usage
	TokenIDs        bool // return_token_ids
	Unstreamed      bool // the answer comes in one piece, as its only event

	// Cached is the prefill engine's cached_tokens. It replaces the count of the decode engine, which is wrong, because
	// that engine counts the KV that it pulled as cached. -1: the number is not known, and the decode engine's count is removed.
	// OwnCached: the decode engine computed the prompt itself, so its count is right.
	Cached int

	// TokensPerChunk is the average number of tokens in a chunk of this decode engine. It estimates the
	// tokens of chunks for which the engine reports no count. 0: not known, taken as 1.
	TokensPerChunk float64

	// MaxTokens bounds the tokens of the answer, and Context those of the prompt and the answer together. An event that
	// exceeds a bound is the engine's fault and is not counted. 0: no bound.
	MaxTokens, Context int

	// For a fan-out: a client's request with n > 1, or with a list of prompts, whose answers share one stream.
	ID             []byte // replaces the id; nil: leave it
	Created        int64  // replaces created; 0: leave it
	Choice         int    // replaces choices[].index; -1: leave it
	DropFinalUsage bool   // the fan-out sends one UsageEvent for all its streams instead
	DropDone       bool   // the fan-out sends one [DONE] for all its streams instead

	Aborted func() bool // the client aborted the answer, so finish_reason abort is not a failure; nil: clients cannot abort it

	Transcript   *Transcript   // records what another engine needs to continue the answer; nil: nothing is recorded
	Continuation *Continuation // set if this engine continues an interrupted answer; nil: this engine begins the answer
}

// Found sets Options.Cached, in tokens. It is for a decode stream that begins before the prefill engine reports how much of
// the prompt it found in its prefix cache.
func (m *Filter) Found(cached int) { m.ask.Cached = cached }

// OwnCached as the value of Options.Cached leaves the decode engine's cached_tokens unchanged.
const OwnCached = -2

// End is how an engine's answer ended.
type End uint8

// The possible ends of an answer.
const (
	Runs      End = iota // the answer has not ended
	Complete             // the answer is complete
	Short                // [DONE] or the end of the body came before a finish_reason
	Refused              // the engine reported an error: see Filter.Failure
	Preempted            // the engine ran out of KV memory and wants a new prefill
	Broken               // the answer exceeds a limit, or its events cannot be joined: see Filter.Fault and Answer.Err
	Garbled              // an event cannot be read; another engine may send the answer intact: see Filter.Fault and Answer.Err
)

// NewFilter returns a filter for one stream of a decode engine.
func NewFilter(a Options) *Filter {
	m := &Filter{marks: make([]mark, 0, 16)}
	m.Reset(a)
	return m
}

// Reset makes the filter ready for another stream and reuses its memory.
func (m *Filter) Reset(a Options) {
	id, marks, owed, details, held := m.id[:0], m.marks[:0], m.owed[:0], m.details[:0], m.held[:0]
	if cap(held) > keepBuffer {
		held = nil
	}
	if cap(marks) > 256 {
		marks = make([]mark, 0, 16)
	}
	switch {
	case a.ID != nil:
		id = rawjson.AppendString(id, a.ID)
	case a.Continuation != nil:
		id = append(id, a.Continuation.Head.ID...)
	}
	*m = Filter{ask: a, byIDs: a.Form == Tokens, continuous: a.Usage && a.ContinuousUsage, id: id, marks: marks, owed: owed, details: details,
		held: held}
}

// Event takes the next event of the stream and returns the client's bytes for it: e.Raw itself if the event does not
// change, dst with the edited event appended if it does, nil if the client gets nothing. With Refused, out is the engine's
// error event. With Preempted, out is the event if it has content, else nil. Event does not allocate if dst has room.
//
// Event does not return Whole for a last event after which no [DONE] comes: Answer.Event does.
//
// Event drops the final usage if the client did not ask for it. It also drops a chunk with an
// empty delta if the engine sends the chunk only because evenkeel asked for token ids.
func (m *Filter) Event(e Event, dst []byte) (out []byte, end End) {
	m.facts.idle = false
	switch e.Kind {
	case KindComment:
		return e.Raw, Runs
	case KindDone:
		end = Short
		if m.Finished() {
			end = Complete
		}
		if m.ask.DropDone {
			return nil, end
		}
		if m.ask.Form == Verbatim {
			return m.verbatim(e)
		}
		return e.Raw, end
	}
	if e.Kind == KindOpaque && m.ask.DropDone { // in one of several answers: its id and its index could not be replaced
		m.fault = ErrLargeEvent
		return nil, Broken
	}
	if !m.ask.Form.chunked() {
		return m.take(e, dst)
	}
	m.facts = facts{choices: -1}
	m.marks = m.marks[:0]
	if e.Kind == KindOpaque { // the event is larger than the reader's limit, so it is forwarded without being read
		m.started = true
		if m.ask.Transcript != nil {
			m.ask.Transcript.Unread = true
		}
		return e.Raw, Runs
	}
	if !m.read(e.Data) {
		return m.unreadable(e.Data)
	}
	if m.facts.isError {
		m.failure = ReadFailure(e.Data)
		return e.Raw, Refused
	}
	if fault := m.overrun(); fault != nil {
		m.fault = fault
		return nil, Broken
	}
	m.count(e.Data)
	out, end = m.judge(e, dst)
	if m.ask.Transcript != nil && end != Refused {
		m.ask.Transcript.keep(m, e.Data)
	}
	return out, end
}

// unreadable judges an event that is not a JSON object. Such an event means that the answer was damaged on its way. It is
// ignored if it is empty or if the answer has ended already.
func (m *Filter) unreadable(data []byte) ([]byte, End) {
	if m.facts.idle = rawjson.Space(data, 0) == len(data); m.facts.idle || m.finish != "" {
		return nil, Runs
	}
	m.fault = ErrNotJSON
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
	// spareTokens is by how many tokens an answer may exceed its limit: with speculative decoding,
	// an engine may stop some tokens late.
	spareTokens = 32
	// chunksPerToken is how many chunks one token may be split into: an engine's parsers of tool calls and
	// reasoning do so.
	chunksPerToken = 4
)

// overrun returns an error that names the limit which the event exceeds; nil: it exceeds none.
func (m *Filter) overrun() error {
	f, limit := &m.facts, m.ask.MaxTokens
	switch {
	case m.ask.Context > 0 && f.hasUsage && f.usage.Prompt+f.usage.Completion > m.ask.Context+spareTokens:
		return ErrBadCount
	case m.ask.Context > 0 && f.promptIDs > m.ask.Context+spareTokens:
		return ErrBadCount
	case limit <= 0:
	case f.hasUsage && f.usage.Completion > limit+spareTokens:
		return ErrBadCount
	case m.ids+f.ids > limit+spareTokens, f.content && m.chunks >= chunksPerToken*(limit+spareTokens):
		return ErrTooManyTokens
	}
	return nil
}

// count adds the tokens that read found in the event. The engine's last usage counts all tokens before it. Tokens after it
// are counted by their token ids or, if the engine sends no ids, estimated from the number of chunks. The next usage
// corrects the estimate.
func (m *Filter) count(data []byte) {
	f, before := &m.facts, m.tokens
	if f.content {
		m.chunks++
	}
	if f.hasIDs {
		m.idsSeen = true
		m.ids += f.ids
	}
	if f.hasUsage {
		m.usageSeen = true
		m.idsAtUsage, m.chunksAtUsage = m.ids, m.chunks
		m.usage = f.usage
		m.details = m.details[:0]
		if f.detailsEnd > 0 {
			m.details = append(m.details, data[f.details:f.detailsEnd]...)
		}
		switch {
		case m.ask.Cached != OwnCached:
			m.usage.Cached = m.ask.Cached
		case m.usage.Cached > m.usage.Prompt: // no more than the prompt can be cached, so the count is wrong
			m.usage.Cached = -1
		}
	}
	m.tokens, m.guessed = m.usage.Completion, !m.idsSeen && m.chunks > m.chunksAtUsage
	if m.idsSeen {
		m.tokens += m.ids - m.idsAtUsage
	} else {
		m.tokens += int(math.Round(float64(m.chunks-m.chunksAtUsage) * m.perChunk()))
	}
	if f.hasUsage && f.choices == 0 {
		m.reconciled, m.drift = true, before-f.usage.Completion
	}
}

// perChunk is the number of tokens assumed for a chunk without an exact count.
func (m *Filter) perChunk() float64 {
	if m.ask.TokensPerChunk <= 0 {
		return 1
	}
	return m.ask.TokensPerChunk
}

// judge decides what the client gets of the event. First it looks for a bad end: recomputed, error or abort.
// Then it drops an event that only evenkeel asked for, or that the client already has from an earlier engine.
func (m *Filter) judge(e Event, dst []byte) ([]byte, End) {
	f := &m.facts
	finish := e.Data[f.finishAt:f.finishEnd]
	switch {
	case f.recomputed: // checked first, because recomputed counts with any finish_reason
		m.started = true
		if !f.content {
			return nil, Preempted
		}
		return m.edit(e, dst), Preempted
	case string(finish) == "abort" && m.ask.Aborted != nil && m.ask.Aborted(): // the client wanted this end, so it is no failure
	case string(finish) == "error", string(finish) == "abort":
		m.failure = finishFailure(string(finish))
		return m.edit(e, dst), Refused
	}
	m.started = true
	if f.promptIDs > 0 {
		m.promptIDs = f.promptIDs
	}
	if len(finish) > 0 {
		m.finish, m.stopped, m.handsBack = finishReason(finish), f.stopText, f.backEnd > 0
	}
	if m.finish != "" && f.hasUsage {
		m.owe(e.Data)
	}
	onlyUsage := f.choices == 0 && f.hasUsage
	onlyRole := f.choices == 1 && f.role && !f.content && f.ids == 0 && len(finish) == 0
	if onlyUsage && (!m.ask.Usage || m.ask.DropFinalUsage) {
		return nil, Runs
	}
	if onlyUsage && m.ask.Transcript != nil && m.finish == "" {
		return nil, Runs // the answer has not ended: the engine that continues it will send the usage
	}
	if f.choices == 1 && f.bare && f.hasIDs && !m.ask.TokenIDs && !m.continuous {
		return nil, Runs // the engine sends this chunk only because evenkeel asked for token ids
	}
	if onlyRole && m.ask.Continuation != nil {
		return nil, Runs // the client already has the event with the role, from an earlier engine
	}
	m.usageSent = m.usageSent || f.hasUsage && (f.choices == 0 || m.continuous)
	return m.edit(e, dst), Runs
}

// owe stores the final usage as an event of its own, which Owed appends. It is needed if the engine sends the usage
// only with the finish_reason, where OpenAI's clients do not look for it.
func (m *Filter) owe(data []byte) {
	f := &m.facts
	switch {
	case !m.ask.Usage || m.continuous || m.ask.DropFinalUsage:
		return
	case f.choices == 0:
		m.owed = m.owed[:0]
		return
	}
	var usage []byte
	m.owed = append(m.owed[:0], "data: {"...)
	o := rawjson.ObjectAt(data, rawjson.Space(data, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "choices":
		case "usage":
			usage = o.Value()
		default:
			m.owed = append(append(m.owed, data[o.Quote:o.Pos]...), ',')
		}
	}
	m.owed = append(append(append(m.owed, `"choices":[],"usage":`...), usage...), "}\n\n"...)
}

// MissingUsage appends the event with the final usage if the client asked for it and the engine sent no such event.
func (m *Filter) MissingUsage(dst []byte) []byte {
	if len(m.owed) == 0 {
		return dst
	}
	const head = len("data: ")
	e := Event{Raw: m.owed, Data: m.owed[head : len(m.owed)-2], Kind: KindData, at: head}
	out, _ := m.Event(e, dst)
	if len(out) > 0 && &out[0] == &e.Raw[0] {
		return append(dst, out...)
	}
	return out
}

// LacksUsage says that the client asked for the usage and did not get it; it is false for an answer that continues another engine's.
// The usage of an earlier chunk does not count: it is not the final one, and it is removed, because only evenkeel asked for it. With
// DropFinalUsage the fan-out reads the usage by Usage, so the usage of any chunk is enough.
func (m *Filter) LacksUsage() bool {
	satisfied := m.usageSent || len(m.owed) > 0 || m.ask.DropFinalUsage && m.usageSeen
	return m.ask.Usage && !satisfied && m.ask.Continuation == nil
}

// Untrack stops adding events to Options.Transcript.
func (m *Filter) Untrack() { m.ask.Transcript = nil }

// Tokens returns how many tokens this engine generated so far. The number falls if the engine's
// usage is lower than the estimate from its chunks was.
func (m *Filter) Tokens() int { return m.tokens }

// Empty says whether the engine has sent no content so far: no text, no reasoning, no tool call.
func (m *Filter) Empty() bool { return m.chunks == 0 }

// Started says whether a data event came that is not a failure. If so, the decode engine has pulled the KV,
// and the prefill engine frees its copy.
func (m *Filter) Started() bool { return m.started }

// Finished says whether a finish_reason came that ends the answer without a failure.
func (m *Filter) Finished() bool { return m.finish != "" }

// Kept says whether the answer ended in a way after which a vLLM engine may keep its KV. From 0.33 on, the last chunk of
// a stream has kv_transfer_params if the engine keeps the KV. vLLM keeps no KV if its front end ended the answer at a stop text
// of the request (0.33, process_outputs in v1/engine/output_processor.py), or if the answer ended for repetition
// (request_finished in nixl/pull_scheduler.py).
func (m *Filter) Kept() bool {
	return m.handsBack || !m.stopped && (m.finish == "stop" || m.finish == "length" || m.finish == "tool_calls")
}

// FinishReason is the finish_reason that ended the answer; empty: none came so far.
func (m *Filter) FinishReason() string { return m.finish }

// Usage returns the last usage that the engine sent, with the tokens of earlier engines of this answer added, as the
// client gets it. ok is false if the engine has sent none so far.
func (m *Filter) Usage() (u Usage, ok bool) {
	if m.ask.Continuation != nil && m.usageSeen {
		return m.ask.Continuation.join(m.usage), true
	}
	return m.usage, m.usageSeen
}

// PromptDetails returns the counts in prompt_tokens_details of the engine's last usage.
func (m *Filter) PromptDetails() (counts map[string]int) {
	addCounts(&counts, m.details)
	return counts
}

// Prompt returns the engine's count of the tokens in the prompt that it was given; 0: it has sent none so far.
func (m *Filter) Prompt() int {
	if m.usageSeen {
		return m.usage.Prompt
	}
	return m.promptIDs
}

// Failure returns the engine's error after Event has returned Failed.
func (m *Filter) Failure() Failure { return m.failure }

// Fault returns the reason after Event has returned Overrun or Unreadable.
func (m *Filter) Fault() error { return m.fault }

// Drift returns the filter's count of tokens before the engine's final usage came, minus the count in that usage.
// ok is false until the final usage has come.
func (m *Filter) Drift() (tokens int, ok bool) { return m.drift, m.reconciled }

const (
	// fewChunks is the least number of chunks a stream must have for its average to count: a parser of
	// tool calls may hold back a whole call and send it as one chunk.
	fewChunks = 4
	// mostPerChunk bounds a stream's average: with speculative decoding, one step makes about so many tokens.
	mostPerChunk = 8
)

// TokensPerChunk returns the average number of tokens in a chunk, for the Options of the next stream. It moves before, the average
// of earlier streams (0: taken as 1), a tenth of the way to the average of this stream. It returns before unchanged if
// the true count of this stream is not known, or if the stream had few chunks.
func (m *Filter) TokensPerChunk(before float64) float64 {
	exact := m.ids
	if m.usageSeen {
		exact = m.usage.Completion
	}
	if m.chunks < fewChunks || exact == 0 {
		return before
	}
	if before <= 0 {
		before = 1
	}
	seen := min(float64(exact)/float64(m.chunks), mostPerChunk)
	return before + (seen-before)/10
}

// finishReason returns string(b); for the reasons that engines use it does not allocate.
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

// keep adds the filter's current event, whose data is b, to the trail.
func (t *Transcript) keep(m *Filter, b []byte) {
	f := &m.facts
	if t.Head.ID == nil {
		t.Head = readHead(b)
	}
	t.Unread = t.Unread || f.choices > 1 // the facts have the text and the ids of one choice only
	if f.idsAt > 0 {
		ids := rawjson.ArrayAt(b, f.idsAt)
		for ids.Next() {
			ids.Pos = rawjson.ValueEnd(b, ids.Val)
			id, ok := rawjson.Int(b, ids.Val, ids.Pos)
			t.Unread = t.Unread || !ok || id > math.MaxInt32
			t.IDs = append(t.IDs, int32(id))
		}
	}
	if t.KeepPrompt && f.promptEnd > 0 {
		t.PromptIDs = append(t.PromptIDs[:0], b[f.promptAt:f.promptEnd]...)
	}
	t.Completed, t.Guessed = m.tokens, m.guessed
	if m.usageSeen {
		t.Prompt = m.usage.Prompt
	} else if f.promptIDs > 0 {
		t.Prompt = f.promptIDs
	}
	if f.backEnd > 0 {
		t.HandBack = append(t.HandBack[:0], b[f.backAt:f.backEnd]...)
	}
	if !f.content {
		return
	}
	t.Content, t.Shown = true, len(t.IDs)
	t.MoreThan = t.MoreThan || f.moreThan
	if f.textEnd > f.textAt {
		text := b[f.textAt+1 : f.textEnd-1]
		t.Runes += runes(text)
		if t.KeepText {
			t.Text = append(t.Text, text...)
		}
	}
}
