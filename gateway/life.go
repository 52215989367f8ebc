package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A job is one prompt that becomes one PD request: a client's request, or one
// leg of a fan-out. serve is its life; every state stands in this file, what a
// failed attempt comes to in attempt.go.
type job struct {
	gw     *Gateway
	req    *openai.Request
	body   mooncake.Body // dropped once a decode engine has it
	leg    *mooncake.Leg // what a leg of a fan-out changes in the body
	client client
	id     string // request id, the stem of the engines' ids
	model  route
	arrive time.Time
	// when the client gives up by itself, for an answer that has not begun; zero: unknown
	patience time.Time
	ask      sse.Ask
	rec      *record

	prompt  int             // tokens as the prefill engine counted them; of a resumed request with the answer so far
	cached  int             // of these, found in its prefix cache; -1 unknown
	ticket  *prefill.Ticket // of a leg that has entered the arrival queue with its siblings
	leased  *prefill.Lease  // of a turn that might have ended in another region
	place   bool            // a reserved place in the pool is ours to give back
	phase   phase
	counted bool // among those whose client left

	question *geo.Question // where it goes, if there are other regions
	returned bool          // another region gave it back
	unowned  bool          // its decode group became another proxy's before a rank had it
	asks     bool          // it came back from a proxy of this region, and is asked about again
	ran      int           // such proxies that may have served it all the same
	failed   bool          // every attempt here did, by no fault of its own
	stranded bool          // its hand-off was in a region that has no rank for it any more

	tries  tries
	notes  notes
	local  locally
	resume resumption
	blame  blame
}

// client is the connection the answer goes to: edge.Conn, or a fan-out's share
// of one.
type client interface {
	Gone() <-chan struct{}
	GoneAt() time.Time
	OnGone(func())
}

// serve runs a request up to the first event of its answer:
//
//	choose prefill → probe → wait for a slot → decode
//	       ↑                                      ↓
//	       └────── what the client has ←── lost in the middle
//
// A prompt that a decode rank computes itself begins with decode (local.go).
//
// The caller relays the rest and settles by closing the stream. Before the
// first event nothing has reached the client, so a failure may start over: with
// the same hand-off while no engine accepted it, else with a fresh prefill
// (contract 2.3, 9). An answer that is lost afterwards comes here again, from
// goOn: the prompt is longer by then, the rest is the same.
func (j *job) serve() (_ *stream, fail *openai.Error) {
	defer j.freePlace()
	defer func() {
		j.find(unclear)
		if fail == nil {
			return
		}
		j.ends(fail)
		if fail.Status == statusGone {
			j.cancelled()
		}
	}()
	var held *handoff // prefilled and not yet consumed
	j.tries.begin()
	for {
		j.rec.Attempts++
		j.begin()
		var fault *fault
		var slot *dispatcher.Slot
		if j.leased == nil {
			slot = j.bindLocal() // to a rank that needs no hand-off
		}
		if slot == nil && held == nil {
			lease, fail := j.choose()
			if fail != nil {
				return nil, fail
			}
			j.tries.prefill = append(j.tries.prefill, lease.Candidate.ID)
			held, fault = j.probe(lease)
		}
		if fault == nil && slot == nil {
			slot, fault = j.wait(held)
		}
		if fault == nil {
			var s *stream
			if s, fault = j.decode(held, slot); fault == nil {
				s.shed()
				j.find(guilty)
				return s, nil
			}
			if !fault.givenBack {
				j.shun(slot.Worker)
			}
		}
		if fault.spent {
			held = nil
		}
		if !j.again(fault) {
			switch {
			case held == nil:
			case j.tries.suspect >= poison: // to drain it would show it to another engine
				held.lease.Orphan()
			default: // no engine accepted it, but nobody wants it any more
				j.gw.drain(held, j.model)
			}
			if j.left() {
				return nil, errGone()
			}
			j.failed = !fault.final && j.tries.suspect < poison
			return nil, fault.answer
		}
	}
}

