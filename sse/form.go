package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// A Form is what the events of an endpoint are like.
type Form uint8

// The forms. Chat and completions share Chunks. Tokens differs little from it, and Mirror.read reads both.
const (
	Chunks    Form = iota
	Responses      // of /v1/responses
	Messages       // of /v1/messages
	Tokens         // of /inference/v1/generate
	Generated      // of /generate
	Verbatim       // any events: the client gets them as they came, and no finish_reason is wanted
)

// FormOf is the form of a path's events.
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

// chunked says whether the events are those of completions, or like them.
func (f Form) chunked() bool { return f == Chunks || f == Tokens }

// formFacts is what an event, or a whole answer, says, of a form that is not chunked. See facts for the chunked ones.
type formFacts struct {
	ok       bool
	opening  bool // the event is about the request, not about the answer
	idle     bool // the event says nothing: a ping
	delta    bool // it has text or another part of the answer that the engine made of tokens
	last     bool // it has the final usage
	over     bool // no event comes behind it
	failed   bool
	fault    error  // why the event cannot be used; nil: it can
	why      []byte // the event, or the error in it: what ReadFailure reads
	finish   string
	stopText bool // a stop text of the request ended the answer
	usage    Usage
	cuts     []cut
	idAt     cut // of Generated: where the answer's id stands
	textAt   cut // of Generated: where the text stands
	idsAt    cut // of Generated: where the token ids stand
	endAt    int // of Generated: the place behind all members
}

// verbatim takes the next event of an answer that goes to the client as it came. Only an error among its members ends it.
func (m *Mirror) verbatim(e Event) ([]byte, Verdict) {
	if e.Kind == KindData && m.ReadUsage(e.Data) {
		m.failure = Failure{Message: "the engine ended its answer with an error; its log says why", Type: "server_error", Code: "engine_failed",
			Status: 502}
		return e.Raw, Failed
	}
	m.started, m.over, m.finish = true, e.Kind == KindDone, "stop" // the end of the body may also end it, so it is finished at any time
	return e.Raw, Forward
}

// ReadUsage takes over the usage of an object, which is an event or an answer in one piece. failed says that the object has an
// error instead.
func (m *Mirror) ReadUsage(b []byte) (failed bool) {
	u := Usage{Cached: -1}
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch v := o.Value(); {
		case string(o.Key) == "error":
			failed = !rawjson.IsNull(v)
		case string(o.Key) == "usage" && v[0] == '{':
			for c := rawjson.ObjectAt(b, o.Val); c.NextValue(); {
				switch n := countOf(&c); {
				case n > mostCounted:
				case string(c.Key) == "prompt_tokens":
					u.Prompt = n
				case string(c.Key) == "completion_tokens":
					u.Completion = n
				}
			}
		}
	}
	if o.Pos <= 0 || rawjson.Space(b, o.Pos) < len(b) {
		return false // b is not one JSON object
	}
	if u.Total = u.Prompt + u.Completion; u.Total > 0 && !failed {
		m.usage, m.usageSeen, m.usageSent = u, true, true
	}
	return failed
}

// mostCounted is the largest number of tokens that an engine is believed to count: a request may have many prompts, but not so
// many tokens.
const mostCounted = 64 << 20

// maxHeld is how many events may come before the answer begins.
const maxHeld = 4

// take takes the next event, or a whole answer, of an endpoint with a form of its own. An engine sends
// events about the request, or about what begins, before the first event with a token. take holds them
// back until that event comes: before it, the engine may not have the KV, and the client has no status.
// If the engine fails before it, another engine can answer, because the client has nothing yet.
func (m *Mirror) take(e Event, dst []byte) (out []byte, v Verdict) {
	if m.ask.Form == Verbatim {
		return m.verbatim(e)
	}
	if e.Kind == KindOpaque {
		if m.ask.Form == Responses { // it may be an opening event or the last one, which have members that are not for the client
			m.fault = ErrLargeEvent
			return nil, Overrun
		}
		m.started = true
		if m.ask.Trail != nil {
			m.ask.Trail.Unread = true
		}
		return m.release(e.Raw, dst), Forward
	}
	said := forms[m.ask.Form].read(e.Data, m.ask.Cached)
	if judge := forms[m.ask.Form].judge; judge != nil && said.ok {
		judge(m, &said, e.Data)
	}
	switch {
	case !said.ok:
		return m.unreadable(e.Data)
	case said.failed:
		m.failure = ReadFailure(said.why)
		return e.Raw, Failed
	case said.fault != nil:
		m.fault = said.fault
		return nil, Overrun
	case said.idle && !m.started && (m.opened == 0 || m.opened == maxHeld):
		return nil, Drop
	case said.over && !said.last && m.finish == "": // the stream ended, and no finish_reason came before
		return nil, Ended
	}
	m.events++
	// SGLang counts the prompt in message_start alone (0.5.23, entrypoints/anthropic/serving.py)
	if said.usage.Prompt == 0 && said.usage.Total > 0 {
		said.usage.Prompt, said.usage.Cached = m.usage.Prompt, m.usage.Cached
		said.usage.Total += said.usage.Prompt
	}
	m.facts = facts{choices: -1, content: said.delta, hasUsage: said.usage.Total > 0, usage: said.usage}
	if said.last {
		m.facts.choices = 0
	}
	if fault := m.overrun(); fault != nil {
		m.fault = fault
		return nil, Overrun
	}
	if !m.started && !said.delta && !said.last && (said.opening || m.opened < maxHeld) {
		if m.opened++; m.opened > maxHeld {
			m.fault = ErrBadCount
			return nil, Overrun
		}
		m.count(e.Data)
		m.held = m.cut(e, said.cuts, m.held)
		return nil, Drop
	}
	m.count(e.Data)
	m.started = true
	if keep := forms[m.ask.Form].keep; keep != nil && m.ask.Trail != nil {
		keep(m.ask.Trail, m, &said, e.Data)
	}
	if said.last {
		m.finish, m.stopped = said.finish, said.stopText
	}
	m.over = said.over && m.finish != ""
	if len(said.cuts) == 0 {
		return m.release(e.Raw, dst), Forward
	}
	dst = append(dst, m.held...)
	m.held = m.held[:0]
	return m.cut(e, said.cuts, dst), Forward
}

