package request

import (
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// tokenBytes is how much of a stream one token may take, beside what each of the likeliest tokens in its place takes as text
// and as bytes: with twenty of them, it is some 3 KiB.
const (
	tokenBytes     = 16 << 10
	likeliestBytes = 1 << 10
	anyVocabulary  = 512 << 10 // tokens: more than a model knows
)

// mayHave is how many tokens the rest of the job's answer may have on an engine
// whose context is so long.
func (j *job) mayHave(context int) int {
	most := prompt.Longest(context)
	if limit := j.req.Limit; limit > 0 {
		most = min(most, max(1, limit-j.resume.before))
	}
	return most * max(1, j.req.Beams)
}

// echoed is how many tokens of the prompt the answer may begin with.
func (j *job) echoed() int {
	switch {
	case !openai.Echoes(&j.body):
		return 0
	case j.prompt > 0:
		return j.prompt
	}
	return max(j.req.PromptTokens, prompt.Bytes(j.req, j.leg)) // no engine has counted the prompt; a token of text has at least one byte
}

// mayTake is how many bytes a stream of so many tokens may have, each with so many likeliest ones and none with more than an event may have.
func mayTake(tokens, likeliest, event int) int64 {
	if likeliest == openai.AllTokens || likeliest > anyVocabulary {
		likeliest = anyVocabulary
	}
	return int64(event) + int64(tokens)*int64(tokenBytes+min(likeliest*likeliestBytes, event))
}

// finishBody reads the rest of the body behind [DONE], within the reader's limits,
// so that the connection can be used again. The client has its answer already.
func finishBody(resp *engine.Response, b *buffers) {
	read := readPool.Get().(*[4 << 10]byte)
	defer readPool.Put(read)
	for {
		wait := b.Reader.Wait(time.Now())
		if b.Reader.Err() != nil {
			break
		}
		resp.SetIdle(wait)
		n, err := resp.Read(read[:])
		if err != nil {
			break
		}
		b.Reader.Feed(read[:n], time.Now())
	}
	resp.Close()
}

// mostTails is how many ends of bodies are waited for at once; beyond it
// connections are closed.
const mostTails = 1024

// limits are what the source's engine may send.
func (s *source) limits(first time.Duration) sse.Limits {
	l := &s.job.srv.Settings().Limits
	gap := l.EventTimeout
	if s.muffled {
		gap = max(gap, l.ProbeTimeout)
	}
	return sse.Limits{Event: l.EventBytes, Bytes: mayTake(s.job.echoed()+s.mayHave, s.job.req.Likeliest, l.EventBytes), First: max(1, first), Gap: gap}
}

// waitAtMost is the time that a limit stands for.
func waitAtMost(l lifecycle.Limit, set *fleet.Settings, p *mooncake.Profile) time.Duration {
	switch l {
	case lifecycle.ByProbe, lifecycle.ByWhole:
		return set.Limits.ProbeTimeout
	case lifecycle.ByFirstEvent, lifecycle.ByHold:
		return p.FirstEventTimeout
	case lifecycle.ByCallback:
		return set.Bind.CallbackTimeout
	case lifecycle.ByGrace:
		return set.Bind.Grace
	case lifecycle.ByConfirm:
		return set.Bind.Confirm
	case lifecycle.ByAbort:
		return abortTime
	case lifecycle.NotHere:
	}
	return handoff.Forever
}

const abortTime = 200 * time.Millisecond
