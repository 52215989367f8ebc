package sse

import (
	"bytes"

	"evenkeel/internal/rawjson"
)

// Mirror follows one decode leg: it counts its tokens, edits its
// events for the client, and knows whether it came to a proper end. The choices
// of a leg count as one; evenkeel never asks a leg for more.
type Mirror struct {
	ask        Ask
	continuous bool   // the client gets the usage of every chunk
	id         []byte // ask.ID as JSON
	byIDs      bool   // the answer is one of /inference/v1/generate

	f     facts  // of the current event
	marks []mark // of the current event

	tokens     int
	guessed    bool // some of the tokens are estimated from the number of chunks
	ids        int  // token ids seen
	chunks     int  // chunks with content
	idsSeen    bool
	usageSeen  bool
	told       bool // the client has the usage that it asked for
	idsThen    int  // ids and chunks when the last usage came, which has counted them
	chunksThen int
	started    bool
	finish     string
	stopped    bool // the answer ended at a stop text of the request
	handsBack  bool // the event with the finish_reason had kv_transfer_params: the engine keeps the KV
	usage      Usage
	details    []byte // prompt_tokens_details of usage
	drift      int
	reconciled bool
	promptIDs  int
	failure    Failure
	fault      error
	owed       []byte // the final usage as an event of its own, which the engine has not sent so far

	// Of the other forms than chunks:
	held   []byte // events that are held back until the first event with a token
	opened int    // how many events were held back
	events int    // events for the client so far, those held back included
	over   bool   // the last event ends the stream, whether it is [DONE] or not
}

// facts is what one event says, found in one pass over its bytes.
type facts struct {
	choices             int // -1: not a list of choices
	hasUsage            bool
	details, detailsEnd int // where the usage's prompt_tokens_details stands
	usage               Usage
	ids                 int // token ids in this event
	hasIDs              bool
	content             bool // text, reasoning, a tool call: what a token becomes
	bare                bool // the last choice says nothing at all: an empty delta, no finish, no logprobs

	finishAt, finishEnd int // the finish_reason, without its quotes
	recomputed          bool
	stopText            bool // the stop_reason is a text
	backAt, backEnd     int  // where kv_transfer_params stands; 0: there is none
	isError             bool

	textAt, textEnd int  // the text or content, with its quotes
	moreThan        bool // the event has content besides that text
	role            bool // the delta has a role
	idsAt           int  // the list of token ids
	promptIDs       int  // how many token ids of the prompt the event has

	promptAt, promptEnd int // where the list of the prompt's token ids stands
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
	spansValue

	// Where the prefill engine's cached_tokens go if the decode engine's usage has no such member:
	noDetails   // behind the members of a usage
	nullDetails // in place of null
	noCached    // behind the members of its details
)

// mark is a member that may have to change. Marks are in the order in which their
// keys stand, so a mark inside the value of another follows it. The places are int32
// because every stream keeps marks in memory; no event has more than 1 GiB.
type mark struct {
	what              what
	level             uint8 // 0 top, 1 a choice or usage, 2 usage's details
	open              int32 // its object's brace
	nth               int32 // members before it in that object
	comma, quote, val int32
	end               int32 // of its value
	n                 int32 // members of its value, where that matters
}

// mark keeps the current member of o, with the end of its value as far as o knows it.
func (m *Mirror) mark(w what, level uint8, o *rawjson.Object) {
	m.marks = append(m.marks, mark{what: w, level: level, open: int32(o.Open), nth: int32(o.N - 1), comma: int32(o.Comma),
		quote: int32(o.Quote), val: int32(o.Val), end: int32(o.Pos)})
}

// marked does what mark does, for a value whose end is not known yet.
func (m *Mirror) marked(w what, level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	m.mark(w, level, o)
}

// insert marks the place behind the last member of an object that was walked.
func (m *Mirror) insert(w what, o *rawjson.Object) {
	m.marks = append(m.marks, mark{what: w, open: int32(o.Open), val: int32(o.Pos - 1), end: int32(o.Pos - 1), n: int32(o.N)})
}

