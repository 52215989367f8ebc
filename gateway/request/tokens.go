package request

import (
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// What answers of /inference/v1/generate have otherwise than those of completions.

// newAssembler makes an answer in one piece of the events of a stream.
func newAssembler(j *job) *sse.Assembler {
	a := sse.NewAssembler(j.req.Endpoint == mooncake.Chat, j.srv.Settings().Limits.AnswerBytes)
	if j.req.Endpoint == mooncake.Tokens {
		return a.ByTokens(j.req.Model, j.arrive.Unix())
	}
	return a
}

// ending is a leg that has nothing but its end.
func ending(e mooncake.Endpoint, head sse.Head, finish string, u sse.Usage) []byte {
	if e == mooncake.Tokens {
		return sse.TokensEnding(nil, head, finish, u)
	}
	return sse.Ending(nil, e == mooncake.Chat, head, finish, u)
}

// appendUsage appends the usage of all legs of a stream.
func (f *fanned) appendUsage(dst []byte, u sse.Usage, details map[string]int) []byte {
	if f.req.Endpoint == mooncake.Tokens {
		return sse.TokensUsage(dst, f.id, f.mode, u, details)
	}
	return sse.UsageEvent(dst, f.id, []byte(f.req.Model), f.in.Record.Arrival.Unix(), f.req.Endpoint == mooncake.Chat, u, details)
}
