package request

import (
	"bytes"
	"fmt"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// prefillOnly has a prefill engine answer the request, which asks for logprobs of its prompt and for one token at most. Only an
// engine that computes the prompt can tell these, and nothing is left to decode. So there is no hand-off and no slot.
func (r *runner) prefillOnly() (*stream, *failure.Fault) {
	j, lease := r.job, r.lease
	if j.client.Left() {
		return nil, failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone(), nil)
	}
	j.enter(journal.Prefill, "")
	began, c, limits := time.Now(), lease.Candidate, &j.srv.Settings().Limits
	call, run := toPrefill(j, lease)
	defer j.srv.Fleet.Untrack(run)
	j.client.OnGone(func() { call.Leave(upstream.Notice) })
	defer j.client.OnGone(nil)
	body := c.Profile.DecodeBody(&j.body, j.req.Endpoint, j.leg, nil, "", j.req.Stream, nil)
	resp, f := call.Open(j.record.Carry(engine.JSONHeaders(j.legID("p", j.record.Attempts))), body)
	var answer []byte
	if resp != nil {
		defer resp.Close()
		if f == nil {
			answer, f = call.Read(resp, nil, mostBytes(j.srv.Settings(), true), began.Add(limits.ProbeTimeout))
		}
	}
	if f = answeredBy(j, call, run, began, f); f != nil {
		return nil, f
	}
	ask := j.ask
	ask.Cached, ask.MaxTokens = sse.OwnCached, j.mayHave(j.model.MaxLen)
	if !j.req.Stream {
		ask.ContinuousUsage, ask.Whole = true, true
	}
	s := slotless(j, &fleet.Rank{Instance: c.Instance, Target: c.Target, Profile: c.Profile, Traffic: &engine.Traffic{}, Signs: engine.NewSigns()}, ask)
	if err := takeAll(s, answer); err != nil {
		s.settle(0)
		return nil, failure.Useless(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "its answer cannot be used"), fmt.Errorf("prefill %s: %w", c.ID, err))
	}
	u, _ := s.Mirror.Usage()
	j.prompt = u.Prompt
	j.record.Report(journal.Event{What: journal.Prefilled, Tokens: u.Prompt, Cached: u.Cached})
	lease.Answered(prefill.Usage{PromptTokens: u.Prompt, CachedTokens: u.Cached}, time.Time{})
	s.firstAt = time.Now()
	j.record.Report(journal.Event{What: journal.First, At: s.firstAt})
	j.enter(journal.Streaming, "")
	return s, nil
}

// takeAll takes an answer of which all is here.
func takeAll(s *stream, answer []byte) error {
	if s.whole {
		return takeWhole(s, answer)
	}
	if !bytes.HasPrefix(bytes.TrimLeft(answer, "\r\n"), []byte("data:")) {
		return errNotJSON
	}
	s.Reader.Reset(s.limits(time.Hour))
	var fx sse.Effects
	s.now = time.Now()
	s.out, fx = s.Feed(s.out, answer, s.now)
	s.effect(fx)
	if s.broken == nil && s.stage < ended {
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	}
	if s.broken != nil {
		return errRefusal
	}
	return nil
}
