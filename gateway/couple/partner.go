package couple

import (
	"math"
	"net/http"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/recording"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

var dialects = map[string]lifecycle.Dialect{
	mooncake.AscendLayerwise: {CallsBack: true, Strands: true, Retries: true},
	mooncake.SGLang:          {Aborts: true},
	mooncake.NIXLPush:        {Keeps: true, Strands: true},
}

// A Partner is a prefill leg. The goroutine that has the decode leg calls its methods; ClientLeft
// may be called by any. What becomes of the legs is decided by life.Legs; this carries it out.
type Partner struct {
	Plan
	Meeting *mooncake.Meeting // for the body of the decode leg

	maker   *Maker
	dialect lifecycle.Dialect
	expect  *metaserver.Expectation // nil: nothing is called back
	dead    chan struct{}           // closed when the decode leg has ended
	over    chan struct{}           // closed when the prefill leg has
	born    fleet.Birth             // of the prefill engine that has the leg
	tried   []string                // prefill engines

	mu       sync.Mutex
	legs     lifecycle.Legs
	tape     recording.Tape
	lease    *prefill.Lease // nil once it is settled
	last     *prefill.Lease // the same, settled or not
	refusal  *failure.Fault // of the last engine that took nothing
	failed   *failure.Fault // why one leg has ended the other
	call     *engine.Call   // the prefill leg's; nil: there is none now
	stranded bool           // the decode engine may keep blocks for ever
	ended    time.Time      // when the prefill engine has answered
	got      mooncake.ProbeAnswer
	times    Times
	silence  *time.Timer
}

// Times are how long the parts of a prefill leg took.
type Times struct{ Callback, Probe time.Duration }

// Start sends the prefill leg, or has it wait for the decode engine's callback. On error nothing was
// sent, and the lease is released.
func (m *Maker) Start(plan Plan) (*Partner, error) {
	c := plan.Lease.Candidate
	d := dialects[c.Profile.Connector]
	p := &Partner{Plan: plan, maker: m, lease: plan.Lease, last: plan.Lease, dialect: d, legs: lifecycle.NewLegs(d), dead: make(chan struct{}), over: make(chan struct{}), tried: []string{c.ID}}
	p.tape.BeginLegs(d)
	err := p.meet()
	if err == nil {
		plan.Lease.PassOn()
		err = m.Run(math.MaxInt, p.serve)
	}
	if err != nil {
		p.forget(0)
		plan.Lease.Release()
		return nil, err
	}
	return p, nil
}

// serve is the life of the prefill leg.
func (p *Partner) serve() {
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

// step tells the legs what happens, and carries out what is to be done. f is why a leg ends, if that ends the other one. It is called
// with p.mu held, and returns whether the prefill leg goes on.
func (p *Partner) step(e lifecycle.LegEvent, f *failure.Fault) (on bool) {
	if f != nil {
		e.End = f.Ended
	}
	was := p.legs.Failed()
	var room [8]lifecycle.LegEffect
	todo := p.legs.Step(e, room[:0])
	p.tape.StepLegs(e, todo)
	if !was && p.legs.Failed() {
		if p.failed = f; f == nil {
			p.failed = whyBroken()
		}
	}
	for _, x := range todo {
		on = p.do(x, f) || on
	}
	return on
}

// do carries an effect out, and says whether it has the prefill leg go on.
func (p *Partner) do(x lifecycle.LegEffect, f *failure.Fault) (on bool) {
	switch x.Do {
	case lifecycle.EndDecode:
		p.EndDecode()
	case lifecycle.AbortDecode:
		p.abort(p.Rank.Target)
	case lifecycle.AbortPrefill:
		p.abort(p.last.Candidate.Target)
	case lifecycle.HangUp:
		if p.call != nil {
			p.call.Leave(upstream.Notice)
		}
	case lifecycle.GiveBack:
		handoff.Settle(p.lease, x.How, f)
		p.lease = nil
	case lifecycle.AwaitFirst:
		p.awaitFirst()
	case lifecycle.StopWaiting:
		if p.silence != nil {
			p.silence.Stop()
		}
	case lifecycle.Forget:
		p.forget(0)
	case lifecycle.Drain:
		cause := drainLate
		if p.legs.Left() {
			cause = drainLeft
		}
		p.maker.drains.WithLabelValues(cause).Inc()
		return true
	case lifecycle.CountLoss:
		p.maker.lost(p.failed)
	case lifecycle.Strand:
		p.stranded = true
	case lifecycle.WaitGone:
		wait := p.maker.Settings().Bind.Grace
		if p.dialect.Aborts {
			wait = p.abortDelay()
		}
		time.AfterFunc(wait, func() { p.tell(lifecycle.LegEvent{What: lifecycle.ClientWaited}, left()) })
	case lifecycle.Send, lifecycle.Seek:
		return true
	}
	return false
}

// tell is step for those that do not hold p.mu.
func (p *Partner) tell(e lifecycle.LegEvent, f *failure.Fault) (on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.step(e, f)
}

// awaitFirst begins the time for the first event. It is called with p.mu held.
func (p *Partner) awaitFirst() {
	limit, why := p.Rank.Profile.FirstEventTimeout, ErrSilent
	if p.Whole { // it has no event before its end
		limit = p.maker.Settings().Limits.ProbeTimeout
	}
	if kept := p.kept(); kept < limit {
		limit, why = kept, ErrLate
	}
	p.silence = time.AfterFunc(limit, func() {
		if p.Whole && p.waitsOn() {
			return
		}
		p.tell(lifecycle.LegEvent{What: lifecycle.Quiet}, unbegun(why))
	})
}

// waitsOn has an answer in one piece waited for as long as its rank goes on, if that is still so.
func (p *Partner) waitsOn() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := handoff.Patience(p.Rank, p.maker.Settings(), p.ended, p.Most, time.Now())
	if left > 0 {
		p.silence.Reset(left)
	}
	return left > 0
}

// unbegun is the end of a decode leg whose first event did not come in time.
func unbegun(why error) *failure.Fault {
	return failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Sent, Why: lifecycle.Unbegun}, openai.NewError(http.StatusGatewayTimeout, "decode_timeout", why.Error()), why)
}

