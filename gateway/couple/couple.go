// Package couple runs the prefill leg of a request whose decode rank was bound before it.
// Both legs are under way at once, and each needs the other. An engine whose counterpart is
// gone may wait for minutes or for ever, so the loss of one leg ends the other one here.
package couple

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/life"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/service"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Config is what a Maker needs of the proxy.
type Config struct {
	Settings   func() *fleet.Settings
	Serving    func() context.Context // ends when what has no answer yet must end
	Client     *engine.Client
	Monitor    *engine.Monitor
	Fleet      *fleet.Fleet
	Dispatcher *dispatcher.Dispatcher
	Meta       *metaserver.Server // nil: no decode engine calls back
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// A Maker couples legs.
type Maker struct {
	Config
	service.Leftovers // prefill legs
	drains, rebinds   *prometheus.CounterVec
}

// Why a prefill was run to its end although nobody wants its answer, as drains are labelled.
const (
	drainLeft = "client_left"
	drainLate = "late_callback"
)

// NewMaker makes the one of a proxy.
func NewMaker(c Config) *Maker {
	m := &Maker{Config: c, drains: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_bind_drains_total", Help: "Prefills that ran although no client waits for the answer any more, because only the end of the prefill frees the blocks of the decode engine that the request was bound to. client_left: the client left. late_callback: the request was given up before its callback came.",
	}, []string{"cause"})}
	for _, cause := range []string{drainLeft, drainLate} {
		m.drains.WithLabelValues(cause)
	}
	m.rebinds = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_bind_rebinds_total", Help: "Requests that were bound to a decode rank before their prefill and lost it before their first token. decode: the decode engine refused or broke off. prefill: the prefill engine did. callback: no callback came, or a bad one. silent: the prefill ended, and no event came.",
	}, []string{"cause"})
	for _, cause := range causes {
		m.rebinds.WithLabelValues(cause)
	}
	c.Registerer.MustRegister(m.drains, m.rebinds)
	return m
}

// Why a rank is lost again before the first token, as rebinds are labelled.
const (
	causeDecode   = "decode"   // its engine took nothing, or broke off
	causePrefill  = "prefill"  // the prefill engine did
	causeCallback = "callback" // none came, or one that names no place for the KV
	causeSilent   = "silent"   // the prefill has ended, and no event came
)

var causes = []string{causeDecode, causePrefill, causeCallback, causeSilent}

// lost counts a rank that a request was bound to and has lost; f is why the prefill leg ended the
// decode leg, nil if that has ended by itself.
func (m *Maker) lost(f *failure.Fault) {
	cause := causePrefill
	switch {
	case f == nil:
		cause = causeDecode
	case f.Verdict().Next == life.Over:
		return
	case f.Why == life.Unbegun:
		cause = causeSilent
	case f.Leg == life.Decode:
		cause = causeCallback
	}
	m.rebinds.WithLabelValues(cause).Inc()
}

// Prefer returns the lease of another prefill engine that ends the prefill at most bind.lead later, where KV from the
// chosen one lately did not arrive at every decode engine: the best rank may be of one that it does not reach.
func (m *Maker) Prefer(lease *prefill.Lease) *prefill.Lease {
	if !lease.Candidate.Profile.Early() {
		return lease
	}
	blocked := m.Dispatcher.Blocked(lease.Candidate.Board)
	if slices.Contains(blocked, lease.Candidate.Instance) {
		if other := lease.Sooner(-m.Settings().Bind.Lead, blocked); other != nil {
			return other
		}
	}
	return lease
}

// Plan is what a request tells of its two legs.
type Plan struct {
	Request    zapcore.ObjectMarshaler // names it in the log
	ID         string                  // X-Request-Id of both legs, never used before
	Lease      *prefill.Lease          // not sent yet; the partner settles it
	Rank       *fleet.Rank             // that decodes
	Slot       *dispatcher.Slot        // there
	Model      string
	Endpoint   mooncake.Endpoint
	Headers    []engine.Header                                         // of the prefill leg
	Prompt     int                                                     // tokens, as estimated
	Longest    int                                                     // as many as the decode engine's context has; 0: unknown
	Body       func(p *mooncake.Profile, m *mooncake.Meeting) [][]byte // of the prefill leg
	EndDecode  func()                                                  // ends the decode leg, from any goroutine; may come more than once
	FirstEvent time.Duration                                           // how long it may take after the prefill
	Whole      bool                                                    // it is the whole answer
}

// dialect is what the connectors differ in.
type dialect struct {
	callsBack bool // the decode engine says where the KV goes, and before that there is nothing to prefill
	aborts    bool // engines are told to abort a request by its id, and give its blocks away at once. And KV may be incomplete although both legs answer well
	keeps     bool // the prefill engine keeps the KV until the decode engine has it, or until the lease on it ends
	strands   bool // the decode engine keeps blocks for a prefill that never comes, and nobody can free them
	retries   bool // a prefill engine that has not taken the request may be replaced by another
}

