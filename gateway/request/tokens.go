package request

import (
	"bytes"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// How answers of /inference/v1/generate or /generate differ from those of /v1/completions.

// newAssembler joins the events of a stream to an answer in one piece.
func newAssembler(j *job) *sse.Assembler {
	a := sse.NewAssembler(j.req.Endpoint == mooncake.Chat, j.srv.Settings().Limits.AnswerBytes)
	if j.req.Endpoint == mooncake.Tokens { // its events have neither the model nor the time
		return a.ByTokens(j.req.Model, j.record.Arrival.Unix())
	}
	return a
}

// ending returns the events that end an answer which its engine did not end.
func ending(endpoint mooncake.Endpoint, head sse.Head, finish string, usage sse.Usage) []byte {
	switch endpoint {
	case mooncake.Tokens:
		return sse.TokensEnding(nil, head, finish, usage)
	case mooncake.Generate:
		return sse.GeneratedEnding(nil, finish, usage)
	}
	return sse.Ending(nil, endpoint == mooncake.Chat, head, finish, usage)
}

// emptyAnswer is for a request that its client has ended by name before any rank began the answer.
func emptyAnswer(j *job) []byte {
	events := emptyEvents(j)
	switch {
	case j.req.Stream:
		return bytes.Join(events, nil)
	case j.req.Endpoint == mooncake.Generate: // the data of its only event
		data, _, _ := bytes.Cut(bytes.TrimPrefix(bytes.Join(events, nil), []byte("data: ")), []byte("\n\n"))
		return data
	}
	assembler := newAssembler(j)
	for _, event := range events {
		_ = assembler.Add(event) // cannot fail, because evenkeel itself wrote the event
	}
	answer, _ := assembler.JSON(nil)
	return answer
}

// emptyEvents are made as if an engine had sent nothing but the end of an answer, which the filter
// then changes to what the client asked for.
func emptyEvents(j *job) (events [][]byte) {
	// The filter replaces the empty id. At /inference/v1/generate, the answer repeats the output_mode.
	head, options := sse.Head{ID: []byte(`""`), Mode: j.namedAbort.outputMode}, j.filterOptions
	options.Continuation, options.Transcript = nil, nil // no part comes from other calls
	options.Cached = sse.OwnCached                      // the filter leaves the usage below as it is
	options.MaxTokens, options.Context = 0, 0           // no limits
	const unknown = -1
	usage := sse.Usage{Prompt: j.estimatedTokens(), Total: j.estimatedTokens(), Cached: unknown}
	const useDefaultLimit = 0 // the events are short
	filter, framer := sse.NewFilter(options), sse.NewFramer(useDefaultLimit)
	framer.Feed(ending(j.req.Endpoint, head, "abort", usage))
	for e, ok := framer.Next(); ok; e, ok = framer.Next() {
		out, _ := filter.Event(e, nil)
		events = append(events, bytes.Clone(out)) // out may be memory of the framer
	}
	return events
}
