package request

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// answerPool has the buffers of probes' answers. What outlives a probe is copied.
var answerPool = sync.Pool{New: func() any { return new([]byte) }}

// probe runs the prefill. Once the engine answers, it holds the blocks, so the
// hand-off is read also of a client that has left, to be discarded. With a fault, it is of no use.
func (j *job) probe(lease *prefill.Lease) (*handoff.Handoff, *failure.Fault) {
	if j.client.Left() { // before anything is sent
		return nil, failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone(), nil)
	}
	j.enter(journal.Prefill, "")
	began := time.Now()
	c := lease.Candidate
	x, err := j.srv.Fleet.Exchange(c)
	if err != nil {
		f := failure.Of(lifecycle.Ended{Why: lifecycle.Unnamed}, failure.BadGateway("prefill", "its bootstrap server does not answer"), err)
		if prefill.Unsent(err) {
			f.Why = lifecycle.Unreachable
		}
		return nil, f
	}
	if x != nil {
		x.TransferID = j.legID("t", j.record.Attempts)
	}
	born := j.srv.Engines().Born(c.Instance)
	limits := &j.srv.Settings().Limits
	call, run := toPrefill(j, lease)
	defer j.srv.Fleet.Untrack(run)
	// An engine that finishes a prefill pins its KV before anyone hears of it, and closing the connection then loses the only
	// name it has: the pin stays until the hold timeout (vllm#50425). So the probe of a client that leaves may still finish for a
	// moment, and its hand-off is discarded like any other. One that takes longer is aborted, which frees it on the engine at
	// once. What an engine finishes in the instant in which it notices that cannot be known to anyone. It is not left on the
	// budget: charging every aborted probe for the whole hold timeout would close the gate on engines that are empty.
	leaving := j.client.leaveAfter(call.Call, limits.ProbeGrace, time.Time{})
	resp, f := call.Open(j.record.Carry(engine.JSONHeaders(j.legID("p", j.record.Attempts))), c.Profile.ProbeBody(&j.body, j.req.Endpoint, j.leg, x, nil))
	leaving.stop()
	answered := time.Now() // the hold timeout counts from the response headers
	if resp != nil {
		defer resp.Close()
	}
	var answer []byte
	if f == nil {
		room := answerPool.Get().(*[]byte)
		defer func() {
			if *room = answer; cap(answer) <= 64<<10 { // one huge answer must not stay in the pool
				answerPool.Put(room)
			}
		}()
		answer, f = call.Read(resp, *room, mooncake.MaxProbeAnswer, began.Add(limits.ProbeTimeout))
	}
	if f = answeredBy(j, call, run, began, f); f != nil {
		return nil, f
	}
	return j.accept(lease, born, x, answer, answered)
}

// toPrefill is a call to the prefill engine of a lease, which a drain may end. Whoever gets it untracks its run.
func toPrefill(j *job, lease *prefill.Lease) (*upstream.Call, *fleet.Run) {
	c, limits := lease.Candidate, &j.srv.Settings().Limits
	call := &upstream.Call{
		Call: j.srv.call(&j.life, c.Profile, c.Target), Engine: c.Instance, Path: j.req.Endpoint.Path(), Log: j.srv.Log,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: limits.ProbeTimeout, Idle: limits.EventTimeout},
	}
	run := j.srv.Fleet.TrackProbe(&lease.Candidate, call.Call)
	call.Run = run
	if c.Profile.Early() { // nobody can name it to a decode engine yet
		lease.Send()
	}
	return call, run
}

// answeredBy takes note of a call to a prefill engine that is over. f is how it failed, nil if it did not.
func answeredBy(j *job, call *upstream.Call, run *fleet.Run, began time.Time, f *failure.Fault) *failure.Fault {
	if f != nil && f.Status == 0 {
		return j.probeFailed(run, f)
	}
	j.srv.Monitor.Answered(call.Engine)
	j.record.Report(journal.Event{What: journal.Probed, Took: time.Since(began)})
	if f != nil && f.Engine != "" {
		j.srv.Monitor.Report(f.Engine, f.Err)
	}
	return f
}

