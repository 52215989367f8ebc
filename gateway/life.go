package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A job is one prompt that becomes one PD request: a client's request, or one
// leg of a fan-out. serve is its life; every state and what a failure there
// does stands in this file.
type job struct {
	gw     *Gateway
	req    *openai.Request
	leg    *mooncake.Leg // what a leg of a fan-out changes in the body
	client client
	id     string // request id, the stem of the engines' ids
	model  route
	arrive time.Time
	ask    sse.Ask
	rec    *record

	prompt int  // tokens as the prefill engine counted them
	cached int  // of these, found in its prefix cache; -1 unknown
	poison int  // 500 once an engine failed so: the request may be what kills it
	place  bool // a reserved place in the pool is ours to give back
}

// client is the connection the answer goes to: edge.Conn, or a fan-out's share
// of one.
type client interface {
	Gone() <-chan struct{}
	OnGone(func())
}

// serve runs a request up to the first event of its answer:
//
//	admit → choose prefill → probe → wait for a slot → decode
//
// The caller relays the rest and settles by closing the stream. Before the
// first event nothing has reached the client, so a failure may start over: with
// the same hand-off while no engine accepted it, else with a fresh prefill
// (contract 2.3, 9). Afterwards it may not.
func (j *job) serve() (*stream, *openai.Error) {
	defer j.freePlace()
	var held *handoff // prefilled and not yet consumed
	var tried []string
	for attempt := 1; ; attempt++ {
		j.rec.Attempts++
		if held == nil {
			lease, fail := j.choose(tried)
			if fail != nil {
				return nil, fail
			}
			tried = append(tried, lease.Candidate.ID)
			var fault *fault
			if held, fault = j.probe(lease, attempt); fault != nil {
				if !j.again(attempt, fault) {
					return nil, fault.answer
				}
				continue
			}
		}
		slot, fail := j.wait(held)
		if fail != nil {
			return nil, fail
		}
		s, fault := j.decode(held, slot, attempt)
		if fault == nil {
			return s, nil
		}
		if fault.spent {
			held = nil
		}
		if !j.again(attempt, fault) {
			if held != nil { // no engine accepted it, but nobody wants it any more
				j.gw.drain(held, j.model)
			}
			return nil, fault.answer
		}
	}
}

// handoff is a prefilled prompt with everything that must be settled with it.
type handoff struct {
	*mooncake.Handoff
	lease *prefill.Lease
	job   *job
	kv    []byte // the taken params, while no engine has accepted them
}

// fault is a failed attempt: what the client sees if it is the last, whether
// the hand-off is spent, and what the retry rule looks at.
type fault struct {
	answer *openai.Error
	status int   // engine's answer, 0: none
	err    error // transport's
	spent  bool
	final  bool // no other engine would answer otherwise
}

// again decides whether to try once more and waits the backoff. The client that
// left ends it.
func (j *job) again(attempt int, f *fault) bool {
	if f.final || j.left() {
		return false
	}
	if f.status == http.StatusInternalServerError {
		j.poison = f.status
	}
	wait, ok := j.gw.tier.Retry(attempt, orElse(j.poison, f.status), f.err)
	if !ok {
		return false
	}
	j.gw.log.Info("attempt failed, trying again", zap.String("id", j.id), zap.Int("attempt", attempt), zap.Int("status", f.status), zap.Error(f.err))
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-j.client.Gone():
		return false
	}
}

func (j *job) left() bool {
	select {
	case <-j.client.Gone():
		return true
	default:
		return false
	}
}

// errGone stands for an answer nobody reads any more. The status is nginx's.
func errGone() *openai.Error {
	return openai.NewError(statusGone, "client_closed", "the client left")
}

const statusGone = 499

// choose waits in the arrival queue for a place in the pool and an engine that
// may take the prompt.
func (j *job) choose(tried []string) (*prefill.Lease, *openai.Error) {
	began := time.Now()
	ctx, cancel := context.WithCancel(j.gw.ctx)
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)

	lease, err := j.gw.tier.Acquire(ctx, prefill.Request{
		ID: j.id, Model: j.model.name, PromptTokens: j.estimate(), Arrival: j.arrive, Reserved: j.place, Exclude: tried,
	})
	j.gw.metrics.stage(stageChoose, time.Since(began))
	if err != nil {
		if j.left() {
			return nil, errGone()
		}
		return nil, j.gw.chooseError(err, j.model.name)
	}
	j.place = true
	j.rec.Prefill, j.rec.ProbeBS = lease.Candidate.ID, lease.Others
	return lease, nil
}