// choose waits in the arrival queue for a place in the pool and an engine that
// may take the prompt.
func (j *job) choose() (*prefill.Lease, *openai.Error) {
	if lease := j.leased; lease != nil {
		j.leased = nil
		return lease, nil
	}
	lease, err := j.acquire()
	if err != nil {
		j.failed = errors.Is(err, prefill.ErrUnavailable)
		return nil, j.notChosen(err)
	}
	return lease, nil
}

// notChosen is the answer to a request that got no turn.
func (j *job) notChosen(err error) *openai.Error {
	if j.left() {
		j.freed()
		return errGone()
	}
	return j.gw.chooseError(err, j.model.name)
}

// acquire takes the request's turn.
func (j *job) acquire() (*prefill.Lease, error) {
	began := time.Now()
	j.reach(phaseQueued)
	ctx, cancel := context.WithCancel(j.gw.service.context())
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)

	var lease *prefill.Lease
	var err error
	if k := j.ticket; k != nil {
		j.ticket = nil
		lease, err = k.Wait(ctx)
	} else {
		lease, err = j.gw.tier.Acquire(ctx, j.turn())
	}
	j.gw.metrics.stage(stageChoose, time.Since(began))
	j.rec.QueueMs += ms(time.Since(began))
	if err != nil {
		return nil, err
	}
	j.place = true
	j.chose(lease)
	if j.question != nil {
		j.question.Stayed(lease.Wait)
		j.question = nil // a retry stays
	}
	j.rec.Route, j.rec.LocalTokens = routeDisaggregated, 0
	j.rec.Prefill, j.rec.ProbeBS = lease.Candidate.ID, lease.Others
	j.rec.prefilledBy, j.rec.hitTokens = lease.Policy, lease.HitTokens
	return lease, nil
}

// turn is what the arrival queue knows of a request. A retry has its first
// arrival.
func (j *job) turn() prefill.Request {
	r := prefill.Request{
		ID: j.id, Model: j.model.name, PromptTokens: j.estimate(), Counted: j.prompt > 0 || (j.leg == nil || j.leg.Prompt == nil) && j.req.PromptTokens > 0, PromptBytes: j.promptBytes(), Arrival: j.arrive,
		Session: j.rec.session, Policy: j.rec.prefillPolicy, Target: j.rec.toPrefill,
		Key: j.rec.Key, Priority: j.rec.priority, Reserved: j.place, Exclude: j.tries.prefill, Returned: j.returned || j.failed || j.stranded,
	}
	if j.question != nil && !j.place && !j.rec.aimed() { // what has a place in the pool stays, and what names engines
		r.Elsewhere, r.Prompt = j.question, j.question.Prompt()
	}
	if r.Prompt.Keys == nil {
		r.Prompt = j.recognize()
	}
	if g := j.gw.regions; g != nil {
		r.May = g.node.May(j.rec.Key, j.model.name)
	}
	return r
}

func (j *job) freePlace() {
	if j.place {
		j.place = false
		j.gw.places.Release()
	}
}

// probe runs the prefill. Once the engine answers, it holds the blocks, so the
// hand-off is read also of a client that has left, to be drained by wait.
func (j *job) probe(lease *prefill.Lease) (*handoff, *fault) {
	if j.left() { // before anything is sent
		return nil, j.drop(lease)
	}
	j.reach(phasePrefill)
	began := time.Now()
	c := lease.Candidate
	x, err := j.gw.exchange(c, j.id, j.rec.Attempts)
	if err != nil {
		lease.Failed(false, 0)
		return nil, &fault{answer: badGateway("prefill", "its bootstrap server does not answer"), err: err}
	}
	born := j.gw.fleet.born(c.Instance)
	call := j.gw.client.NewCall(c.Target)
	run := j.gw.begin(place{c.Instance, c.Target.Rank}, call, true) // an aborted probe keeps nothing
	defer j.gw.ended(run)
	stop := j.finishOrLeave(call)
	resp, err := call.Do(http.MethodPost, j.req.Endpoint.Path(), j.carry(j.headers("p", j.rec.Attempts)), c.Profile.ProbeBody(&j.body, j.req.Endpoint, j.leg, x, nil), engine.Deadlines{
		Connect: j.gw.conf().Limits.ConnectTimeout, FirstByte: j.gw.conf().Limits.ProbeTimeout, Idle: j.gw.conf().Limits.EventTimeout,
	})
	stop()
	if err != nil {
		return nil, j.probeFailed(lease, run, err)
	}
	answered := time.Now() // the hold timeout counts from the response headers (contract 2.4)
	defer resp.Close()
	answer, err := resp.ReadAll(mooncake.MaxProbeAnswer)
	if err != nil {
		return nil, j.probeFailed(lease, run, err)
	}
	j.rec.ProbeMs += ms(time.Since(began))
	j.gw.metrics.stage(stageProbe, time.Since(began))
	if status := resp.StatusCode(); status != http.StatusOK {
		if status/100 == 4 && status != http.StatusTooManyRequests || status == http.StatusNotImplemented {
			lease.Release() // the request's fault, not the engine's
		} else {
			lease.Failed(false, 0)
		}
		if status == http.StatusInternalServerError {
			j.hold(c.Instance, func(f finding) {
				if f == innocent {
					j.gw.tier.Forgive(c.ID)
				}
			})
		}
		return nil, j.refused("prefill", c.ID, resp, answer)
	}
	return j.accept(lease, born, x, answer, answered)
}

