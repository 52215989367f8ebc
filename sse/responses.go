package sse

import (
	"bytes"
	"slices"
	"strconv"

	"evenkeel/rawjson"
)

// maxHeld is how many events may come before the answer begins.
const maxHeld = 4

// response takes the next event of /v1/responses, or its whole answer. An engine sends the
// events that tell of the request itself at once. So they wait here for the first that tells
// of a token: until then the engine may not have the KV, and the client no status.
func (m *Mirror) response(e Event, dst []byte) (out []byte, v Verdict) {
	r := readResponse(e.Data)
	switch {
	case !r.ok: // not ours to judge
		m.started = true
		return m.release(e.Raw, dst), Forward
	case r.failed:
		m.failure = parseFailure(r.why)
		return e.Raw, Failed
	}
	m.events++
	if r.opening && !m.started {
		if m.opened++; m.opened > maxHeld {
			m.fault = ErrBadCount
			return nil, Overrun
		}
		m.held = m.cut(e, r.cuts, m.held)
		return nil, Drop
	}
	m.f = facts{choices: -1, content: r.delta, hasUsage: r.usage.Total > 0, usage: r.usage}
	if r.last {
		m.f.choices = 0
	}
	if fault := m.overrun(); fault != nil {
		m.fault = fault
		return nil, Overrun
	}
	m.count(e.Data)
	m.started = true
	if r.last {
		m.finish = r.finish
	}
	if len(r.cuts) == 0 {
		return m.release(e.Raw, dst), Forward
	}
	dst = append(dst, m.held...)
	m.held = m.held[:0]
	return m.cut(e, r.cuts, dst), Forward
}

// release puts what was held back before an event.
func (m *Mirror) release(raw, dst []byte) []byte {
	if len(m.held) == 0 {
		return raw
	}
	dst = append(append(dst, m.held...), raw...)
	m.held = m.held[:0]
	return dst
}

// cut is a place of an event that the client gets otherwise.
type cut struct {
	from, to int
	cached   bool // prefill's cached_tokens go there; else nothing does
	listed   bool // as a list
}

// cut writes an event without some members, and with prefill's cached_tokens.
func (m *Mirror) cut(e Event, cuts []cut, dst []byte) []byte {
	dst, at := appendHead(dst, e), 0
	for _, c := range cuts {
		if c.cached && m.ask.Cached == OwnCached || c.to <= at {
			continue
		}
		dst = appendPart(dst, e, e.Data[at:max(c.from, at)])
		if c.cached {
			n := strconv.Itoa(max(0, m.ask.Cached)) // clients want a number
			if c.listed {
				n = "[" + n + "]"
			}
			dst = append(dst, n...)
		}
		at = c.to
	}
	return appendTail(appendPart(dst, e, e.Data[at:]), e)
}

// over tells that nothing comes behind the event, although it is not [DONE].
func (m *Mirror) over() bool { return m.ask.Responses && m.finish != "" }

// responseFacts is what an event of /v1/responses says.
type responseFacts struct {
	ok      bool
	opening bool // it tells of the request, not of the answer
	delta   bool // it has what a token became
	last    bool // it has the whole response
	failed  bool
	why     []byte // the event, or its error
	finish  string
	usage   Usage
	cuts    []cut
}

func readResponse(b []byte) (s responseFacts) {
	var kind, object string
	at := rawjson.Space(b, 0)
	o := rawjson.ObjectAt(b, at)
	for o.NextValue() {
		switch string(o.Key) {
		case "type":
			kind = text(o.Value())
		case "object":
			object = text(o.Value())
		case "error":
			s.failed = s.failed || !rawjson.IsNull(o.Value())
		case "response":
			if b[o.Val] == '{' { // each of several, for a client may take any of them
				s.read(rawjson.ObjectAt(b, o.Val))
			}
		}
	}
	s.ok = o.Pos > 0 && rawjson.Space(b, o.Pos) == len(b)
	s.why = b
	switch {
	case !s.ok:
	case object == "response":
		s.last = true
		s.read(rawjson.ObjectAt(b, at))
		slices.SortFunc(s.cuts, func(a, b cut) int { return a.from - b.from })
	case kind == "response.completed", kind == "response.incomplete":
		s.last = true
	case kind == "response.failed", kind == "error", object == "error":
		s.failed = true
	case kind == "response.created", kind == "response.in_progress", kind == "response.queued":
		s.opening = true
	default:
		s.delta = len(kind) > len(".delta") && kind[len(kind)-len(".delta"):] == ".delta"
	}
	return s
}

// read takes in a response.
func (s *responseFacts) read(o rawjson.Object) {
	kept := false // a member before
	for o.NextValue() {
		key, v := rawjson.Key(o.Key), o.Value()
		if key == "kv_transfer_params" || key == "ec_transfer_params" {
			from, to := rawjson.Cut(o.Text, o.Comma, o.Quote, o.Pos, !kept)
			s.cuts = append(s.cuts, cut{from: from, to: to})
			continue
		}
		kept = true
		switch key {
		case "status":
			switch string(v) {
			case `"completed"`:
				s.finish = "stop"
			case `"incomplete"`:
				s.finish = "length"
			case `"failed"`, `"cancelled"`:
				s.failed = true
			}
		case "error":
			if !rawjson.IsNull(v) {
				s.why = append(append([]byte(`{"error":`), v...), '}')
			}
		case "usage":
			if v[0] == '{' {
				s.readUsage(rawjson.ObjectAt(o.Text, o.Val))
			}
		}
	}
}

func (s *responseFacts) readUsage(o rawjson.Object) {
	number := func() int {
		n, _ := rawjson.Int(o.Text, o.Val, o.Pos)
		return max(0, n)
	}
	for o.NextValue() {
		switch string(o.Key) {
		case "input_tokens":
			s.usage.Prompt = number()
		case "output_tokens":
			s.usage.Completion = number()
		case "total_tokens":
			s.usage.Total = number()
		case "input_tokens_details":
			if o.Text[o.Val] != '{' {
				continue
			}
			for d := rawjson.ObjectAt(o.Text, o.Val); d.NextValue(); {
				switch key := string(d.Key); key {
				case "cached_tokens":
					s.usage.Cached, _ = rawjson.Int(d.Text, d.Val, d.Pos)
					s.cuts = append(s.cuts, cut{from: d.Val, to: d.Pos, cached: true})
				case "cached_tokens_per_turn":
					if bytes.HasPrefix(d.Value(), []byte("[")) && len(d.Value()) > len("[]") {
						s.cuts = append(s.cuts, cut{from: d.Val, to: d.Pos, cached: true, listed: true})
					}
				}
			}
		}
	}
}

// text is what a JSON string says; empty: it is none.
func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return rawjson.Unquote(v)
}

// Ending appends what ends a stream for its client: the error, if there is one, and [DONE]
// where the endpoint has it.
func (a *Answer) Ending(dst []byte, failed bool, message, typ, code string) []byte {
	if a.Mirror.ask.Responses {
		if !failed {
			return dst
		}
		dst = rawjson.AppendString(append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...), code)
		dst = rawjson.AppendString(append(dst, `,"message":`...), message)
		return append(strconv.AppendInt(append(dst, `,"param":null,"sequence_number":`...), int64(a.Mirror.events), 10), "}\n\n"...)
	}
	if failed {
		dst = ErrorEvent(dst, message, typ, code)
	}
	return append(dst, Done...)
}