var dialects = map[string]dialect{
	mooncake.AscendLayerwise: {callsBack: true, strands: true, retries: true},
	mooncake.SGLang:          {aborts: true},
	mooncake.NIXLPush:        {keeps: true, strands: true},
}

// A Partner is a prefill leg. The goroutine that has the decode leg calls its methods; ClientLeft
// may be called by any.
type Partner struct {
	Plan
	Meeting *mooncake.Meeting // for the body of the decode leg

	maker *Maker
	dialect
	expect *metaserver.Expectation // nil: nothing is called back
	dead   chan struct{}           // closed when the decode leg has ended
	over   chan struct{}           // closed when the prefill leg has
	born   fleet.Birth             // of the prefill engine that has the leg
	tried  []string                // prefill engines

	mu       sync.Mutex
	lease    *prefill.Lease // nil once it is settled
	last     *prefill.Lease // the same, settled or not
	refusal  *failure.Fault // of the last engine that took nothing
	call     *engine.Call   // the prefill leg's; nil: there is none now
	called   bool           // the decode engine has blocks for the request
	idle     bool           // and needs nothing of a prefill engine
	sent     bool           // a prefill engine may have the request
	answered bool           // and has answered well
	started  bool           // the decode leg's first event has come
	counted  int            // tokens of the prompt, by the decode engine
	closed   bool           // the decode leg has ended
	left     bool           // the client has
	ended    time.Time      // when it has answered
	failed   *failure.Fault // why one leg has ended the other
	got      mooncake.ProbeAnswer
	times    Times
	silence  *time.Timer
}

// Times are how long the parts of a prefill leg took.
type Times struct{ Callback, Probe time.Duration }

// Why the legs of a request did not come together.
var (
	ErrUnknown     = errors.New("it is not known yet at which address decode engines reach the prefill engine")
	ErrUnheard     = errors.New("nothing listens for callbacks of decode engines; bind.listen takes effect with a restart")
	ErrNoCallback  = errors.New("the decode engine did not say in time where the KV goes")
	ErrRestarted   = errors.New("the prefill engine is another process than the decode engine was told of")
	ErrSilent      = errors.New("the prompt was prefilled, and the decode engine did not begin its answer")
	ErrLate        = errors.New("the decode engine did not begin its answer while the prefill engine certainly kept the KV; a later answer could be made of another prompt's KV")
	ErrUnconfirmed = errors.New("the prefill engine did not say in time whether the KV is complete")
	ErrBroken      = errors.New("the prefill engine broke off while it handed the KV over")
	errLeft        = errors.New("the client left")
	errDrained     = errors.New("the engine was taken out of service")
)

// Start sends the prefill leg, or has it wait for the decode engine's callback. On error nothing was
// sent, and the lease is released.
func (m *Maker) Start(plan Plan) (*Partner, error) {
	c := plan.Lease.Candidate
	p := &Partner{Plan: plan, maker: m, lease: plan.Lease, last: plan.Lease, dialect: dialects[c.Profile.Connector], dead: make(chan struct{}), over: make(chan struct{}), tried: []string{c.ID}}
	err := p.meet()
	if err == nil {
		plan.Lease.PassOn()
		plan.Lease.Follow(plan.Slot.Foresee)
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
	if p.callsBack {
		if !p.awaitCallback() {
			return
		}
		p.lookAgain()
	}
	for p.probe() && p.anew() {
	}
}

// fail ends the decode leg, once. It does nothing if that leg has ended by itself, or if its answer has
// begun and the connector is one where this means that the KV is complete. With a connector where it does not mean
// that, an answer that has ended is then not believed. It is called with p.mu held.
func (p *Partner) fail(f *failure.Fault) {
	if p.failed != nil || p.closed && !(p.started && p.aborts) || p.started && !p.aborts {
		return
	}
	if p.failed = f; p.closed {
		return
	}
	if p.aborts {
		p.abort(p.Rank.Target)
	}
	p.EndDecode()
}

// awaitFirst ends the decode leg if nothing comes of it in time. It is called with p.mu held.
func (p *Partner) awaitFirst() {
	if p.started || p.closed {
		return
	}
	limit, why := p.FirstEvent, ErrSilent
	if kept := p.kept(); kept < limit {
		limit, why = kept, ErrLate
	}
	p.silence = time.AfterFunc(limit, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.started {
			p.failSilent(why)
		}
	})
}