// accept makes a hand-off of a probe's answer.
func (j *job) accept(lease *prefill.Lease, born string, x *mooncake.Exchange, answer []byte, answered time.Time) (*handoff, *fault) {
	c := lease.Candidate
	got, err := c.Profile.ReadProbe(answer, x, j.gw.knownPrefillHost)
	if err == nil && got.PromptTokens == 0 {
		got.PromptTokens = j.estimate()
	}
	budget, budgetErr := c.Profile.HoldBudget()
	if err = errors.Join(err, budgetErr); err != nil {
		// Without a hand-off the engine keeps nothing; blocks that we cannot
		// name may be held, so they stay on its budget.
		if errors.Is(err, mooncake.ErrNoHandoff) && got.FinishReason == "stop" {
			lease.Release() // its first token was the end of the answer (contract 1.3): the prompt's doing
			j.endsAtOnce(got.PromptTokens)
		} else {
			lease.Failed(!errors.Is(err, mooncake.ErrNoHandoff), c.Profile.KVHoldTimeout)
		}
		err = fmt.Errorf("prefill %s answered without a usable hand-off: %w", c.ID, err)
		if !errors.Is(err, mooncake.ErrNoHandoff) { // wrong connector, or an engine that points elsewhere
			j.gw.log.Error("hand-off refused", zap.Inline(j), zap.Error(err))
		}
		return nil, &fault{answer: badGateway("prefill", "it gave no usable hand-off"), status: http.StatusOK, err: err}
	}
	j.prompt = got.PromptTokens
	j.prefilled(&got)
	if j.resume.times == 0 {
		j.resume.alone, j.cached = got.PromptTokens, got.CachedTokens
		j.rec.PromptTokens, j.rec.CachedTokens = got.PromptTokens, max(0, got.CachedTokens)
		if j.wantsIDs(c.Profile) {
			j.resume.ids = got.PromptTokenIDs
		}
	}
	expires := answered.Add(c.Profile.KVHoldTimeout)
	lease.Answered(prefill.Usage{PromptTokens: got.PromptTokens, CachedTokens: got.CachedTokens}, expires)
	h := &handoff{Handoff: mooncake.NewHandoff(got.KV, answered.Add(budget), expires), lease: lease, born: born, job: j}
	fail := j.tooLong() // the decode engine would refuse it after the pull (contract 9)
	if fail == nil {
		fail = j.verify(j.resume.atP, got.PromptTokens)
	}
	if fail != nil {
		j.gw.drain(h, j.model)
		return nil, &fault{answer: fail, final: true}
	}
	return h, nil
}