func whyBroken() *failure.Fault {
	return failure.Of(lifecycle.Ended{Far: lifecycle.Through, Why: lifecycle.Incomplete}, failure.BadGateway("prefill", ErrBroken.Error()), ErrBroken)
}

// left is the end of legs whose client has left.
func left() *failure.Fault {
	return failure.Of(lifecycle.Ended{Why: lifecycle.Left}, failure.Gone(), errLeft)
}

// kept is for how long after its answer the prefill engine certainly keeps the KV. It has no limit if nothing is kept, or
// if the answer comes in one piece and does not show when the KV was read. No decode engine renews this time: a heartbeat
// has to name the request as the prefill engine does, and that name was not known when the decode leg was sent.
func (p *Partner) kept() time.Duration {
	if !p.dialect.Keeps || p.Whole {
		return math.MaxInt64
	}
	return p.last.Candidate.Profile.PulledWithin()
}

// Started is told of the decode leg's first event. prompt is how many tokens of the prompt the decode
// engine has counted, 0 if it has not said so. Where the KV may be incomplete all the same, Started waits
// a moment for the prefill engine's answer. It returns why the answer cannot be believed, or nil.
func (p *Partner) Started(prompt int) *failure.Fault {
	p.mu.Lock()
	p.step(lifecycle.LegEvent{What: lifecycle.Began, Prompt: prompt, Late: time.Since(p.ended) > p.kept()}, unbegun(ErrLate))
	confirm := p.failed == nil && p.dialect.Aborts && !p.legs.Answered()
	p.mu.Unlock()
	if confirm {
		p.awaitOver(p.maker.Settings().Bind.Confirm)
	}
	p.tell(lifecycle.LegEvent{What: lifecycle.Confirmed}, nil)
	return p.Lost()
}

// awaitOver waits for the end of the prefill leg, for at most so long.
func (p *Partner) awaitOver(limit time.Duration) (ended bool) {
	select {
	case <-p.over:
		return true
	case <-time.After(limit):
		return false
	}
}