// accept makes a hand-off of a probe's answer.
func (j *job) accept(lease *prefill.Lease, born fleet.Birth, x *mooncake.Exchange, answer []byte, answered time.Time) (*handoff.Handoff, *failure.Fault) {
	c := lease.Candidate
	got, err := c.Profile.ReadProbe(answer, x, j.srv.Fleet.KnownHost)
	if err == nil && !prompt.Credible(got.PromptTokens, 0, j.srv.Engines().Context(c.Instance)) {
		err = fmt.Errorf("it counts %d tokens in the prompt, more than the context of its model has", got.PromptTokens)
	}
	if err == nil && got.PromptTokens == 0 {
		got.PromptTokens = j.estimate()
	}
	if err == nil && got.ByProbeID && j.srv.Engines().NamesRequests(c) {
		err = fmt.Errorf("%w: remote_request_id is missing, which decode engines of its version wait for", mooncake.ErrBadHandoff)
	}
	if got.CachedTokens > got.PromptTokens {
		got.CachedTokens = -1 // it cannot have found more than there is
	}
	budget, budgetErr := c.Profile.HoldBudget()
	if err = errors.Join(err, budgetErr); err != nil {
		why := lifecycle.Garbled
		switch {
		case errors.Is(err, mooncake.ErrNoHandoff) && got.FinishReason == "stop":
			why = lifecycle.Empty
			j.endsAtOnce(got.PromptTokens)
		case errors.Is(err, mooncake.ErrNoHandoff):
			why = lifecycle.Bare
		}
		err = fmt.Errorf("prefill %s answered without a usable hand-off: %w", c.ID, err)
		if why == lifecycle.Garbled { // wrong connector, or an engine that points elsewhere
			j.srv.Log.Error("a prefill engine's answer has no usable hand-off, and is refused", zap.Inline(j), zap.Error(err))
		}
		return nil, failure.Useless(lifecycle.Prefill, why, failure.BadGateway("prefill", "it gave no usable hand-off"), err)
	}
	j.prompt = got.PromptTokens
	j.record.Report(journal.Event{What: journal.Prefilled, Tokens: got.PromptTokens, Cached: got.CachedTokens, Resumed: j.life.Resumed()})
	if !j.life.Resumed() {
		j.resume.alone, j.cached = got.PromptTokens, got.CachedTokens
		if wantsIDs(j.req, c.Profile) {
			j.resume.ids = bytes.Clone(got.PromptTokenIDs)
		}
	}
	expires := answered.Add(c.Profile.KVHoldTimeout)
	lease.Answered(prefill.Usage{PromptTokens: got.PromptTokens, CachedTokens: got.CachedTokens}, expires)
	h := &handoff.Handoff{Handoff: mooncake.NewHandoff(got.KV, answered.Add(budget), expires), Lease: lease, Born: j.srv.Fleet.Made(born, c, got.EngineID)}
	h.Origin = handoff.Origin{Request: j, ID: j.id, Arrival: j.arrive, Model: j.model, Endpoint: j.req.Endpoint, Body: j.body, Leg: j.leg, Prompt: j.prompt, Attempt: j.record.Attempts}
	if got.Coordinates != nil {
		j.srv.Fleet.Learn(c, born, got.Coordinates)
	}
	if got.ByProbeID {
		h.ProbeID = j.legID("p", j.record.Attempts)
	}
	if fail := prompt.Beyond(j.model, j.req, j.prompt, j.resume.before); fail != nil {
		return h, failure.Of(lifecycle.Ended{Far: lifecycle.Through, Why: lifecycle.TooLong}, fail, nil)
	}
	return h, ignored(lifecycle.Prefill, j.verify(j.resume.atP, got.PromptTokens))
}

// endsAtOnce notes that the first token was the end of the answer.
// Later probes mask the end-of-sequence token; where that does not help, a decode
// rank may do without a hand-off.
func (j *job) endsAtOnce(tokens int) {
	if j.leg.IgnoreEOS {
		j.local.ended = cmp.Or(tokens, j.estimate())
		return
	}
	leg := *j.leg
	leg.IgnoreEOS = true
	j.leg = &leg
}
