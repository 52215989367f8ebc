package sse

import (
	"strconv"

	"evenkeel/internal/rawjson"
)

// The answers of POST /generate: SGLang 0.5.23, _handle_batch_output in
// managers/tokenizer_manager.py. Each event has all of the answer so far, or only the new part if
// the engine runs with --incremental-streaming-output. meta_info has the token counts, the id and
// the finish_reason. If the request has a list of prompts, each event has the index of its prompt.

// readGenerated reads an event of /generate, or an answer in one piece. It does not use
// Options.Cached, the second argument of all such functions, because the cached tokens in such an
// event stay as they are.
func readGenerated(b []byte, _ int) (s formFacts) {
	s.errorText = b // used only if the event turns out to be an error
	at := rawjson.Space(b, 0)
	o := rawjson.ObjectAt(b, at)
	for o.NextValue() {
		switch string(o.Key) {
		case "error":
			s.failed = s.failed || !rawjson.IsNull(o.Value())
		case "text":
			s.textAt = edit{from: o.Val, to: o.Pos}
		case "output_ids":
			s.idsAt = edit{from: o.Val, to: o.Pos}
		case "meta_info":
			if b[o.Val] == '{' {
				s.readMeta(rawjson.ObjectAt(b, o.Val))
			}
		}
	}
	s.readable = isWhole(&o)
	s.endAt = max(0, o.Pos-1)              // Pos is after the closing brace, or -1 if b is no object
	s.hasFinalUsage = s.finishReason != "" // each event has the usage so far, and only the last one has a finish_reason
	s.hasTokens = s.usage.Completion > 0   // the usage counts all tokens so far
	return s
}

// readMeta reads a meta_info: the id, the usage and the end of the answer.
func (s *formFacts) readMeta(o rawjson.Object) {
	u := Usage{Cached: -1} // -1: not known
	for o.NextValue() {
		switch string(o.Key) {
		case "id":
			s.idAt = edit{from: o.Val, to: o.Pos}
		case "prompt_tokens":
			u.Prompt = countOf(&o)
		case "completion_tokens":
			u.Completion = countOf(&o)
		case "cached_tokens":
			u.Cached = countOf(&o)
		case "weight_versions":
			s.spans = o.Value()
		case "finish_reason":
			if o.Text[o.Val] == '{' { // null until the answer ends
				s.readEnd(rawjson.ObjectAt(o.Text, o.Val))
			}
		}
	}
	u.Total = u.Prompt + u.Completion
	s.usage = u
}

// readEnd reads a finish_reason. If its type is abort, it has a message and the HTTP status of the
// error, which readEnd stores in errorText.
func (s *formFacts) readEnd(o rawjson.Object) {
	message, status := `""`, "500"
	for o.NextValue() {
		switch v := o.Value(); string(o.Key) {
		case "type":
			s.finishReason = text(v)
		case "message":
			if v[0] == '"' {
				message = string(v)
			}
		case "status_code":
			if n, ok := rawjson.Int(o.Text, o.Val, o.Pos); ok {
				status, s.abortHasStatus = strconv.Itoa(n), true
			}
		}
	}
	if s.finishReason == "abort" {
		s.errorText = []byte(`{"error":{"message":` + message + `,"code":` + status + `}}`)
	}
}

// adaptGenerated decides whether an event that readGenerated has read failed, and adds the edits
// that the client's copy needs: the client's id, the index of its prompt in a stream, and the
// answer so far of earlier engines. If the event cannot be joined to those of an earlier engine, it
// sets fault.
func (f *Filter) adaptGenerated(s *formFacts, data []byte) {
	if s.finishReason == "abort" && (f.options.Aborted == nil || mayAcceptAbort(f)) {
		// SGLang gives each abort of its own, as for a failed transfer of KV, the status of an error. The
		// others were asked for (0.5.23, FINISH_ABORT in managers/schedule_batch.py, _handle_abort_req in
		// managers/tokenizer_manager.py).
		wasAskedFor := f.options.Aborted != nil && !s.abortHasStatus
		s.aborted, s.failed = wasAskedFor, s.failed || !wasAskedFor
	}
	if len(f.id) > 0 && s.idAt.to > 0 { // the event has an id, and the client gets f.id instead
		s.idAt.replacement = string(f.id)
		s.edits = append(s.edits, s.idAt)
	}
	promptIndex := f.options.Choice                // -1: the request has no list of prompts, so events have no index
	if promptIndex >= 0 && !f.options.Unstreamed { // an answer in one piece shows its prompt by its place in the list of all answers
		s.addIndex(promptIndex, data)
	}
	if f.options.Continuation != nil && f.options.Continuation.Last != nil { // earlier engines have sent a part of the answer
		joinGenerated(f, s, data)
	}
}

