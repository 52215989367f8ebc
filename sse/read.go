package sse

import (
	"bytes"

	"evenkeel/rawjson"
)

// facts is what one event says, found in one pass over its bytes.
type facts struct {
	choices             int // -1: not a list of choices
	hasUsage            bool
	details, detailsEnd int // of the usage
	usage               Usage
	ids                 int // token ids in this event
	hasIDs              bool
	content             bool // text, reasoning, a tool call: what a token becomes
	bare                bool // the last choice says nothing at all: an empty delta, no finish, no logprobs

	finishAt, finishEnd int // the finish_reason, without its quotes
	recomputed          bool
	isError             bool

	textAt, textEnd int  // the text or content, with its quotes
	moreThan        bool // content that is not that text
	role            bool // the delta has a role
	idsAt           int  // the list of token ids
	promptIDs       int  // tokens of the prompt, where they came

	promptAt, promptEnd int // the list of them
}

// what names a place that may have to change.
type what uint8

const (
	usageValue what = iota
	detailsValue
	cachedValue
	foreign // token ids and hand-off params: never for this client
	idValue
	createdValue
	indexValue
	endValue // a finish_reason or stop_reason

	// Of a leg that goes on with an answer only:
	modelValue
	fingerprintValue
	roleValue
	promptValue
	completionValue
	totalValue
	offsetsValue

	// Where prefill's cached_tokens go that decode has no place for:
	noDetails   // behind the members of a usage
	nullDetails // in place of null
	noCached    // behind the members of its details
)

// mark is a member that may have to change. Marks are in the order of their
// keys, so one inside another's value follows it.
type mark struct {
	what              what
	level             uint8 // 0 top, 1 a choice or usage, 2 usage's details
	open              int   // its object's brace
	nth               int   // members before it in that object
	comma, quote, val int
	end               int // of its value
	n                 int // members of its value, where that matters
}

// mark keeps the current member of o; the caller sets its end.
func (m *Mirror) mark(w what, level uint8, o *rawjson.Object) *mark {
	m.marks = append(m.marks, mark{what: w, level: level, open: o.Open, nth: o.N - 1, comma: o.Comma, quote: o.Quote, val: o.Val, end: -1})
	return &m.marks[len(m.marks)-1]
}

// marked is mark with the end of a plain value, which it also returns.
func (m *Mirror) marked(w what, level uint8, o *rawjson.Object) int {
	end := rawjson.ValueEnd(o.Text, o.Val)
	m.mark(w, level, o).end = end
	return end
}

// insert marks the place behind the last member of an object that was walked.
func (m *Mirror) insert(w what, o *rawjson.Object) {
	m.marks = append(m.marks, mark{what: w, open: o.Open, val: o.Pos - 1, end: o.Pos - 1, n: o.N})
}

// read scans an event's JSON into m.f and m.marks; false if it is not an object.
func (m *Mirror) read(b []byte) bool {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.Next() {
		switch string(o.Key) {
		case "choices":
			o.Pos = m.readChoices(b, o.Val)
		case "usage":
			o.Pos = m.readUsage(&o)
		case "prompt_token_ids":
			o.Pos = m.foreignIDs(0, &o)
		case "kv_transfer_params":
			o.Pos = m.marked(foreign, 0, &o)
		case "id":
			if len(m.id) > 0 {
				o.Pos = m.marked(idValue, 0, &o)
			} else {
				o.Pos = rawjson.ValueEnd(b, o.Val)
			}
		case "created":
			if m.ask.Created != 0 || m.ask.Seam != nil {
				o.Pos = m.marked(createdValue, 0, &o)
			} else {
				o.Pos = rawjson.ValueEnd(b, o.Val)
			}
		case "model":
			o.Pos = m.seamed(modelValue, 0, &o)
		case "system_fingerprint":
			o.Pos = m.seamed(fingerprintValue, 0, &o)
		case "error":
			o.Pos = rawjson.ValueEnd(b, o.Val)
			m.f.isError = m.f.isError || !rawjson.IsNull(b[o.Val:])
		case "object":
			o.Pos = rawjson.ValueEnd(b, o.Val)
			m.f.isError = m.f.isError || o.Pos > 0 && string(b[o.Val:o.Pos]) == `"error"`
		default:
			o.Pos = rawjson.ValueEnd(b, o.Val)
		}
	}
	return o.Pos > 0 && rawjson.Space(b, o.Pos) == len(b)
}

