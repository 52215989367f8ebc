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
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A prefillCall is a call that has an engine compute a prompt. What the engine hands over or answers depends on the kind of request.
type prefillCall struct {
	upstream.Call
	srv   *Server
	run   *fleet.Run // a drain may end it
	born  fleet.Birth
	began time.Time
}

// toPrefill prepares the call to the engine of a lease. until bounds the wait for its answer. A drain may end the call, until untrack.
func toPrefill(j *job, lease *prefill.Lease, until lifecycle.Limit) *prefillCall {
	srv, p := j.srv, lease.Candidate
	limits := &srv.Settings().Limits
	c := &prefillCall{srv: srv, born: srv.Engines().Born(p.Instance), began: time.Now(), Call: upstream.Call{
		Call: upstream.New(srv.Client, p.Profile, p.Target), Engine: p.Instance, Path: j.req.Endpoint.Path(), Log: srv.Log,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: waitAtMost(until, srv.Settings(), p.Profile),
			Idle: limits.EventTimeout},
	}}
	if j.life.Dials() {
		c.Fresh()
	}
	c.run = srv.Fleet.TrackProbe(&lease.Candidate, c.Call.Call)
	c.Run = c.run
	return c
}

func (c *prefillCall) untrack() { c.srv.Fleet.Untrack(c.run) }

// by is until when the engine may answer.
func (c *prefillCall) by() time.Time { return c.began.Add(c.Limits.FirstByte) }

// ended takes note of how the call has ended; f is nil if it has brought an answer. An engine aborts with the connection, unless its
// answer had begun. stopped says that the call was ended here, or never sent, and left that the client had left.
func (c *prefillCall) ended(f *failure.Fault, stopped, left bool) *failure.Fault {
	switch {
	case f == nil || f.Status != 0:
		c.srv.Monitor.Answered(c.Engine)
		if f != nil && f.Engine != "" {
			c.srv.Monitor.Report(f.Engine, f.Err)
		}
		return f
	case stopped && left:
		f.Why, f.Answer, f.Err = lifecycle.Left, failure.Gone, nil
	case stopped && c.run.Moved():
		f.Why = lifecycle.Moved
	case f.Why != lifecycle.HungUp:
		c.srv.Monitor.Report(f.Engine, f.Err)
	}
	if f.Why == lifecycle.Moved || f.Why == lifecycle.HungUp {
		f.Answer, f.Err, f.Engine = c.srv.movedOut(), failure.ErrMoved, ""
	}
	return f
}

// answered takes note of a call that came before any decode leg, and has ended.
func (c *prefillCall) answered(j *job, f *failure.Fault) *failure.Fault {
	if f == nil || f.Status != 0 {
		j.record.Report(journal.Event{What: journal.Probed, Took: time.Since(c.began)})
	}
	return c.ended(f, f != nil && (f.Why == lifecycle.HungUp || f.Far == lifecycle.Unsent), j.client.Left())
}

// answerPool has the buffers of probes' answers. What outlives a probe is copied.
var answerPool = sync.Pool{New: func() any { return new([]byte) }}

// probe runs the prefill. Once the engine answers, it holds the blocks. So the hand-off is
// also read if the client has left, to be discarded. With a fault, the hand-off is of no use.
func (j *job) probe(lease *prefill.Lease, until lifecycle.Limit) (*handoff.Handoff, *failure.Fault) {
	c, began := lease.Candidate, time.Now()
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
	call := toPrefill(j, lease, until)
	call.began = began
	defer call.untrack()
	if c.Profile.Early() { // the address at which decode engines reach it is not known yet, see script
		lease.Send()
	}
	// An engine that finishes a prefill pins its KV before it sends the answer. Closing the connection then loses the only name of
	// that KV: the pin stays until the hold timeout (vllm#50425). So the probe of a client that leaves may still finish for a
	// moment, and its hand-off is discarded like any other. A probe that takes longer is aborted, which frees its KV on the engine at
	// once. A prefill that ends in the same instant as the engine notices the abort stays unknown. Its KV is not left on the
	// budget: charging every aborted probe for the whole hold timeout would close the gate on engines that are empty.
	leaves := j.client.leaveAfter(call.Call.Call, j.srv.Settings().Limits.ProbeGrace, time.Time{})
	leg, turn := j.fetching(lease)
	resp, f := call.Open(j.record.Carry(engine.JSONHeaders(j.legID("p", j.record.Attempts))),
		c.Profile.ProbeBody(&j.body, j.req.Endpoint, leg, x, nil))
	leaves.stop()
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
		answer, f = call.Read(resp, *room, mooncake.MaxProbeAnswer, call.by())
	}
	f = call.answered(j, f)
	if j.fetched(turn, f); f != nil {
		return nil, f
	}
	return j.accept(lease, call.born, x, answer, answered)
}

