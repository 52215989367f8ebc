package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// A Form is the format of the events of an endpoint.
type Form uint8

// The forms. Chat and completions share Chunks. Tokens differs little from Chunks, and Filter.read reads both.
const (
	Chunks    Form = iota
	Responses      // the events of /v1/responses
	Messages       // the events of /v1/messages
	Tokens         // the events of /inference/v1/generate
	Generated      // the events of /generate
	Verbatim       // events of any other format: the client gets them unchanged, and a finish_reason is not required
)

// FormOf returns the form of the events that the endpoint at this path sends. Every path that is not listed has Chunks.
func FormOf(path string) Form {
	switch path {
	case "/v1/responses":
		return Responses
	case "/v1/messages":
		return Messages
	case "/inference/v1/generate":
		return Tokens
	case "/generate":
		return Generated
	}
	return Chunks
}

// chunked says whether the events have choices, as those of completions have.
func (f Form) chunked() bool { return f == Chunks || f == Tokens }

// formFacts is what one event, or one answer in one piece, contains if its form is not chunked. For chunked forms see facts.
type formFacts struct {
	readable        bool // the event is one whole JSON object
	announces       bool // the event only announces the answer, as response.created does
	isPing          bool // the event is a ping, which has no content
	hasTokens       bool // the event has generated tokens, as text or in another form
	hasFinalUsage   bool // the event has the final usage
	endsStream      bool // the event is the last one of the stream
	failed          bool
	aborted         bool   // the engine was told to end the answer, but not by the client: see Aborted
	abortHasStatus  bool   // of Generated: the finish_reason abort has the status of an error
	fault           error  // why the event cannot be forwarded; nil: it can
	errorText       []byte // the event or the error in it, as the argument for ReadFailure
	finishReason    string // the finish_reason; empty: the event has none
	endedByStopText bool   // a stop text of the request ended the answer
	usage           Usage
	edits           []edit // changes between the engine's event and the client's copy
	modelAt         edit   // of Messages: the offsets of the model
	idAt            edit   // of Generated: the offsets of the answer's id
	textAt          edit   // of Generated: the offsets of the text
	idsAt           edit   // of Generated: the offsets of the list of token ids
	spans           []byte // of Generated: the list weight_versions; nil: there is none
	endAt           int    // of Generated: the offset of the object's closing brace
}

// forwardVerbatim takes the next event of an answer that the client gets unchanged. Only an event with an error makes the answer fail.
func (f *Filter) forwardVerbatim(e Event) ([]byte, End) {
	hasError := false
	if e.Kind == KindData {
		hasError = f.ReadUsage(e.Data) // it also stores the event's usage
	}
	if hasError {
		const message = "the engine ended its answer with an error; its log says why"
		f.failure = Failure{Message: message, Type: "server_error", Code: "engine_failed", Status: 502}
		return e.Raw, Refused
	}
	f.started = true
	f.streamEnded = e.Kind == KindDone
	f.finishReason = "stop" // the body may end at any event, so the answer always counts as finished
	return e.Raw, NotEnded
}

// ReadUsage stores the usage in b, which is an event or an answer in one piece. failed says that b has a member error; its usage is then
// not stored. ReadUsage ignores b if it is not exactly one JSON object.
func (f *Filter) ReadUsage(b []byte) (failed bool) {
	u := Usage{Cached: -1}
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch v := o.Value(); {
		case string(o.Key) == "error":
			failed = !rawjson.IsNull(v)
		case string(o.Key) == "usage" && v[0] == '{':
			for c := rawjson.ObjectAt(b, o.Val); c.NextValue(); {
				switch n := countOf(&c); {
				case n > maxPlausibleTokens: // ignored, because no request has so many tokens
				case string(c.Key) == "prompt_tokens":
					u.Prompt = n
				case string(c.Key) == "completion_tokens":
					u.Completion = n
				}
			}
		}
	}
	if !isWhole(&o) { // what was read may be wrong
		return false
	}
	u.Total = u.Prompt + u.Completion
	if u.Total > 0 && !failed { // 0: b has no usage, or one that counts nothing
		f.usage, f.usageSeen, f.usageSent = u, true, true // usageSent: the client gets b as it is
	}
	return failed
}

// maxPlausibleTokens is the largest number of tokens in a usage that is taken seriously (67 million). Not even a request with many prompts
// has more.
const maxPlausibleTokens = 64 << 20

// maxHeldEvents bounds how many events takeFormEvent holds back before the first event with a token.
const maxHeldEvents = 4