// read scans an event's JSON into m.f and m.marks; false if it is not an object.
func (m *Mirror) read(b []byte) bool {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.Next() {
		switch string(o.Key) {
		case "choices":
			m.readChoices(&o)
		case "usage":
			m.readUsage(&o)
		case "prompt_token_ids":
			m.foreignIDs(0, &o)
		case "kv_transfer_params":
			if b[o.Val] == '{' {
				m.f.backAt, m.f.backEnd = o.Val, rawjson.ValueEnd(b, o.Val)
			}
			m.marked(foreign, 0, &o)
		case "id":
			if len(m.id) > 0 {
				m.marked(idValue, 0, &o)
			}
		case "request_id":
			if m.byIDs && len(m.id) > 0 {
				m.marked(idValue, 0, &o)
			}
		case "created":
			if m.ask.Created != 0 || m.ask.Seam != nil {
				m.marked(createdValue, 0, &o)
			}
		case "model":
			m.seamed(modelValue, 0, &o)
		case "system_fingerprint":
			m.seamed(fingerprintValue, 0, &o)
		case "error":
			m.f.isError = m.f.isError || !rawjson.IsNull(b[o.Val:])
		case "object":
			m.f.isError = m.f.isError || bytes.HasPrefix(b[o.Val:], []byte(`"error"`))
		}
	}
	return o.Pos > 0 && rawjson.Space(b, o.Pos) == len(b)
}

// foreignIDs marks the prompt's token ids for removal, if the client did not ask for
// them or has them from an earlier leg.
func (m *Mirror) foreignIDs(level uint8, o *rawjson.Object) {
	o.Pos = rawjson.ValueEnd(o.Text, o.Val)
	if !m.ask.TokenIDs || m.ask.Seam != nil {
		m.mark(foreign, level, o)
	}
	if (m.ask.Trail != nil || m.ask.Seam != nil) && o.Pos-o.Val > len("[]") && o.Text[o.Val] == '[' { // not null, as behind the first event
		m.f.promptIDs = bytes.Count(o.Text[o.Val:o.Pos], []byte{','}) + 1
		m.f.promptAt, m.f.promptEnd = o.Val, o.Pos
	}
}

// seamed calls marked for a leg that goes on with an answer; other legs leave the
// member as it is.
func (m *Mirror) seamed(w what, level uint8, o *rawjson.Object) {
	if m.ask.Seam != nil {
		m.marked(w, level, o)
	}
}

func (m *Mirror) readChoices(top *rawjson.Object) {
	if top.Text[top.Val] != '[' {
		return
	}
	a := rawjson.ArrayAt(top.Text, top.Val)
	for a.Next() {
		if a.Text[a.Val] == '{' {
			a.Pos = m.readChoice(a.Text, a.Val)
		}
	}
	m.f.choices, top.Pos = a.N, a.Pos
}

func (m *Mirror) readChoice(b []byte, i int) int {
	bare, delta, texts := true, false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "index":
			if m.ask.Choice >= 0 {
				m.marked(indexValue, 1, &o)
			}
		case "delta":
			says := m.readDelta(&o)
			delta, bare = true, bare && !says
		case "text":
			bare, texts = false, true
			o.Pos = rawjson.ValueEnd(b, o.Val)
			if o.Pos-o.Val > len(`""`) && b[o.Val] == '"' {
				m.f.content, m.f.textAt, m.f.textEnd = true, o.Val, o.Pos
			}
		case "finish_reason":
			m.marked(endValue, 1, &o)
			if b[o.Val] == '"' {
				bare = false
				m.f.finishAt, m.f.finishEnd = o.Val+1, o.Pos-1
			}
		case "stop_reason":
			m.marked(endValue, 1, &o)
			m.f.stopText = m.f.stopText || b[o.Val] == '"'
			m.f.recomputed = m.f.recomputed || bytes.HasPrefix(b[o.Val:], []byte(`"recomputed"`))
		case "token_ids":
			m.readIDs(&o)
		case "prompt_token_ids":
			m.foreignIDs(1, &o)
		case "kv_transfer_params":
			m.marked(foreign, 1, &o)
		case "logprobs":
			if m.ask.Seam != nil && m.ask.Seam.Runes > 0 && b[o.Val] == '{' {
				o.Pos = m.readOffsets(b, o.Val)
			}
			bare = bare && rawjson.IsNull(b[o.Val:])
		case "weight_versions":
			if m.ask.Seam != nil && b[o.Val] == '[' {
				m.marked(spansValue, 1, &o)
			}
		}
	}
	if m.byIDs && !texts { // without a text, only token ids show that the choice has content
		m.f.content = m.f.content || m.f.ids > 0
	}
	m.f.bare = bare && delta
	return o.Pos
}

