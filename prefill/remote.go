package prefill

import (
	"errors"
	"time"
)

// The answers of RemoteRegions.Where.
const (
	ToHere     Where = iota // the scheduler's own policy chooses the candidate
	ToThere                 // Acquire returns ErrElsewhere
	WaitsAlone              // requests behind this one may be served
	ModelWaits              // all other first attempts for the model wait, too
)

// ErrElsewhere is returned by Acquire for a request that goes to another region.
var ErrElsewhere = errors.New("prefill: the request goes to another region")

func (d *chooser) askRegions(m *model, r *Request, waitingSince time.Time) Where {
	if r.Remote == nil {
		return ToHere
	}
	here := Here{Model: m.name, Now: d.now, Round: d.queue.Round(), Tokens: d.tokensOf(r), Since: waitingSince, Local: d.localState(m, r)}
	return r.Remote.Where(&here)
}

// localState measures all candidates of a model in this region, for the choice between regions.
// Without a request r, it measures for a prompt of one token. The result's Prefillers are valid
// until the next call.
func (d *chooser) localState(m *model, r *Request) Local {
	// Without retries, which have their place already, and batch requests, which use only what others
	// leave.
	local := Local{Waiting: m.queue.OnlineFirstAttempts(), Tokens: int(m.queue.Tokens()), Prefillers: d.prefillers[:0]}
	local.ArrivalsPerS = m.throughput.ArrivalsPerS(d.now)
	local.TTFTMs = m.throughput.TTFTMs()
	isRetry := r != nil && r.HasPlace
	hasPlace := isRetry || d.cfg.Places == nil || d.cfg.Places.Room() // nil: the pool has no bound
	if r == nil {
		r = &Request{Model: m.name} // an empty prompt counts as one token
	}
	d.fillView(m, r, m.candidates)
	for i, c := range m.candidates {
		prefiller := d.measuredPrefiller(m, c, hasPlace)
		prefiller.Engine = d.view[i]
		local.Prefillers = append(local.Prefillers, prefiller)
	}
	d.closeWithoutDecodeSlot(m, local.Prefillers)
	d.prefillers = local.Prefillers
	return local
}

// measuredPrefiller leaves out Engine. Without a place in the pool for the request, the candidate
// is not open.
func (d *chooser) measuredPrefiller(m *model, c *candidate, hasPlace bool) Prefiller {
	gateOpen, _ := c.load.MayPass(d.now)
	if c.Aggregated { // no KV gate, but a bounded pool
		gateOpen = d.mayEnterPool(c, m.name)
	}
	prefiller := d.prefiller(c)
	prefiller.Live = c.Live && c.takesPrompts(d.now)
	prefiller.Open = gateOpen && hasPlace
	if kvRoom, known := c.load.RoomForecast(d.now); known {
		prefiller.Room = kvRoom // also while the gate is open: a long prompt may have no room yet
		onlyGateKeepsAway := !gateOpen && hasPlace
		prefiller.KVGateWillOpen = onlyGateKeepsAway
	}
	// Each unanswered probe, and this request's, will probably take longer by the residual.
	prefiller.ResidualMs = float64(prefiller.Unanswered+1) * c.residual.Ms(d.now)
	prefiller.Samples = d.fit.Samples(m.name, c.Hardware)
	return prefiller
}

// Offers calls f, under the scheduler's lock, for each model that this region serves.
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

// Waiting is the length of a model's arrival queue, without batch requests and retries.
func (s *Scheduler) Waiting(model string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[model]; m != nil {
		return m.queue.OnlineFirstAttempts()
	}
	return 0
}

func (r *Request) remoteMayServe() bool { return r.Remote != nil && r.Remote.Offered() }
