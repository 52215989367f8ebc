package request

import (
	"errors"
	"sync/atomic"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// tokenBytes is how many bytes of a stream one token may take. Each of its alternatives (top_logprobs) may take likeliestBytes more,
// because it comes as text and as bytes. In practice, a token with twenty alternatives takes some 3 KiB.
const (
	tokenBytes     = 16 << 10
	likeliestBytes = 1 << 10
	anyVocabulary  = 512 << 10 // tokens: more than the vocabulary of any model
)

// maxAnswerTokens is how many tokens the rest of the job's answer may have. context is the engine's largest number of tokens per request.
func (j *job) maxAnswerTokens(context int) int {
	most := prompt.Longest(context)
	if limit := j.req.Limit; limit > 0 {
		most = min(most, max(1, limit-j.resume.answerTokens))
	}
	return most * max(1, j.req.Beams)
}

// maxEchoed is how many tokens of the prompt the answer may repeat at its beginning; 0: the request does not ask for an echo.
func (j *job) maxEchoed() int {
	switch {
	case !openai.Echoes(&j.body):
		return 0
	case j.promptTokens > 0:
		return j.promptTokens
	}
	// no engine has counted the prompt, so this is an upper bound: a token of text has at least one byte
	return max(j.req.PromptTokens, prompt.Bytes(j.req, j.changes))
}

// maxStreamBytes is how many bytes a stream with this many tokens may have. likeliest is how many alternatives (top_logprobs) come with
// each token. The alternatives of one token are in one event, so together they have no more than eventBytes, the largest size of an event.
func maxStreamBytes(tokens, likeliest, eventBytes int) int64 {
	if likeliest == openai.AllTokens || likeliest > anyVocabulary {
		likeliest = anyVocabulary
	}
	return int64(eventBytes) + int64(tokens)*int64(tokenBytes+min(likeliest*likeliestBytes, eventBytes))
}

// finishBody reads the rest of a body after [DONE], within the reader's limits, so that the connection can be used again. The client has
// its answer already.
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

// mostTails is how many bodies finishBody may read at once. If there are more, their connections are closed instead.
const mostTails = 1024

// limits bounds the size and the pauses of the engine's stream. first is how long the first event may take.
func (s *source) limits(first time.Duration) sse.Limits {
	l := &s.job.srv.Settings().Limits
	gap := l.EventTimeout
	if s.muffled {
		gap = max(gap, l.ProbeTimeout)
	}
	likeliest := s.job.req.TopLogprobs
	if s.job.req.Endpoint == mooncake.Generate {
		likeliest = openai.AllTokens // each event may have all of the answer so far
	}
	return sse.Limits{Event: l.EventBytes, Bytes: maxStreamBytes(s.job.maxEchoed()+s.maxTokens, likeliest, l.EventBytes),
		First: max(1, first), Gap: gap}
}

// waitAtMost returns the duration of a limit of the request's lifecycle. profile belongs to the engine that is waited for.
func waitAtMost(limit lifecycle.Limit, settings *fleet.Settings, profile *mooncake.Profile) time.Duration {
	switch limit {
	case lifecycle.ByProbe, lifecycle.ByWhole:
		return settings.Limits.ProbeTimeout
	case lifecycle.ByFirstEvent, lifecycle.ByHold:
		return profile.FirstEventTimeout
	case lifecycle.ByCallback:
		return settings.Bind.CallbackTimeout
	case lifecycle.ByGrace:
		return settings.Bind.Grace
	case lifecycle.ByConfirm:
		return settings.Bind.Confirm
	case lifecycle.ByAbort:
		return abortTime
	case lifecycle.NotHere:
	}
	return handoff.Forever
}

const abortTime = 200 * time.Millisecond

// manyTimes times the predicted time of a prompt, plus first_event_timeout, is how long a rank that prefills and decodes may take before
// watchCore looks for signs of life. The factor is large, because other prompts may be computed before this one.
const manyTimes = 16

var errStuck = errors.New("its core gave no sign of life for first_event_timeout, and has had the prompt for many times as long as it " +
	"takes to compute it: there was no event on any of its streams, and no gauge moved")

// watchCore ends a call that waits for its first event if the core of the rank stands still: the prompt takes far longer than predicted,
// and for first_event_timeout no event came on any stream of the rank and none of its gauges moved. A core that is only slow gives such
// signs, and keeps the request. The request also stays while no rank of another group or engine takes requests, and while prefill.retry
// grants no further attempt. The retry budget has two purposes: of many requests that wait at this core, not all move at the same moment,
// and a prompt that itself halts cores reaches only as many cores as it has attempts. limits.probe_timeout ends the wait in any case.
func watchCore(s *stream) (stop func()) {
	if s.from.slot.ComputeMs <= 0 || s.from.whole || s.from.muffled || s.job.incoming.ToDecode != nil {
		return func() {} // no prediction to compare with, or no event before the whole answer, or no other rank that may get the request
	}
	silence := s.from.rank.Profile.FirstEventTimeout
	patience := silence + time.Duration(manyTimes*float64(s.from.slot.ComputeMs)*float64(time.Millisecond))
	j, avoided, move := s.job, s.job.avoid.ranks(), s.job.avoid.haltedCores+1
	halted := &atomic.Bool{}
	s.from.coreHalted = halted
	return handoff.Watch(patience, func() (again time.Duration) {
		if heard := s.from.rank.Signs.Last(); heard.After(s.from.began) && time.Since(heard) < silence {
			return silence - time.Since(heard)
		}
		if _, others := j.srv.Engines().Around(s.from.rank.Worker, avoided); !others {
			return silence
		}
		if !halted.Load() { // else the retry was granted by an earlier look
			if _, granted := j.srv.Tier.Retry(move, 0, errStuck); !granted {
				return silence / 4
			}
		}
		halted.Store(true)
		s.from.call.Expire()
		return silence / 4 // Expire does nothing if the call does not wait for bytes at this moment, so it is called again
	})
}

// stuck corrects the reason of a call that watchCore has ended: its fault says that the engine was silent, but the rank's core stands
// still.
func stuck(s *stream, fault *failure.Fault) *failure.Fault {
	if fault != nil && fault.Why == lifecycle.Silent && s.from.coreHalted != nil && s.from.coreHalted.Load() {
		fault.Why, fault.Err = lifecycle.Stuck, errStuck
	}
	return fault
}

// anyPrompt is more tokens than a prompt has.
const anyPrompt = 1 << 40

// reportCompute announces, right before the request is sent, how many tokens of the prompt the engine may have to compute itself. If the
// engine computes more than was announced, it has not pulled all of the KV that was handed over.
func (s *source) reportCompute() {
	if s.mayCompute = handoff.BlockTokens; s.local {
		s.mayCompute = anyPrompt // the length is known only when the engine has counted the prompt
	}
	s.rank.Traffic.Sends(s.mayCompute)
}

// settleCompute replaces the number that reportCompute has announced by the tokens that the engine has computed; only its first call
// counts. It is called at the first event, when the engine has counted the prompt, or at the end of the request. none says that the engine
// has computed nothing.
func (s *source) settleCompute(none bool) {
	if s.mayCompute == 0 {
		return
	}
	computed := s.mayCompute
	switch usage, _ := s.answer.Mirror.Usage(); {
	case none:
		computed = 0
	case (s.local || s.job.passed != nil) && usage.Prompt > 0:
		computed = int64(usage.Prompt)
	case s.local:
		computed = int64(prompt.Bytes(s.job.req, s.job.changes)) + handoff.BlockTokens
	}
	s.rank.Traffic.Settles(s.mayCompute, computed)
	s.mayCompute = 0
}
