package sse

import (
	"bytes"
	"strconv"

	"evenkeel/internal/rawjson"
)

// action says how the client's copy of an event differs at a marked member.
type action uint8

const (
	keepValue action = iota
	removeMember
	setNull
	setValue // write the value that appendValue returns
)

// editMarked returns the event as the client gets it: e.Raw if nothing changes, else dst with the changed event appended. Members that do
// not change keep their bytes, so that their order and the spelling of numbers stay as the engine wrote them.
func (f *Filter) editMarked(e Event, dst []byte) []byte {
	var removed removals
	b, copied, edited := e.Data, 0, false // copied: the offset in b up to which bytes were written or left out
	for i := range f.marks {
		marked := &f.marks[i]
		if int(marked.val) < copied {
			continue // a member that contains this one was replaced or removed already
		}
		action := f.actionFor(marked, b)
		if action == keepValue {
			continue
		}
		from, to := int(marked.val), int(marked.end)
		if action == removeMember {
			from, to = removed.next(b, marked)
		}
		if !edited {
			edited = true
			dst = appendHead(dst, e)
		}
		dst = appendPart(dst, e, b[copied:from])
		switch action {
		case setNull:
			dst = append(dst, "null"...)
		case setValue:
			dst = f.appendValue(dst, marked, b[marked.val:marked.end])
		}
		copied = to
	}
	if !edited {
		return e.Raw
	}
	return appendTail(appendPart(dst, e, b[copied:]), e)
}

// removals says for each nesting level of an event where the current object opens, and how many members it has lost.
type removals [3]struct{ open, lost int32 }

// next returns the part of b to leave out in order to remove the marked member, together with one comma, and counts this removal. The
// members must be removed in their order.
func (r *removals) next(b []byte, marked *mark) (from, to int) {
	object := &r[marked.level]
	if object.open != marked.open { // this member is the first one that its object loses
		object.open, object.lost = marked.open, 0
	}
	isFirst := marked.membersBefore == object.lost // every member before this one is removed
	object.lost++
	return rawjson.Cut(b, int(marked.comma), int(marked.quote), int(marked.end), isFirst)
}

// actionFor decides what to do at a mark. A mark is the place of a member of the event or, for three of its kinds, the place where the
// event lacks cached_tokens. b is the event's data.
func (f *Filter) actionFor(marked *mark, b []byte) action {
	old := b[marked.val:marked.end]
	switch marked.kind {
	case usageValue:
		return usageAction(f, old)
	case detailsValue, cachedValue, noDetails, nullDetails, noCached:
		return cachedAction(f, marked, old)
	case engineOnlyValue:
		switch {
		case !f.options.Unstreamed: // in a stream, the client's event lacks the member
			return removeMember
		case rawjson.IsNull(old): // in an answer in one piece, the member is null instead
			return keepValue
		}
		return setNull
	case idValue:
		if bytes.Equal(old, f.id) {
			return keepValue
		}
		return setValue
	case indexValue:
		return setUnlessSame(f, marked, old)
	case endValue: // after a preemption another engine continues the answer, so the client gets null instead of this end
		if f.facts.recomputed && !rawjson.IsNull(old) {
			return setNull
		}
		return keepValue
	}
	return continuedAction(f, marked, old)
}

// cachedAction decides what to do with cached_tokens and the prompt_tokens_details around it, or at the place where the event lacks them.
func cachedAction(f *Filter, marked *mark, old []byte) action {
	switch marked.kind {
	case detailsValue: // the details as a whole; cached_tokens in them has a mark of its own
		if f.options.Cached == unknownCached && marked.hasOnlyCached { // the details would be empty without cached_tokens
			return removeMember
		}
		return keepValue
	case cachedValue:
		switch f.options.Cached {
		case OwnCached: // this engine's own count is right
			return keepValue
		case unknownCached:
			return removeMember
		}
		return setUnlessSame(f, marked, old) // the prefill engine's count replaces it
	}
	// The event lacks cached_tokens: noDetails, nullDetails, noCached. The prefill engine's count is inserted.
	if f.facts.hasUsage {
		return setValue
	}
	return keepValue // a usage whose counts could not be read gets no new details
}

// continuedAction decides what to do with created, and with a member that is only marked if this engine continues the answer of an earlier
// engine.
func continuedAction(f *Filter, marked *mark, old []byte) action {
	switch marked.kind {
	case roleValue: // the client has the role from the first engine
		return removeMember
	case offsetsValue, spansValue: // the engine counts them from the start of its own part of the answer
		return setValue
	case promptValue, completionValue, totalValue:
		if !f.facts.hasUsage { // the usage could not be read, so the tokens of earlier engines cannot be added
			return keepValue
		}
	case createdValue:
		if f.options.Created == 0 && len(f.options.Continuation.Head.Created) == 0 {
			return keepValue // neither the caller nor the first engine of this answer has another value
		}
	case modelValue:
		if len(f.options.Continuation.Head.Model) == 0 {
			return keepValue // the first engine of this answer sent no model
		}
	case fingerprintValue:
		if len(f.options.Continuation.Head.Fingerprint) == 0 {
			return removeMember // the first engine of this answer sent no fingerprint
		}
	}
	return setUnlessSame(f, marked, old)
}