// tooLong checks prompt and answer against the model's context. What a request
// leaves open, engines cut to fit.
func (j *job) tooLong() *openai.Error {
	context, key := j.model.maxLen, j.req.MaxTokensKey
	if context == 0 || key == "" || j.prompt-j.resume.before+j.req.MaxTokens <= context {
		return nil
	}
	return &openai.Error{
		Status: http.StatusBadRequest, Code: "context_length_exceeded", Param: key,
		Message: fmt.Sprintf("the model's context is %d tokens; the prompt has %d and %q asks for %d more", context, j.prompt, key, j.req.MaxTokens),
	}
}

// endsAtOnce notes that the first token was the end of the answer (contract 1.3).
// Later probes mask the end-of-sequence token; where that does not help, a decode
// rank may do without a hand-off.
func (j *job) endsAtOnce(tokens int) {
	if j.leg != nil && j.leg.IgnoreEOS {
		j.local.ended = cmp.Or(tokens, j.estimate())
		return
	}
	leg := mooncake.Leg{}
	if j.leg != nil {
		leg = *j.leg
	}
	leg.IgnoreEOS = true
	j.leg = &leg
}

// wait parks the hand-off in the pool until the dispatcher binds it to a rank.
// All that ends the wait otherwise ends the request but one: a region whose
// engines are ours no more, or whose ranks are gone, leaves it to be prefilled
// in another.
func (j *job) wait(h *handoff) (*dispatcher.Slot, *fault) {
	began := time.Now()
	j.reach(phasePooled)
	if !j.place { // a hand-off that comes back for another rank
		j.gw.places.Reserve()
	}
	j.place = false // the entry has it now
	region := j.gw.fleet.regionFor(h.lease.Candidate.Instance)
	e := &pool.Entry{
		ID: j.gw.nextID(), Model: boardIn(j.model.board, region), Prompt: j.prompt, Age: j.resume.before, Key: j.promptHash(), Arrival: j.arrive, Entered: began, Deadline: h.Deadline(),
		Only: j.rec.toDecode, Avoid: j.tries.decode, Prefiller: h.lease.Candidate.Instance,
	}
	got, lost := j.gw.dispatcher.Enqueue(e), j.gw.groups.losses()
	var r dispatcher.Result
	withdraw := func(why *openai.Error) (*dispatcher.Slot, *fault) {
		j.gw.dispatcher.Withdraw(e)
		if r = <-got; r.Err == nil { // the slot came first: ours to give back
			j.gw.dispatcher.Release(r.Slot, dispatcher.Outcome{Kind: dispatcher.Cancelled})
		}
		j.gw.drain(h, j.model)
		return nil, &fault{answer: why, final: true, spent: true}
	}
	for waits := true; waits; {
		if j.unowned = !j.gw.fleet.owned(j.model.board); j.unowned {
			j.gw.dispatcher.Withdraw(e)
			r = <-got // the slot may have come first: it is looked at again before it is used
			break
		}
		select {
		case r = <-got:
			waits = false
		case <-lost:
			lost = j.gw.groups.losses()
		case <-j.client.Gone():
			return withdraw(errGone())
		case <-j.gw.service.context().Done():
			return withdraw(errLeaving())
		case <-j.gw.owners.lost(region):
			j.gw.dispatcher.Withdraw(e)
			r = <-got // the slot may have come first: it counts among what still runs there
			waits = false
		}
	}
	if r.Err != nil {
		f := j.unplaced(r.Err, region)
		if f.final && !j.unowned {
			j.gw.drain(h, j.model)
		} else { // no rank is left that could drain it
			h.orphan()
		}
		return nil, f
	}
	j.gw.metrics.stage(stagePoolWait, r.Slot.Wait)
	j.gw.metrics.stage(stageDecide, r.Slot.Decide)
	j.rec.Rank, j.rec.Policy = r.Slot.WorkerName, r.Slot.Policy
	j.rec.WaitMs += ms(time.Since(began))
	j.bound(r.Slot)
	return r.Slot, nil
}