// accept makes a hand-off of a probe's answer.
func (j *job) accept(lease *prefill.Lease, born fleet.Birth, x *mooncake.Exchange, answer []byte, answered time.Time) (*handoff.Handoff,
	*failure.Fault) {
	c := lease.Candidate
	got, err := c.Profile.ReadProbe(answer, x, j.srv.Fleet.KnownHost)
	switch engines := j.srv.Engines(); {
	case err != nil:
	case !prompt.Credible(got.PromptTokens, 0, engines.Context(c.Instance)):
		err = fmt.Errorf("it counts %d tokens in the prompt, more than the context of its model has", got.PromptTokens)
	case got.ByProbeID && engines.NamesRequests(c):
		err = fmt.Errorf("%w: remote_request_id is missing, which decode engines of its version wait for", mooncake.ErrBadHandoff)
	}
	got.PromptTokens = cmp.Or(got.PromptTokens, j.estimate())
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
		if f := failure.Said(lifecycle.Prefill, err); f != nil {
			return nil, f
		}
		if why == lifecycle.Garbled { // wrong connector, or an engine that points elsewhere
			j.srv.Log.Error("a prefill engine's answer has no usable hand-off, and is refused", zap.Inline(j), zap.Error(err))
		}
		return nil, failure.Useless(lifecycle.Prefill, why, failure.BadGateway("prefill", "it gave no usable hand-off"), err)
	}
	prefilled(j, &got, c.Profile)
	expires := answered.Add(c.Profile.KVHoldTimeout)
	lease.Answered(prefill.Usage{PromptTokens: got.PromptTokens, CachedTokens: got.CachedTokens}, expires)
	h := &handoff.Handoff{Handoff: mooncake.NewHandoff(got.KV, answered.Add(budget), expires), Lease: lease,
		Born: j.srv.Fleet.Made(born, c, got.EngineID)}
	h.Origin = handoff.Origin{Request: j, ID: j.id, Arrival: j.record.Arrival, Model: j.model, Endpoint: j.req.Endpoint, Body: j.body,
		Changes: j.changes, Prompt: j.prompt, Attempt: j.record.Attempts}
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

// prefilled takes note of what the prefill engine has said of the prompt. p is the profile of an engine: if it loses the answer, the token
// ids may be needed.
func prefilled(j *job, got *mooncake.ProbeAnswer, p *mooncake.Profile) {
	j.prompt = cmp.Or(got.PromptTokens, j.prompt)
	j.record.Report(journal.Event{What: journal.Prefilled, Tokens: got.PromptTokens, Cached: got.CachedTokens, Resumed: j.life.Resumed()})
	if j.life.Resumed() {
		return
	}
	j.resume.alone = j.prompt
	if p.Connector != mooncake.SGLang { // there the decode engine counts them, too
		j.cached = got.CachedTokens
	}
	if wantsIDs(j.req, p) && got.PromptTokenIDs != nil {
		j.resume.ids = bytes.Clone(got.PromptTokenIDs)
	}
}

// ignored is the end of a leg whose engine did not go on from the answer so far; nil if fail is nil.
func ignored(leg lifecycle.Leg, fail *openai.Error) *failure.Fault {
	if fail == nil {
		return nil
	}
	return failure.Of(lifecycle.Ended{Leg: leg, Far: lifecycle.Through, Why: lifecycle.Ignored}, fail, nil)
}

// endsAtOnce notes that the first token was the end of the answer.
// Later probes mask the end-of-sequence token; where that does not help, a decode
// rank may do without a hand-off.
func (j *job) endsAtOnce(tokens int) {
	if j.changes.IgnoreEOS {
		j.local.ended = cmp.Or(tokens, j.estimate())
		return
	}
	changes := *j.changes
	changes.IgnoreEOS = true
	j.changes = &changes
}

// serve is the goroutine of the prefill leg.
func (p *partner) serve() {
	defer close(p.over)
	if p.dialect.CallsBack {
		if !p.awaitCallback() {
			return
		}
		p.lookAgain()
	}
	for p.probe() && p.anew() {
	}
}

// probe sends the prefill leg that runs beside its decode leg, and reads its answer. It returns whether another engine is to be tried.
func (p *partner) probe() (again bool) {
	j, lease := p.job, p.last // not p.lease, which the other leg may have settled
	c := lease.Candidate
	var call *prefillCall
	p.locked(func() {
		if p.step(lifecycle.Event{What: lifecycle.ProbeDue}, nil) {
			call = toPrefill(j, lease, p.until)
			p.call = call.Call.Call
		}
	})
	if call == nil {
		return false
	}
	defer call.untrack()
	p.born = call.born
	lease.Send()
	answer, f := call.Whole(p.headers, c.Profile.EarlyProbe(&p.body, p.changes, p.meeting, p.streamed, nil), nil, mooncake.MaxProbeAnswer,
		call.by())
	answered := time.Now()
	hungUp := f != nil && f.Why == lifecycle.HungUp
	// the engine may still write KV, and the end of this leg ends the decode leg
	if hungUp && deaf(p.whole, p.rank.Profile, j.req.Endpoint) {
		select {
		case <-time.After(p.limit(lifecycle.ByGrace)):
		case <-j.srv.Serving().Done():
		}
	}
	f = call.ended(f, hungUp, false)
	j.mu.Lock()
	defer j.mu.Unlock()
	p.call = nil
	p.took = answered.Sub(call.began)
	if f == nil {
		f = p.accept(answer, answered)
	}
	if f == nil {
		return false
	}
	f.Kept, p.refusal = p.dialect.Keeps, f // if the engine took nothing, another one may serve the same decode leg
	return p.step(lifecycle.Event{What: lifecycle.PrefillFell, Again: len(p.tried) < p.job.srv.Settings().Prefill.Retry.Attempts}, f)
}

