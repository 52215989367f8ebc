package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// A Form is the format of the events of an endpoint.
type Form uint8

// Chat and completions share Chunks. Tokens differs little from it, and Filter.read reads both.
const (
	Chunks    Form = iota
	Responses      // /v1/responses
	Messages       // /v1/messages
	Tokens         // /inference/v1/generate
	Generated      // /generate
	// any other format: the client gets the events unchanged, and a finish_reason is not required
	Verbatim
)

// FormOf returns the form of the events that the endpoint at this path sends.
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

// chunked says whether the events have choices.
func (f Form) chunked() bool { return f == Chunks || f == Tokens }

// formFacts is facts for a form that is not chunked.
type formFacts struct {
	readable        bool // one whole JSON object
	announces       bool // only announces the answer, as response.created does
	isPing          bool
	hasTokens       bool
	hasFinalUsage   bool
	endsStream      bool // the last event of the stream
	failed          bool
	aborted         bool   // the engine was told to end the answer, but not by the client
	abortHasStatus  bool   // of Generated: the abort has the status of an error
	fault           error  // why the event cannot be forwarded
	errorText       []byte // argument for ReadFailure
	finishReason    string
	endedByStopText bool
	usage           Usage
	edits           []edit // for the client's copy
	modelAt         edit   // of Messages: offsets of the model
	idAt            edit   // of Generated: offsets
	textAt          edit   // of Generated: offsets
	idsAt           edit   // of Generated: offsets of the list of token ids
	spans           []byte // of Generated: weight_versions; nil: there is none
	endAt           int    // of Generated: offset of the object's closing brace
}

func (f *Filter) forwardVerbatim(e Event) ([]byte, End) {
	hasError := false
	if e.Kind == KindData {
		hasError = f.ReadUsage(e.Data) // also stores the usage
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

// ReadUsage stores the usage in b, an event or an answer in one piece, unless b has an error. It
// ignores b if it is not exactly one JSON object.
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
				case n > maxPlausibleTokens: // no request has so many tokens
				case string(c.Key) == "prompt_tokens":
					u.Prompt = n
				case string(c.Key) == "completion_tokens":
					u.Completion = n
				}
			}
		}
	}
	if !isWhole(&o) {
		return false
	}
	u.Total = u.Prompt + u.Completion
	if u.Total > 0 && !failed {
		f.usage, f.usageSeen, f.usageSent = u, true, true // the client gets b as it is
	}
	return failed
}

// maxPlausibleTokens is 67 million. Not even a request with many prompts has more.
const maxPlausibleTokens = 64 << 20

// maxHeldEvents bounds the events that are held back before the first token.
const maxHeldEvents = 4

// takeFormEvent takes the next event, or an answer in one piece, of a form that is not chunked.
// Events that only announce the answer are held back until the first token: until then the engine
// may still fail to get the KV, and another engine can answer in its place. The results are those
// of Event.
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

// rejectFormEvent says whether an event is kept out of the answer.
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
	// There is no room for the ping, or it would be the first event to be held back.
	case event.isPing && !f.started && (f.heldCount == 0 || f.heldCount >= maxHeldEvents):
		return nil, NotEnded, true
	// In these forms the finish_reason comes with the final usage.
	case event.endsStream && !event.hasFinalUsage && f.finishReason == "":
		return nil, Short, true
	}
	return nil, NotEnded, false
}

func adaptToClient(f *Filter, event *formFacts, data []byte) {
	if adapt := forms[f.options.Form].adapt; adapt != nil && event.readable {
		adapt(f, event, data)
	}
}

// mustHold: once maxHeldEvents are held back, hold only gets an event that still announces the
// answer, and refuses it.
func mustHold(f *Filter, event *formFacts) bool {
	beforeAnswer := !f.started && !event.hasTokens && !event.hasFinalUsage
	return beforeAnswer && (event.announces || f.heldCount < maxHeldEvents)
}

func recordFormEvent(f *Filter, event *formFacts, data []byte) {
	f.countTokens(data)
	f.started = true
	if record := forms[f.options.Form].record; record != nil && f.options.Transcript != nil {
		record(f.options.Transcript, f, event, data)
	}
	if event.hasFinalUsage { // in these forms it comes with the finish_reason
		f.finishReason, f.endedByStopText = event.finishReason, event.endedByStopText
	}
	// The last event may come after the one with the finish_reason. Without a finish_reason, the
	// answer was cut short.
	f.streamEnded = event.endsStream && f.finishReason != ""
}

