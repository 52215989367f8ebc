package sse

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"unicode"
	"unicode/utf8"

	"evenkeel/internal/rawjson"
)

// ErrOtherGrowth is the fault of an event that cannot be joined to those of another engine.
var ErrOtherGrowth = errors.New("this engine and the one before send /generate differently, all of an answer so far or only what is new; " +
	"set --incremental-streaming-output for all engines of a model or for none")

// growthOf finds out whether an event of /generate has all tokens of the answer so far or only the new ones. listed is the number of token
// ids in the event, completion the engine's count of the answer's tokens, and earlier the number of ids in earlier events. ok is false if
// the numbers fit neither.
func growthOf(listed, completion, earlier int) (growth Growth, ok bool) {
	switch {
	case earlier == 0: // the first event with tokens looks the same in cumulative and in delta streams
		return GrowthUnknown, listed == completion
	case listed == completion:
		return Cumulative, true
	}
	return Delta, listed+earlier == completion
}

// recordGenerated adds an event of /generate, whose data is b, to the transcript. The event has either the whole answer so far (Cumulative)
// or only the new part (Delta), which decides what in it is new.
func (t *Transcript) recordGenerated(f *Filter, s *formFacts, b []byte) {
	if t.Head.ID == nil && s.idAt.to-s.idAt.from <= maxHead { // a longer id is left out, as in readHead
		t.Head.ID = bytes.Clone(b[s.idAt.from:s.idAt.to])
	}
	t.Completed, t.Prompt = f.tokens, s.usage.Prompt
	idsBefore := len(t.IDs)
	growth := t.recordGeneratedIDs(s, b)
	t.Content = t.Content || len(t.IDs) > idsBefore // new tokens are content, even if they show no text yet
	t.recordTextShown(b[s.textAt.from:s.textAt.to], growth)
	t.Last = append(t.Last[:0], b...) // if another engine continues the answer, its events are joined to this one (editsToJoin)
}

// recordGeneratedIDs adds the ids of the event's new tokens. It returns whether the event has the whole answer so far (Cumulative) or only
// the new part (Delta), and stores this unless it is GrowthUnknown. The transcript becomes Unread, so that no other engine continues the
// answer, if the number of ids does not fit the engine's count, or if earlier events were of the other kind.
func (t *Transcript) recordGeneratedIDs(s *formFacts, b []byte) Growth {
	idsBefore := len(t.IDs)
	listed, allTokens := countListed(b, s.idsAt), s.usage.Completion // ids in this event, and tokens so far by the engine's count
	// consistent is false if the event lists neither all tokens nor just the new ones. In the first event with tokens all of them are
	// new, so that grows is GrowthUnknown.
	grows, consistent := growthOf(listed, allTokens, idsBefore)
	if grows != GrowthUnknown { // all later events must grow in the same way
		consistent = consistent && (t.Grows == GrowthUnknown || t.Grows == grows)
		t.Grows = grows
	}
	t.Unread = t.Unread || !consistent // no other engine continues an Unread transcript
	repeated := 0                      // how many ids at the beginning of the list came in earlier events
	if grows == Cumulative {
		repeated = idsBefore
	}
	if s.idsAt.to == 0 { // the event has no list of ids
		return grows
	}
	for ids := rawjson.ArrayAt(b, s.idsAt.from); ids.Next(); {
		id := takeElement(&ids)
		if ids.N > repeated {
			t.recordID(id)
		}
	}
	return grows
}

// recordTextShown counts all tokens so far as shown to the client, if the event has new text and the engine holds none back. An engine
// holds back the text of the last tokens while the next token may change it, as when a character is not complete. textJSON is the event's
// text as a JSON string, with its quotes. It is empty if the event has no text at all: the engine then has no tokenizer, and the client
// misses no text.
func (t *Transcript) recordTextShown(textJSON []byte, grows Growth) {
	hasText := len(textJSON) > 0
	isNew := len(textJSON) > t.textBytes // in a cumulative stream, the text is longer than that of the last event
	if grows == Delta {
		isNew = len(textJSON) > len(`""`)
	}
	if hasText && !isNew {
		return // the text of the new tokens comes with a later event
	}
	t.textBytes = len(textJSON)
	if holdsNothingBack(textJSON) {
		t.Shown = len(t.IDs)
	}
}

