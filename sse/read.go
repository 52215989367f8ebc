package sse

import "bytes"

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
func (m *Mirror) mark(w what, level uint8, o *object) *mark {
	m.marks = append(m.marks, mark{what: w, level: level, open: o.open, nth: o.n - 1, comma: o.comma, quote: o.quote, val: o.val, end: -1})
	return &m.marks[len(m.marks)-1]
}

// marked is mark with the end of a plain value, which it also returns.
func (m *Mirror) marked(w what, level uint8, o *object) int {
	end := valueEnd(o.b, o.val)
	m.mark(w, level, o).end = end
	return end
}

// insert marks the place behind the last member of an object that was walked.
func (m *Mirror) insert(w what, o *object) {
	m.marks = append(m.marks, mark{what: w, open: o.open, val: o.pos - 1, end: o.pos - 1, n: o.n})
}

// read scans an event's JSON into m.f and m.marks; false if it is not an object.
func (m *Mirror) read(b []byte) bool {
	o := at(b, space(b, 0))
	for o.next() {
		switch string(o.key) {
		case "choices":
			o.pos = m.readChoices(b, o.val)
		case "usage":
			o.pos = m.readUsage(&o)
		case "prompt_token_ids":
			o.pos = m.foreignIDs(0, &o)
		case "kv_transfer_params":
			o.pos = m.marked(foreign, 0, &o)
		case "id":
			if len(m.id) > 0 {
				o.pos = m.marked(idValue, 0, &o)
			} else {
				o.pos = valueEnd(b, o.val)
			}
		case "created":
			if m.ask.Created != 0 || m.ask.Seam != nil {
				o.pos = m.marked(createdValue, 0, &o)
			} else {
				o.pos = valueEnd(b, o.val)
			}
		case "model":
			o.pos = m.seamed(modelValue, 0, &o)
		case "system_fingerprint":
			o.pos = m.seamed(fingerprintValue, 0, &o)
		case "error":
			o.pos = valueEnd(b, o.val)
			m.f.isError = m.f.isError || !isNull(b[o.val:])
		case "object":
			o.pos = valueEnd(b, o.val)
			m.f.isError = m.f.isError || o.pos > 0 && string(b[o.val:o.pos]) == `"error"`
		default:
			o.pos = valueEnd(b, o.val)
		}
	}
	return o.pos > 0 && space(b, o.pos) == len(b)
}

// foreignIDs marks prompt token ids unless the client asked for them, and has
// not got them.
func (m *Mirror) foreignIDs(level uint8, o *object) int {
	var end int
	if m.ask.TokenIDs && m.ask.Seam == nil {
		end = valueEnd(o.b, o.val)
	} else {
		end = m.marked(foreign, level, o)
	}
	if (m.ask.Trail != nil || m.ask.Seam != nil) && end-o.val > len("[]") {
		m.f.promptIDs = bytes.Count(o.b[o.val:end], []byte{','}) + 1
		m.f.promptAt, m.f.promptEnd = o.val, end
	}
	return end
}

// seamed is marked for a leg that goes on with an answer; no other changes the
// member.
func (m *Mirror) seamed(w what, level uint8, o *object) int {
	if m.ask.Seam == nil {
		return valueEnd(o.b, o.val)
	}
	return m.marked(w, level, o)
}

func (m *Mirror) readChoices(b []byte, i int) int {
	if b[i] != '[' {
		return valueEnd(b, i)
	}
	a := elements(b, i)
	for a.next() {
		a.pos = m.readChoice(b, a.val)
	}
	m.f.choices = a.n
	return a.pos
}

func (m *Mirror) readChoice(b []byte, i int) int {
	if b[i] != '{' {
		return valueEnd(b, i)
	}
	bare, delta := true, false
	o := at(b, i)
	for o.next() {
		switch string(o.key) {
		case "index":
			if m.ask.Choice >= 0 {
				o.pos = m.marked(indexValue, 1, &o)
			} else {
				o.pos = valueEnd(b, o.val)
			}
		case "delta":
			var says bool
			o.pos, says = m.readDelta(b, o.val)
			delta, bare = true, bare && !says
		case "text":
			bare = false
			o.pos = valueEnd(b, o.val)
			if o.pos-o.val > len(`""`) && b[o.val] == '"' {
				m.f.content, m.f.textAt, m.f.textEnd = true, o.val, o.pos
			}
		case "finish_reason":
			o.pos = m.marked(endValue, 1, &o)
			if b[o.val] == '"' {
				bare = false
				m.f.finishAt, m.f.finishEnd = o.val+1, o.pos-1
			}
		case "stop_reason":
			o.pos = m.marked(endValue, 1, &o)
			if o.pos > 0 && string(b[o.val:o.pos]) == `"recomputed"` {
				m.f.recomputed = true
			}
		case "token_ids":
			o.pos = m.readIDs(&o)
		case "prompt_token_ids":
			o.pos = m.foreignIDs(1, &o)
		case "kv_transfer_params":
			o.pos = m.marked(foreign, 1, &o)
		case "logprobs":
			if m.ask.Seam != nil && m.ask.Seam.Runes > 0 && b[o.val] == '{' {
				o.pos = m.readOffsets(b, o.val)
			} else {
				o.pos = valueEnd(b, o.val)
			}
			bare = bare && isNull(b[o.val:])
		default:
			o.pos = valueEnd(b, o.val)
		}
	}
	m.f.bare = bare && delta
	return o.pos
}