// failSilent ends a decode leg whose first event did not come in time. It is called with p.mu held.
func (p *Partner) failSilent(why error) {
	p.fail(&failure.Fault{Ended: life.Ended{Leg: life.Decode, Far: life.Sent, Why: life.Unbegun}, Answer: openai.NewError(http.StatusGatewayTimeout, "decode_timeout", why.Error()), Err: why})
}

// kept is for how long after its answer the prefill engine certainly keeps the KV. It has no limit if nothing is kept, or
// if the answer comes in one piece and does not show when the KV was read. No decode engine renews this time: a heartbeat
// has to name the request as the prefill engine does, and that name was not known when the decode leg was sent.
func (p *Partner) kept() time.Duration {
	if !p.keeps || p.Whole {
		return math.MaxInt64
	}
	return p.last.Candidate.Profile.PulledWithin()
}

// Started is told of the decode leg's first event. prompt is how many tokens of the prompt the decode
// engine has counted, 0 if it has not said so. Where the KV may be incomplete all the same, Started waits
// a moment for the prefill engine's answer. It returns why the answer cannot be believed, or nil.
func (p *Partner) Started(prompt int) *failure.Fault {
	p.mu.Lock()
	if p.answered && time.Since(p.ended) > p.kept() {
		p.failSilent(ErrLate)
	}
	p.started, p.counted = true, prompt
	p.moved()
	if p.callsBack && !p.called { // it needed nothing, and has not said so
		p.settle()
	}
	if p.silence != nil {
		p.silence.Stop()
	}
	failed, confirm := p.failed, p.aborts && !p.answered
	p.mu.Unlock()
	if failed == nil && confirm {
		t := time.NewTimer(p.maker.Settings().Bind.Confirm)
		defer t.Stop()
		select {
		case <-p.over:
		case <-t.C:
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.compare()
	if p.failed == nil && p.answered {
		p.settle()
	}
	return p.failed
}

// Believe returns why an answer that has ended must not go out as whole; nil: nothing speaks against it. With a connector
// whose KV may be broken although both legs go on, it waits for the prefill engine's answer, for at most bind.grace, because
// the client could not tell a wrong answer that ends like a right one. The wait also ends when the client leaves. The decode
// leg needs no slot meanwhile. prompt is the number of prompt tokens that the decode engine has counted by now.
func (p *Partner) Believe(prompt int, gone <-chan struct{}) *failure.Fault {
	if p == nil {
		return nil
	}
	if p.aborts {
		late := time.NewTimer(p.maker.Settings().Bind.Grace)
		defer late.Stop()
		select {
		case <-p.over:
		case <-gone:
			p.abandon(left())
		case <-late.C:
			p.abandon(&failure.Fault{Ended: life.Ended{Far: life.Sent, Why: life.Unconfirmed}, Answer: openai.NewError(http.StatusGatewayTimeout, "prefill_timeout", ErrUnconfirmed.Error()), Err: ErrUnconfirmed})
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counted = max(p.counted, prompt)
	p.compare()
	return p.failed
}

// abandon ends a prefill leg whose answer is not waited for any longer. It does nothing if that leg has ended.
func (p *Partner) abandon(f *failure.Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.call == nil {
		return
	}
	if p.failed == nil {
		p.failed = f
	}
	p.abort(p.last.Candidate.Target)
	p.hangUp()
}

// compare ends a decode leg that has more of the prompt than was prefilled. It is called with p.mu held.
func (p *Partner) compare() {
	if p.broken() {
		p.fail(whyBroken())
	}
}

func (p *Partner) broken() bool {
	got := p.got.PromptTokens
	return p.aborts && p.started && p.answered && got > 0 && got < p.counted
}

func whyBroken() *failure.Fault {
	return &failure.Fault{Ended: life.Ended{Far: life.Through, Why: life.Incomplete}, Answer: failure.BadGateway("prefill", ErrBroken.Error()), Err: ErrBroken}
}

// left is the end of legs whose client has left.
func left() *failure.Fault {
	return &failure.Fault{Ended: life.Ended{Why: life.Left}, Answer: failure.Gone(), Err: errLeft}
}

// moved teaches how long it took from the end of the prefill to the first event, once both are over. It is called with
// p.mu held.
func (p *Partner) moved() {
	if p.started && p.answered && !p.idle && !p.Whole && p.failed == nil {
		p.last.Moved(cmp.Or(p.got.PromptTokens, p.Prompt), time.Since(p.ended))
	}
}

// settle releases the lease, once nothing of the prefill engine is used any more. It is called with
// p.mu held; later calls do nothing.
func (p *Partner) settle() {
	if p.lease != nil {
		p.lease.Release()
		p.lease = nil
	}
}

// Ended is how a decode leg ends without a first event.
type Ended uint8

// The ways.
const (
	Refused  Ended = iota // its engine took nothing
	Rejected              // it is the request's fault
	Died                  // nobody knows what its engine does
)

// Ended is told that the decode leg has ended without a first event, and ends the prefill leg where
// that is of use. f is why the prefill leg has ended the decode leg, nil if that has ended by itself.
// stranded says that the decode engine may keep blocks for ever.
func (p *Partner) Ended(how Ended) (f *failure.Fault, stranded bool) {
	f, stranded = p.conclude(how)
	if f == nil && how == Died && p.aborts { // whoever calls closes the decode leg, and its pages must not be given away while they are written
		t := time.NewTimer(abortDelay)
		defer t.Stop()
		select {
		case <-p.over:
		case <-t.C:
		}
	}
	return f, stranded
}

func (p *Partner) conclude(how Ended) (f *failure.Fault, stranded bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.silence != nil {
		p.silence.Stop()
	}
	if f = p.failed; f == nil {
		stranded = p.part(how)
	} else {
		stranded = p.strands && (p.called || p.keeps) && !p.idle && (!p.answered || f.Why == life.Unbegun)
	}
	if p.called {
		p.forget(0)
	}
	if how != Rejected && !p.left {
		p.maker.lost(f)
	}
	if p.answered && p.lease != nil { // nobody fetches it
		p.lease.Orphan()
		p.lease = nil
	}
	close(p.dead)
	return f, stranded
}

// part ends the prefill leg after the decode leg has ended by itself, and says whether blocks may be
// stranded on the decode engine.
func (p *Partner) part(how Ended) (stranded bool) {
	switch {
	case p.aborts:
		p.abort(p.last.Candidate.Target)
		p.hangUp()
	case p.callsBack && p.sent && !p.left: // it would write to nobody
		p.hangUp()
		return how == Died && !p.answered
	case p.callsBack && !p.called && how != Died:
		p.forget(0)
	case p.keeps && how != Died:
		p.hangUp()
	case p.keeps:
		return !p.answered // an engine that died frees them as it restarts
	}
	return false
}

// abortDelay is how long the decode leg outlives an abort of the prefill leg.
const abortDelay = 200 * time.Millisecond

// notice is how long an engine may take to notice that we left.
const notice = 250 * time.Millisecond

// hangUp ends the call of the prefill leg, if there is one. It is called with p.mu held.
func (p *Partner) hangUp() {
	if p.call != nil {
		p.call.Leave(notice)
	}
}

// ClientLeft is told that the client has left; after the first event it does nothing. It does not block,
// and may be called from any goroutine.
func (p *Partner) ClientLeft() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left || p.started || p.closed {
		return
	}
	p.left = true
	switch {
	case p.callsBack && !p.called: // no engine has blocks yet, as far as is known
		p.fail(left())
	case p.aborts: // the prefill engine first: the decode engine must not give blocks away that are written
		p.abort(p.last.Candidate.Target)
		p.hangUp()
		time.AfterFunc(abortDelay, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.fail(left())
		})
	}
	if p.failed == nil && !p.aborts {
		// Only the first event says that both engines' blocks can be freed; the reader of the decode leg ends it then. If no
		// event comes for too long, because a prefill engine stands still, the blocks are left to the engines.
		time.AfterFunc(p.maker.Settings().Bind.Grace, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.fail(left())
		})
	}
}

// Wait waits for the end of the prefill leg of a client that has left, for at most bind.grace. stranded says that the leg may
// still write to blocks that the decode engine keeps for it. An engine of SGLang keeps none, and ends a leg that was aborted.
func (p *Partner) Wait() (stranded bool) {
	late := time.NewTimer(p.maker.Settings().Bind.Grace)
	defer late.Stop()
	select {
	case <-p.over:
		return false
	case <-late.C:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.strands && (p.called || p.keeps) && !p.idle
}

// Prefiller is the last engine that was to prefill.
func (p *Partner) Prefiller() prefill.Candidate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last.Candidate
}

// Lost is why an answer that has begun cannot be believed any more; nil: it can be.
func (p *Partner) Lost() *openai.Error {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		return nil
	}
	return p.failed.Answer
}

// Abandon ends the prefill leg of an answer that has begun, because the client does not wait for the answer any more.
func (p *Partner) Abandon() {
	if p.aborts {
		p.abandon(left())
	}
}

// Close is told that the decode leg has ended after its first event.
func (p *Partner) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.closed = true
		if p.called { // else the decode engine may still say that it needed nothing
			p.forget(0)
		}
		close(p.dead)
	}
}

// Told is what the prefill engine has said so far; false: it has not answered.
func (p *Partner) Told() (mooncake.ProbeAnswer, Times, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.got, p.times, p.answered
}

// forget ends the callback's token after a time.
func (p *Partner) forget(grace time.Duration) {
	if p.expect != nil {
		p.expect.Forget(grace)
	}
}
