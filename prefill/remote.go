package prefill

import (
	"errors"
	"time"
)

// The answers of RemoteRegions.Where.
const (
	ToHere  Where = iota // this region serves the request: the scheduler's own policy chooses the candidate
	ToThere              // another region serves the request: Acquire returns ErrElsewhere
	Waits                // the request waits; requests behind it may still be served
	AllWait              // the request waits, and so do all other first attempts for its model
)

// ErrElsewhere is returned by Acquire for a request that goes to another region.
var ErrElsewhere = errors.New("prefill: the request goes to another region")

// elsewhere asks the request's RemoteRegions in which region to serve it. Without RemoteRegions, it is served here.
func (d *chooser) elsewhere(m *model, r *Request, since time.Time) Where {
	if r.Remote == nil {
		return ToHere
	}
	here := Here{Model: m.name, Now: d.now, Round: d.queue.Round(), Tokens: d.tokensOf(r), Since: since, Local: d.local(m, r)}
	return r.Remote.Where(&here)
}

// local measures all candidates of a model in this region, for the choice between regions. r is the request; nil: no
// request, the candidates are measured for a prompt of one token.
func (d *chooser) local(m *model, r *Request) Local {
	local := Local{Waiting: m.queue.Fresh(), Tokens: int(m.queue.Tokens()), Prefillers: d.prefillers[:0]}
	local.ArrivalsPerS = m.throughput.ArrivalsPerS(d.now)
	local.TTFTMs = m.throughput.TTFTMs()
	isRetry := r != nil && r.Reserved                                 // has its place in the pool of hand-offs already
	hasPlace := isRetry || d.cfg.Places == nil || d.cfg.Places.Room() // Places nil: the pool has no bound
	if r == nil {
		r = &Request{Model: m.name}
	}
	d.look(m, r, m.servers)
	for i, c := range m.servers {
		open, _ := c.load.Passes(d.now)
		if c.Mixed {
			open = d.mayPool(c, m.name)
		}
		prefiller := d.prefiller(c)
		prefiller.Engine = d.view[i]
		prefiller.Live = c.Live && c.circuit.Allows(d.now)
		prefiller.Open = open && hasPlace
		if kvRoom, known := c.load.Room(d.now); known {
			prefiller.Room = kvRoom
			prefiller.Filled = !open && hasPlace
		}
		prefiller.ResidualMs = float64(prefiller.Unanswered+1) * c.residual.Ms(d.now)
		prefiller.Samples = d.fit.Samples(m.name, c.Hardware)
		local.Prefillers = append(local.Prefillers, prefiller)
	}
	d.closeCrowded(m, local.Prefillers)
	d.prefillers = local.Prefillers
	return local
}

// Offers calls f, under the scheduler's lock, for each model with the candidates that prefill it in this region.
func (s *Scheduler) Offers(f func(model string, l *Local)) {
	s.lock()
	defer s.unlock()
	for name, m := range s.models {
		if len(m.servers) > 0 {
			l := s.choose.local(m, nil)
			f(name, &l)
		}
	}
}

// Waiting is the number of requests in a model's arrival queue, without batch requests.
func (s *Scheduler) Waiting(model string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[model]; m != nil {
		return m.queue.Fresh()
	}
	return 0
}

// offered reports whether another region may serve the request if no engine of this region can.
func (r *Request) offered() bool { return r.Remote != nil && r.Remote.Offered() }