// setUnlessSame returns setValue, or keepValue if the member has the client's value already: an event without any edit is not copied.
func setUnlessSame(f *Filter, marked *mark, old []byte) action {
	var scratch [20]byte
	if bytes.Equal(old, f.appendValue(scratch[:0], marked, old)) {
		return keepValue
	}
	return setValue
}

// usageAction decides what to do with a usage, whose value in the event is old.
func usageAction(f *Filter, old []byte) action {
	wanted := f.continuousUsage || f.options.Usage && f.facts.choices == 0 // the client asked for the usage of this event
	switch {
	case wanted:
		return keepValue
	case !f.options.Usage && !f.isTokensForm: // at /inference/v1/generate every event has a usage, and the client expects one
		return removeMember
	case rawjson.IsNull(old):
		return keepValue
	}
	return setNull // OpenAI sends null in each event before the one with the final usage
}

// appendValue appends what the client gets at a mark if it gets a new value there. old is the value in the event.
func (f *Filter) appendValue(dst []byte, marked *mark, old []byte) []byte {
	switch marked.kind {
	case noDetails, nullDetails, noCached: // the event lacks cached_tokens
		return f.appendCached(dst, marked)
	case cachedValue: // cached_tokens: the prefill engine's count
		return strconv.AppendInt(dst, int64(f.options.Cached), 10)
	case idValue:
		return append(dst, f.id...)
	case indexValue: // the index of a choice
		return strconv.AppendInt(dst, int64(f.options.Choice), 10)
	case createdValue:
		if f.options.Created != 0 { // the caller wants this value; otherwise the mark is for a continued answer
			return strconv.AppendInt(dst, f.options.Created, 10)
		}
	}
	return appendContinued(dst, f, marked.kind, old)
}

// appendContinued appends the value of a member that differs because this engine continues the answer of an earlier engine, so
// Options.Continuation is set. The client gets the first engine's head, and counts and offsets that include the earlier part of the answer.
func appendContinued(dst []byte, f *Filter, kind valueKind, old []byte) []byte {
	earlier := f.options.Continuation
	switch kind {
	case createdValue:
		return append(dst, earlier.Head.Created...)
	case modelValue:
		return append(dst, earlier.Head.Model...)
	case fingerprintValue:
		return append(dst, earlier.Head.Fingerprint...)
	case promptValue:
		return strconv.AppendInt(dst, int64(earlier.addEarlier(f.facts.usage).Prompt), 10)
	case completionValue:
		return strconv.AppendInt(dst, int64(earlier.addEarlier(f.facts.usage).Completion), 10)
	case totalValue:
		return strconv.AppendInt(dst, int64(earlier.addEarlier(f.facts.usage).Total), 10)
	case offsetsValue: // where each token begins in the text
		return appendShifted(dst, old, earlier.Runes)
	default: // spansValue: which model weights made which tokens
		return appendSpans(dst, old, earlier.Tokens)
	}
}

// appendCached appends the prefill engine's cached_tokens, and the enclosing prompt_tokens_details if the event lacks that object.
func (f *Filter) appendCached(dst []byte, marked *mark) []byte {
	isNewMember := marked.kind != nullDetails // nullDetails: a value in place of null
	lacksObject := marked.kind != noCached    // noCached: the object prompt_tokens_details is there
	if isNewMember && marked.needsComma {
		dst = append(dst, ',')
	}
	if marked.kind == noDetails {
		dst = append(dst, `"prompt_tokens_details":`...)
	}
	if lacksObject {
		dst = append(dst, '{')
	}
	dst = strconv.AppendInt(append(dst, `"cached_tokens":`...), int64(f.options.Cached), 10)
	if lacksObject {
		dst = append(dst, '}')
	}
	return dst
}

// appendShifted appends a list of numbers with offset added to each.
func appendShifted(dst, list []byte, offset int) []byte {
	dst = append(dst, '[')
	a := rawjson.ArrayAt(list, 0)
	for a.Next() {
		a.Pos = rawjson.ValueEnd(list, a.Val)
		if a.N > 1 {
			dst = append(dst, ',')
		}
		if v, ok := rawjson.Int(list, a.Val, a.Pos); ok {
			dst = strconv.AppendInt(dst, int64(v+offset), 10)
		} else if a.Pos > 0 { // the element is no number, such as null, so it is copied unchanged
			dst = append(dst, list[a.Val:a.Pos]...)
		}
	}
	return append(dst, ']')
}

// appendHead appends the bytes of an event before its data. If the data came in several lines, all other lines of the event come first.
func appendHead(dst []byte, e Event) []byte {
	if e.dataAt > 0 { // the data came in one line
		return append(dst, e.Raw[:e.dataAt]...)
	}
	return append(appendOtherLines(dst, e.Raw), "data: "...)
}

// appendPart appends a piece of the data. Data that came in several data lines is written in several, too.
func appendPart(dst []byte, e Event, part []byte) []byte {
	if e.dataAt > 0 { // the data came in one line, so part has no line break
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

// appendTail appends the bytes of an event after its data, at least the blank line that ends the event.
func appendTail(dst []byte, e Event) []byte {
	if e.dataAt > 0 { // the data came in one line; otherwise appendHead has written all other lines
		return append(dst, e.Raw[e.dataAt+len(e.Data):]...)
	}
	return append(dst, "\n\n"...)
}
