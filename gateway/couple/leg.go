package couple

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// ID is the X-Request-Id of both legs of an attempt. None begins another one, not even the tenth attempt's the
// first one's: SGLang ends every request whose id begins with the one that it is told to abort.
func ID(request string, attempt int) string {
	return "ek-" + request + "-" + strconv.Itoa(attempt) + "b"
}

func (p *Partner) meet() error {
	m, c, rank, longest := p.maker, p.lease.Candidate, p.Rank, p.Rank.Context
	p.Meeting = upstream.Meet(p.ID, p.Endpoint, c.Profile, c.Target, m.Engines().Ranks(c.Instance), rank.Profile, rank.Target)
	switch {
	case p.dialect.CallsBack && m.Meta == nil:
		return ErrUnheard
	case p.dialect.CallsBack:
		known := m.Engines().HostsOf(rank.Instance)
		p.expect = m.Meta.Expect(metaserver.Wanted{Rank: rank.Target.ID, Limit: mooncake.MaxCallback(longest, leastBlock), Read: func(body []byte) (mooncake.Callback, error) {
			return rank.Profile.ReadCallback(body, p.Meeting.RequestID, longest, leastBlock, known)
		}})
		p.Meeting.Metaserver = p.expect.URL
	case p.dialect.Keeps:
		if p.Meeting.Coordinates = m.Fleet.Coordinates(c); p.Meeting.Coordinates == nil {
			return ErrUnknown
		}
	}
	return nil
}

// leastBlock is the least that a KV block of any engine may hold, in tokens. It bounds the blocks of a prompt.
const leastBlock = 1

// awaitCallback waits until the decode engine has said where the KV goes. It returns whether there is
// something to prefill.
func (p *Partner) awaitCallback() bool {
	began := time.Now()
	select {
	case came := <-p.expect.Came():
		return p.calledBack(came, time.Since(began))
	case <-time.After(p.maker.Settings().Bind.CallbackTimeout):
		why := failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Uncalled}, failure.Transport("decode", ErrNoCallback), ErrNoCallback)
		p.tell(lifecycle.LegEvent{What: lifecycle.Overdue}, why)
		<-p.dead // of an answer that has begun although nobody called back, its end
	case <-p.dead:
	}
	return p.lateCallback()
}

// calledBack takes in a callback that came in time.
func (p *Partner) calledBack(came metaserver.Callback, took time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.times.Callback, p.Meeting.Callback = took, came.KV
	if came.Err == nil {
		p.last.CalledBack(took)
	}
	e := lifecycle.LegEvent{What: lifecycle.CalledBack}
	var f *failure.Fault
	switch {
	case came.Err != nil:
		e.What = lifecycle.Miscalled
		f = failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Garbled}, failure.BadGateway("decode", "it named no place for the KV"), came.Err)
		if errors.Is(came.Err, mooncake.ErrUnknownHost) {
			f.Why = lifecycle.Misplaced
		}
	case came.Empty: // it has the whole prompt
		e.What = lifecycle.NeedsNothing
	}
	p.step(e, f)
	return p.legs.Due()
}

// lateCallback waits a little longer for the callback of a request that is over. If it comes, the decode
// engine has allocated blocks, and only the end of a prefill frees them: so it returns true, and one is run.
func (p *Partner) lateCallback() bool {
	grace := p.maker.Settings().Bind.Grace
	p.forget(grace)
	select {
	case came := <-p.expect.Came():
		p.mu.Lock()
		defer p.mu.Unlock()
		if came.Err == nil && !came.Empty {
			p.Meeting.Callback = came.KV
			return p.step(lifecycle.LegEvent{What: lifecycle.CalledLate}, nil)
		}
		return p.step(lifecycle.LegEvent{What: lifecycle.Uncallable}, nil)
	case <-time.After(grace):
	case <-p.expect.Forgotten():
	}
	return p.tell(lifecycle.LegEvent{What: lifecycle.Uncallable}, nil)
}