// takeFormEvent takes the next event, or an answer in one piece, of a form that is not chunked. Before the first event with a token, an
// engine sends events that only announce the answer. takeFormEvent holds these back until the first token comes. Until then the engine may
// still fail to get the KV, and another engine can answer in its place, because the client has received nothing. With the first token, out
// has the held-back events before this one.
//
// The results are those of Event: out is e.Raw itself if no events were held back and this one does not change, dst with the client's bytes
// appended if it gets other bytes, and nil if it gets nothing.
func (f *Filter) takeFormEvent(e Event, dst []byte) (out []byte, end End) {
	if f.options.Form == Verbatim {
		return f.forwardVerbatim(e)
	}
	if e.Kind == KindOpaque {
		return takeOpaque(f, e, dst)
	}
	event := forms[f.options.Form].read(e.Data, f.options.Cached)
	adaptToClient(f, &event, e.Data)
	if out, end, rejected := rejectFormEvent(f, e, &event); rejected {
		return out, end
	}
	f.eventCount++
	setFacts(f, &event)
	if fault := f.exceededLimit(); fault != nil {
		f.fault = fault
		return nil, Broken
	}
	if mustHold(f, &event) {
		return nil, hold(f, e, event.edits)
	}
	recordFormEvent(f, &event, e.Data)
	if len(event.edits) == 0 {
		return f.appendAfterHeld(e.Raw, dst), NotEnded
	}
	dst = append(dst, f.heldEvents...)
	f.heldEvents = f.heldEvents[:0]
	return f.appendEdited(e, event.edits, dst), NotEnded
}

// rejectFormEvent says whether an event is kept out of the answer: it cannot be read or forwarded, it reports a failure, it ends the stream
// before a finish_reason has come, or it is a ping that can be dropped. If rejected is true, out and end are the results of takeFormEvent.
func rejectFormEvent(f *Filter, e Event, event *formFacts) (out []byte, end End, rejected bool) {
	switch {
	case !event.readable:
		out, end = f.handleNonJSON(e.Data)
		return out, end, true
	case event.failed:
		f.failure = ReadFailure(event.errorText)
		return e.Raw, Refused, true
	case event.aborted:
		f.failure = ReadFailure(event.errorText)
		if t := f.options.Transcript; t != nil {
			t.Spans = append(t.Spans[:0], event.spans...)
		}
		return nil, Aborted, true
	case event.fault != nil:
		f.fault = event.fault
		return nil, Broken, true
	// Before the answer, a ping is dropped if it would be the first event to be held back, or if there is no room for it.
	case event.isPing && !f.started && (f.heldCount == 0 || f.heldCount >= maxHeldEvents):
		return nil, NotEnded, true
	// In these forms the finish_reason comes with the final usage. So neither this event nor an earlier one has it.
	case event.endsStream && !event.hasFinalUsage && f.finishReason == "":
		return nil, Short, true
	}
	return nil, NotEnded, false
}

// adaptToClient adds the edits that only this client needs, such as its own id, if the form has such edits. It may also set
// failed or fault.
func adaptToClient(f *Filter, event *formFacts, data []byte) {
	if adapt := forms[f.options.Form].adapt; adapt != nil && event.readable {
		adapt(f, event, data)
	}
}

// mustHold says whether hold must take the event, because no part of the answer has come, not even in this event. Once maxHeldEvents are
// held back, hold takes only an event that still announces the answer, and refuses it. Any other event then counts as a part of the answer.
func mustHold(f *Filter, event *formFacts) bool {
	beforeAnswer := !f.started && !event.hasTokens && !event.hasFinalUsage
	return beforeAnswer && (event.announces || f.heldCount < maxHeldEvents)
}

// recordFormEvent records an event with a part of the answer: its tokens, its place in the transcript, if there is one, and what it says
// of the end of the answer. f.facts has the facts of the event already.
func recordFormEvent(f *Filter, event *formFacts, data []byte) {
	f.countTokens(data)
	f.started = true
	if record := forms[f.options.Form].record; record != nil && f.options.Transcript != nil {
		record(f.options.Transcript, f, event, data)
	}
	if event.hasFinalUsage { // in all forms that are not chunked, the final usage and the finish_reason come in the same event
		f.finishReason, f.endedByStopText = event.finishReason, event.endedByStopText
	}
	// The last event may come after the one with the finish_reason. Without a finish_reason, the answer was cut short.
	f.streamEnded = event.endsStream && f.finishReason != ""
}

// hold stores an event that only announces the answer, with its edits applied. It returns Broken if the engine sends more than
// maxHeldEvents of them.
func hold(f *Filter, e Event, edits []edit) End {
	if f.heldCount++; f.heldCount > maxHeldEvents { // no engine announces an answer with so many events
		f.fault = ErrBadCount
		return Broken
	}
	f.countTokens(e.Data)
	f.heldEvents = f.appendEdited(e, edits, f.heldEvents)
	return NotEnded
}

// setFacts copies the facts of an event without a list of choices, as those of /v1/messages, to f.facts. There countTokens and
// exceededLimit find them as they find those of a completion's chunk. It first completes a usage without the prompt's tokens by those of
// the last usage.
func setFacts(f *Filter, event *formFacts) {
	// SGLang sends the prompt's tokens in message_start only (0.5.23, entrypoints/anthropic/serving.py).
	if event.usage.Prompt == 0 && event.usage.Total > 0 {
		event.usage.Prompt, event.usage.Cached = f.usage.Prompt, f.usage.Cached
		event.usage.Total += event.usage.Prompt
	}
	choices := noChoiceList
	if event.hasFinalUsage {
		choices = 0 // as in the last chunk of a completion: countTokens knows the final usage by the empty list of choices
	}
	f.facts = facts{choices: choices, isEmpty: event.isPing, content: event.hasTokens, hasUsage: event.usage.Total > 0, usage: event.usage}
}

