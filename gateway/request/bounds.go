package request

import (
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/sse"
)

// mostTokens bounds an engine's counts where the length of its model's context is
// not known. No model's context is near it.
const mostTokens = 16 << 20

// tokenBytes is how much of a stream one token may take: with the twenty
// likeliest tokens beside it, each as text and bytes, it is some 3 KiB.
const tokenBytes = 16 << 10

// contextOf is how many tokens prompt and answer may have together on an engine,
// as the engine says.
func contextOf(said int) int {
	if said <= 0 {
		return mostTokens
	}
	return said
}

// mayHave is how many tokens the rest of the job's answer may have on an engine
// whose context is so long.
func (j *job) mayHave(context int) int {
	most := contextOf(context)
	if limit := j.req.Limit; limit > 0 {
		most = min(most, max(1, limit-j.resume.before))
	}
	return most
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

// mayTake is how many bytes a stream of so many tokens may have.
func mayTake(tokens, event int) int64 {
	return int64(event) + int64(tokens)*tokenBytes
}

// credible says whether a prompt and its answer can have so many tokens together,
// as an engine or another proxy counts them.
func credible(prompt, completion, context int) bool {
	most := contextOf(context)
	return prompt >= 0 && prompt <= most && completion >= 0 && completion <= most-prompt
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
func (s *stream) limits(first time.Duration) sse.Limits {
	l := &s.job.srv.Settings().Limits
	return sse.Limits{Event: l.EventBytes, Bytes: mayTake(s.job.echoed()+s.mayHave, l.EventBytes), First: max(1, first), Gap: l.EventTimeout}
}
