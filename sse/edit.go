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

// editMarked returns the event as the client gets it: e.Raw if nothing changes, else dst with the changed event appended. f.marks has the
// members that may have to change. All other bytes are copied, so that the order of the members and the spelling of numbers stay as the
// engine wrote them.
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
			from, to = removed.next(b, marked) // the member with its key and one comma
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

// removals has, for each nesting level of an event, the object that loses members now: the offset of its opening brace, and how many
// members it has lost so far. This number decides which comma goes with the next member.
type removals [3]struct{ openAt, lost int32 }

// next returns the part of b to leave out in order to remove the marked member, together with one comma, and counts this removal. The
// members must be removed in their order.
func (r *removals) next(b []byte, marked *mark) (from, to int) {
	object := &r[marked.level]          // the object at this level that lost a member last
	if object.openAt != marked.openAt { // the marked member is in another object, which has lost none yet
		object.openAt, object.lost = marked.openAt, 0
	}
	isFirst := marked.membersBefore == object.lost // every member before this one is removed, so the comma after it goes, too
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
	case detailsValue, cachedValue: // prompt_tokens_details, and cached_tokens in them
		return cachedAction(f, marked, old)
	case missingDetails, nullDetails, missingCached: // the event lacks cached_tokens, so the prefill engine's count is inserted
		if f.facts.hasUsage {
			return setValue
		}
		return keepValue // a usage whose counts could not be read gets no new details
	case engineOnlyValue: // such as kv_transfer_params, and token ids that the client did not ask for
		switch {
		case !f.options.Unstreamed: // in a stream, the client's event lacks the member
			return removeMember
		case rawjson.IsNull(old): // in an answer in one piece, the member is null instead
			return keepValue
		}
		return setNull
	case idValue: // f.id: the caller's, or that of the engine that began the answer
		if bytes.Equal(old, f.id) {
			return keepValue
		}
		return setValue
	case modelValue:
		switch {
		case len(f.model) == 0:
			return continuedAction(f, marked, old)
		case bytes.Equal(old, f.model):
			return keepValue
		}
		return setValue
	case indexValue: // the number of the choice; Options.Choice replaces it
		return setUnlessSame(f, marked, old)
	case endValue: // finish_reason or stop_reason
		if f.facts.recomputed && !rawjson.IsNull(old) { // preempted: another engine continues the answer, so it has not ended
			return setNull
		}
		return keepValue
	default: // created, system_fingerprint, role, the counts of the usage, text_offset, weight_versions
		return continuedAction(f, marked, old)
	}
}

// cachedAction decides what to do with cached_tokens in the event, or with the prompt_tokens_details around it. It depends on
// Options.Cached, which is the prefill engine's count, unknownCached or OwnCached.
func cachedAction(f *Filter, marked *mark, old []byte) action {
	isUnknown := f.options.Cached == unknownCached // the client must not get any count
	switch {
	case marked.kind == detailsValue && isUnknown && marked.hasOnlyCached: // without cached_tokens, the details would be empty
		return removeMember
	case marked.kind == detailsValue: // cached_tokens in the details has a mark of its own
		return keepValue
	case f.options.Cached == OwnCached: // this engine's own count is right
		return keepValue
	case isUnknown:
		return removeMember
	}
	return setUnlessSame(f, marked, old) // the prefill engine's count replaces it
}

// continuedAction decides what to do with a member that is marked because this engine continues the answer of an earlier engine. The client
// must see one answer: the head of the first engine's events, and counts from the beginning of the answer. created is also marked if
// Options.Created replaces it. old is the member's value in the event.
func continuedAction(f *Filter, marked *mark, old []byte) action {
	switch marked.kind {
	case roleValue: // the client has the role from the first engine
		return removeMember
	case offsetsValue: // the engine counts them from the start of its own part of the answer
		return setValue
	case spansValue: // null in all events but the one with the finish_reason
		if isLast := f.facts.finishEnd > 0; rawjson.IsNull(old) && !isLast {
			return keepValue
		}
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
		if len(f.options.Continuation.Head.Model) == 0 { // the first engine sent no model
			return keepValue // clients expect a model in each event, so this engine's is better than none
		}
	case fingerprintValue:
		if len(f.options.Continuation.Head.Fingerprint) == 0 { // the first engine sent no fingerprint
			return removeMember // the member is optional, so the client's events stay alike without it
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

// usageAction decides what to do with a usage, whose value in the event is old. A client that asked for the usage of each event keeps it.
// One that asked for the final usage keeps it in the event without choices, and gets null in all others. A client that asked for none gets
// no usage; at /inference/v1/generate it gets null.
func usageAction(f *Filter, old []byte) action {
	wanted := f.continuousUsage || f.options.Usage && f.facts.choices == 0 // the client asked for the usage of this event
	switch {
	case wanted:
		return keepValue
	case !f.options.Usage && !f.isTokensForm: // at /inference/v1/generate every event has the member usage, so it must stay
		return removeMember
	case rawjson.IsNull(old):
		return keepValue
	}
	return setNull // as OpenAI does in each event before the one with the final usage
}

// appendValue appends the new value of a marked member, which may differ from old, its value in the event. At a place where the event lacks
// cached_tokens, it appends what must be inserted.
func (f *Filter) appendValue(dst []byte, marked *mark, old []byte) []byte {
	switch marked.kind {
	case missingDetails, nullDetails, missingCached: // the event lacks cached_tokens
		return f.appendCached(dst, marked)
	case cachedValue: // cached_tokens: the prefill engine's count
		return strconv.AppendInt(dst, int64(f.options.Cached), 10)
	case idValue:
		return append(dst, f.id...)
	case indexValue: // the index of a choice
		return strconv.AppendInt(dst, int64(f.options.Choice), 10)
	case createdValue:
		if f.options.Created != 0 { // the caller has chosen this value
			return strconv.AppendInt(dst, f.options.Created, 10)
		}
	case modelValue:
		if len(f.model) > 0 {
			return append(dst, f.model...)
		}
	}
	// Here the member is only marked because this engine continues an answer: created, model, the counts of the usage and so on.
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
		return append(dst, joinSpans(earlier.Spans, old, earlier.Tokens)...)
	}
}

// appendCached appends the prefill engine's cached_tokens, and the enclosing prompt_tokens_details if the event lacks that object.
func (f *Filter) appendCached(dst []byte, marked *mark) []byte {
	if marked.needsComma { // the new member comes after others; false if only the value null is replaced
		dst = append(dst, ',')
	}
	switch marked.kind {
	case missingDetails: // the usage has no prompt_tokens_details
		dst = append(append(dst, `"prompt_tokens_details":`...), '{')
	case nullDetails: // their value is null, which the object replaces
		dst = append(dst, '{')
	}
	dst = strconv.AppendInt(append(dst, `"cached_tokens":`...), int64(f.options.Cached), 10)
	if marked.kind == missingCached { // the event has the object, and so its closing brace
		return dst
	}
	return append(dst, '}')
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
