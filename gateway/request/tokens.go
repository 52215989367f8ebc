package request

import (
	"bytes"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// This file has the differences between answers of /inference/v1/generate or /generate and answers of /v1/completions.

// newAssembler returns an assembler, which joins the events of a stream to an answer in one piece.
func newAssembler(j *job) *sse.Assembler {
	a := sse.NewAssembler(j.req.Endpoint == mooncake.Chat, j.srv.Settings().Limits.AnswerBytes)
	if j.req.Endpoint == mooncake.Tokens { // the events of this endpoint have neither the model nor the time, which the answer has
		return a.ByTokens(j.req.Model, j.record.Arrival.Unix())
	}
	return a
}

// ending returns the events with which evenkeel ends an answer that its engine did not end.
func ending(endpoint mooncake.Endpoint, head sse.Head, finish string, usage sse.Usage) []byte {
	switch endpoint {
	case mooncake.Tokens:
		return sse.TokensEnding(nil, head, finish, usage)
	case mooncake.Generate:
		return sse.GeneratedEnding(nil, finish, usage)
	}
	return sse.Ending(nil, endpoint == mooncake.Chat, head, finish, usage)
}

// emptyAnswer returns an answer without tokens, for a request that its client has ended by name before any rank began the answer: a stream
// of events, or one piece. It is made as if an engine had sent nothing but the end of an answer. The filter gives the events of this end
// the form that the client asked for. If the client wants one piece, an assembler joins them.
func emptyAnswer(j *job) []byte {
	head, options := sse.Head{ID: []byte(`""`), Mode: j.byName.outputMode}, j.filterOptions // the filter replaces the empty id
	options.Continuation, options.Transcript = nil, nil                                     // no part of the answer comes from other calls
	options.Cached = sse.OwnCached                                                          // the filter leaves the usage below as it is
	options.MaxTokens, options.Context = 0, 0                                               // no limits
	const unknown = -1
	usage := sse.Usage{Prompt: j.estimatedTokens(), Total: j.estimatedTokens(), Cached: unknown}
	const defaultSize = 0 // the largest size that an event may have by default
	filter, framer := sse.NewFilter(options), sse.NewFramer(defaultSize)
	var assembler *sse.Assembler
	hasFormOfEvent := j.req.Endpoint == mooncake.Generate // an answer of /generate in one piece is the data of its only event
	if !j.req.Stream && !hasFormOfEvent {
		assembler = newAssembler(j)
	}
	framer.Feed(ending(j.req.Endpoint, head, "abort", usage))
	var answer []byte
	for e, ok := framer.Next(); ok; e, ok = framer.Next() {
		out, _ := filter.Event(e, nil)
		answer = append(answer, out...)
		if assembler != nil {
			_ = assembler.Add(out) // cannot fail, because evenkeel itself wrote the event
		}
	}
	switch {
	case assembler != nil:
		answer, _ = assembler.JSON(nil)
	case !j.req.Stream: // the answer is the data of the event
		answer, _, _ = bytes.Cut(bytes.TrimPrefix(answer, []byte("data: ")), []byte("\n\n"))
	}
	return answer
}