// countListed returns the number of elements of the list that b has between the offsets in at. It returns 0 if at is empty, because the
// event has no such list.
func countListed(b []byte, at edit) (n int) {
	for list := rawjson.ArrayAt(b, at.from); at.to > 0 && list.Next(); n++ {
		list.Pos = rawjson.ValueEnd(b, list.Val)
	}
	return n
}

// holdsNothingBack says whether a text that has just become longer surely includes the text of all its tokens. textJSON is the text as a
// JSON string, with its quotes; empty: the event has no text. If an engine holds back characters that the next token may change, it cuts
// the text after a space or a Chinese character (SGLang 0.5.23, find_printable_text in utils.py). So a text with another last character is
// not cut. One with such a last character may be cut, so the result is false.
func holdsNothingBack(textJSON []byte) bool {
	switch {
	case len(textJSON) == 0: // an engine without a tokenizer sends no text, so no token lacks its text
		return true
	case len(textJSON) <= len(`""`): // the engine has a tokenizer, and holds back all text so far
		return false
	}
	inside := textJSON[1 : len(textJSON)-1]
	at := len(inside) - len(`\u0000`) // where an escape at the end of the text would begin
	endsWithEscape := at >= 0 && inside[at] == '\\' && inside[at+1] == 'u'
	if endsWithEscape { // the escaped character is not decoded here: it may be a Chinese one
		return false
	}
	r, _ := utf8.DecodeLastRune(inside)
	return r != ' ' && !unicode.Is(unicode.Han, r)
}

// Join appends next, the transcript of the engine that continued this answer. Head, Prompt and PromptIDs do not change.
func (t *Transcript) Join(next *Transcript) {
	if next.Content { // else the client has seen none of the next engine's tokens
		t.Shown = len(t.IDs) + next.Shown
	}
	t.IDs = append(t.IDs, next.IDs...)
	t.Text = append(t.Text, next.Text...)
	t.Runes += next.Runes
	if len(t.Spans)+len(next.Spans) > 0 {
		t.Spans = []byte(joinSpans(t.Spans, next.Spans, t.Completed))
	}
	t.Completed += next.Completed            // tokens
	t.Guessed = t.Guessed || next.Guessed    // some of these tokens are estimated
	t.Content = t.Content || next.Content    // text, reasoning or a tool call has come
	t.MoreThan = t.MoreThan || next.MoreThan // there was content other than plain text
	t.Unread = t.Unread || next.Unread       // a part of the answer may be missing
	t.joinLast(next)                         // the last event, for /generate
}

// joinLast replaces t.Last, the last event of the engines before, by next.Last, edited so that it also has their part of the answer. Both
// are events of /generate. joinLast also adds weight_versions, in which SGLang lists which model weights made which tokens, so that the
// list of a further engine can be joined to it.
func (t *Transcript) joinLast(next *Transcript) {
	if len(next.Last) == 0 { // the endpoint is not /generate, or the next engine sent nothing
		return
	}
	last := withWeightVersions(next.Last, next.Spans)
	if len(t.Last) == 0 { // t is still empty: next is the transcript of the first engine
		t.Last, t.Grows = last, next.Grows // Grows says whether events have the whole answer so far or only the new part
		return
	}
	// The next engine's events grow as those of t: joinGenerated has refused any other engine.
	t.Last = applyEdits(editsToJoin(nil, t.Last, t.Grows, last), last)
}

// withWeightVersions returns a copy of the event with the member weight_versions, a list of spans that says which model weights made which
// tokens. Some engines send the list only in the last event of an answer, which an engine that failed never sent. Then withWeightVersions
// adds spans, which came with an abort, or without them a list with one span: weight_version, the current weights, made all of the engine's
// tokens.
func withWeightVersions(event, spans []byte) []byte {
	o := rawjson.ObjectAt(event, rawjson.Space(event, 0))
	for o.NextValue() {
		meta := o.Value()
		if string(o.Key) != "meta_info" || meta[0] != '{' {
			continue
		}
		version := memberOf(meta, "weight_version")
		if memberOf(meta, "weight_versions") == nil && version != nil {
			end := o.Pos - len("}") // where a new last member of meta_info is inserted
			tokens := numberOf(memberOf(meta, "completion_tokens"))
			list := string(appendSpanList(nil, []span{{version, 0, tokens}}))
			if len(spans) > 0 {
				list = joinSpans(spans, nil, tokens)
			}
			return applyEdits([]edit{{end, end, `,"weight_versions":` + list}}, event)
		}
	}
	return bytes.Clone(event)
}

