package prefill

import (
	"errors"
	"math"
	"time"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
)

// Elsewhere is what other regions could do for one request. Every call comes
// under the tier's lock: none may wait, do I/O or call the tier.
type Elsewhere interface {
	// Offered says whether another region serves the request's model.
	Offered() bool
	// Where is asked when it is the request's turn, at every event, as long as it
	// waits.
	Where(h *Here) Where
	// Takes says of one that stays whether a prefiller may have one more probe now.
	Takes(p *Prefiller) bool
	// Queued tells that a request of its model entered or left the arrival queue,
	// and how many are there now.
	Queued(now time.Time, entered bool, waiting int)
	// Stay tells that part of the request is served here, so that the rest is, too.
	Stay()
}

// Where a request goes.
type Where uint8

// The places.
const (
	ToHere  Where = iota // the tier's own policy says to which prefiller
	ToThere              // to another region: Acquire returns ErrElsewhere
	Waits                // those behind it may pass
	AllWait              // nor can anybody else go anywhere but a retry
)

// ErrElsewhere is Acquire's answer to a request that its Elsewhere took.
var ErrElsewhere = errors.New("prefill: the request goes to another region")

// Here is this region as a request finds it. It is valid during the call only.
type Here struct {
	Model  string
	Now    time.Time
	Round  uint64 // of decisions: nothing but what they charge changes within one
	Tokens int    // of the prompt
	Since  time.Time
	Local
}

// Local is what prefills a model here.
type Local struct {
	Prefillers   []Prefiller
	Waiting      int     // requests in the arrival queue
	Tokens       int     // of their prompts
	ArrivalsPerS float64 // of first attempts
	TTFTMs       float64 // median from a probe to its answer; 0: none came yet
}

// Prefiller is one candidate as it was measured.
type Prefiller struct {
	policy.Candidate
	Region     string      // empty: ours
	Live       bool        // and not out for its failures
	Open       bool        // its KV gate, the pool has room, and so has the decode side of its region
	Unanswered int         // our probes
	Held       int         // the same, and prompts that it still holds
	Foreign    int         // requests of others that wait there
	Pending    int         // all that waited there at the last scrape
	Ran        int         // all that ran there at the last scrape at which none waited
	Answered   int         // our probes that were answered since, less those sent
	MaxSeqs    int         // it runs at once; 0: nobody says
	Samples    int         // prefills that its line was learned from
	Filled     bool        // only its KV gate keeps it from prompts, and the gate is predicted to open
	Room       ledger.Room // zero: nobody knows
	ResidualMs float64     // that its probes, and one more, take beyond what is predicted; below 0: less
}

// elsewhere asks where a request goes, if there is a choice.
func (d *chooser) elsewhere(m *model, r *Request, since time.Time) Where {
	if r.Elsewhere == nil {
		return ToHere
	}
	h := Here{Model: m.name, Now: d.now, Round: d.queue.Round(), Tokens: d.tokensOf(r), Since: since, Local: d.local(m, r)}
	return r.Elsewhere.Where(&h)
}

// local measures all prefillers of a model for a request; nil: for none.
func (d *chooser) local(m *model, r *Request) Local {
	l := Local{Waiting: m.line.Fresh(), Tokens: int(m.line.Tokens()), Prefillers: d.prefillers[:0]}
	l.ArrivalsPerS, l.TTFTMs = m.pace.ArrivalsPerS(d.now), m.pace.TTFTMs()
	room := r != nil && r.Reserved || d.cfg.Places == nil || d.cfg.Places.Room()
	if r == nil {
		r = &Request{Model: m.name}
	}
	d.look(m, r, m.servers)
	for i, c := range m.servers {
		open, _ := c.account.Passes(d.now)
		p := d.prefiller(c)
		p.Candidate, p.Live, p.Open = d.view[i], c.Live && c.circuit.Allows(d.now), open && room
		if r, known := c.account.Room(d.now); known {
			p.Room, p.Filled = r, !open && room
		}
		p.ResidualMs = float64(p.Unanswered+1) * c.residual.Ms(d.now)
		p.Samples = d.fit.Samples(m.name, c.Hardware)
		l.Prefillers = append(l.Prefillers, p)
	}
	d.closeCrowded(m, l.Prefillers)
	d.prefillers = l.Prefillers
	return l
}

// prefiller is what decides how many probes a candidate may have.
func (d *chooser) prefiller(c *candidate) Prefiller {
	ran, answered := c.account.SinceIdle()
	p := Prefiller{
		Region: c.Region, Unanswered: c.account.Leases[ledger.Probing], Held: c.account.Live(),
		Ran: int(math.Ceil(ran)), Answered: answered,
	}
	if c.Profile != nil {
		p.MaxSeqs = c.Profile.MaxNumSeqs
	}
	if c.Limit > 0 {
		p.Foreign = max(0, d.cfg.Push.MaxUnanswered-c.Limit) // fresh in service: so many fewer
	}
	if foreign, all, ok := c.account.Strangers(d.now); ok {
		p.Foreign, p.Pending = max(p.Foreign, int(math.Ceil(foreign))), int(math.Ceil(all))
	}
	p.Foreign = max(p.Foreign, c.account.Shared.Unanswered)
	return p
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

// Waiting is how many requests are in a model's arrival queue.
func (t *Tier) Waiting(model string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.models[model]; m != nil {
		return m.line.Fresh()
	}
	return 0
}

// offered says that another region may serve what nobody here can.
func (r *Request) offered() bool { return r.Elsewhere != nil && r.Elsewhere.Offered() }