func hold(f *Filter, e Event, edits []edit) End {
	// no engine announces an answer with so many events
	if f.heldCount++; f.heldCount > maxHeldEvents {
		f.fault = ErrBadCount
		return Broken
	}
	f.countTokens(e.Data)
	f.heldEvents = f.appendEdited(e, edits, f.heldEvents)
	return NotEnded
}

// setFacts fills f.facts, where countTokens and exceededLimit look.
func setFacts(f *Filter, event *formFacts) {
	// SGLang sends the prompt's tokens in message_start only (0.5.23,
	// entrypoints/anthropic/serving.py).
	if event.usage.Prompt == 0 && event.usage.Total > 0 {
		event.usage.Prompt, event.usage.Cached = f.usage.Prompt, f.usage.Cached
		event.usage.Total += event.usage.Prompt
	}
	choices := noChoiceList
	if event.hasFinalUsage {
		choices = 0 // as in the last chunk of a completion
	}
	f.facts = facts{choices: choices, isEmpty: event.isPing, content: event.hasTokens, hasUsage: event.usage.Total > 0, usage: event.usage}
}

func takeOpaque(f *Filter, e Event, dst []byte) (out []byte, end End) {
	if f.options.Form == Responses { // it may have members that clients must not get
		f.fault = ErrLargeEvent
		return nil, Broken
	}
	markUnread(f)
	return f.appendAfterHeld(e.Raw, dst), NotEnded // events that announced the answer go first
}

// appendAfterHeld returns raw itself, without a copy, if no events were held back.
func (f *Filter) appendAfterHeld(raw, dst []byte) []byte {
	if len(f.heldEvents) == 0 {
		return raw
	}
	dst = append(append(dst, f.heldEvents...), raw...)
	f.heldEvents = f.heldEvents[:0]
	return dst
}

// edit replaces the data between the offsets from and to.
type edit struct {
	from, to    int
	replacement string
}

// appendEdited needs edits sorted by where they start.
func (f *Filter) appendEdited(e Event, edits []edit, dst []byte) []byte {
	dst, copied := appendHead(dst, e), 0
	for _, edit := range edits {
		if edit.to <= copied { // inside an earlier edit
			continue
		}
		dst = append(appendPart(dst, e, e.Data[copied:max(edit.from, copied)]), edit.replacement...)
		copied = edit.to
	}
	return appendTail(appendPart(dst, e, e.Data[copied:]), e)
}

// removalOf removes the current member and one comma: the one before it if an earlier member stays,
// else the one after it.
func removalOf(o *rawjson.Object, keptBefore bool) edit {
	from, to := rawjson.Cut(o.Text, o.Comma, o.Quote, o.Pos, !keptBefore)
	return edit{from: from, to: to}
}

func (s *formFacts) sortEdits() {
	if len(s.edits) > 1 {
		slices.SortFunc(s.edits, func(a, b edit) int { return a.from - b.from })
	}
}

// isEngineOnlyKey: clients must not get these members.
func isEngineOnlyKey(key string) bool {
	return key == "kv_transfer_params" || key == "ec_transfer_params"
}

func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return rawjson.Unquote(v)
}

func countOf(o *rawjson.Object) int {
	n, _ := tokenCount(o)
	return n
}

// OnlyFailure appends a complete stream whose only event is an error.
func OnlyFailure(dst []byte, f Form, message, typ, code string) []byte {
	const failed = true
	return (&Answer{Filter: Filter{options: Options{Form: f}}}).Ending(dst, failed, message, typ, code)
}

// Silence returns the bytes that show a client that its connection is alive: the event ping for
// /v1/messages, else a comment, which is a line of the event that comes next (see AppendComments).
// They must not be changed.
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

// Ending appends the end of a client's stream: an error event if failed, and [DONE] if the endpoint
// uses it. typ and code are as this endpoint names them.
func (a *Answer) Ending(dst []byte, failed bool, message, typ, code string) []byte {
	f := &a.Filter
	form := &forms[f.options.Form]
	switch {
	case failed && form.failed != nil: // this error event ends the stream
		return form.failed(dst, f.eventCount, message, typ, code)
	case failed: // as OpenAI does
		return append(ErrorEvent(dst, message, typ, code), Done...)
	case f.options.Form.chunked():
		return append(dst, Done...)
	case !f.streamEnded: // else the client has the engine's own last event
		return append(dst, form.end...)
	}
	return dst
}

// failedResponse: events, the number of events before, is the sequence_number.
func failedResponse(dst []byte, events int, message, _, code string) []byte {
	dst = rawjson.AppendString(append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...), code)
	dst = rawjson.AppendString(append(dst, `,"message":`...), message)
	return append(strconv.AppendInt(append(dst, `,"param":null,"sequence_number":`...), int64(events), 10), "}\n\n"...)
}
