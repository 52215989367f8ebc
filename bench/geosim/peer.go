package geosim

import (
	"evenkeel/geo/policy"
	"evenkeel/prefill/index"
)

// peer is what a dispatcher knows of another one.
type peer struct {
	to       *dispatcher
	slot     index.Slot // in the snapshot
	rtt      policy.RTT
	reserved policy.Reservations
	distrust policy.Distrust

	offer    policy.Offer
	major    int
	boot     int
	draining bool
	probed   bool
	goodAt   float64
	misses   int
	good     int // answers in a row
	down     bool

	failures  int // fallbacks in a row
	openUntil float64
	openFor   float64
}

const (
	rttAlpha      = 0.3
	probeTimeout  = 500.0
	mostMisses    = 3
	goodToReturn  = 2
	mostFailures  = 5
	leastOpen     = 1000.0
	mostOpen      = 30_000.0
	probeJitter   = 0.1
	requestBytes  = 600 // of a forward, beside its prompt
	bytesPerToken = 4
	bytesPerEvent = 180
)

// place is the peer as the policy sees it.
func (d *dispatcher) place(p *peer) policy.Place {
	p.reserved.Expire(d.s.now, d.s.probeMs)
	n, tokens := p.reserved.Reserved()
	rtt, _ := p.rtt.Ms()
	x := policy.Peer{
		ID: p.to.id, Probed: p.probed, Down: p.down, Major: p.major, AgeMs: d.s.now - p.goodAt, IntervalMs: d.s.probeMs + rtt,
		Draining: p.draining, Offers: true, CircuitOpen: d.s.now < p.openUntil, Offer: p.offer, RTTMs: rtt,
		Reserved: n, UnseenTokens: tokens, DistrustMs: p.distrust.Ms(d.s.now),
	}
	switch d.s.arm.blindTo {
	case "rtt":
		x.RTTMs = 0
	case "wait":
		x.UnseenTokens, x.Offer.QueuedTokens, x.Offer.QueueWaitMs = 0, 0, 0
	}
	if p.major != d.major {
		x.Major = -1
	}
	return d.policy.PeerPlace(&x)
}

// probe asks a peer, again and again.
func (d *dispatcher) probe(p *peer) {
	s := d.s
	wait := s.probeMs * (1 - probeJitter + 2*probeJitter*s.rng.Float64())
	s.after(wait, func() { d.probe(p) })
	if d.dead {
		return
	}
	sentAt, boot, answered := s.now, d.boot, false
	rtt := s.scenario.RTTMs[d.region][p.to.region]
	s.after(max(probeTimeout, 3*rtt), func() {
		if !answered && d.boot == boot && !d.dead {
			d.missed(p)
		}
	})
	if s.parted(d, p.to) {
		return
	}
	s.after(rtt/2, func() {
		if p.to.dead {
			return
		}
		offer, major, draining, theirs := p.to.offer(), p.to.major, p.to.draining, p.to.boot
		s.after(rtt/2, func() {
			if s.parted(d, p.to) || d.dead || d.boot != boot {
				return
			}
			answered = true
			if theirs != p.boot && p.boot != 0 { // another process: what it had is gone
				d.snapshot.Clear(p.slot, index.Removed)
				p.reserved.Forget()
			}
			p.boot, p.offer, p.major, p.draining, p.goodAt = theirs, offer, major, draining, s.now
			p.rtt.Add(s.now-sentAt, 0, false)
			p.reserved.Answered(sentAt)
			p.misses = 0
			if p.good++; p.good >= goodToReturn {
				p.down = false
			}
			p.probed = true
			d.decide()
		})
	})
}

func (d *dispatcher) missed(p *peer) {
	p.good = 0
	if p.misses++; p.misses < mostMisses || p.down {
		return
	}
	p.down = true
	for _, v := range append([]*visit(nil), d.live...) {
		if v.state == forwarded && d.peers[v.place] == p && !v.answered {
			d.fallBack(v, p)
		}
	}
	d.decide()
}

// forward sends a request to a peer.
func (d *dispatcher) forward(v *visit, p *peer) {
	s := d.s
	v.state, v.movedAt, v.answered = forwarded, s.now, false
	for i := range d.peers {
		if d.peers[i] == p {
			v.place = i
		}
	}
	v.r.forwards++
	p.reserved.Forwarded(s.now, v.fresh)
	d.snapshot.Insert(p.slot, v.r.keys)
	s.meter.forward(v.r, s.now)
	attempt := v.attempt
	s.link(d, p.to, func() {
		if v.attempt != attempt || !v.current() {
			return
		}
		refuse := func(busy bool) {
			s.link(p.to, d, func() {
				if v.attempt == attempt && v.state == forwarded && !v.answered {
					if !busy {
						d.failure(p)
					}
					d.fallBack(v, p)
					d.decide()
				}
			})
		}
		switch {
		case p.to.dead, p.to.draining, p.to.major != d.major:
			refuse(false)
		case !p.to.policy.Settings().Accepts(len(p.to.queue)):
			s.meter.busy++
			refuse(true)
		default:
			p.to.enqueue(p.to.admit(v.r, v))
		}
	})
}

// failure counts towards the circuit.
func (d *dispatcher) failure(p *peer) {
	if p.failures++; p.failures >= mostFailures {
		p.openFor = min(max(2*p.openFor, leastOpen), mostOpen)
		p.openUntil = d.s.now + p.openFor
		p.failures = mostFailures - 1 // one more trial
	}
}

// fallBack puts a forwarded request into the own queue, at its old place.
func (d *dispatcher) fallBack(v *visit, _ *peer) {
	v.r.attempt++
	v.attempt = v.r.attempt
	d.s.meter.fallbacks++
	for _, other := range v.r.visits {
		if other != v && other.state != over {
			d.s.link(d, other.d, func() {
				if other.state != over {
					other.d.abandon(other)
				}
			})
		}
	}
	v.q.Stay, v.hitsAt = true, -hitsFor
	d.enqueue(v)
}

// relayed takes a first token from a peer.
func (d *dispatcher) relayed(v *visit) {
	p := d.peers[v.place]
	v.answered = true
	p.failures, p.openFor = 0, 0
	p.distrust.Add(d.s.now, d.s.now-v.movedAt-v.predict)
	for _, other := range v.r.visits {
		if other.from == v && other.job != nil && other.attempt == v.attempt && other.job.hit+blockTokens <= v.hit {
			d.snapshot.Correct(p.slot, v.r.keys, other.job.hit/blockTokens)
			d.snapshot.Insert(p.slot, v.r.keys)
		}
	}
}