// Believe returns why an answer that has ended must not go out as whole; nil: nothing speaks against it. With a connector
// whose KV may be broken although both legs go on, it waits for the prefill engine's answer, for at most the grace, because
// the client could not tell a wrong answer that ends like a right one. The wait also ends when the client leaves. The decode
// leg needs no slot meanwhile. prompt is the number of prompt tokens that the decode engine has counted by now.
func (p *Partner) Believe(prompt int, gone <-chan struct{}) *failure.Fault {
	if p == nil {
		return nil
	}
	if p.dialect.Aborts {
		select {
		case <-p.over:
		case <-gone:
			p.tell(lifecycle.LegEvent{What: lifecycle.Unwanted}, left())
		case <-time.After(p.maker.Settings().Bind.Grace):
			answer := openai.NewError(http.StatusGatewayTimeout, "prefill_timeout", ErrUnconfirmed.Error())
			p.tell(lifecycle.LegEvent{What: lifecycle.Unwanted}, failure.Of(lifecycle.Ended{Far: lifecycle.Sent, Why: lifecycle.Unconfirmed}, answer, ErrUnconfirmed))
		}
	}
	p.tell(lifecycle.LegEvent{What: lifecycle.Confirmed, Prompt: prompt}, nil)
	return p.Lost()
}

// Ended is told that the decode leg has ended without a first event, and ends the prefill leg where
// that is of use. f is why the prefill leg has ended the decode leg, nil if that has ended by itself.
// stranded says that the decode engine may keep blocks for ever.
func (p *Partner) Ended(how lifecycle.EndReason) (f *failure.Fault, stranded bool) {
	p.mu.Lock()
	p.step(lifecycle.LegEvent{What: lifecycle.DecodeFell, Reason: how}, nil)
	f, stranded = p.failed, p.stranded
	close(p.dead)
	p.mu.Unlock()
	if f == nil && how == lifecycle.Died && p.dialect.Aborts { // whoever calls closes the decode leg, and its pages must not be given away while they are written
		p.awaitOver(p.abortDelay())
	}
	return f, stranded
}

// unheard says that an engine may not heed an abort, and notices only after some seconds that we have left: SGLang looks every
// 4 s who still waits for an answer in one piece (0.5.23, SGLANG_REQUEST_STATE_WAIT_TIMEOUT in environ.py).
func (p *Partner) unheard() bool { return p.Whole && p.Rank.Profile.Nameless(p.Endpoint) }

// abortDelay is how long the decode leg outlives an abort of the prefill leg.
func (p *Partner) abortDelay() time.Duration {
	if p.unheard() {
		return p.maker.Settings().Bind.Grace
	}
	return 200 * time.Millisecond
}

// ClientLeft is told that the client has left; after the first event it does nothing. It does not block,
// and may be called from any goroutine.
func (p *Partner) ClientLeft() { p.tell(lifecycle.LegEvent{What: lifecycle.ClientGone}, left()) }

// Wait waits for the end of the prefill leg of a client that has left, for at most the grace. stranded says that the leg may
// still write to blocks that the decode engine keeps for it. An engine of SGLang keeps none, and ends a leg that was aborted.
func (p *Partner) Wait() (stranded bool) {
	if p.awaitOver(p.maker.Settings().Bind.Grace) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.legs.Stranded()
}

// Prefiller is the last engine that was to prefill.
func (p *Partner) Prefiller() prefill.Candidate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last.Candidate
}

// Lost is why an answer that has begun cannot be believed any more; nil: it can be.
func (p *Partner) Lost() *failure.Fault {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// Abandon ends the prefill leg of an answer that has begun, because the client does not wait for the answer any more.
func (p *Partner) Abandon() {
	if p.dialect.Aborts {
		p.tell(lifecycle.LegEvent{What: lifecycle.Unwanted}, left())
	}
}

// Close is told that the decode leg has ended after its first event.
func (p *Partner) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.legs.Closed() {
		p.step(lifecycle.LegEvent{What: lifecycle.DecodeOver}, nil)
		close(p.dead)
	}
}

// Told is what the prefill engine has said so far; false: it has not answered.
func (p *Partner) Told() (mooncake.ProbeAnswer, Times, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.got, p.times, p.legs.Answered()
}

// forget ends the callback's token after a time.
func (p *Partner) forget(grace time.Duration) {
	if p.expect != nil {
		p.expect.Forget(grace)
	}
}
