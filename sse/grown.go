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

// growthOf finds out whether an event of /generate has all tokens so far or only the new ones.
// listed is its number of token ids, completion the engine's count, and earlier the number of ids
// in earlier events. ok is false if they fit neither.
func growthOf(listed, completion, earlier int) (growth Growth, ok bool) {
	switch {
	case earlier == 0: // the same in cumulative and delta streams
		return GrowthUnknown, listed == completion
	case listed == completion:
		return Cumulative, true
	}
	return Delta, listed+earlier == completion
}

func (t *Transcript) recordGenerated(f *Filter, s *formFacts, b []byte) {
	if t.Head.ID == nil && s.idAt.to-s.idAt.from <= maxHead { // as in readHead
		t.Head.ID = bytes.Clone(b[s.idAt.from:s.idAt.to])
	}
	t.Completed, t.Prompt = f.tokens, s.usage.Prompt
	idsBefore := len(t.IDs)
	growth := t.recordGeneratedIDs(s, b)
	// new tokens are content, even if they show no text yet
	t.Content = t.Content || len(t.IDs) > idsBefore
	t.recordTextShown(b[s.textAt.from:s.textAt.to], growth)
	t.Last = append(t.Last[:0], b...) // the events of a further engine are joined to this one
}

// recordGeneratedIDs makes the transcript Unread if the number of ids does not fit the engine's
// count, or if earlier events grew in the other way.
func (t *Transcript) recordGeneratedIDs(s *formFacts, b []byte) Growth {
	idsBefore := len(t.IDs)
	listed, allTokens := countListed(b, s.idsAt), s.usage.Completion
	grows, consistent := growthOf(listed, allTokens, idsBefore)
	if grows != GrowthUnknown { // all later events must grow in the same way
		consistent = consistent && (t.Grows == GrowthUnknown || t.Grows == grows)
		t.Grows = grows
	}
	t.Unread = t.Unread || !consistent
	repeated := 0 // ids at the beginning of the list that came in earlier events
	if grows == Cumulative {
		repeated = idsBefore
	}
	if s.idsAt.to == 0 {
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

// recordTextShown counts all tokens so far as shown, if the event has new text and the engine holds
// none back: it holds back text that the next token may change, as when a character is not
// complete. textJSON is empty if the engine has no tokenizer; the client then misses no text.
func (t *Transcript) recordTextShown(textJSON []byte, grows Growth) {
	hasText := len(textJSON) > 0
	isNew := len(textJSON) > t.textBytes // in a cumulative stream, the text grows
	if grows == Delta {
		isNew = len(textJSON) > len(`""`)
	}
	if hasText && !isNew {
		return // the text of the new tokens comes later
	}
	t.textBytes = len(textJSON)
	if holdsNothingBack(textJSON) {
		t.Shown = len(t.IDs)
	}
}

func countListed(b []byte, at edit) (n int) {
	for list := rawjson.ArrayAt(b, at.from); at.to > 0 && list.Next(); n++ {
		list.Pos = rawjson.ValueEnd(b, list.Val)
	}
	return n
}

// holdsNothingBack says whether a text that has just become longer surely includes the text of all
// its tokens. An engine that holds back characters cuts the text after a space or a Chinese
// character (SGLang 0.5.23, find_printable_text in utils.py), so a text with another last character
// is not cut.
func holdsNothingBack(textJSON []byte) bool {
	switch {
	case len(textJSON) == 0: // no tokenizer, so no token lacks its text
		return true
	case len(textJSON) <= len(`""`): // all text so far is held back
		return false
	}
	inside := textJSON[1 : len(textJSON)-1]
	at := len(inside) - len(`\u0000`)
	endsWithEscape := at >= 0 && inside[at] == '\\' && inside[at+1] == 'u'
	if endsWithEscape { // it may be a Chinese character
		return false
	}
	r, _ := utf8.DecodeLastRune(inside)
	return r != ' ' && !unicode.Is(unicode.Han, r)
}

// Join appends the transcript of the engine that continued this answer. Head, Prompt and PromptIDs
// do not change.
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
	t.Completed += next.Completed
	t.Guessed = t.Guessed || next.Guessed
	t.Content = t.Content || next.Content
	t.MoreThan = t.MoreThan || next.MoreThan
	t.Unread = t.Unread || next.Unread
	t.joinLast(next)
}

// joinLast replaces the last event of /generate by next.Last, edited so that it has the whole
// answer.
func (t *Transcript) joinLast(next *Transcript) {
	if len(next.Last) == 0 {
		return
	}
	last := withWeightVersions(next.Last, next.Spans)
	if len(t.Last) == 0 { // next is the transcript of the first engine
		t.Last, t.Grows = last, next.Grows
		return
	}
	// joinGenerated has refused any engine whose events grow differently.
	t.Last = applyEdits(editsToJoin(nil, t.Last, t.Grows, last), last)
}

// withWeightVersions adds weight_versions, so that the list of a further engine can be joined to
// it. Some engines send it only in the last event, which an engine that failed never sent. Then it
// is spans, which came with an abort, or else one span: the current weights made all tokens.
func withWeightVersions(event, spans []byte) []byte {
	o := rawjson.ObjectAt(event, rawjson.Space(event, 0))
	for o.NextValue() {
		meta := o.Value()
		if string(o.Key) != "meta_info" || meta[0] != '{' {
			continue
		}
		version := memberOf(meta, "weight_version")
		if memberOf(meta, "weight_versions") == nil && version != nil {
			end := o.Pos - len("}")
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

func applyEdits(edits []edit, event []byte) (all []byte) {
	copied := 0
	for _, edit := range edits {
		all = append(append(all, event[copied:edit.from]...), edit.replacement...)
		copied = edit.to
	}
	return append(all, event[copied:]...)
}

var perTokenMembers = []string{
	"output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_sampling_mask",
	"output_token_sampling_logprobs",
}

// editsToJoin adds the edits that make the event b look as if its engine had made the whole answer.
// last is the last event of the engines before. If events grow as a Delta, text and ids stay: the
// client joins those itself.
func editsToJoin(edits []edit, last []byte, grows Growth, b []byte) []edit {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		before, joined := memberOf(last, string(o.Key)), "" // empty: the value in b stays
		switch key := string(o.Key); {
		case before == nil:
		// joined without the quotes between
		case key == "text" && grows == Cumulative && before[0] == '"' && b[o.Val] == '"':
			joined = string(before[:len(before)-1]) + string(o.Value()[1:])
		case key == "output_ids" && grows == Cumulative:
			joined = joinLists(before, o.Value())
		case key == "prompt_token_ids": // this engine's prompt includes the answer so far
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

func editsToJoinMeta(edits []edit, lastMeta []byte, grows Growth, meta rawjson.Object) []edit {
	earlierTokens := numberOf(memberOf(lastMeta, "completion_tokens"))
	for meta.NextValue() {
		key, v := string(meta.Key), meta.Value()
		if key == "finish_reason" && v[0] == '{' {
			edits = editsToJoinReason(edits, rawjson.ObjectAt(meta.Text, meta.Val), earlierTokens)
			continue
		}
		joined := joinedMember(key, memberOf(lastMeta, key), v, grows, earlierTokens)
		if joined != "" {
			edits = append(edits, edit{from: meta.Val, to: meta.Pos, replacement: joined})
		}
	}
	return edits
}

// editsToJoinReason: the length in a finish_reason is the max_new_tokens of this engine alone.
func editsToJoinReason(edits []edit, reason rawjson.Object, earlierTokens int) []edit {
	for reason.NextValue() {
		if n, ok := rawjson.Int(reason.Text, reason.Val, reason.Pos); ok && string(reason.Key) == "length" {
			edits = append(edits, edit{reason.Val, reason.Pos, strconv.Itoa(n + earlierTokens)})
		}
	}
	return edits
}

// joinedMember returns the value of a member of meta_info in the joined answer; empty: v stays.
// before is the value in the last event of the engines before; nil: they sent none.
func joinedMember(key string, before, v []byte, grows Growth, earlierTokens int) string {
	switch {
	// Even without before, its token numbers must count from the start of the whole answer.
	case key == "weight_versions" && v[0] == '[':
		return joinSpans(before, v, earlierTokens)
	case before == nil:
		return ""
	case slices.Contains(perTokenMembers, key):
		if grows == Cumulative {
			return joinLists(before, v)
		}
		return "" // each event has only the elements of its new tokens
	case key == "completion_tokens", key == "reasoning_tokens", key == "output_token_logprobs_length",
		key == "output_token_sampling_mask_length": // counts for the whole answer so far, even in a Delta
		return strconv.Itoa(numberOf(before) + numberOf(v))
	case key == "prompt_tokens", key == "cached_tokens", key == "cached_tokens_details", bytes.HasPrefix([]byte(key), []byte("input_")):
		// these describe the client's own prompt; this engine's includes the answer so far
		return string(before)
	}
	return ""
}

// joinSpans shifts the spans of this engine (v) by earlierTokens. An engine that ended early may
// have told of more tokens than the client got, so its spans end at earlierTokens.
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

// A span says which model weights made the tokens from start to end
// (add_weight_versions_to_meta_info in utils/weight_versions.py).
type span struct {
	versionJSON []byte // as JSON with its quotes
	start, end  int
}

// readSpans shifts spans by offset tokens, and joins neighbours of the same weights. A span without
// a version is left out, and so is everything after malformed JSON.
func readSpans(all []span, list []byte, offset int) []span {
	for one := range rawjson.Elements(list) {
		next := span{memberOf(one, "version"), numberOf(memberOf(one, "start")) + offset, numberOf(memberOf(one, "end")) + offset}
		if next.versionJSON == nil {
			continue
		}
		i := len(all) - 1
		continues := i >= 0 && bytes.Equal(all[i].versionJSON, next.versionJSON) && all[i].end == next.start
		if continues {
			all[i].end = next.end
			continue
		}
		all = append(all, next)
	}
	return all
}

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

func memberOf(object []byte, key string) []byte {
	o := rawjson.ObjectAt(object, rawjson.Space(object, 0))
	for o.NextValue() {
		if string(o.Key) == key {
			return o.Value()
		}
	}
	return nil
}

func numberOf(v []byte) int {
	n, _ := rawjson.Int(v, 0, len(v))
	return n
}

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

func listElements(list []byte) []byte {
	if len(list) < len("[]") || list[0] != '[' {
		return nil
	}
	return bytes.TrimSpace(list[1 : len(list)-1])
}
