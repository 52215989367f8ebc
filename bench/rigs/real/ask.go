package main

import (
	"context"

	"evenkeel/bench/rigs/asked"
)

// The two routes that are asked.
const (
	completions = "/v1/completions"
	chat        = "/v1/chat/completions"
)

type body = asked.Body

// answer is what a server said, which document reads.
type answer struct{ asked.Answer }

func ask(ctx context.Context, method, url string, of any) answer {
	return answer{asked.Ask(ctx, method, url, of)}
}

func listen(ctx context.Context, method, url string, of any, heard func(sofar []byte)) answer {
	return answer{asked.Listen(ctx, method, url, of, heard)}
}