// takeOpaque takes a piece of an event that is too large to be read, and forwards it.
func takeOpaque(f *Filter, e Event, dst []byte) (out []byte, end End) {
	if f.options.Form == Responses { // such an event may have members that clients must not get, and cannot be edited
		f.fault = ErrLargeEvent
		return nil, Broken
	}
	markUnread(f)
	return f.appendAfterHeld(e.Raw, dst), NotEnded // events that announced the answer may still be held back, and go first
}

// appendAfterHeld returns the client's bytes for an event that does not change; raw has the event. If events were held back, it appends
// them and then raw to dst, and returns dst. Otherwise it returns raw itself, which then need not be copied.
func (f *Filter) appendAfterHeld(raw, dst []byte) []byte {
	if len(f.heldEvents) == 0 {
		return raw
	}
	dst = append(append(dst, f.heldEvents...), raw...)
	f.heldEvents = f.heldEvents[:0]
	return dst
}

// edit replaces the part of an event's data between the offsets from and to in the client's copy.
type edit struct {
	from, to    int
	replacement string // empty: the part is removed
}

// appendEdited appends an event with its edits applied. The edits are sorted by where they start.
func (f *Filter) appendEdited(e Event, edits []edit, dst []byte) []byte {
	dst, copied := appendHead(dst, e), 0
	for _, edit := range edits {
		if edit.to <= copied { // this edit lies inside an earlier one
			continue
		}
		dst = append(appendPart(dst, e, e.Data[copied:max(edit.from, copied)]), edit.replacement...)
		copied = edit.to
	}
	return appendTail(appendPart(dst, e, e.Data[copied:]), e)
}

// removalOf returns the edit that removes an object's current member and one comma. keptBefore says that an earlier member stays: then the
// comma before the member is removed, else the comma after it.
func removalOf(o *rawjson.Object, keptBefore bool) edit {
	from, to := rawjson.Cut(o.Text, o.Comma, o.Quote, o.Pos, !keptBefore)
	return edit{from: from, to: to}
}

// sortEdits sorts the edits by where they start, because appendEdited needs them in this order.
func (s *formFacts) sortEdits() {
	if len(s.edits) > 1 {
		slices.SortFunc(s.edits, func(a, b edit) int { return a.from - b.from })
	}
}

// isEngineOnlyKey says whether a member of an answer is meant for engines, so that clients must not get it.
func isEngineOnlyKey(key string) bool {
	return key == "kv_transfer_params" || key == "ec_transfer_params"
}

// text unquotes a JSON string; empty: v is not a string.
func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return rawjson.Unquote(v)
}

// countOf reads the current member of an object as a number of tokens; 0: it is not a whole number.
func countOf(o *rawjson.Object) int {
	n, _ := tokenCount(o)
	return n
}

// OnlyFailure appends a complete stream whose only event is an error, with [DONE] after it if the endpoint uses it. It is Ending for an
// answer without any event.
func OnlyFailure(dst []byte, f Form, message, typ, code string) []byte {
	const failed = true
	return (&Answer{Filter: Filter{options: Options{Form: f}}}).Ending(dst, failed, message, typ, code)
}

// Silence returns the bytes that show a client that its connection is alive while no event comes. For /v1/messages it is
// the event ping, for other endpoints a comment, which clients ignore. It is a line of the event that comes next: see AppendComments. The
// caller must not change the bytes.
func Silence(f Form) []byte {
	if f == Messages {
		return pinged
	}
	return commented
}

var (
	pinged    = []byte("event: ping\ndata: {\"type\": \"ping\"}\n\n")
	commented = []byte(": keep-alive\n")
)

// Ending appends the end of a client's stream: an error event if failed, and [DONE] if the endpoint uses it.
// typ and code are the error's type and code as this endpoint names them.
func (a *Answer) Ending(dst []byte, failed bool, message, typ, code string) []byte {
	f := &a.Filter
	form := &forms[f.options.Form]
	switch {
	case failed && form.failed != nil: // the endpoint has an error event of its own, which ends the stream
		return form.failed(dst, f.eventCount, message, typ, code)
	case failed: // the endpoint reports errors as OpenAI does
		return append(ErrorEvent(dst, message, typ, code), Done...)
	case f.options.Form.chunked():
		return append(dst, Done...)
	case !f.streamEnded: // if streamEnded is true, the client has the engine's own last event
		return append(dst, form.end...)
	}
	return dst
}

// failedResponse appends the error event of /v1/responses. events, the number of events before it, becomes its sequence_number.
func failedResponse(dst []byte, events int, message, _, code string) []byte {
	dst = rawjson.AppendString(append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...), code)
	dst = rawjson.AppendString(append(dst, `,"message":`...), message)
	return append(strconv.AppendInt(append(dst, `,"param":null,"sequence_number":`...), int64(events), 10), "}\n\n"...)
}
