package sse

import (
	"bytes"
	"strconv"

	"evenkeel/internal/rawjson"
)

type action uint8

const (
	keepValue action = iota
	removeMember
	setNull
	setValue
)

// editMarked returns e.Raw if nothing changes. All other bytes are copied, so that the order of the
// members and the spelling of numbers stay as the engine wrote them.
func (f *Filter) editMarked(e Event, dst []byte) []byte {
	var removed removals
	b, copied, edited := e.Data, 0, false // copied: up to where bytes of b were written or left out
	for i := range f.marks {
		marked := &f.marks[i]
		if int(marked.val) < copied {
			continue // inside a member that was replaced or removed
		}
		action := f.actionFor(marked, b)
		if action == keepValue {
			continue
		}
		from, to := int(marked.val), int(marked.end)
		if action == removeMember {
			from, to = removed.next(b, marked) // with its key and one comma
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

// removals has, per nesting level, the object that loses members now, and how many it has lost.
// This number decides which comma goes with the next one.
type removals [3]struct{ openAt, lost int32 }

// next returns the part of b to leave out. The members must be removed in their order.
func (r *removals) next(b []byte, marked *mark) (from, to int) {
	object := &r[marked.level]
	if object.openAt != marked.openAt {
		object.openAt, object.lost = marked.openAt, 0
	}
	isFirst := marked.membersBefore == object.lost // then the comma after it goes, too
	object.lost++
	return rawjson.Cut(b, int(marked.comma), int(marked.quote), int(marked.end), isFirst)
}

func (f *Filter) actionFor(marked *mark, b []byte) action {
	old := b[marked.val:marked.end]
	switch marked.kind {
	case usageValue:
		return usageAction(f, old)
	case detailsValue, cachedValue:
		return cachedAction(f, marked, old)
	case missingDetails, nullDetails, missingCached: // the event lacks cached_tokens
		if f.facts.hasUsage {
			return setValue
		}
		return keepValue // the counts of the usage could not be read
	case engineOnlyValue:
		switch {
		case !f.options.Unstreamed:
			return removeMember
		case rawjson.IsNull(old): // in an answer in one piece, the member is null
			return keepValue
		}
		return setNull
	case idValue:
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
	case indexValue:
		return setUnlessSame(f, marked, old)
	case endValue:
		if f.facts.recomputed && !rawjson.IsNull(old) { // another engine continues the answer
			return setNull
		}
		return keepValue
	default: // only marked if this engine continues an answer; created also for Options.Created
		return continuedAction(f, marked, old)
	}
}

func cachedAction(f *Filter, marked *mark, old []byte) action {
	isUnknown := f.options.Cached == unknownCached
	switch {
	// the details would be empty
	case marked.kind == detailsValue && isUnknown && marked.hasOnlyCached:
		return removeMember
	case marked.kind == detailsValue: // cached_tokens has a mark of its own
		return keepValue
	case f.options.Cached == OwnCached:
		return keepValue
	case isUnknown:
		return removeMember
	}
	return setUnlessSame(f, marked, old)
}

// continuedAction: this engine continues the answer of an earlier one. The client must see one
// answer: the head of the first engine's events, and counts from the beginning of the answer.
func continuedAction(f *Filter, marked *mark, old []byte) action {
	switch marked.kind {
	case roleValue: // the client has it from the first engine
		return removeMember
	case offsetsValue: // the engine counts from the start of its own part
		return setValue
	case spansValue: // null except with the finish_reason
		if isLast := f.facts.finishEnd > 0; rawjson.IsNull(old) && !isLast {
			return keepValue
		}
		return setValue
	case promptValue, completionValue, totalValue:
		if !f.facts.hasUsage { // the usage could not be read
			return keepValue
		}
	case createdValue:
		if f.options.Created == 0 && len(f.options.Continuation.Head.Created) == 0 {
			return keepValue
		}
	case modelValue:
		if len(f.options.Continuation.Head.Model) == 0 {
			return keepValue // clients expect a model in each event
		}
	case fingerprintValue:
		if len(f.options.Continuation.Head.Fingerprint) == 0 {
			return removeMember // optional, so the client's events stay alike without it
		}
	}
	return setUnlessSame(f, marked, old)
}

// setUnlessSame avoids an edit where it can: an event without any is not copied.
func setUnlessSame(f *Filter, marked *mark, old []byte) action {
	var scratch [20]byte
	if bytes.Equal(old, f.appendValue(scratch[:0], marked, old)) {
		return keepValue
	}
	return setValue
}

// usageAction: a client that asked for the final usage gets it in the event without choices, and
// null in all others.
func usageAction(f *Filter, old []byte) action {
	wanted := f.continuousUsage || f.options.Usage && f.facts.choices == 0
	switch {
	case wanted:
		return keepValue
	case !f.options.Usage && !f.isTokensForm: // a Tokens event must keep usage
		return removeMember
	case rawjson.IsNull(old):
		return keepValue
	}
	return setNull // as OpenAI does before the final usage
}

func (f *Filter) appendValue(dst []byte, marked *mark, old []byte) []byte {
	switch marked.kind {
	case missingDetails, nullDetails, missingCached:
		return f.appendCached(dst, marked)
	case cachedValue:
		return strconv.AppendInt(dst, int64(f.options.Cached), 10)
	case idValue:
		return append(dst, f.id...)
	case indexValue:
		return strconv.AppendInt(dst, int64(f.options.Choice), 10)
	case createdValue:
		if f.options.Created != 0 {
			return strconv.AppendInt(dst, f.options.Created, 10)
		}
	case modelValue:
		if len(f.model) > 0 {
			return append(dst, f.model...)
		}
	}
	// Only marked because this engine continues an answer.
	return appendContinued(dst, f, marked.kind, old)
}

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
	case offsetsValue:
		return appendShifted(dst, old, earlier.Runes)
	default:
		return append(dst, joinSpans(earlier.Spans, old, earlier.Tokens)...)
	}
}

func (f *Filter) appendCached(dst []byte, marked *mark) []byte {
	if marked.needsComma {
		dst = append(dst, ',')
	}
	switch marked.kind {
	case missingDetails:
		dst = append(append(dst, `"prompt_tokens_details":`...), '{')
	case nullDetails:
		dst = append(dst, '{')
	}
	dst = strconv.AppendInt(append(dst, `"cached_tokens":`...), int64(f.options.Cached), 10)
	if marked.kind == missingCached { // the event has the closing brace
		return dst
	}
	return append(dst, '}')
}

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
		} else if a.Pos > 0 { // no number, such as null
			dst = append(dst, list[a.Val:a.Pos]...)
		}
	}
	return append(dst, ']')
}

// appendHead: if the data came in several lines, all other lines come first.
func appendHead(dst []byte, e Event) []byte {
	if e.dataAt > 0 { // the data came in one line
		return append(dst, e.Raw[:e.dataAt]...)
	}
	return append(appendOtherLines(dst, e.Raw), "data: "...)
}

func appendPart(dst []byte, e Event, part []byte) []byte {
	if e.dataAt > 0 {
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

func appendTail(dst []byte, e Event) []byte {
	if e.dataAt > 0 { // otherwise appendHead has written all other lines
		return append(dst, e.Raw[e.dataAt+len(e.Data):]...)
	}
	return append(dst, "\n\n"...)
}
