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
	Verbatim       // any events: the client gets them unchanged, and a finish_reason is not required
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

// chunked says whether the events have choices, as those of completions have.
func (f Form) chunked() bool { return f == Chunks || f == Tokens }

// formFacts is what one event, or one answer in one piece, contains if its form is not chunked. For chunked forms see facts.
type formFacts struct {
	ok       bool // the event is readable JSON
	opening  bool // the event is about the request, not about the answer
	idle     bool // the event is a ping, which has no content
	delta    bool // it has generated tokens, as text or in another form
	last     bool // it has the final usage
	over     bool // it is the last event of the stream
	failed   bool
	fault    error  // why the event cannot be forwarded; nil: it can
	why      []byte // the event or the error in it, as the argument for ReadFailure
	finish   string
	stopText bool // a stop text of the request ended the answer
	usage    Usage
	cuts     []cut // changes that the client's copy needs
	idAt     cut   // of Generated: where the answer's id stands
	textAt   cut   // of Generated: where the text stands
	idsAt    cut   // of Generated: where the token ids stand
	endAt    int   // of Generated: where the object's closing brace stands
}

// verbatim takes the next event of an answer that the client gets unchanged. Only an event with an error makes the answer fail.
func (f *Filter) verbatim(e Event) ([]byte, End) {
	if e.Kind == KindData && f.ReadUsage(e.Data) {
		const message = "the engine ended its answer with an error; its log says why"
		f.failure = Failure{Message: message, Type: "server_error", Code: "engine_failed", Status: 502}
		return e.Raw, Refused
	}
	f.started = true
	f.over = e.Kind == KindDone
	f.finish = "stop" // the body may end at any event, so the answer always counts as finished
	return e.Raw, NotEnded
}

// ReadUsage stores the usage in b, which is an event or an answer in one piece. failed says that b has a member error; its usage is then
// not stored. b may also be no JSON object, which ReadUsage ignores.
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
				case n > mostCounted: // ignored, because no request has so many
				case string(c.Key) == "prompt_tokens":
					u.Prompt = n
				case string(c.Key) == "completion_tokens":
					u.Completion = n
				}
			}
		}
	}
	if o.Pos <= 0 || rawjson.Space(b, o.Pos) < len(b) {
		return false // b is not one JSON object, so what was read may be wrong
	}
	if u.Total = u.Prompt + u.Completion; u.Total > 0 && !failed {
		f.usage, f.usageSeen, f.usageSent = u, true, true
	}
	return failed
}

// mostCounted is the largest number of tokens in a usage that is taken seriously (67 million). Not even a request with many prompts
// has more.
const mostCounted = 64 << 20

// maxHeld bounds how many events take holds back before the first event with a token.
const maxHeld = 4

// take takes the next event, or an answer in one piece, of a form that is not chunked. Before the first event with a token,
// an engine sends events that only announce the answer. take holds these back until the first token comes. Until then the
// engine may still fail to get the KV, and another engine can answer in its place, because the client has received nothing.
func (f *Filter) take(e Event, dst []byte) (out []byte, end End) {
	if f.options.Form == Verbatim {
		return f.verbatim(e)
	}
	if e.Kind == KindOpaque {
		return takeOpaque(f, e, dst)
	}
	said := forms[f.options.Form].read(e.Data, f.options.Cached)
	if judge := forms[f.options.Form].judge; judge != nil && said.ok {
		judge(f, &said, e.Data)
	}
	noPlace := f.opened == 0 || f.opened == maxHeld // a ping is held only after another event, and if there is room
	switch {
	case !said.ok:
		return f.unreadable(e.Data)
	case said.failed:
		f.failure = ReadFailure(said.why)
		return e.Raw, Refused
	case said.fault != nil:
		f.fault = said.fault
		return nil, Broken
	case said.idle && !f.started && noPlace: // a ping says nothing of the answer, so it may be dropped
		return nil, NotEnded
	case said.over && !said.last && f.finish == "": // the stream ends without a finish_reason
		return nil, Short
	}
	f.events++
	// SGLang sends the prompt's tokens in message_start only (0.5.23, entrypoints/anthropic/serving.py).
	if said.usage.Prompt == 0 && said.usage.Total > 0 {
		said.usage.Prompt, said.usage.Cached = f.usage.Prompt, f.usage.Cached
		said.usage.Total += said.usage.Prompt
	}
	f.facts = facts{choices: -1, idle: said.idle, content: said.delta, hasUsage: said.usage.Total > 0, usage: said.usage}
	if said.last {
		f.facts.choices = 0 // by this, count knows the final usage
	}
	if fault := f.overrun(); fault != nil {
		f.fault = fault
		return nil, Broken
	}
	announces := !f.started && !said.delta && !said.last // nothing of the answer itself has come
	// Once maxHeld events are held, an event counts as a part of the answer, and is forwarded, unless it is surely an opening.
	if announces && (said.opening || f.opened < maxHeld) {
		if f.opened++; f.opened > maxHeld { // no engine opens an answer with so many events
			f.fault = ErrBadCount
			return nil, Broken
		}
		f.count(e.Data)
		f.held = f.cut(e, said.cuts, f.held)
		return nil, NotEnded
	}
	f.count(e.Data)
	f.started = true
	if keep := forms[f.options.Form].keep; keep != nil && f.options.Transcript != nil {
		keep(f.options.Transcript, f, &said, e.Data)
	}
	if said.last {
		f.finish, f.stopped = said.finish, said.stopText
	}
	f.over = said.over && f.finish != ""
	if len(said.cuts) == 0 {
		return f.release(e.Raw, dst), NotEnded
	}
	dst = append(dst, f.held...)
	f.held = f.held[:0]
	return f.cut(e, said.cuts, dst), NotEnded
}