// readDelta returns whether a choice's delta says anything, a role or "" included.
func (m *Mirror) readDelta(choice *rawjson.Object) (says bool) {
	b := choice.Text
	if b[choice.Val] != '{' {
		return !rawjson.IsNull(b[choice.Val:])
	}
	o := rawjson.ObjectAt(b, choice.Val)
	for o.Next() {
		if string(o.Key) == "role" {
			m.f.role = true
			m.seamed(roleValue, 2, &o)
			continue
		}
		switch b[o.Val] {
		case '"', '[', '{': // more than the two quotes or brackets
			if o.Pos = rawjson.ValueEnd(b, o.Val); o.Pos-o.Val <= 2 {
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
	choice.Pos = o.Pos
	return o.N > 0
}

// readOffsets marks text_offset in a completion's logprobs: where each token begins in
// the text.
func (m *Mirror) readOffsets(b []byte, i int) int {
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		if string(o.Key) == "text_offset" && b[o.Val] == '[' {
			m.marked(offsetsValue, 2, &o)
		}
	}
	return o.Pos
}

// readIDs counts a choice's token ids: how many were generated since the last event.
func (m *Mirror) readIDs(choice *rawjson.Object) {
	if choice.Text[choice.Val] == '[' {
		a := rawjson.ArrayAt(choice.Text, choice.Val)
		for a.Next() {
			m.f.ids++
		}
		m.f.hasIDs, m.f.idsAt = true, choice.Val
		choice.Pos = a.Pos
	} else {
		choice.Pos = rawjson.ValueEnd(choice.Text, choice.Val)
	}
	if !m.ask.TokenIDs {
		m.mark(foreign, 1, choice)
	}
}

func (m *Mirror) readUsage(top *rawjson.Object) {
	k := len(m.marks)
	m.mark(usageValue, 0, top)
	if top.Text[top.Val] == '{' {
		top.Pos = m.readCounts(top.Text, top.Val)
	} else {
		top.Pos = rawjson.ValueEnd(top.Text, top.Val)
	}
	m.marks[k].end = int32(top.Pos)
}

func (m *Mirror) readCounts(b []byte, i int) int {
	u := Usage{Cached: -1}
	counts, total, details := false, false, false
	o := rawjson.ObjectAt(b, i)
	for o.Next() {
		switch string(o.Key) {
		case "prompt_tokens_details":
			details = true
			m.readDetails(&o, &u)
		case "prompt_tokens":
			u.Prompt, _ = m.readCount(promptValue, &o)
		case "completion_tokens":
			u.Completion, counts = m.readCount(completionValue, &o)
		case "total_tokens":
			u.Total, total = m.readCount(totalValue, &o)
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

func (m *Mirror) readCount(w what, usage *rawjson.Object) (n int, ok bool) {
	usage.Pos = rawjson.ValueEnd(usage.Text, usage.Val)
	if m.ask.Seam != nil {
		m.mark(w, 1, usage)
	}
	return rawjson.Int(usage.Text, usage.Val, usage.Pos)
}

func (m *Mirror) readDetails(usage *rawjson.Object, u *Usage) {
	b := usage.Text
	if b[usage.Val] != '{' {
		if m.ask.Cached >= 0 && b[usage.Val] == 'n' {
			m.marked(nullDetails, 1, usage)
		}
		return
	}
	k := len(m.marks)
	m.mark(detailsValue, 1, usage)
	o := rawjson.ObjectAt(b, usage.Val)
	cached := 0
	for o.Next() {
		if string(o.Key) == "cached_tokens" {
			cached++
			m.marked(cachedValue, 2, &o)
			if n, ok := rawjson.Int(b, o.Val, o.Pos); ok {
				u.Cached = n
			}
		}
	}
	usage.Pos = o.Pos
	m.f.details, m.f.detailsEnd = usage.Val, o.Pos
	m.marks[k].end, m.marks[k].n = int32(o.Pos), int32(o.N-cached)
	if cached == 0 {
		m.marks[k].n = 1 // the details lack cached_tokens, so act must not remove them, even if they are empty
		if m.ask.Cached >= 0 && o.Pos > 0 {
			m.insert(noCached, &o)
		}
	}
}