// probe sends the prefill leg and reads its answer. It returns whether another engine is to be tried.
func (p *Partner) probe() (again bool) {
	m, lease := p.maker, p.lease
	c := lease.Candidate
	limits := &m.Settings().Limits
	call := upstream.Call{
		Call: upstream.New(m.Client, c.Profile, c.Target), Engine: c.Instance, Path: p.Endpoint.Path(), Log: m.Log,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: limits.ProbeTimeout, Idle: limits.EventTimeout},
	}
	if p.Dials {
		call.Fresh()
	}
	p.mu.Lock()
	if !p.step(lifecycle.LegEvent{What: lifecycle.ProbeDue}, nil) {
		p.mu.Unlock()
		return false
	}
	p.call = call.Call
	p.mu.Unlock()
	run := m.Fleet.TrackProbe(&lease.Candidate, call.Call)
	defer m.Fleet.Untrack(run)
	call.Run = run
	began := time.Now()
	p.born = m.Engines().Born(c.Instance)
	lease.Send()
	answer, f := call.Whole(p.Headers, p.Body(c.Profile, p.Meeting), nil, mooncake.MaxProbeAnswer, began.Add(limits.ProbeTimeout))
	answered := time.Now()
	if f != nil && f.Why == lifecycle.HungUp && p.unheard() { // the engine may write all the same, and the end of this leg ends the decode leg
		select {
		case <-time.After(p.abortDelay()):
		case <-m.Serving().Done():
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.call = nil
	p.times.Probe = answered.Sub(began)
	if f == nil {
		m.Monitor.Answered(c.Instance)
		p.accept(answer, answered)
		return false
	}
	switch {
	case f.Status != 0:
		m.Monitor.Answered(c.Instance)
		if f.Engine != "" {
			m.Monitor.Report(f.Engine, f.Err)
		}
	case f.Why == lifecycle.HungUp:
		f.Err, f.Engine = failure.ErrMoved, ""
		if run.Moved() {
			f.Why = lifecycle.Moved
		}
	default:
		m.Monitor.Report(f.Engine, f.Err)
	}
	return p.unserved(f)
}

// aborted is the end of a prefill leg whose engine says that it has not finished the prompt, after it was told to abort the request.
// That is no failure of the engine's, and it has given the blocks away.
func aborted() *failure.Fault {
	end := lifecycle.Ended{Leg: lifecycle.Prefill, Far: lifecycle.Sent, Why: lifecycle.HungUp}
	return failure.Of(end, failure.Transport("prefill", failure.ErrMoved), failure.ErrMoved)
}

// unserved is what becomes of the request for want of a prefill. If the engine took nothing, another one may
// serve the same decode leg. It is called with p.mu held.
func (p *Partner) unserved(f *failure.Fault) (again bool) {
	f.Kept, p.refusal = p.dialect.Keeps, f
	return p.step(lifecycle.LegEvent{What: lifecycle.PrefillFell, Again: len(p.tried) < p.maker.Settings().Prefill.Retry.Attempts}, f)
}

// anew has another engine prefill for the same decode leg.
func (p *Partner) anew() bool {
	ctx, cancel := context.WithTimeout(p.maker.Serving(), p.maker.Settings().Limits.ProbeTimeout)
	defer cancel()
	lease, err := p.last.Another(ctx, p.tried)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		return p.step(lifecycle.LegEvent{What: lifecycle.NotFound}, p.refusal)
	}
	p.tried = append(p.tried, lease.Candidate.ID)
	p.step(lifecycle.LegEvent{What: lifecycle.Found}, nil)
	p.goTo(lease)
	return true
}

// lookAgain has another engine prefill if it is a step sooner to end, now that the decode engine has room: while that
// was waited for, other prefills may have ended earlier than predicted, or later.
func (p *Partner) lookAgain() {
	shunned := p.maker.Dispatcher.Shunned(p.Slot)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lease == nil {
		return
	}
	step := time.Duration(p.Slot.StepMs * float32(time.Millisecond))
	if lease := p.lease.Sooner(step, shunned); lease != nil {
		p.tried[len(p.tried)-1] = lease.Candidate.ID // the other one was not
		p.goTo(lease)
	}
}

// goTo has another engine prefill. It is called with p.mu held.
func (p *Partner) goTo(lease *prefill.Lease) {
	lease.PassOn()
	p.maker.Dispatcher.Rerouted(p.Slot, lease.Candidate.Instance)
	p.lease, p.last = lease, lease
}

// accept reads an answer with status 200. It is called with p.mu held.
func (p *Partner) accept(answer []byte, at time.Time) {
	lease, c := p.lease, p.last.Candidate
	got, err := c.Profile.ReadEarlyProbe(answer, p.maker.Fleet.KnownHost)
	if errors.Is(err, mooncake.ErrPrefillFailed) && p.legs.Aborting() {
		p.unserved(aborted())
		return
	}
	if err != nil {
		err = fmt.Errorf("prefill %s: %w", c.ID, err)
		p.maker.Log.Warn("a prefill failed after its request had got its decode rank", zap.Inline(p.Request), zap.Error(err))
		p.unserved(failure.Useless(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "it did not hand the prompt over"), err))
		return
	}
	if at := got.Coordinates; at != nil {
		p.maker.Fleet.Learn(c, p.born, at)
		if at.EngineID != p.Meeting.Coordinates.EngineID {
			p.unserved(failure.Useless(lifecycle.Prefill, lifecycle.Restarted, failure.BadGateway("prefill", ErrRestarted.Error()), ErrRestarted))
			return
		}
	}
	p.got, p.ended = got, at
	if p.Whole {
		p.Slot.Unheard(p.Most)
	}
	lease.Answered(prefill.Usage{PromptTokens: cmp.Or(got.PromptTokens, p.Prompt), CachedTokens: got.CachedTokens}, at.Add(c.Profile.KVHoldTimeout))
	p.step(lifecycle.LegEvent{What: lifecycle.PrefillDone, Prompt: got.PromptTokens}, nil)
}

// abort has an engine of SGLang end the leg. Nobody waits for the answer.
func (p *Partner) abort(t *engine.Target) {
	m := p.maker
	_ = m.Run(math.MaxInt, func() { // else the proxy is about to end, and engines notice that
		if err := upstream.Abort(m.Client, t, p.ID, m.Log); err != nil {
			m.Log.Warn("an engine did not accept an abort, so it ends the request at its own timeout", zap.Inline(p.Request), zap.String("engine", t.ID), zap.Error(err))
		}
	})
}