// release returns the events that were held back and raw behind them, appended to dst; raw itself if none were held back.
func (m *Mirror) release(raw, dst []byte) []byte {
	if len(m.held) == 0 {
		return raw
	}
	dst = append(append(dst, m.held...), raw...)
	m.held = m.held[:0]
	return dst
}

// cut is a stretch of an event's data that is replaced for the client.
type cut struct {
	from, to int
	put      string // the replacement
}

// cut writes an event with its cuts, which are in the order of their places.
func (m *Mirror) cut(e Event, cuts []cut, dst []byte) []byte {
	dst, at := appendHead(dst, e), 0
	for _, c := range cuts {
		if c.to <= at {
			continue
		}
		dst = append(appendPart(dst, e, e.Data[at:max(c.from, at)]), c.put...)
		at = c.to
	}
	return appendTail(appendPart(dst, e, e.Data[at:]), e)
}

// without returns the cut that removes an object's current member. kept says that a member before it stays.
func without(o *rawjson.Object, kept bool) cut {
	from, to := rawjson.Cut(o.Text, o.Comma, o.Quote, o.Pos, !kept)
	return cut{from: from, to: to}
}

// order puts the cuts in the order of their places.
func (s *formFacts) order() {
	if len(s.cuts) > 1 {
		slices.SortFunc(s.cuts, func(a, b cut) int { return a.from - b.from })
	}
}

// foreignKey says whether a member of an answer is for engines alone.
func foreignKey(key string) bool { return key == "kv_transfer_params" || key == "ec_transfer_params" }

// text unquotes a JSON string; empty: v is not a string.
func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return rawjson.Unquote(v)
}

// countOf reads the current member of an object as a number of tokens.
func countOf(o *rawjson.Object) int {
	n, _ := rawjson.Int(o.Text, o.Val, o.Pos)
	return max(0, n)
}

// OnlyFailure appends a whole stream that has only an error.
func OnlyFailure(dst []byte, f Form, message, typ, code string) []byte {
	return (&Answer{Mirror: Mirror{ask: Ask{Form: f}}}).Ending(dst, true, message, typ, code)
}

// Silence is what a client gets while no event comes, so that it sees that the connection lives. Clients of messages know the
// event ping for that, and clients of other endpoints ignore comments. The caller must not change the bytes.
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

// Ending appends what ends a stream for its client: the error, if there is one, and [DONE]
// where the endpoint has it. typ and code are the error's in the words of the endpoint.
func (a *Answer) Ending(dst []byte, failed bool, message, typ, code string) []byte {
	m := &a.Mirror
	form := &forms[m.ask.Form]
	switch {
	case failed && form.failed == nil:
		return append(ErrorEvent(dst, message, typ, code), Done...)
	case m.ask.Form.chunked():
		return append(dst, Done...)
	case failed:
		return form.failed(dst, m.events, message, typ, code)
	case !m.over:
		return append(dst, form.end...)
	}
	return dst
}

// failedResponse appends the error event of /v1/responses.
func failedResponse(dst []byte, events int, message, _, code string) []byte {
	dst = rawjson.AppendString(append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...), code)
	dst = rawjson.AppendString(append(dst, `,"message":`...), message)
	return append(strconv.AppendInt(append(dst, `,"param":null,"sequence_number":`...), int64(events), 10), "}\n\n"...)
}