// foreignIDs marks prompt token ids unless the client asked for them, and has
// not got them.
func (m *Mirror) foreignIDs(level uint8, o *rawjson.Object) int {
	var end int
	if m.ask.TokenIDs && m.ask.Seam == nil {
		end = rawjson.ValueEnd(o.Text, o.Val)
	} else {
		end = m.marked(foreign, level, o)
	}
	if (m.ask.Trail != nil || m.ask.Seam != nil) && end-o.Val > len("[]") && o.Text[o.Val] == '[' { // not null, as behind the first event
		m.f.promptIDs = bytes.Count(o.Text[o.Val:end], []byte{','}) + 1
		m.f.promptAt, m.f.promptEnd = o.Val, end
	}
	return end
}

// seamed is marked for a leg that goes on with an answer; no other changes the
// member.
func (m *Mirror) seamed(w what, level uint8, o *rawjson.Object) int {
	if m.ask.Seam == nil {
		return rawjson.ValueEnd(o.Text, o.Val)
	}
	return m.marked(w, level, o)
}

func (m *Mirror) readChoices(b []byte, i int) int {
	if b[i] != '[' {
		return rawjson.ValueEnd(b, i)
	}
	a := rawjson.ArrayAt(b, i)
	for a.Next() {
		a.Pos = m.readChoice(b, a.Val)
	}
	m.f.choices = a.N
	return a.Pos
}

func (m *Mirror) readChoice(b []byte, i int) int {
	if b[i] != '{' {
		return rawjson.ValueEnd(b, i)
	}
	bare, delta := true, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "index":
			if m.ask.Choice >= 0 {
				o.Pos = m.marked(indexValue, 1, &o)
			} else {
				o.Pos = rawjson.ValueEnd(b, o.Val)
			}
		case "delta":
			var says bool
			o.Pos, says = m.readDelta(b, o.Val)
			delta, bare = true, bare && !says
		case "text":
			bare = false
			o.Pos = rawjson.ValueEnd(b, o.Val)
			if o.Pos-o.Val > len(`""`) && b[o.Val] == '"' {
				m.f.content, m.f.textAt, m.f.textEnd = true, o.Val, o.Pos
			}
		case "finish_reason":
			o.Pos = m.marked(endValue, 1, &o)
			if b[o.Val] == '"' {
				bare = false
				m.f.finishAt, m.f.finishEnd = o.Val+1, o.Pos-1
			}
		case "stop_reason":
			o.Pos = m.marked(endValue, 1, &o)
			if o.Pos > 0 && string(b[o.Val:o.Pos]) == `"recomputed"` {
				m.f.recomputed = true
			}
		case "token_ids":
			o.Pos = m.readIDs(&o)
		case "prompt_token_ids":
			o.Pos = m.foreignIDs(1, &o)
		case "kv_transfer_params":
			o.Pos = m.marked(foreign, 1, &o)
		case "logprobs":
			if m.ask.Seam != nil && m.ask.Seam.Runes > 0 && b[o.Val] == '{' {
				o.Pos = m.readOffsets(b, o.Val)
			} else {
				o.Pos = rawjson.ValueEnd(b, o.Val)
			}
			bare = bare && rawjson.IsNull(b[o.Val:])
		default:
			o.Pos = rawjson.ValueEnd(b, o.Val)
		}
	}
	m.f.bare = bare && delta
	return o.Pos
}

// readDelta also returns whether the delta says anything, a role or "" included.
func (m *Mirror) readDelta(b []byte, i int) (end int, says bool) {
	if b[i] != '{' {
		end = rawjson.ValueEnd(b, i)
		return end, !rawjson.IsNull(b[i:])
	}
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "role" {
			m.f.role = true
			o.Pos = m.seamed(roleValue, 2, &o)
			continue
		}
		o.Pos = rawjson.ValueEnd(b, o.Val)
		switch b[o.Val] {
		case '"', '[', '{': // more than the two quotes or brackets
			if o.Pos-o.Val <= 2 {
				break
			}
			m.f.content = true
			if string(o.Key) == "content" && b[o.Val] == '"' {
				m.f.textAt, m.f.textEnd = o.Val, o.Pos
			} else {
				m.f.moreThan = true
			}
		}
	}
	return o.Pos, o.N > 0
}

