package sse

import (
	"bytes"
	"strconv"

	"evenkeel/internal/rawjson"
)

// action is what becomes of a marked member of an event.
type action uint8

const (
	keep action = iota
	remove
	null
	put // the value that m.value appends
)

// edit returns the event as the client gets it. All bytes but those of the
// members that change stay as the engine wrote them, order and numbers included.
func (m *Mirror) edit(e Event, dst []byte) []byte {
	var gone [3]struct{ open, n int32 } // members removed so far of the current object of each level
	b, copied, edited := e.Data, 0, false
	for i := range m.marks {
		marked := &m.marks[i]
		if int(marked.val) < copied {
			continue // inside a member that is gone
		}
		act := m.act(marked, b)
		if act == keep {
			continue
		}
		from, to := int(marked.val), int(marked.end)
		if act == remove {
			removed := &gone[marked.level]
			if removed.open != marked.open {
				removed.open, removed.n = marked.open, 0
			}
			from, to = rawjson.Cut(b, int(marked.comma), int(marked.quote), to, marked.nth == removed.n)
			removed.n++
		}
		if !edited {
			edited = true
			dst = appendHead(dst, e)
		}
		dst = appendPart(dst, e, b[copied:from])
		switch act {
		case null:
			dst = append(dst, "null"...)
		case put:
			switch marked.kind {
			case spansValue:
				dst = appendSpans(dst, b[marked.val:marked.end], m.ask.Seam.Tokens)
			case offsetsValue:
				dst = appendShifted(dst, b[marked.val:marked.end], m.ask.Seam.Runes)
			case noDetails, nullDetails, noCached:
				dst = m.appendCached(dst, marked)
			default:
				dst = m.appendValue(dst, marked.kind)
			}
		}
		copied = to
	}
	if !edited {
		return e.Raw
	}
	return appendTail(appendPart(dst, e, b[copied:]), e)
}

// act says what becomes of a marked member.
func (m *Mirror) act(marked *mark, b []byte) action {
	var scratch [20]byte
	old := b[marked.val:marked.end]
	switch marked.kind {
	case usageValue:
		switch {
		case m.continuous, m.ask.Usage && m.facts.choices == 0:
			return keep
		case m.byIDs && rawjson.IsNull(old): // each event of this endpoint has a usage
			return keep
		case !m.ask.Usage && !m.byIDs:
			return remove
		case rawjson.IsNull(old):
			return keep
		}
		return null // what OpenAI sends before the final usage
	case detailsValue:
		if m.ask.Cached == -1 && marked.inside == 0 {
			return remove
		}
		return keep
	case cachedValue:
		switch m.ask.Cached {
		case OwnCached:
			return keep
		case -1:
			return remove
		}
	case noDetails, nullDetails, noCached:
		if m.facts.hasUsage {
			return put
		}
		return keep
	case foreign:
		switch {
		case !m.ask.Whole:
			return remove
		case rawjson.IsNull(old): // engines send this null in every answer in one piece
			return keep
		}
		return null
	case roleValue:
		return remove
	case offsetsValue, spansValue:
		return put
	case promptValue, completionValue, totalValue:
		if !m.facts.hasUsage {
			return keep
		}
	case createdValue:
		if m.ask.Created == 0 && len(m.ask.Seam.Head.Created) == 0 {
			return keep
		}
	case modelValue:
		if len(m.ask.Seam.Head.Model) == 0 {
			return keep
		}
	case fingerprintValue:
		if len(m.ask.Seam.Head.Fingerprint) == 0 {
			return remove // the first leg had none
		}
	case idValue:
		if bytes.Equal(old, m.id) {
			return keep
		}
		return put
	case endValue: // of a leg whose answer goes on in another
		if m.facts.recomputed && !rawjson.IsNull(old) {
			return null
		}
		return keep
	}
	if bytes.Equal(old, m.appendValue(scratch[:0], marked.kind)) {
		return keep
	}
	return put
}

// appendValue appends the value that the client gets for a member of this kind.
func (m *Mirror) appendValue(dst []byte, w valueKind) []byte {
	switch w {
	case idValue:
		return append(dst, m.id...)
	case createdValue:
		if m.ask.Created == 0 {
			return append(dst, m.ask.Seam.Head.Created...)
		}
		return strconv.AppendInt(dst, m.ask.Created, 10)
	case modelValue:
		return append(dst, m.ask.Seam.Head.Model...)
	case fingerprintValue:
		return append(dst, m.ask.Seam.Head.Fingerprint...)
	case promptValue:
		return strconv.AppendInt(dst, int64(m.ask.Seam.join(m.facts.usage).Prompt), 10)
	case completionValue:
		return strconv.AppendInt(dst, int64(m.ask.Seam.join(m.facts.usage).Completion), 10)
	case totalValue:
		return strconv.AppendInt(dst, int64(m.ask.Seam.join(m.facts.usage).Total), 10)
	case indexValue:
		return strconv.AppendInt(dst, int64(m.ask.Choice), 10)
	default:
		return strconv.AppendInt(dst, int64(m.ask.Cached), 10)
	}
}

// appendCached appends prefill's cached_tokens with what is missing around them.
func (m *Mirror) appendCached(dst []byte, marked *mark) []byte {
	if marked.kind != nullDetails && marked.inside > 0 {
		dst = append(dst, ',')
	}
	if marked.kind == noDetails {
		dst = append(dst, `"prompt_tokens_details":`...)
	}
	if marked.kind != noCached {
		dst = append(dst, '{')
	}
	dst = strconv.AppendInt(append(dst, `"cached_tokens":`...), int64(m.ask.Cached), 10)
	if marked.kind != noCached {
		dst = append(dst, '}')
	}
	return dst
}

// appendShifted appends a list of numbers, each with n more.
func appendShifted(dst, list []byte, n int) []byte {
	dst = append(dst, '[')
	a := rawjson.ArrayAt(list, 0)
	for a.Next() {
		a.Pos = rawjson.ValueEnd(list, a.Val)
		if a.N > 1 {
			dst = append(dst, ',')
		}
		if v, ok := rawjson.Int(list, a.Val, a.Pos); ok {
			dst = strconv.AppendInt(dst, int64(v+n), 10)
		} else if a.Pos > 0 {
			dst = append(dst, list[a.Val:a.Pos]...)
		}
	}
	return append(dst, ']')
}

// appendHead appends what stands before an event's data.
func appendHead(dst []byte, e Event) []byte {
	if e.at > 0 {
		return append(dst, e.Raw[:e.at]...)
	}
	return append(appendOtherLines(dst, e.Raw), "data: "...)
}

// appendPart appends a piece of the data. Data that came in several lines goes
// out in several lines.
func appendPart(dst []byte, e Event, part []byte) []byte {
	if e.at > 0 {
		return append(dst, part...)
	}
	for {
		i := bytes.IndexByte(part, '\n')
		if i < 0 {
			return append(dst, part...)
		}
		dst = append(append(dst, part[:i+1]...), "data: "...)
		part = part[i+1:]
	}
}

// appendTail appends what stands behind an event's data.
func appendTail(dst []byte, e Event) []byte {
	if e.at > 0 {
		return append(dst, e.Raw[e.at+len(e.Data):]...)
	}
	return append(dst, "\n\n"...)
}
