package sse

import (
	"strconv"

	"evenkeel/internal/rawjson"
)

// readResponse reads an event of /v1/responses, or an answer in one piece. Some events have a
// member response; an answer in one piece is such a response itself. The first events only announce
// the answer (s.announces). s.edits says how the client's copy must differ. cached is
// Options.Cached: the number of cached prompt tokens that the client is to see, unknownCached, or
// OwnCached for the engine's own number.
func readResponse(b []byte, cached int) (s formFacts) {
	var kind, object string
	s.errorText = b // used only if the event turns out to be an error
	at := rawjson.Space(b, 0)
	o := rawjson.ObjectAt(b, at)
	for o.NextValue() {
		switch string(o.Key) {
		case "type":
			kind = text(o.Value())
		case "object":
			object = text(o.Value())
		case "error":
			s.failed = s.failed || !rawjson.IsNull(o.Value())
		case "response":
			if b[o.Val] == '{' { // if the key is repeated, each value is read, because a client may take any of them
				s.readResponseObject(rawjson.ObjectAt(b, o.Val), cached)
			}
		}
	}
	s.readable = isWhole(&o)
	switch {
	case !s.readable: // what was read is not used
	case object == "response": // b is an answer in one piece, not an event
		s.hasFinalUsage = true
		s.readResponseObject(rawjson.ObjectAt(b, at), cached)
		s.sortEdits() // if b also has a member response, its edits were added before those of members in front of it
	case kind == "response.completed", kind == "response.incomplete": // the loop has read the usage in its member response
		s.hasFinalUsage = true
	case kind == "response.failed", kind == "error", object == "error":
		s.failed = true
	case kind == "response.created", kind == "response.in_progress", kind == "response.queued":
		s.announces = true
	default: // events with generated tokens have types such as response.output_text.delta
		s.hasTokens = len(kind) > len(".delta") && kind[len(kind)-len(".delta"):] == ".delta"
	}
	s.endsStream = s.hasFinalUsage
	return s
}

// readResponseObject reads a response: its status, error and usage. It adds edits for members that
// clients must not get, and for the count of cached tokens in its usage. cached is the number that
// the client is to see there; negative: unknownCached or OwnCached.
func (s *formFacts) readResponseObject(o rawjson.Object, cached int) {
	keptBefore := false // true once a member before the current one stays in the client's copy
	for o.NextValue() {
		key, v := rawjson.Key(o.Key), o.Value()
		if isEngineOnlyKey(key) {
			s.edits = append(s.edits, removalOf(&o, keptBefore)) // with the comma before it, or after it if no member before it stays
			continue
		}
		keptBefore = true
		switch key {
		case "status":
			switch string(v) {
			case `"completed"`:
				s.finishReason = "stop"
			case `"incomplete"`:
				s.finishReason = "length"
			case `"failed"`, `"cancelled"`:
				s.failed = true
			}
		case "error":
			if !rawjson.IsNull(v) { // the error alone becomes the argument for ReadFailure
				s.errorText = append(append([]byte(`{"error":`), v...), '}')
			}
		case "usage":
			if v[0] == '{' {
				s.readUsage(rawjson.ObjectAt(o.Text, o.Val), cached)
			}
		}
	}
}

// readUsage reads the usage of a response. cached is the number of cached prompt tokens that the
// client is to see, unknownCached, or OwnCached for the engine's own number.
func (s *formFacts) readUsage(o rawjson.Object, cached int) {
	for o.NextValue() {
		switch string(o.Key) {
		case "input_tokens":
			s.usage.Prompt = countOf(&o)
		case "output_tokens":
			s.usage.Completion = countOf(&o)
		case "total_tokens":
			s.usage.Total = countOf(&o)
		case "input_tokens_details":
			if o.Text[o.Val] == '{' { // else null: there are no details
				s.readInputDetails(rawjson.ObjectAt(o.Text, o.Val), cached)
			}
		}
	}
}

// readInputDetails reads the counts of cached tokens in the details of a usage. Unless cached is
// OwnCached, it adds the edits that replace them by cached. A list with a count for each turn
// becomes a list with this one number, because the prefill engine counts no turns.
func (s *formFacts) readInputDetails(details rawjson.Object, cached int) {
	replaces := cached != OwnCached
	shown := strconv.Itoa(max(0, cached)) // clients expect a number, even if the count is not known
	for details.NextValue() {
		value := edit{from: details.Val, to: details.Pos}
		switch string(details.Key) {
		case "cached_tokens":
			s.usage.Cached = countOf(&details)
			if replaces {
				value.replacement = shown
				s.edits = append(s.edits, value)
			}
		case "cached_tokens_per_turn":
			hasCounts := details.Text[details.Val] == '[' && len(details.Value()) > len("[]")
			if replaces && hasCounts {
				value.replacement = "[" + shown + "]"
				s.edits = append(s.edits, value)
			}
		}
	}
}
