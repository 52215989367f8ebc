package request

import (
	"fmt"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// What answers of /inference/v1/generate and of /generate have otherwise than those of completions.

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
	switch e {
	case mooncake.Tokens:
		return sse.TokensEnding(nil, head, finish, u)
	case mooncake.Generate:
		return sse.GeneratedEnd(nil, u)
	case mooncake.Chat, mooncake.Completions, mooncake.Responses, mooncake.Messages:
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

// nameOf is the name of a leg's answer. SGLang numbers those of a list (0.5.23, normalize in managers/io_struct.py).
func (f *fanned) nameOf(leg int) []byte {
	if f.req.Endpoint != mooncake.Generate {
		return f.id
	}
	return fmt.Appendf(nil, "%s_%d", f.id, leg)
}

// merge makes one answer of the legs' answers.
func (f *fanned) merge(parts []sse.Part) ([]byte, error) {
	if f.req.Endpoint == mooncake.Generate {
		return sse.MergeGenerated(parts), nil
	}
	return sse.MergeAnswers(parts)
}