func (j *job) freePlace() {
	if j.place {
		j.place = false
		j.gw.places.Release()
	}
}

// probe runs the prefill. A client that leaves aborts it, and an aborted probe
// keeps nothing on its engine (contract 2.6).
func (j *job) probe(lease *prefill.Lease, attempt int) (*handoff, *fault) {
	began := time.Now()
	c := lease.Candidate
	x, err := j.gw.exchange(c, j.id, attempt)
	if err != nil {
		lease.Failed(false, 0)
		return nil, &fault{answer: badGateway("prefill", c.ID, err), err: err}
	}
	call := j.gw.client.NewCall(c.Target)
	j.client.OnGone(call.Abort)
	defer j.client.OnGone(nil)

	body := c.Profile.ProbeBody(&j.req.Body, j.req.Endpoint, j.leg, x, nil)
	resp, err := call.Do(http.MethodPost, j.req.Endpoint.Path(), j.headers("p", attempt), body, engine.Deadlines{
		Connect: j.gw.cfg.Limits.ConnectTimeout, FirstByte: j.gw.cfg.Limits.ProbeTimeout, Idle: j.gw.cfg.Limits.EventTimeout,
	})
	if err != nil {
		return nil, j.probeFailed(lease, err)
	}
	answered := time.Now() // the hold timeout counts from the response headers (contract 2.4)
	defer resp.Close()
	answer, err := resp.ReadAll(mooncake.MaxProbeAnswer)
	if err != nil {
		return nil, j.probeFailed(lease, err)
	}
	j.rec.ProbeMs += ms(time.Since(began))
	j.gw.metrics.stage(stageProbe, time.Since(began))
	if status := resp.StatusCode(); status != http.StatusOK {
		if status/100 == 4 && status != http.StatusTooManyRequests {
			lease.Release() // the request's fault, not the engine's
		} else {
			lease.Failed(false, 0)
		}
		return nil, j.refused("prefill", c.ID, resp, answer)
	}
	got, err := c.Profile.ReadProbe(answer, x, j.gw.knownPrefillHost)
	if err != nil {
		// Without a hand-off the engine keeps nothing; blocks that we cannot
		// name may be held, so they stay on its budget.
		lease.Failed(!errors.Is(err, mooncake.ErrNoHandoff), c.Profile.KVHoldTimeout)
		if errors.Is(err, mooncake.ErrNoHandoff) && got.FinishReason == "stop" {
			j.ignoreEOS() // its first token was the end of the answer (contract 1.3)
		}
		err = fmt.Errorf("prefill %s: request %s: %w", c.ID, j.id, err)
		j.gw.log.Error("prefill answered without a usable hand-off", zap.Error(err))
		return nil, &fault{answer: badGateway("prefill", c.ID, err), status: http.StatusOK, err: err}
	}
	budget, err := c.Profile.HoldBudget()
	if err != nil {
		lease.Failed(true, c.Profile.KVHoldTimeout)
		return nil, &fault{answer: badGateway("prefill", c.ID, err), err: err, final: true}
	}
	j.prompt, j.cached = got.PromptTokens, got.CachedTokens
	j.rec.PromptTokens, j.rec.CachedTokens = got.PromptTokens, max(0, got.CachedTokens)
	lease.Answered(got.PromptTokens, answered.Add(c.Profile.KVHoldTimeout))
	h := &handoff{Handoff: mooncake.NewHandoff(got.KV, answered.Add(budget), answered.Add(c.Profile.KVHoldTimeout)), lease: lease, job: j}
	if n := j.model.maxLen; n > 0 && j.req.MaxTokens > 0 && got.PromptTokens+j.req.MaxTokens > n {
		// The decode engine would refuse it after the pull (contract 9).
		j.gw.drain(h, j.model)
		return nil, &fault{final: true, answer: &openai.Error{
			Status: http.StatusBadRequest, Code: "context_length_exceeded", Param: j.req.MaxTokensKey,
			Message: fmt.Sprintf("the model's context is %d tokens; the prompt has %d and %s asks for %d more", n, got.PromptTokens, j.req.MaxTokensKey, j.req.MaxTokens),
		}}
	}
	return h, nil
}

