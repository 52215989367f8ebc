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

// tokenBytes is how many bytes of a stream one token may take. A request can ask for the likeliest alternatives to each token
// (top_logprobs), and each alternative may take alternativeBytes more, as text and as bytes. In practice, a token with twenty alternatives
// takes about 3 KiB.
const (
	tokenBytes       = 16 << 10
	alternativeBytes = 1 << 10
	maxVocabulary    = 512 << 10 // tokens; no model's vocabulary has as many
)

// maxAnswerTokens is how many tokens the rest of the job's answer may have. context is the engine's context length in tokens. The limit of
// the client counts less the tokens that the client has already, but the rest has at least one token. A beam search has a text per beam.
func (j *job) maxAnswerTokens(context int) int {
	tokensPerText := prompt.ContextLimit(context)
	if limit := j.req.Limit; limit > 0 {
		tokensPerText = min(tokensPerText, max(1, limit-j.resume.answerTokens))
	}
	return tokensPerText * max(1, j.req.Beams)
}

// maxEchoed is how many tokens of the prompt the answer may repeat at its beginning; 0: the request does not ask for an echo.
func (j *job) maxEchoed() int {
	switch {
	case !openai.Echoes(&j.body):
		return 0
	case j.promptTokens > 0: // an engine has counted the prompt
		return j.promptTokens
	}
	tokenIDs := j.req.PromptTokens // how many token ids the client has sent; 0: the prompt is text
	// A token of text has at least one byte, so the text has at most as many tokens as bytes. If the job is a leg of a fan-out (one of
	// several prompts), j.changes has the leg's own prompt.
	textBytes := prompt.Bytes(j.req, j.changes)
	return max(tokenIDs, textBytes) // an upper bound is enough, so it does not matter which of the two the prompt has
}

// maxStreamBytes is how many bytes a stream with the given number of tokens may have. alternatives is how many alternatives come with each
// token (top_logprobs). The alternatives of one token have at most eventBytes together, because one event may have no more. The sum also
// has room for one event without tokens (eventBytes).
func maxStreamBytes(tokens, alternatives, eventBytes int) int64 {
	if alternatives == openai.AllTokens || alternatives > maxVocabulary {
		alternatives = maxVocabulary
	}
	return int64(eventBytes) + int64(tokens)*int64(tokenBytes+min(alternatives*alternativeBytes, eventBytes))
}

// drainBody reads the rest of a body after [DONE], within the reader's limits, so that the connection can be used again. The client has
// its whole answer by then. It closes resp.
func drainBody(resp *engine.Response, b *buffers) {
	readBuffer := readPool.Get().(*[4 << 10]byte)
	defer readPool.Put(readBuffer)
	for {
		wait := b.Reader.Wait(time.Now())
		if b.Reader.Err() != nil { // the body has exceeded a limit
			break
		}
		resp.SetIdle(wait)
		n, err := resp.Read(readBuffer[:])
		if err != nil { // io.EOF at the end of the body, or the connection broke
			break
		}
		b.Reader.Feed(readBuffer[:n], time.Now())
	}
	resp.Close()
}

// maxFinishers is how many goroutines may finish requests at once after their clients have the answer. Beyond that number, detach closes
// the connection to the engine and does not wait for the end of the body.
const maxFinishers = 1024

// streamLimits returns the limits of the engine's stream: its bytes, and how long its events may take. first is the time that is left for
// the first event; 0 or less: the time is over.
func (u *upstreamCall) streamLimits(first time.Duration) sse.Limits {
	l := &u.job.srv.Settings().Limits
	gap := l.EventTimeout  // how long the engine may be silent between two events
	if u.mayHoldTextBack { // after its first event the engine may send nothing more until it has computed the whole answer
		gap = max(gap, l.ProbeTimeout) // as for an answer in one piece, which takes as long
	}
	// Each token may come with as many likely alternatives as the client asks for, which take many times the bytes of the token.
	alternatives := u.job.req.TopLogprobs
	if u.job.req.Endpoint == mooncake.Generate {
		alternatives = openai.AllTokens // each event may have all of the answer so far, so the bytes per token have no useful bound
	}
	mostTokens := u.job.maxEchoed() + u.maxTokens // an echo repeats the prompt at the beginning of the answer
	return sse.Limits{Event: l.EventBytes, Bytes: maxStreamBytes(mostTokens, alternatives, l.EventBytes),
		First: max(1, first), Gap: gap} // 1 ns, because 0 would mean no limit
}

// timeoutOf returns the duration of a limit of the request's lifecycle. profile belongs to the engine whose answer is awaited; it is nil
// for a request that is passed through, which has only the limit ByProbe.
func timeoutOf(limit lifecycle.Timeout, settings *fleet.Settings, profile *mooncake.Profile) time.Duration {
	switch limit {
	case lifecycle.ByProbe: // an engine computes the prompt
		return settings.Limits.ProbeTimeout
	case lifecycle.ByWhole: // an engine computes a whole answer; later, the caller waits on while the rank shows signs of life
		return settings.Limits.ProbeTimeout
	case lifecycle.ByFirstEvent: // the prompt is computed, and a decode engine is to send its first event
		return profile.FirstEventTimeout
	case lifecycle.ByCallback: // a decode engine is to say where the KV goes
		return settings.Bind.CallbackTimeout
	case lifecycle.ByGrace: // a call whose result is not needed any more is to end
		return settings.Bind.Grace
	case lifecycle.ByConfirm: // the prefill engine is to answer before the client gets the first event
		return settings.Bind.Confirm
	case lifecycle.NoTimeout: // other code ends the wait
	}
	return handoff.Forever
}

