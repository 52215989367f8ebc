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
// of events, or one piece.
func emptyAnswer(j *job) []byte {
	head, options := sse.Head{ID: []byte(`""`), Mode: j.byName.outputMode}, j.filterOptions // the filter replaces the empty id
	options.Continuation, options.Transcript = nil, nil
	options.Cached = sse.OwnCached
	options.MaxTokens, options.Context = 0, 0 // no limits
	usage := sse.Usage{Prompt: j.estimatedTokens(), Total: j.estimatedTokens(), Cached: -1}
	filter, framer := sse.NewFilter(options), sse.NewFramer(0)
	var assembler *sse.Assembler
	options.Unstreamed = !j.req.Stream && j.req.Endpoint == mooncake.Generate
	if !j.req.Stream && !options.Unstreamed { // an answer of /generate in one piece has the form of its event, and needs no assembler
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
	case !j.req.Stream: // the answer is one event: take its data
		answer, _, _ = bytes.Cut(bytes.TrimPrefix(answer, []byte("data: ")), []byte("\n\n"))
	}
	return answer
}