// ignoreEOS makes later probes mask the end-of-sequence token.
func (j *job) ignoreEOS() {
	leg := mooncake.Leg{}
	if j.leg != nil {
		leg = *j.leg
	}
	leg.IgnoreEOS = true
	j.leg = &leg
}

func (j *job) probeFailed(lease *prefill.Lease, err error) *fault {
	var ee *engine.Error
	written := errors.As(err, &ee) && ee.Sent
	gone := j.left()
	if gone { // the engine aborts with the connection and keeps nothing (contract 2.6)
		lease.Release()
		return &fault{answer: errGone(), final: true}
	}
	// Any other silence may hide a finished prefill (prefill P46).
	lease.Failed(written, lease.Candidate.Profile.KVHoldTimeout)
	j.gw.monitor.Report(lease.Candidate.Instance, err)
	return &fault{answer: transportError("prefill", lease.Candidate.ID, err), err: err}
}

// wait parks the hand-off in the pool until the dispatcher binds it to a rank.
func (j *job) wait(h *handoff) (*dispatcher.Slot, *openai.Error) {
	began := time.Now()
	if !j.place { // a hand-off that comes back for another rank
		j.gw.places.Reserve()
	}
	j.place = false // the entry has it now
	e := &pool.Entry{
		ID: j.gw.nextID(), Model: j.model.board, Prompt: j.prompt, Arrival: j.arrive, Entered: began, Deadline: h.Deadline(),
	}
	got := j.gw.dispatcher.Enqueue(e)
	var r dispatcher.Result
	select {
	case r = <-got:
	case <-j.client.Gone():
		j.gw.dispatcher.Withdraw(e)
		if r = <-got; r.Err == nil { // the slot came first: ours to give back
			j.gw.dispatcher.Release(r.Slot, dispatcher.Outcome{Kind: dispatcher.Cancelled})
		}
		j.gw.drain(h, j.model)
		return nil, errGone()
	}
	if r.Err != nil {
		j.gw.drain(h, j.model)
		return nil, j.gw.waitError(r.Err, j.prompt)
	}
	j.gw.metrics.stage(stagePoolWait, r.Slot.Wait)
	j.gw.metrics.stage(stageDecide, r.Slot.Decide)
	j.rec.Rank, j.rec.Policy = r.Slot.WorkerName, r.Slot.Policy
	j.rec.WaitMs += ms(time.Since(began))
	return r.Slot, nil
}

