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

// tokenBytes is how many bytes of a stream one token may take. Each likely alternative that a
// request asks for (top_logprobs) may take alternativeBytes more, as text and as bytes. In
// practice, a token with twenty alternatives takes about 3 KiB.
const (
	tokenBytes       = 16 << 10
	alternativeBytes = 1 << 10
	maxVocabulary    = 512 << 10 // tokens; no model's vocabulary has as many
)

// maxAnswerTokens is how many tokens the rest of the answer may have, at least one for each text.
// context is the engine's context length. A beam search has a text per beam.
func (j *job) maxAnswerTokens(context int) int {
	tokensPerText := prompt.ContextLimit(context)
	if limit := j.req.Limit; limit > 0 {
		tokensPerText = min(tokensPerText, max(1, limit-j.resume.answerTokens))
	}
	return tokensPerText * max(1, j.req.Beams)
}

// maxEchoed is how many tokens of the prompt the answer may repeat.
func (j *job) maxEchoed() int {
	switch {
	case !openai.Echoes(&j.body):
		return 0
	case j.promptTokens > 0:
		return j.promptTokens
	}
	tokenIDs := j.req.PromptTokens // 0: the prompt is text
	// A token of text has at least one byte. A leg of a fan-out has its own prompt in j.changes.
	textBytes := prompt.Bytes(j.req, j.changes)
	return max(tokenIDs, textBytes) // an upper bound is enough
}

// maxStreamBytes: the alternatives of one token have at most eventBytes together, because one event
// may have no more. One event without tokens is added.
func maxStreamBytes(tokens, alternatives, eventBytes int) int64 {
	if alternatives == openai.AllTokens || alternatives > maxVocabulary {
		alternatives = maxVocabulary
	}
	return int64(eventBytes) + int64(tokens)*int64(tokenBytes+min(alternatives*alternativeBytes, eventBytes))
}

// drainBody reads the rest of a body after [DONE], so that the connection can be used again. The
// client has its whole answer by then.
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
		if err != nil {
			break
		}
		b.Reader.Feed(readBuffer[:n], time.Now())
	}
	resp.Close()
}

// maxFinishers bounds the goroutines that finish requests whose clients have the answer. Beyond it,
// detach closes the connection to the engine.
const maxFinishers = 1024

// streamLimits: first is the time that is left for the first event; 0 or less: it is over.
func (u *upstreamCall) streamLimits(first time.Duration) sse.Limits {
	l := &u.job.srv.Settings().Limits
	gap := l.EventTimeout // between two events
	// After its first event the engine may be silent until the whole answer is computed.
	if u.mayHoldTextBack {
		gap = max(gap, l.ProbeTimeout) // as for an answer in one piece
	}
	// The alternatives take many times the bytes of the token.
	alternatives := u.job.req.TopLogprobs
	if u.job.req.Endpoint == mooncake.Generate {
		// Each event may have all of the answer so far, so there is no useful bound.
		alternatives = openai.AllTokens
	}
	mostTokens := u.job.maxEchoed() + u.maxTokens // an echo repeats the prompt at the beginning
	return sse.Limits{Event: l.EventBytes, Bytes: maxStreamBytes(mostTokens, alternatives, l.EventBytes),
		First: max(1, first), Gap: gap} // 1 ns, because 0 would mean no limit
}

// timeoutOf: profile is nil for a request that is passed through, which has only the limit ByProbe.
func timeoutOf(limit lifecycle.Timeout, settings *fleet.Settings, profile *mooncake.Profile) time.Duration {
	switch limit {
	case lifecycle.ByProbe:
		return settings.Limits.ProbeTimeout
	case lifecycle.ByWhole: // later, the caller waits on while the rank shows signs of life
		return settings.Limits.ProbeTimeout
	case lifecycle.ByFirstEvent:
		return profile.FirstEventTimeout
	case lifecycle.ByCallback:
		return settings.Bind.CallbackTimeout
	case lifecycle.ByGrace:
		return settings.Bind.Grace
	case lifecycle.ByConfirm:
		return settings.Bind.Confirm
	case lifecycle.NoTimeout: // other code ends the wait
	}
	return handoff.Forever
}

// stuckFactor bounds how long a rank that prefills and decodes may take for a prompt: stuckFactor
// times the prediction, plus the first_event_timeout of its profile. Then watchCore looks for signs
// of life.
const stuckFactor = 16

var errStuck = errors.New("its core gave no sign of life for first_event_timeout, and has had the prompt for many times as long as it " +
	"takes to compute it: there was no event on any of its streams, and no gauge moved")