// takeOpaque takes a piece of an event that is too large to be read, and forwards it.
func takeOpaque(f *Filter, e Event, dst []byte) (out []byte, end End) {
	if f.options.Form == Responses { // it may have members that clients must not get
		f.fault = ErrLargeEvent
		return nil, Broken
	}
	f.started = true
	if f.options.Transcript != nil {
		f.options.Transcript.Unread = true
	}
	return f.release(e.Raw, dst), NotEnded
}

// release appends the events that were held back and then raw to dst. If none were held back, it returns raw alone.
func (f *Filter) release(raw, dst []byte) []byte {
	if len(f.held) == 0 {
		return raw
	}
	dst = append(append(dst, f.held...), raw...)
	f.held = f.held[:0]
	return dst
}

// cut is a stretch of an event's data that is replaced for the client.
type cut struct {
	from, to int
	put      string // the replacement
}

// cut appends an event with its cuts made. The cuts are sorted by where they start.
func (f *Filter) cut(e Event, cuts []cut, dst []byte) []byte {
	dst, copied := appendHead(dst, e), 0
	for _, c := range cuts {
		if c.to <= copied { // it lies in an earlier cut
			continue
		}
		dst = append(appendPart(dst, e, e.Data[copied:max(c.from, copied)]), c.put...)
		copied = c.to
	}
	return appendTail(appendPart(dst, e, e.Data[copied:]), e)
}

// without returns the cut that removes an object's current member and one comma: the comma before it if kept is true, which says
// that an earlier member stays, else the comma after it.
func without(o *rawjson.Object, kept bool) cut {
	from, to := rawjson.Cut(o.Text, o.Comma, o.Quote, o.Pos, !kept)
	return cut{from: from, to: to}
}

// order sorts the cuts by where they start.
func (s *formFacts) order() {
	if len(s.cuts) > 1 {
		slices.SortFunc(s.cuts, func(a, b cut) int { return a.from - b.from })
	}
}

// foreignKey says whether a member of an answer is meant for engines, so that clients must not get it.
func foreignKey(key string) bool { return key == "kv_transfer_params" || key == "ec_transfer_params" }

// text unquotes a JSON string; empty: v is not a string.
func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return rawjson.Unquote(v)
}

// countOf reads the current member of an object as a number of tokens; 0: it is no such number.
func countOf(o *rawjson.Object) int {
	n, _ := rawjson.Int(o.Text, o.Val, o.Pos)
	return max(0, n)
}

// OnlyFailure appends a complete stream whose only event is an error.
func OnlyFailure(dst []byte, f Form, message, typ, code string) []byte {
	return (&Answer{Filter: Filter{options: Options{Form: f}}}).Ending(dst, true, message, typ, code)
}

// Silence returns the bytes that show a client that its connection is alive while no event comes. For /v1/messages it is
// the event ping, for other endpoints a comment, which clients ignore. The caller must not change the bytes.
func Silence(f Form) []byte {
	if f == Messages {
		return pinged
	}
	return commented
}

var (
	pinged    = []byte("event: ping\ndata: {\"type\": \"ping\"}\n\n")
	commented = []byte(": keep-alive\n\n")
)

// Ending appends the end of a client's stream: an error event if failed, and [DONE] if the endpoint uses it.
// typ and code are the error's type and code as this endpoint names them.
func (a *Answer) Ending(dst []byte, failed bool, message, typ, code string) []byte {
	f := &a.Filter
	form := &forms[f.options.Form]
	switch {
	case failed && form.failed == nil: // the endpoint reports errors as OpenAI does
		return append(ErrorEvent(dst, message, typ, code), Done...)
	case f.options.Form.chunked():
		return append(dst, Done...)
	case failed:
		return form.failed(dst, f.events, message, typ, code)
	case !f.over: // else the client has the engine's own last event
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
