package sse

// facts is what one event says, found in one pass over its bytes.
type facts struct {
	choices  int // -1: not a list of choices
	hasUsage bool
	usage    Usage
	ids      int // token ids in this event
	hasIDs   bool
	content  bool // text, reasoning, a tool call: what a token becomes
	bare     bool // the last choice says nothing at all: an empty delta, no finish, no logprobs

	finishAt, finishEnd int // the finish_reason, without its quotes
	recomputed          bool
	isError             bool
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
			if m.ask.Created != 0 {
				o.pos = m.marked(createdValue, 0, &o)
			} else {
				o.pos = valueEnd(b, o.val)
			}
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

// foreignIDs marks prompt token ids unless the client asked for them.
func (m *Mirror) foreignIDs(level uint8, o *object) int {
	if m.ask.TokenIDs {
		return valueEnd(o.b, o.val)
	}
	return m.marked(foreign, level, o)
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
			m.f.content = m.f.content || o.pos-o.val > len(`""`) && b[o.val] == '"'
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
			o.pos = valueEnd(b, o.val)
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
		o.pos = valueEnd(b, o.val)
		switch b[o.val] {
		case '"', '[', '{': // more than the two quotes or brackets
			if o.pos-o.val > 2 && string(o.key) != "role" {
				m.f.content = true
			}
		}
	}
	return o.pos, o.n > 0
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
	m.f.hasIDs = true
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
	var u Usage
	counts, total := false, false
	o := at(b, i)
	for o.next() {
		if string(o.key) == "prompt_tokens_details" {
			o.pos = m.readDetails(&o)
			continue
		}
		o.pos = valueEnd(b, o.val)
		n, ok := intAt(b, o.val, o.pos)
		switch {
		case !ok:
		case string(o.key) == "prompt_tokens":
			u.Prompt = n
		case string(o.key) == "completion_tokens":
			u.Completion, counts = n, true
		case string(o.key) == "total_tokens":
			u.Total, total = n, true
		}
	}
	if counts {
		if !total {
			u.Total = u.Prompt + u.Completion
		}
		m.f.hasUsage, m.f.usage = true, u
	}
	return o.pos
}

func (m *Mirror) readDetails(usage *object) int {
	b := usage.b
	if b[usage.val] != '{' {
		return valueEnd(b, usage.val)
	}
	k := len(m.marks)
	m.mark(detailsValue, 1, usage)
	o := at(b, usage.val)
	cached := 0
	for o.next() {
		if string(o.key) == "cached_tokens" {
			cached++
			o.pos = m.marked(cachedValue, 2, &o)
		} else {
			o.pos = valueEnd(b, o.val)
		}
	}
	m.marks[k].end, m.marks[k].n = o.pos, o.n-cached
	if cached == 0 {
		m.marks[k].n = 1 // nothing in it is ours to remove
	}
	return o.pos
}