// addIndex adds the edit that appends the member index to the event, whose data is data: the index
// of the prompt in the client's request.
func (s *formFacts) addIndex(promptIndex int, data []byte) {
	comma := ","
	open := rawjson.Space(data, 0) // the offset of the object's opening brace
	if hasNoMembers := rawjson.Space(data, open+1) == s.endAt; hasNoMembers {
		comma = ""
	}
	s.edits = append(s.edits, edit{from: s.endAt, to: s.endAt, replacement: comma + `"index":` + strconv.Itoa(promptIndex)})
}

// joinGenerated adds the edits that join an event of the engine that continues an answer to the
// last event of the engines before. Some engines send all of the answer so far in each event
// (Cumulative), others only its new part (Delta). If this engine and those before it differ in
// this, or if an event of a cumulative stream lacks ids, joinGenerated sets fault instead.
func joinGenerated(f *Filter, s *formFacts, data []byte) {
	if !growsAsBefore(f, s, data) {
		s.fault = ErrOtherGrowth
		return
	}
	continuation := f.options.Continuation
	s.edits = editsToJoin(s.edits, continuation.Last, continuation.Grows, data)
	s.sortEdits() // adaptGenerated may have added the member index, at the object's end, before these edits inside the object
}

// growsAsBefore says whether an event can be joined to those of earlier engines: it has all of the
// answer so far if theirs had, or only the new part if theirs had only this. The numbers of token
// ids show which of both it has. The first event with tokens looks the same in both ways, so it
// does not show this.
func growsAsBefore(f *Filter, s *formFacts, data []byte) bool {
	growthBefore := f.options.Continuation.Grows
	earlierIDs := 0 // token ids in earlier events of this engine
	if f.options.Transcript != nil {
		earlierIDs = len(f.options.Transcript.IDs)
	}
	listedIDs := countListed(data, s.idsAt)                 // token ids in this event
	allTokens := s.usage.Completion                         // tokens of this engine so far, by its own count
	growth, _ := growthOf(listedIDs, allTokens, earlierIDs) // GrowthUnknown if earlierIDs is 0
	otherGrowth := growth != GrowthUnknown && growth != growthBefore
	// In a cumulative stream, an event that lacks some ids cannot be joined, because the joined list
	// would lack them, too.
	lacksIDs := growthBefore == Cumulative && listedIDs != allTokens
	return !otherGrowth && !lacksIDs
}

// GeneratedEnding appends the end of a stream of /generate that no engine ends. finish is the
// finish_reason. A caller gives abort only for an answer that its client has aborted before the
// first token. One event that says so then comes before [DONE], as SGLang sends it
// (_handle_abort_req in managers/tokenizer_manager.py).
func GeneratedEnding(dst []byte, finish string, u Usage) []byte {
	if finish == "abort" {
		dst = append(dst, `data: {"text":"","output_ids":[],"meta_info":{"id":"","finish_reason":`...)
		dst = append(dst, `{"type":"abort","message":"Abort in waiting queue"},"prompt_tokens":`...)
		dst = append(strconv.AppendInt(dst, int64(u.Prompt), 10), ",\"completion_tokens\":0,\"cached_tokens\":0}}\n\n"...)
	}
	return append(dst, Done...)
}

// MergeGenerated returns the answers to a list of prompts as one JSON list.
func MergeGenerated(parts []Part) []byte {
	all := []byte{'['}
	for i, p := range parts {
		if i > 0 {
			all = append(all, ',')
		}
		all = append(all, p.JSON...)
	}
	return append(all, ']')
}
