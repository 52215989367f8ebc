package regions

import (
	"evenkeel/bench/lab/reftext"
	"evenkeel/geo"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// request is what a client sent, until it ends.
type request struct {
	client *client
	id     string
	keys   []index.Key // of the prompt
	all    []index.Key // and its answer
	tokens int
	output int
	key    uint64 // where it stands on a ring
	then   func(ok bool)

	sentAt     float64
	attempt    int // what an abandoned attempt still says is not heard
	forwards   int
	executions int
	ends       int
	first      bool // the client has its first token
	abroad     bool // a peer has answered it
	visits     []*visit
}

// visit is a request at one dispatcher.
type visit struct {
	r       *request
	d       *dispatcher
	from    *visit  // at the dispatcher that forwarded it
	attempt int     // of the request, when the visit began
	arrived float64 // its place in the queue, kept when it comes back
	live    int     // its place among the dispatcher's visits

	state    state
	query    *geo.RoutingQuery // where it goes
	withdraw func()            // takes it out of the queue
	lease    *prefill.Lease
	refused  error
	place    int // of its replica
	job      *job
	forward  *geo.Forward
	movedAt  float64 // when it was forwarded
	answered bool
}

// state of a visit.
type state uint8

const (
	queued  state = iota
	decided       // by the tier, in this moment
	running
	forwarded
	over
)

// current says that the visit still speaks for its request.
func (v *visit) current() bool { return v.state != over && v.attempt == v.r.attempt }

// send lets a client ask the nearest dispatcher that takes clients.
func (s *simulation) send(r *request) {
	s.requests++
	r.id = s.requestID()
	r.sentAt = s.now
	r.client.live++
	s.meter.sent++
	s.offer(r)
}

// offer looks for a dispatcher, again after a second when there is none.
func (s *simulation) offer(r *request) {
	d := s.nearest(r.client.region)
	if d == nil {
		s.after(1000, func() { s.offer(r) })
		return
	}
	s.after(s.scenario.RTTMs[r.client.region][d.region]/2, func() {
		if d.dead {
			s.offer(r)
			return
		}
		d.enqueue(d.admit(r, nil), false)
	})
}

// nearest dispatcher that is up and not draining.
func (s *simulation) nearest(region int) *dispatcher {
	var best *dispatcher
	for _, d := range s.dispatchers {
		if !d.dead && !d.draining && (best == nil || s.scenario.RTTMs[region][d.region] < s.scenario.RTTMs[region][best.region]) {
			best = d
		}
	}
	return best
}

func (s *simulation) requestID() string {
	const digits = "0123456789abcdef"
	var id [8]byte
	x := reftext.Mix(s.salt ^ uint64(s.requests))
	for i := range id {
		id[i] = digits[x&15]
		x >>= 4
	}
	return string(id[:])
}

// firstToken is said by an engine. It reaches the dispatcher once what lies
// between prefill and a first token beside the GPU is over.
func (s *simulation) firstToken(r *replica, j *job) {
	if j.gone {
		return
	}
	v := j.v
	if v.r.sentAt >= s.scenario.warmMs() && v.r.executions == 1 {
		s.meter.hit += float64(j.hit)
		s.meter.prompt += float64(v.r.tokens)
	}
	s.after(r.lag()+v.d.distance(r), func() {
		if v.current() {
			v.d.first(v)
		}
	})
}

func (s *simulation) lastToken(r *replica, j *job) {
	v := j.v
	s.after(r.lag()+v.d.distance(r), func() {
		if v.state == running {
			v.d.last(v)
		}
	})
}

// lag is the part of a first token's time in which no GPU works for it.
func (r *replica) lag() float64 { return max(0, r.T0Ms-r.BusyMs) }

// tell brings an event of the request from a dispatcher towards the client.
func (s *simulation) tell(v *visit, what func(v *visit)) {
	if v.from == nil {
		s.after(s.scenario.RTTMs[v.r.client.region][v.d.region]/2, func() { what(nil) })
		return
	}
	from, attempt := v.from, v.attempt
	s.link(v.d, from.d, func() {
		if from.state == forwarded && from.attempt == attempt {
			what(from)
		}
	})
}

// heard is the first token, on its way to the client; cached is how much of the
// prompt its engine found in its cache.
func (s *simulation) heard(v *visit, cached int) {
	s.tell(v, func(at *visit) {
		if at != nil {
			at.d.relayed(at, cached)
			s.heard(at, cached)
			return
		}
		r := v.r
		if r.ends > 0 || r.first {
			return
		}
		r.first = true
		s.meter.first(s.now-r.sentAt, s.now)
	})
}

// done is the last token, on its way to the client.
func (s *simulation) done(v *visit) {
	s.tell(v, func(at *visit) {
		if at != nil {
			at.r.abroad = true
			at.forward.End(geo.OutcomeOK)
			at.d.end(at)
			s.done(at)
			return
		}
		s.end(v.r, ok)
	})
}

// outcome of a request.
type outcome uint8

const (
	ok     outcome = iota
	failed         // its dispatcher died, or knew nobody who serves it
	lost           // the peer was lost after its first token
)

// end tells the client, and whoever still works for it.
func (s *simulation) end(r *request, how outcome) {
	r.ends++
	if r.ends > 1 {
		s.meter.violations++
		return
	}
	s.meter.ended(r, how, s.now)
	if r.forwards > 1 || r.executions > 2 {
		s.meter.violations++
	}
	r.attempt++
	for _, v := range r.visits {
		if v.state != over {
			v.d.abandon(v)
		}
	}
	r.client.live--
	if how == ok {
		r.then(true)
		return
	}
	s.after(1000, func() { r.then(false) })
}
