package request

import (
	"bytes"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// This file has the differences between answers of /inference/v1/generate or /generate and answers of completions.

// newAssembler returns an assembler that joins the events of a stream to an answer in one piece.
func newAssembler(j *job) *sse.Assembler {
	a := sse.NewAssembler(j.req.Endpoint == mooncake.Chat, j.srv.Settings().Limits.AnswerBytes)
	if j.req.Endpoint == mooncake.Tokens {
		return a.ByTokens(j.req.Model, j.record.Arrival.Unix())
	}
	return a
}

// ending returns the events that evenkeel writes at the end of an answer in place of the engine.
func ending(endpoint mooncake.Endpoint, head sse.Head, finish string, usage sse.Usage) []byte {
	switch endpoint {
	case mooncake.Tokens:
		return sse.TokensEnding(nil, head, finish, usage)
	case mooncake.Generate:
		return sse.GeneratedEnding(nil, finish, usage)
	case mooncake.Chat, mooncake.Completions, mooncake.Responses, mooncake.Messages:
	}
	return sse.Ending(nil, endpoint == mooncake.Chat, head, finish, usage)
}

// unanswered is the answer to a request that ended before a rank began it: events, or one piece.
func unanswered(j *job) []byte {
	head, ask := sse.Head{ID: []byte(`""`), Mode: j.abort.outputMode}, j.ask // the mirror replaces the empty ID by the request's name
	ask.Seam, ask.Trail, ask.Cached, ask.MaxTokens, ask.Context = nil, nil, sse.OwnCached, 0, 0
	usage := sse.Usage{Prompt: j.estimate(), Total: j.estimate(), Cached: -1}
	mirror, framer := sse.NewMirror(ask), sse.NewFramer(0)
	var assembler *sse.Assembler
	if ask.Whole = !j.req.Stream && j.req.Endpoint == mooncake.Generate; !j.req.Stream && !ask.Whole {
		assembler = newAssembler(j)
	}
	framer.Feed(ending(j.req.Endpoint, head, "abort", usage))
	var answer []byte
	for e, ok := framer.Next(); ok; e, ok = framer.Next() {
		out, _ := mirror.Event(e, nil)
		if answer = append(answer, out...); assembler != nil {
			_ = assembler.Add(out) // no error: evenkeel made the event
		}
	}
	switch {
	case assembler != nil:
		answer, _ = assembler.JSON(nil)
	case !j.req.Stream: // the answer is the JSON of the only event
		answer, _, _ = bytes.Cut(bytes.TrimPrefix(answer, []byte("data: ")), []byte("\n\n"))
	}
	return answer
}