// accept reads an answer with status 200. It is called with the job's mutex held.
func (p *partner) accept(answer []byte, at time.Time) *failure.Fault {
	srv, lease, c := p.job.srv, p.lease, p.last.Candidate
	got, err := c.Profile.ReadEarlyProbe(answer, srv.Fleet.KnownHost)
	// the engine did as it was told: no failure, and its blocks were freed
	if errors.Is(err, mooncake.ErrPrefillFailed) && p.legs().Aborting() {
		end := lifecycle.Ended{Leg: lifecycle.Prefill, Far: lifecycle.Sent, Why: lifecycle.HungUp}
		return failure.Of(end, srv.movedOut(), failure.ErrMoved)
	}
	if err != nil {
		err = fmt.Errorf("prefill %s: %w", c.ID, err)
		if f := failure.Said(lifecycle.Prefill, err); f != nil {
			return f
		}
		srv.Log.Warn("a prefill failed after its request had got its decode rank", zap.Inline(p.job), zap.Error(err))
		return failure.Useless(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "it did not hand the prompt over"), err)
	}
	if at := got.Coordinates; at != nil {
		srv.Fleet.Learn(c, p.born, at)
		if at.EngineID != p.meeting.Coordinates.EngineID {
			return failure.Useless(lifecycle.Prefill, lifecycle.Restarted, failure.BadGateway("prefill", errRestarted.Error()), errRestarted)
		}
	}
	p.got, p.ended = got, at
	if p.whole {
		p.slot.Unheard(p.most)
	}
	lease.Answered(prefill.Usage{PromptTokens: cmp.Or(got.PromptTokens, p.prompt), CachedTokens: got.CachedTokens},
		at.Add(c.Profile.KVHoldTimeout))
	p.step(lifecycle.Event{What: lifecycle.PrefillDone, Prompt: got.PromptTokens}, nil)
	return nil
}

// prefillOnly has a prefill engine answer the request, which asks for logprobs of its prompt and for one token at most. Only an
// engine that computes the prompt can tell these, and nothing is left to decode. So there is no hand-off and no slot.
func (j *job) prefillOnly(lease *prefill.Lease, until lifecycle.Limit) (*stream, *failure.Fault) {
	c, call := lease.Candidate, toPrefill(j, lease, until)
	defer call.untrack()
	if c.Profile.Early() {
		lease.Send()
	}
	j.client.OnGone(func() { call.Leave(upstream.Notice) })
	body := c.Profile.DecodeBody(&j.body, j.req.Endpoint, j.changes, nil, "", j.req.Stream, nil)
	resp, f := call.Open(j.record.Carry(engine.JSONHeaders(j.legID("p", j.record.Attempts))), body)
	var answer []byte
	if resp != nil {
		defer resp.Close()
		if f == nil {
			answer, f = call.Read(resp, nil, mostBytes(j.srv.Settings(), true), call.by())
		}
	}
	if f = call.answered(j, f); f != nil {
		return nil, f
	}
	ask := j.ask
	ask.Cached, ask.MaxTokens = sse.OwnCached, j.mayHave(j.model.MaxLen)
	if !j.req.Stream {
		ask.ContinuousUsage, ask.Whole = true, true
	}
	s := slotless(j,
		&fleet.Rank{Instance: c.Instance, Target: c.Target, Profile: c.Profile, Traffic: &engine.Traffic{}, Signs: engine.NewSigns()}, ask)
	if err := takeAll(s, answer); err != nil {
		s.settle(0)
		return nil, failure.Useless(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "its answer cannot be used"),
			fmt.Errorf("prefill %s: %w", c.ID, err))
	}
	u, _ := s.from.answer.Mirror.Usage()
	j.prompt = u.Prompt
	j.record.Report(journal.Event{What: journal.Prefilled, Tokens: u.Prompt, Cached: u.Cached})
	lease.Answered(prefill.Usage{PromptTokens: u.Prompt, CachedTokens: u.Cached}, time.Time{})
	s.firstAt = time.Now()
	j.record.Report(journal.Event{What: journal.First, At: s.firstAt})
	j.enter(journal.Streaming, "")
	return s, nil
}

// takeAll takes an answer that has come in full.
func takeAll(s *stream, answer []byte) error {
	if s.from.whole {
		return takeWhole(s, answer)
	}
	if !bytes.HasPrefix(bytes.TrimLeft(answer, "\r\n"), []byte("data:")) {
		return errNotJSON
	}
	s.from.answer.Reader.Reset(s.from.limits(time.Hour))
	var fx sse.Effects
	s.now = time.Now()
	s.from.answer.out, fx = s.from.answer.Feed(s.from.answer.out, answer, s.now)
	s.effect(fx)
	return complete(s)
}