// decode consumes the hand-off, if there is one, and returns with the first data event in hand:
// the engine has the KV then, and only then the client sees a status line
// (contract 0.6).
func (j *job) decode(h *handoff, slot *dispatcher.Slot) (*stream, *fault) {
	next := phaseTransfer
	if h == nil {
		next = phasePrefill
	}
	j.calls("decode")
	j.reach(next)
	s := j.newStream(slot)
	if fault := j.open(h, s); fault != nil {
		if s.run.moved.Load() && !fault.final {
			fault.moved = true
		}
		j.judge(s.rank, fault)
		kind := dispatcher.Failed
		switch {
		case errors.Is(fault.err, errNotOwner):
			kind = dispatcher.Cancelled
		case h == nil:
			kind = j.localFailed(s, fault)
		case s.whole && j.left():
			kind = dispatcher.Cancelled
		}
		s.settle(kind)
		if j.resume.times == 0 {
			j.forget()
		}
		return nil, fault
	}
	h.release() // the prefiller has its blocks back (contract 2.3)
	slot.Started()
	j.arrived(h, s)
	s.opened()
	s.run.settle()
	j.reach(phaseStreaming)
	j.client.OnGone(func() { s.call.Leave(notice) }) // from here a close aborts cleanly on the engine
	return s, nil
}

// open sends the decode request and reads up to the first data event. The
// connection stays until then even if the client left, for a pull that is cut
// leaks blocks on both sides (contract 2.6).
func (j *job) open(h *handoff, s *stream) *fault {
	sent, ok := s.rank.area.enter()
	defer sent()
	if !ok {
		return &fault{answer: errNotOurs(), err: errNotOwner, moved: true}
	}
	s.call.OnWritten(sent)
	s.call.Guard(s.rank.area.ours)
	var kv json.RawMessage
	if h == nil {
		j.leaveAtOnce(s.call)
	} else {
		if j.gw.outlived(h) {
			h.orphan()
			return &fault{answer: badGateway("prefill", "it is gone, and the prefilled prompt with it"), err: errOutlived, spent: true, moved: true}
		}
		var err error
		if kv, err = h.take(s.began); err != nil {
			h.orphan()
			return &fault{answer: badGateway("decode", "its turn came after the hand-off's deadline"), err: err, spent: true}
		}
		h.lease.Dispatched()
	}
	profile, limits := s.rank.Profile, &j.gw.conf().Limits
	silence := profile.FirstEventTimeout
	if h != nil {
		silence = min(silence, h.pulledBy().Sub(s.began))
	}
	pulled := s.began.Add(silence)
	if s.whole { // nothing comes before all of it has
		if h != nil {
			defer j.finishPull(s.call, pulled)()
		}
		silence = limits.ProbeTimeout
		s.slot.Progress(min(j.outputLimit(), wholeCharge)) // in advance: no event will tell
	}
	resp, err := s.call.Do(http.MethodPost, j.req.Endpoint.Path(), j.carry(s.rank.area.mark(j.headers("d", j.rec.Attempts))), profile.DecodeBody(&j.body, j.req.Endpoint, j.leg, kv, !s.whole, nil),
		engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: silence, Idle: silence})
	switch {
	case errors.Is(err, errNotOwner): // nothing was sent, and the engine is not to blame
		return &fault{answer: errNotOurs(), err: errNotOwner, moved: true}
	case err != nil:
		j.gw.monitor.Report(s.rank.Instance, err)
		var ee *engine.Error
		spent := !errors.As(err, &ee) || ee.Sent // it may have reached the engine: never offer it again
		switch {
		case !spent:
		case s.whole && ee != nil && ee.Aborted && !time.Now().Before(pulled):
			h.release() // its answer was not awaited any longer, its pull was over
		default:
			j.overdue(h, s)
			h.orphan()
		}
		return &fault{answer: transportError("decode", err), err: err, engine: s.rank.Instance, spent: spent}
	}
	s.resp = resp
	if resp.StatusCode() != http.StatusOK {
		return j.decodeRefused(h, s)
	}
	if err := s.first(s.began.Add(silence)); err != nil {
		if s.mirror.Started() || s.tooLong(err) {
			h.release() // the pull was over when it broke
		} else {
			j.overdue(h, s)
			h.orphan()
		}
		return s.failure(err)
	}
	if fail := j.verify(j.resume.atD, s.mirror.Prompt()); fail != nil {
		h.release()
		return &fault{answer: fail, final: true, spent: true}
	}
	return nil
}
