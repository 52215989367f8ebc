package prefill

import (
	"errors"
	"time"
)

// The answers of Elsewhere.Where.
const (
	ToHere  Where = iota // here: the tier's own policy chooses the prefiller
	ToThere              // to another region: Acquire returns ErrElsewhere
	Waits                // nowhere yet; requests behind it may pass
	AllWait              // nowhere yet, and no other first attempt of its line can pass either
)

// ErrElsewhere is what Acquire returns for a request that goes to another region.
var ErrElsewhere = errors.New("prefill: the request goes to another region")

// elsewhere asks where a request goes, if there is a choice.
func (d *chooser) elsewhere(m *model, r *Request, since time.Time) Where {
	if r.Elsewhere == nil {
		return ToHere
	}
	h := Here{Model: m.name, Now: d.now, Round: d.queue.Round(), Tokens: d.tokensOf(r), Since: since, Local: d.local(m, r)}
	return r.Elsewhere.Where(&h)
}

// local measures all prefillers of a model in this region, for the choice of a region. r is the request that is
// decided; nil: there is none, and the prefillers are measured for a prompt of one token.
func (d *chooser) local(m *model, r *Request) Local {
	local := Local{Waiting: m.line.Fresh(), Tokens: int(m.line.Tokens()), Prefillers: d.prefillers[:0]}
	local.ArrivalsPerS, local.TTFTMs = m.pace.ArrivalsPerS(d.now), m.pace.TTFTMs()
	places := r != nil && r.Reserved || d.cfg.Places == nil || d.cfg.Places.Room()
	if r == nil {
		r = &Request{Model: m.name}
	}
	d.look(m, r, m.servers)
	for i, c := range m.servers {
		open, _ := c.account.Passes(d.now)
		if c.Mixed {
			open = d.mayPool(c, m.name)
		}
		prefiller := d.prefiller(c)
		prefiller.Candidate, prefiller.Live, prefiller.Open = d.view[i], c.Live && c.circuit.Allows(d.now), open && places
		if kvRoom, known := c.account.Room(d.now); known {
			prefiller.Room, prefiller.Filled = kvRoom, !open && places
		}
		prefiller.ResidualMs = float64(prefiller.Unanswered+1) * c.residual.Ms(d.now)
		prefiller.Samples = d.fit.Samples(m.name, c.Hardware)
		local.Prefillers = append(local.Prefillers, prefiller)
	}
	d.closeCrowded(m, local.Prefillers)
	d.prefillers = local.Prefillers
	return local
}

// Offers calls f with each model and what prefills it here, under the tier's
// lock.
func (t *Tier) Offers(f func(model string, l *Local)) {
	t.lock()
	defer t.unlock()
	for name, m := range t.models {
		if len(m.servers) > 0 {
			l := t.choose.local(m, nil)
			f(name, &l)
		}
	}
}

// Waiting is how many requests are in a model's arrival queue, without batch.
func (t *Tier) Waiting(model string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.models[model]; m != nil {
		return m.line.Fresh()
	}
	return 0
}

// offered reports whether another region may serve the request if no engine here can.
func (r *Request) offered() bool { return r.Elsewhere != nil && r.Elsewhere.Offered() }