// stuckFactor bounds how long a rank that prefills and decodes may take for a prompt: stuckFactor as long as predicted, plus the
// first_event_timeout of its profile. After that, watchCore looks for signs of life of the rank's core.
const stuckFactor = 16

var errStuck = errors.New("its core gave no sign of life for first_event_timeout, and has had the prompt for many times as long as it " +
	"takes to compute it: there was no event on any of its streams, and no gauge moved")

// watchCore ends a call that waits for its first event if the core of the rank (the process that computes) stands still. A core counts as
// standing still if the prompt takes far longer than predicted, and if for first_event_timeout no stream of the rank had an event and none
// of its gauges moved. A core that is only slow keeps the request. The call that watchCore ends fails as Stuck (see correctIfStuck). The
// request then gets another attempt, for which the lifecycle does not ask the retry budget again.
//
// The request also stays if no rank of another group or engine takes requests, or as long as prefill.retry allows no further attempt. This
// limit has two reasons. Many requests may wait at the same core, and another group must not get all of them at one moment. And if the
// prompt itself makes cores stand still, it reaches no more cores than it has attempts. limits.probe_timeout ends the wait in any case.
func watchCore(s *stream) (stop func()) {
	if s.upstream.slot.ComputeMs <= 0 || s.upstream.mayHoldTextBack || s.job.incoming.ToDecode != nil {
		return func() {} // no time was predicted, or no text may come before the whole answer, or the caller named the rank
	}
	silence := s.upstream.rank.Profile.FirstEventTimeout // a core without a sign of life for this long stands still
	predicted := float64(s.upstream.slot.ComputeMs) * float64(time.Millisecond)
	firstCheck := silence + time.Duration(stuckFactor*predicted) // after many times the predicted time, and a further silence
	soon := silence / 4                                          // until the next check, if the core stands still but the call goes on
	// The check runs on another goroutine, so it has copies of what it needs of the request's attempts.
	j, avoided, retryNumber := s.job, s.job.avoid.ranks(), s.job.avoid.haltedCores+1
	halted := &atomic.Bool{} // the core stands still, and another attempt was granted
	s.upstream.coreHalted = halted
	return handoff.Repeat(firstCheck, func() (nextCheck time.Duration) {
		if lastSign := s.upstream.rank.Signs.LastSign(); lastSign.After(s.upstream.began) && time.Since(lastSign) < silence {
			return silence - time.Since(lastSign) // the core works, so look again when it could have been silent for too long
		}
		// The ranks that share a queue with this one are those of its group, or of its engine if no other group takes requests. So
		// every other rank has another core.
		if _, otherCoreExists := j.srv.Engines().SharingQueueWith(s.upstream.rank.Worker, avoided); !otherCoreExists {
			return silence // the request has nowhere to go
		}
		if !halted.Load() { // a retry that the budget has granted is not asked for again
			const noStatus = 0 // the engine has not answered
			if _, granted := j.srv.Prefill.Retry(retryNumber, noStatus, errStuck); !granted {
				return soon // by the next check, the budget may grant an attempt
			}
		}
		halted.Store(true)
		s.upstream.call.Expire()
		return soon // Expire does nothing if the call does not wait for bytes at this moment, so it is called again
	})
}

// correctIfStuck returns the fault of a call. If watchCore has ended the call, it corrects the reason: such a call fails as Silent, but the
// core of the rank stands still, which is the reason Stuck. A nil fault stays nil.
func correctIfStuck(s *stream, fault *failure.Fault) *failure.Fault {
	if fault == nil || fault.Reason != lifecycle.Silent {
		return fault
	}
	if halted := s.upstream.coreHalted; halted != nil && halted.Load() { // nil: watchCore does not watch this call
		fault.Reason, fault.Err = lifecycle.Stuck, errStuck
	}
	return fault
}

// unknownPromptTokens stands for the length of a prompt that is not known yet. It is larger than any prompt.
const unknownPromptTokens = 1 << 40

// announceTokensToCompute tells the engine's traffic, right before the request is sent, how many tokens of the prompt the engine may
// compute itself. If the engine computes more than this, it has not pulled the KV of all tokens that were handed over.
func (u *upstreamCall) announceTokensToCompute() {
	u.tokensToCompute = handoff.MostComputed(u.rank)
	if u.computesPrompt {
		u.tokensToCompute = unknownPromptTokens // the length of the prompt is known only from the answer
	}
	u.rank.Traffic.ExpectComputed(u.tokensToCompute)
}

// correctTokensToCompute replaces the number that announceTokensToCompute has noted by the number of tokens that the engine has computed.
// Only the first call changes something. That call comes with the first event, when the engine has counted the prompt, or at the end of the
// request. computedNothing says that the engine has computed nothing.
func (u *upstreamCall) correctTokensToCompute(computedNothing bool) {
	if u.tokensToCompute == 0 { // corrected before, or nothing was noted
		return
	}
	// After a hand-off, the announced number stays: one block, and the engine computes less than that. It also stays for a request that
	// is passed through, if no count came: then it is the most that the engine may have computed.
	computed := u.tokensToCompute
	switch usage, _ := u.answer.Filter.Usage(); {
	case computedNothing:
		computed = 0
	case (u.computesPrompt || u.job.passthrough != nil) && usage.Prompt > 0: // the engine has computed the whole prompt, and counted it
		computed = int64(usage.Prompt)
	// No count came, so an upper bound counts: a token per byte of the client's prompt. One block more leaves room for tokens that the
	// engine adds, e.g. those of its chat template.
	case u.computesPrompt:
		computed = int64(prompt.Bytes(u.job.req, u.job.changes)) + handoff.BlockTokens
	}
	u.rank.Traffic.SettleComputed(u.tokensToCompute, computed)
	u.tokensToCompute = 0
}