// decode consumes the hand-off and returns with the first data event in hand:
// the engine has the KV then, and only then the client sees a status line
// (contract 0.6). Its connection stays open until that event even if the client
// left, for a pull that is cut leaks blocks on both sides (contract 2.6).
func (j *job) decode(h *handoff, slot *dispatcher.Slot, attempt int) (*stream, *fault) {
	began := time.Now()
	rank := j.gw.fleet.rank(slot.Worker)
	s := &stream{job: j, slot: slot, rank: rank, lease: h.lease, began: began}
	giveUp := func(f *fault) (*stream, *fault) {
		s.outcome = dispatcher.Outcome{Kind: dispatcher.Failed}
		s.settle()
		return nil, f
	}
	if h.kv == nil {
		kv, err := h.Take(began)
		if err != nil {
			h.lease.Orphan()
			return giveUp(&fault{answer: badGateway("decode", rank.Target.ID, err), err: err, spent: true})
		}
		h.kv = kv
	} else if !began.Before(h.Deadline()) {
		h.lease.Orphan()
		return giveUp(&fault{answer: badGateway("decode", rank.Target.ID, mooncake.ErrExpired), err: mooncake.ErrExpired, spent: true})
	}
	h.lease.Dispatched()
	s.call = j.gw.client.NewCall(rank.Target)
	body := rank.Profile.DecodeBody(&j.req.Body, j.req.Endpoint, j.leg, h.kv, !j.req.Passthrough, nil)
	resp, err := s.call.Do(http.MethodPost, j.req.Endpoint.Path(), j.headers("d", attempt), body, engine.Deadlines{
		Connect: j.gw.cfg.Limits.ConnectTimeout, FirstByte: rank.Profile.FirstEventTimeout, Idle: rank.Profile.FirstEventTimeout,
	})
	if err != nil {
		j.gw.monitor.Report(rank.Instance, err)
		var ee *engine.Error
		spent := !errors.As(err, &ee) || ee.Sent // it may have reached the engine: never offer it again
		if spent {
			h.lease.Orphan()
		}
		return giveUp(&fault{answer: transportError("decode", rank.Target.ID, err), err: err, spent: spent})
	}
	s.resp = resp
	if resp.StatusCode() != http.StatusOK {
		return giveUp(j.decodeRefused(h, s))
	}
	if err := s.first(began.Add(rank.Profile.FirstEventTimeout)); err != nil {
		h.lease.Orphan()
		j.gw.monitor.Report(rank.Instance, err)
		return giveUp(&fault{answer: s.failure(err), err: err, spent: true, final: s.mirror.Failure().Status/100 == 4})
	}
	h.lease.Release() // the prefiller has its blocks back (contract 2.3)
	slot.Started()
	j.gw.metrics.stage(stageTransfer, time.Since(began))
	j.rec.TransferMs = ms(time.Since(began))
	j.rec.TTFTMs = ms(time.Since(j.arrive))
	j.gw.metrics.ttft.Observe(time.Since(j.arrive).Seconds())
	resp.SetIdle(j.gw.cfg.Limits.EventTimeout)
	j.client.OnGone(s.call.Abort) // from here a close aborts cleanly on the engine
	return s, nil
}

// decodeRefused settles an error status from the decode engine. Where the
// engine then tells the prefiller to free, the hand-off is spent; else it is
// intact (contract 2.3, 2.5b).
func (j *job) decodeRefused(h *handoff, s *stream) *fault {
	body, err := s.resp.ReadAll(maxErrorBody)
	if err != nil {
		body = nil
	}
	f := j.refused("decode", s.rank.Target.ID, s.resp, body)
	spent, freed := j.gw.fleet.rejects(s.rank)
	if f.spent = spent; spent {
		if freed {
			h.lease.Release()
		} else {
			h.lease.Orphan()
		}
	}
	return f
}

const maxErrorBody = 1 << 20

// refused maps an engine's error status: its 4xx reach the client as they came,
// our own credential's failure and its 5xx do not (contract 9).
func (j *job) refused(side, id string, resp *engine.Response, body []byte) *fault {
	status := resp.StatusCode()
	err := fmt.Errorf("%s %s answered %d", side, id, status)
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		j.gw.log.Error("engine refuses our credential; check the profile's api_key_env", zap.String("engine", id), zap.Int("status", status))
		return &fault{answer: badGateway(side, id, errors.New("the engine refused the proxy's credential")), status: status, err: err, final: true}
	case status == http.StatusTooManyRequests:
		return &fault{answer: relayed(status, resp, body), status: status, err: err}
	case status >= 400 && status < 500:
		return &fault{answer: relayed(status, resp, body), status: status, err: err, final: true}
	default:
		return &fault{answer: badGateway(side, id, err), status: status, err: err}
	}
}

// headers are built from scratch for every leg and attempt: a fresh id, so that
// a retried probe never meets its own first attempt (contract 1.6).
func (j *job) headers(leg string, attempt int) []engine.Header {
	return []engine.Header{
		{Name: "Content-Type", Value: "application/json"},
		{Name: "X-Request-Id", Value: fmt.Sprintf("ek-%s-%s%d", j.id, leg, attempt)},
	}
}

// estimate is the prompt's length before anyone counted it.
func (j *job) estimate() int {
	if j.prompt > 0 {
		return j.prompt
	}
	if n := j.req.PromptTokens; n > 0 {
		return n
	}
	if j.leg != nil && j.leg.Prompt != nil {
		return len(j.leg.Prompt) / bytesPerToken
	}
	return j.req.PromptBytes / bytesPerToken
}

// bytesPerToken is the usual length of a token of English text.
const bytesPerToken = 4

func (j *job) chat() bool { return j.req.Endpoint == mooncake.Chat }
