package prefill

import (
	"errors"
	"time"
)

// The answers of RemoteRegions.Where.
const (
	ToHere     Where = iota // this region serves the request: the scheduler's own policy chooses the candidate
	ToThere                 // another region serves the request: Acquire returns ErrElsewhere
	WaitsAlone              // the request waits, but requests behind the request may be served
	ModelWaits              // the request waits, and so do all other first attempts for its model
)

// ErrElsewhere is returned by Acquire for a request that goes to another region.
var ErrElsewhere = errors.New("prefill: the request goes to another region")

// askRegions asks the request's RemoteRegions in which region to serve it. Without RemoteRegions, it is served here. waitingSince is when
// the request entered the arrival queue.
func (d *chooser) askRegions(m *model, r *Request, waitingSince time.Time) Where {
	if r.Remote == nil {
		return ToHere
	}
	here := Here{Model: m.name, Now: d.now, Round: d.queue.Round(), Tokens: d.tokensOf(r), Since: waitingSince, Local: d.localState(m, r)}
	return r.Remote.Where(&here)
}

// localState measures all candidates of a model in this region, for the choice between regions. r is the request; nil: there is none, and
// the candidates are measured for a prompt of one token. If the request neither has a place in the pool of hand-offs nor can get one, no
// candidate is open (Prefiller.Open). At the end, the candidates whose prompts would wait for a decode slot are marked as not open, too.
// The result's Prefillers are valid until the next call.
func (d *chooser) localState(m *model, r *Request) Local {
	// Waiting and Tokens leave out retries, which have their place in the pool already, and batch requests, which use only what others
	// leave.
	local := Local{Waiting: m.queue.OnlineFirstAttempts(), Tokens: int(m.queue.Tokens()), Prefillers: d.prefillers[:0]}
	local.ArrivalsPerS = m.throughput.ArrivalsPerS(d.now)
	local.TTFTMs = m.throughput.TTFTMs()
	isRetry := r != nil && r.HasPlace                                 // a retry has its place in the pool of hand-offs already
	hasPlace := isRetry || d.cfg.Places == nil || d.cfg.Places.Room() // Places nil: the pool has no bound
	if r == nil {
		r = &Request{Model: m.name} // an empty prompt counts as one token
	}
	d.fillView(m, r, m.candidates) // computes the policy's indicators of each candidate for this prompt, such as its backlog
	for i, c := range m.candidates {
		prefiller := d.measuredPrefiller(m, c, hasPlace)
		prefiller.Engine = d.view[i]
		local.Prefillers = append(local.Prefillers, prefiller)
	}
	d.closeWithoutDecodeSlot(m, local.Prefillers)
	d.prefillers = local.Prefillers
	return local
}

// measuredPrefiller returns the state of a candidate for localState, without its policy indicators (Engine). hasPlace says that the request
// has, or can get, a place in the pool of hand-offs. Without a place, the candidate is not open, even if its KV gate is. This gate keeps
// new prompts from an engine whose KV cache is full.
func (d *chooser) measuredPrefiller(m *model, c *candidate, hasPlace bool) Prefiller {
	gateOpen, _ := c.load.MayPass(d.now)
	if c.Aggregated { // an aggregated candidate has no KV gate, but a bounded pool in which its requests wait
		gateOpen = d.mayEnterPool(c, m.name)
	}
	prefiller := d.prefiller(c)
	prefiller.Live = c.Live && c.takesPrompts(d.now)
	prefiller.Open = gateOpen && hasPlace
	if kvRoom, known := c.load.RoomForecast(d.now); known {
		prefiller.Room = kvRoom                    // set also while the gate is open: a long prompt may have no room yet
		onlyGateKeepsAway := !gateOpen && hasPlace // the gate opens when the KV cache has room, which is predicted
		prefiller.KVGateWillOpen = onlyGateKeepsAway
	}
	// residual is by how much a prefill recently took longer than predicted. Each unanswered probe will probably take longer by this,
	// too, and so will the prompt of this request.
	prefiller.ResidualMs = float64(prefiller.Unanswered+1) * c.residual.Ms(d.now)
	prefiller.Samples = d.fit.Samples(m.name, c.Hardware)
	return prefiller
}

// Offers calls f, under the scheduler's lock, for each model that this region serves, with the state of its candidates.
func (s *Scheduler) Offers(f func(model string, l *Local)) {
	s.lock()
	defer s.unlock()
	for name, m := range s.models {
		if len(m.candidates) > 0 {
			l := s.choose.localState(m, nil)
			f(name, &l)
		}
	}
}

// Waiting is the number of requests in a model's arrival queue, without batch requests and without retries, which have their place in the
// pool of hand-offs already.
func (s *Scheduler) Waiting(model string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[model]; m != nil {
		return m.queue.OnlineFirstAttempts()
	}
	return 0
}

// remoteMayServe reports whether another region may serve the request if no engine of this region can.
func (r *Request) remoteMayServe() bool { return r.Remote != nil && r.Remote.Offered() }