// watchCore ends a call that waits for its first event if the core of the rank (the process that
// computes) stands still: the prompt takes far longer than predicted, and for first_event_timeout
// no stream of the rank had an event and none of its gauges moved. The call fails as Stuck, and the
// lifecycle does not ask the retry budget again.
//
// The request stays if no other group or engine takes requests, or as long as prefill.retry allows
// no further attempt: many requests may wait at the same core, and another group must not get all
// of them at one moment. And if the prompt itself makes cores stand still, it reaches no more cores
// than it has attempts. limits.probe_timeout ends the wait in any case.
func watchCore(s *stream) (stop func()) {
	if s.upstream.slot.ComputeMs <= 0 || s.upstream.mayHoldTextBack || s.job.incoming.ToDecode != nil {
		return func() {} // no prediction, perhaps no text before the end, or a rank that the caller named
	}
	silence := s.upstream.rank.Profile.FirstEventTimeout
	predicted := float64(s.upstream.slot.ComputeMs) * float64(time.Millisecond)
	// The first check comes after many times the predicted time, and a further silence.
	firstCheck := silence + time.Duration(stuckFactor*predicted)
	soon := silence / 4 // until the next check, if the core stands still but the call goes on
	// The check runs on another goroutine, so it has copies.
	j, avoided, retryNumber := s.job, s.job.avoid.ranks(), s.job.avoid.haltedCores+1
	halted := &atomic.Bool{} // and another attempt was granted
	s.upstream.coreHalted = halted
	return handoff.Repeat(firstCheck, func() (nextCheck time.Duration) {
		if lastSign := s.upstream.rank.Signs.LastSign(); lastSign.After(s.upstream.began) && time.Since(lastSign) < silence {
			return silence - time.Since(lastSign) // look again when it could have been silent for too long
		}
		// The ranks that share a queue are those of the group, or of the engine if no other group takes
		// requests. So every other rank has another core.
		if _, otherCoreExists := j.srv.Engines().SharingQueueWith(s.upstream.rank.Worker, avoided); !otherCoreExists {
			return silence // the request has nowhere to go
		}
		if !halted.Load() { // a granted retry is not asked for again
			const noStatus = 0 // the engine has not answered
			if _, granted := j.srv.Prefill.Retry(retryNumber, noStatus, errStuck); !granted {
				return soon // by then, the budget may grant an attempt
			}
		}
		halted.Store(true)
		s.upstream.call.Expire()
		return soon // Expire does nothing if the call does not wait for bytes now, so it is called again
	})
}

// correctIfStuck: a call that watchCore has ended fails as Silent, but its reason is Stuck.
func correctIfStuck(s *stream, fault *failure.Fault) *failure.Fault {
	if fault == nil || fault.Reason != lifecycle.Silent {
		return fault
	}
	if halted := s.upstream.coreHalted; halted != nil && halted.Load() { // nil: not watched
		fault.Reason, fault.Err = lifecycle.Stuck, errStuck
	}
	return fault
}

// unknownPromptTokens is larger than any prompt.
const unknownPromptTokens = 1 << 40

// announceTokensToCompute tells the traffic, before the request is sent, how many tokens of the
// prompt the engine may compute. If it computes more, it has not pulled the KV of all tokens that
// were handed over.
func (u *upstreamCall) announceTokensToCompute() {
	u.tokensToCompute = handoff.MostComputed(u.rank)
	if u.computesPrompt {
		u.tokensToCompute = unknownPromptTokens // known only from the answer
	}
	u.rank.Traffic.ExpectComputed(u.tokensToCompute)
}

// correctTokensToCompute replaces the announced number by what the engine has computed. Only the
// first call, at the first event or at the end, changes something.
func (u *upstreamCall) correctTokensToCompute(computedNothing bool) {
	if u.tokensToCompute == 0 { // corrected before, or nothing was noted
		return
	}
	// After a hand-off, the announced number stays: one block, and the engine computes less than that.
	// Without a count it also stays for a passed-through request.
	computed := u.tokensToCompute
	switch usage, _ := u.answer.Filter.Usage(); {
	case computedNothing:
		computed = 0
	case (u.computesPrompt || u.job.passthrough != nil) && usage.Prompt > 0: // all of the prompt
		computed = int64(usage.Prompt)
	// Without a count: a token per byte, and one block for tokens that the engine adds, e.g. those of
	// its chat template.
	case u.computesPrompt:
		computed = int64(prompt.Bytes(u.job.req, u.job.changes)) + handoff.BlockTokens
	}
	u.rank.Traffic.SettleComputed(u.tokensToCompute, computed)
	u.tokensToCompute = 0
}