// readDelta also returns whether the delta says anything, a role or "" included.
func (m *Mirror) readDelta(b []byte, i int) (end int, says bool) {
	if b[i] != '{' {
		end = valueEnd(b, i)
		return end, !isNull(b[i:])
	}
	o := at(b, i)
	for o.next() {
		if string(o.key) == "role" {
			m.f.role = true
			o.pos = m.seamed(roleValue, 2, &o)
			continue
		}
		o.pos = valueEnd(b, o.val)
		switch b[o.val] {
		case '"', '[', '{': // more than the two quotes or brackets
			if o.pos-o.val <= 2 {
				break
			}
			m.f.content = true
			if string(o.key) == "content" && b[o.val] == '"' {
				m.f.textAt, m.f.textEnd = o.val, o.pos
			} else {
				m.f.moreThan = true
			}
		}
	}
	return o.pos, o.n > 0
}

// readOffsets marks where the tokens of a completion's logprobs stand in its
// text.
func (m *Mirror) readOffsets(b []byte, i int) int {
	o := at(b, i)
	for o.next() {
		if string(o.key) == "text_offset" && b[o.val] == '[' {
			o.pos = m.marked(offsetsValue, 2, &o)
		} else {
			o.pos = valueEnd(b, o.val)
		}
	}
	return o.pos
}

// readIDs counts a choice's token ids: how many were generated since the last event.
func (m *Mirror) readIDs(o *object) int {
	b := o.b
	if !m.ask.TokenIDs {
		k := len(m.marks)
		m.mark(foreign, 1, o)
		end := m.countIDs(b, o.val)
		m.marks[k].end = end
		return end
	}
	return m.countIDs(b, o.val)
}

func (m *Mirror) countIDs(b []byte, i int) int {
	if b[i] != '[' {
		return valueEnd(b, i)
	}
	a := elements(b, i)
	for a.next() {
		a.pos = valueEnd(b, a.val)
	}
	m.f.ids += a.n
	m.f.hasIDs, m.f.idsAt = true, i
	return a.pos
}

func (m *Mirror) readUsage(top *object) int {
	k := len(m.marks)
	m.mark(usageValue, 0, top)
	end := m.usageEnd(top.b, top.val)
	m.marks[k].end = end
	return end
}

func (m *Mirror) usageEnd(b []byte, i int) int {
	if b[i] != '{' {
		return valueEnd(b, i)
	}
	u := Usage{Cached: -1}
	counts, total, details := false, false, false
	o := at(b, i)
	for o.next() {
		if string(o.key) == "prompt_tokens_details" {
			details = true
			o.pos = m.readDetails(&o, &u)
			continue
		}
		switch string(o.key) {
		case "prompt_tokens":
			o.pos = m.seamed(promptValue, 1, &o)
			u.Prompt, _ = intAt(b, o.val, o.pos)
		case "completion_tokens":
			o.pos = m.seamed(completionValue, 1, &o)
			u.Completion, counts = intAt(b, o.val, o.pos)
		case "total_tokens":
			o.pos = m.seamed(totalValue, 1, &o)
			u.Total, total = intAt(b, o.val, o.pos)
		default:
			o.pos = valueEnd(b, o.val)
		}
	}
	if counts && !details && m.ask.Cached >= 0 && o.pos > 0 {
		m.insert(noDetails, &o)
	}
	if counts {
		if !total {
			u.Total = u.Prompt + u.Completion
		}
		m.f.hasUsage, m.f.usage = true, u
	}
	return o.pos
}

func (m *Mirror) readDetails(usage *object, u *Usage) int {
	b := usage.b
	if b[usage.val] != '{' {
		if m.ask.Cached >= 0 && b[usage.val] == 'n' {
			return m.marked(nullDetails, 1, usage)
		}
		return valueEnd(b, usage.val)
	}
	k := len(m.marks)
	m.mark(detailsValue, 1, usage)
	m.f.details = usage.val
	o := at(b, usage.val)
	cached := 0
	for o.next() {
		if string(o.key) == "cached_tokens" {
			cached++
			o.pos = m.marked(cachedValue, 2, &o)
			if n, ok := intAt(b, o.val, o.pos); ok {
				u.Cached = n
			}
		} else {
			o.pos = valueEnd(b, o.val)
		}
	}
	m.marks[k].end, m.marks[k].n = o.pos, o.n-cached
	m.f.detailsEnd = o.pos
	if cached == 0 {
		m.marks[k].n = 1 // nothing in it is ours to remove
		if m.ask.Cached >= 0 && o.pos > 0 {
			m.insert(noCached, &o)
		}
	}
	return o.pos
}