// readOffsets marks where the tokens of a completion's logprobs stand in its
// text.
func (m *Mirror) readOffsets(b []byte, i int) int {
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "text_offset" && b[o.Val] == '[' {
			o.Pos = m.marked(offsetsValue, 2, &o)
		} else {
			o.Pos = rawjson.ValueEnd(b, o.Val)
		}
	}
	return o.Pos
}

// readIDs counts a choice's token ids: how many were generated since the last event.
func (m *Mirror) readIDs(o *rawjson.Object) int {
	b := o.Text
	if !m.ask.TokenIDs {
		k := len(m.marks)
		m.mark(foreign, 1, o)
		end := m.countIDs(b, o.Val)
		m.marks[k].end = end
		return end
	}
	return m.countIDs(b, o.Val)
}

func (m *Mirror) countIDs(b []byte, i int) int {
	if b[i] != '[' {
		return rawjson.ValueEnd(b, i)
	}
	a := rawjson.ArrayAt(b, i)
	for a.Next() {
		a.Pos = rawjson.ValueEnd(b, a.Val)
	}
	m.f.ids += a.N
	m.f.hasIDs, m.f.idsAt = true, i
	return a.Pos
}

func (m *Mirror) readUsage(top *rawjson.Object) int {
	k := len(m.marks)
	m.mark(usageValue, 0, top)
	end := m.usageEnd(top.Text, top.Val)
	m.marks[k].end = end
	return end
}

func (m *Mirror) usageEnd(b []byte, i int) int {
	if b[i] != '{' {
		return rawjson.ValueEnd(b, i)
	}
	u := Usage{Cached: -1}
	counts, total, details := false, false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "prompt_tokens_details" {
			details = true
			o.Pos = m.readDetails(&o, &u)
			continue
		}
		switch string(o.Key) {
		case "prompt_tokens":
			o.Pos = m.seamed(promptValue, 1, &o)
			u.Prompt, _ = rawjson.Int(b, o.Val, o.Pos)
		case "completion_tokens":
			o.Pos = m.seamed(completionValue, 1, &o)
			u.Completion, counts = rawjson.Int(b, o.Val, o.Pos)
		case "total_tokens":
			o.Pos = m.seamed(totalValue, 1, &o)
			u.Total, total = rawjson.Int(b, o.Val, o.Pos)
		default:
			o.Pos = rawjson.ValueEnd(b, o.Val)
		}
	}
	if counts && !details && m.ask.Cached >= 0 && o.Pos > 0 {
		m.insert(noDetails, &o)
	}
	if counts {
		if !total {
			u.Total = u.Prompt + u.Completion
		}
		m.f.hasUsage, m.f.usage = true, u
	}
	return o.Pos
}

func (m *Mirror) readDetails(usage *rawjson.Object, u *Usage) int {
	b := usage.Text
	if b[usage.Val] != '{' {
		if m.ask.Cached >= 0 && b[usage.Val] == 'n' {
			return m.marked(nullDetails, 1, usage)
		}
		return rawjson.ValueEnd(b, usage.Val)
	}
	k := len(m.marks)
	m.mark(detailsValue, 1, usage)
	m.f.details = usage.Val
	o := rawjson.ObjectAt(b, usage.Val)
	cached := 0
	for o.Next() {
		if string(o.Key) == "cached_tokens" {
			cached++
			o.Pos = m.marked(cachedValue, 2, &o)
			if n, ok := rawjson.Int(b, o.Val, o.Pos); ok {
				u.Cached = n
			}
		} else {
			o.Pos = rawjson.ValueEnd(b, o.Val)
		}
	}
	m.marks[k].end, m.marks[k].n = o.Pos, o.N-cached
	m.f.detailsEnd = o.Pos
	if cached == 0 {
		m.marks[k].n = 1 // nothing in it is ours to remove
		if m.ask.Cached >= 0 && o.Pos > 0 {
			m.insert(noCached, &o)
		}
	}
	return o.Pos
}