// applyEdits returns a copy of the event with the edits applied. The edits are sorted by where they start.
func applyEdits(edits []edit, event []byte) (all []byte) {
	copied := 0
	for _, edit := range edits {
		all = append(append(all, event[copied:edit.from]...), edit.replacement...)
		copied = edit.to
	}
	return append(all, event[copied:]...)
}

// perTokenMembers are the members of meta_info that have an element for each token.
var perTokenMembers = []string{
	"output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_sampling_mask",
	"output_token_sampling_logprobs",
}

// editsToJoin adds the edits that make the event b, of an engine that continues an answer, look as if this engine had made the whole
// answer. last is the last event of the engines before; grows says whether it has the whole answer up to there. If it has (Cumulative), its
// text and ids come before those of b. If not (Delta), the text and the ids of b stay, because the client joins those of all events itself.
// The ids of the prompt become those of the client's own prompt, and meta_info gets the numbers of the whole answer.
func editsToJoin(edits []edit, last []byte, grows Growth, b []byte) []edit {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		before, joined := memberOf(last, string(o.Key)), "" // joined: the new value of the member; empty: the value in b stays
		switch key := string(o.Key); {
		case before == nil: // earlier engines sent no such member
		case key == "text" && grows == Cumulative && before[0] == '"' && b[o.Val] == '"': // two JSON strings, joined without the quotes between
			joined = string(before[:len(before)-1]) + string(o.Value()[1:])
		case key == "output_ids" && grows == Cumulative:
			joined = joinLists(before, o.Value())
		case key == "prompt_token_ids": // this engine's prompt includes the answer so far, so the client gets the ids of its own prompt
			joined = string(before)
		case key == "meta_info" && b[o.Val] == '{':
			edits = editsToJoinMeta(edits, before, grows, rawjson.ObjectAt(b, o.Val))
		}
		if joined != "" {
			edits = append(edits, edit{from: o.Val, to: o.Pos, replacement: joined})
		}
	}
	return edits
}

// editsToJoinMeta adds the edits that make meta look as if its engine had made the whole answer. meta is the meta_info of an event,
// lastMeta that of the last event of the engines before. grows says whether events have the whole answer so far or only the new part.
func editsToJoinMeta(edits []edit, lastMeta []byte, grows Growth, meta rawjson.Object) []edit {
	earlierTokens := numberOf(memberOf(lastMeta, "completion_tokens")) // tokens of the engines before
	for meta.NextValue() {
		key, v := string(meta.Key), meta.Value()
		if key == "finish_reason" && v[0] == '{' {
			edits = editsToJoinReason(edits, rawjson.ObjectAt(meta.Text, meta.Val), earlierTokens)
			continue
		}
		joined := joinedMember(key, memberOf(lastMeta, key), v, grows, earlierTokens)
		if joined != "" { // empty: the engine's own value stays
			edits = append(edits, edit{from: meta.Val, to: meta.Pos, replacement: joined})
		}
	}
	return edits
}

// editsToJoinReason adds the edit for a finish_reason of type length, whose member length is the max_new_tokens of this engine alone. The
// tokens of earlier engines are added to it.
func editsToJoinReason(edits []edit, reason rawjson.Object, earlierTokens int) []edit {
	for reason.NextValue() {
		if n, ok := rawjson.Int(reason.Text, reason.Val, reason.Pos); ok && string(reason.Key) == "length" {
			edits = append(edits, edit{reason.Val, reason.Pos, strconv.Itoa(n + earlierTokens)})
		}
	}
	return edits
}

