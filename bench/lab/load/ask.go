package load

import (
	"math/rand/v2"
	"strconv"
	"time"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
	"evenkeel/internal/rawjson"
)

// ask is one request to be: what is sent and what must come.
type ask struct {
	index  int
	chat   bool
	stream bool
	usage  bool // stream_options.include_usage
	req    trace.Request

	cancel Phase   // "": never
	where  float64 // within the phase, 0 to 1
}

// ask plans request i. It depends on i and the seed alone.
func (c *Config) ask(i int) ask {
	if c.Own != nil {
		return ask{index: i}
	}
	rng := rand.New(rand.NewPCG(c.Seed, uint64(i)))
	a := ask{index: i, req: c.Requests[i%len(c.Requests)]}
	a.chat = rng.Float64() < c.Chat
	a.stream = rng.Float64() < c.Stream
	a.usage = rng.Float64() < c.Usage && a.stream
	if rng.Float64() < c.Cancel.Share {
		a.cancel = c.Cancel.Phases[rng.IntN(len(c.Cancel.Phases))]
		a.where = rng.Float64()
	}
	if c.MaxPrompt > 0 {
		a.req.Prompt = min(a.req.Prompt, c.MaxPrompt)
	}
	if c.MaxOutput > 0 {
		a.req.Output = min(a.req.Output, c.MaxOutput)
	}
	return a
}

// at is when request i arrives in an open loop, after the first. A trace that
// is sent more than once starts again one mean gap after its last request.
func (c *Config) at(i int) time.Duration {
	n := len(c.Requests)
	first, last := c.Requests[0].At, c.Requests[n-1].At
	if c.Rate > 0 && first == last { // no times to scale: evenly
		return time.Duration(float64(i) / c.Rate * float64(time.Second))
	}
	gap := 0.0 // the mean one, ns
	if n > 1 {
		gap = float64(last-first) / float64(n-1)
	}
	at := float64(c.Requests[i%n].At-first) + float64(i/n)*gap*float64(n)
	if c.Rate > 0 {
		at *= float64(time.Second) / gap / c.Rate
	}
	return time.Duration(at)
}

// cancelAfter is the time a planned cancel waits for; 0: not by time.
func (a *ask) cancelAfter(ttft time.Duration) time.Duration {
	low, high := 0.0, 0.0
	switch a.cancel {
	case Waiting:
		high = 0.3
	case Pooled:
		low, high = 0.3, 0.8
	case Transferring:
		low, high = 0.8, 1
	case Streaming:
		if a.stream {
			return 0
		}
		low, high = 1, 2 // no events to count
	default:
		return 0
	}
	return max(time.Microsecond, time.Duration((low+(high-low)*a.where)*float64(ttft)))
}

// cancelTokens is the number of tokens a planned cancel waits for; 0: not by tokens.
func (a *ask) cancelTokens() int {
	if a.cancel != Streaming || !a.stream {
		return 0
	}
	return 1 + int(a.where*float64(a.req.Output-1))
}

// appendPrompt appends the prompt's text: unique words, or with shared blocks
// and a unique last one.
func (c *Config) appendPrompt(dst []byte, a *ask) []byte {
	own := c.Seed<<32 + uint64(a.index)
	left := a.req.Prompt
	if c.SharePrefixes {
		for _, id := range a.req.HashIDs {
			if left <= trace.BlockTokens {
				break
			}
			dst = reftext.AppendPrompt(dst, 1<<63|id, trace.BlockTokens)
			left -= trace.BlockTokens
		}
	}
	return reftext.AppendPrompt(dst, own, left)
}

// appendBody appends the request as JSON. Prompts need no escape.
func (c *Config) appendBody(dst []byte, a *ask, model string, prompt []byte) []byte {
	dst = append(rawjson.AppendString(append(dst, `{"model":`...), model), ',')
	if a.chat {
		dst = append(append(append(dst, `"messages":[{"role":"user","content":"`...), prompt...), `"}],`...)
	} else {
		dst = append(append(append(dst, `"prompt":"`...), prompt...), `",`...)
	}
	dst = strconv.AppendInt(append(dst, `"max_tokens":`...), int64(a.req.Output), 10)
	dst = append(dst, `,"ignore_eos":true,"stream":`...)
	dst = strconv.AppendBool(dst, a.stream)
	if a.usage {
		dst = append(dst, `,"stream_options":{"include_usage":true}`...)
	}
	return append(dst, '}')
}

// expects is what the answer must be.
func (c *Config) expects(a *ask, prompt string) expected {
	e := expected{check: c.Check, tokens: a.req.Output, promptTokens: a.req.Prompt, usage: a.usage || !a.stream}
	if c.Check == CheckShape {
		return e
	}
	p := reftext.Of(prompt)
	if a.chat {
		p = reftext.OfUser(prompt)
	}
	e.answer, e.promptTokens = p.Answer, p.Tokens()
	return e
}