// joinedMember returns the value that a member of meta_info must have in an answer that several engines made one after the other; empty:
// the value v of the engine that answers now stays. before is the value in the last event of the engines before, which made earlierTokens
// tokens; nil: they sent none. grows says whether each event has the whole answer so far or only the new part.
func joinedMember(key string, before, v []byte, grows Growth, earlierTokens int) string {
	switch {
	// weight_versions lists which model weights made which tokens. Even without before, its token numbers must count from the start of
	// the whole answer, as joinSpans makes them do.
	case key == "weight_versions" && v[0] == '[':
		return joinSpans(before, v, earlierTokens)
	case before == nil: // there is nothing to join with
		return ""
	case slices.Contains(perTokenMembers, key):
		if grows == Cumulative {
			return joinLists(before, v)
		}
		return "" // Delta: each event has only the elements of its new tokens
	case key == "completion_tokens", key == "reasoning_tokens", key == "output_token_logprobs_length",
		key == "output_token_sampling_mask_length": // counts for the whole answer so far, even if grows is Delta
		return strconv.Itoa(numberOf(before) + numberOf(v))
	case key == "prompt_tokens", key == "cached_tokens", key == "cached_tokens_details", bytes.HasPrefix([]byte(key), []byte("input_")):
		return string(before) // these members describe the client's own prompt; this engine's prompt includes the answer so far
	}
	return ""
}

// joinSpans joins two lists weight_versions, whose spans say which model weights made which tokens. The offsets of this engine's spans, in
// v, are shifted by earlierTokens even if the engines before sent no list (before is nil): they must count from the start of the whole
// answer. An engine that has ended its answer early may have told of more tokens than the client got, so its spans end at earlierTokens.
func joinSpans(before, v []byte, earlierTokens int) string {
	var spans []span
	for _, s := range readSpans(nil, before, 0) {
		if s.end = min(s.end, earlierTokens); s.start < s.end {
			spans = append(spans, s)
		}
	}
	spans = readSpans(spans, v, earlierTokens)
	return string(appendSpanList(nil, spans))
}

// A span says which model weights made the tokens from start to end of an answer (add_weight_versions_to_meta_info in
// utils/weight_versions.py).
type span struct {
	versionJSON []byte // the version as the engine sent it, as JSON with its quotes
	start, end  int
}

// readSpans adds a list of spans to all, each shifted by offset tokens. A span that continues the one before it with the same weights
// is joined with it. A span without a version is left out, and so is everything after malformed JSON.
func readSpans(all []span, list []byte, offset int) []span {
	for one := range rawjson.Elements(list) {
		next := span{memberOf(one, "version"), numberOf(memberOf(one, "start")) + offset, numberOf(memberOf(one, "end")) + offset}
		if next.versionJSON == nil {
			continue
		}
		i := len(all) - 1 // the span before it; -1: there is none
		continues := i >= 0 && bytes.Equal(all[i].versionJSON, next.versionJSON) && all[i].end == next.start
		if continues {
			all[i].end = next.end
			continue
		}
		all = append(all, next)
	}
	return all
}

// appendSpanList appends spans as the JSON list of the member weight_versions.
func appendSpanList(dst []byte, spans []span) []byte {
	dst = append(dst, '[')
	for i, s := range spans {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(append(dst, `{"version":`...), s.versionJSON...)
		dst = strconv.AppendInt(append(dst, `,"start":`...), int64(s.start), 10)
		dst = append(strconv.AppendInt(append(dst, `,"end":`...), int64(s.end), 10), '}')
	}
	return append(dst, ']')
}

// memberOf returns the value of the member with this key; nil: the object has none.
func memberOf(object []byte, key string) []byte {
	o := rawjson.ObjectAt(object, rawjson.Space(object, 0))
	for o.NextValue() {
		if string(o.Key) == key {
			return o.Value()
		}
	}
	return nil
}

// numberOf reads a number of tokens; 0: v is not a number.
func numberOf(v []byte) int {
	n, _ := rawjson.Int(v, 0, len(v))
	return n
}

// joinLists joins two JSON lists, each of which may be null. If one of them is null or empty, the result is the other one.
func joinLists(before, behind []byte) string {
	switch first, second := listElements(before), listElements(behind); {
	case len(first) == 0:
		return string(behind)
	case len(second) == 0:
		return string(before)
	default:
		return "[" + string(first) + "," + string(second) + "]"
	}
}

// listElements returns the text between the brackets of a JSON list, without white space at its ends; nil: list is not a list.
func listElements(list []byte) []byte {
	if len(list) < len("[]") || list[0] != '[' {
		return nil
	}
	return bytes.TrimSpace(list[1 : len(list)-1])
}
