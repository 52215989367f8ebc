package regions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/url"
	"time"

	"evenkeel/engine"
	"evenkeel/geo"
)

const (
	requestBytes  = 600 // of a forward, beside its prompt
	bytesPerToken = 4
	bytesPerEvent = 180
)

// nowhere is the address of every peer: nothing is sent over HTTP.
var nowhere = &engine.Target{URL: &url.URL{Scheme: "http", Host: "simulated"}}

// start of virtual time: not the zero time, which means never.
var start = time.Unix(1_000_000_000, 0)

// time is virtual time as the server counts it.
func (s *simulation) time() time.Time {
	return start.Add(time.Duration(math.Round(s.now * float64(time.Millisecond))))
}

// process is one run of a dispatcher, and its clock. What it plans does not happen
// once it is dead.
type process struct {
	d    *dispatcher
	boot int
}

func (p process) alive() bool { return !p.d.dead && p.d.boot == p.boot }

// Now, After and Spread are geo.Clock's.
func (p process) Now() time.Time { return p.d.s.time() }

// After plans a call.
func (p process) After(in time.Duration, f func()) (stop func() bool) {
	open := true
	p.d.s.after(float64(in)/float64(time.Millisecond), func() {
		if open && p.alive() {
			open = false
			f()
		}
	})
	return func() bool {
		was := open
		open = false
		return was
	}
}

// Spread is one of the seed's numbers.
func (p process) Spread() float64 { return p.d.s.rng.Float64() }

// every calls f now and again and again.
func (p process) every(ms float64, f func()) {
	if p.alive() {
		f()
		p.d.s.after(ms, func() { p.every(ms, f) })
	}
}

// link brings the probes of a dispatcher to a peer.
type link struct {
	process
	to *dispatcher
}

var errSilent = errors.New("no answer in time")

// Ask is geo.Link's. A dead peer is silent, and so is one from which we are parted.
func (l *link) Ask(_ context.Context, question []byte, limit time.Duration, answered func(geo.ProbeOutcome)) {
	s, d, sentAt := l.d.s, l.d, l.d.s.now
	open := true
	tell := func(e geo.ProbeOutcome) {
		if open && l.alive() {
			open = false
			answered(e)
		}
	}
	s.after(float64(limit)/float64(time.Millisecond), func() { tell(geo.ProbeOutcome{Err: errSilent}) })
	if s.parted(d, l.to) {
		return
	}
	way := s.scenario.RTTMs[d.region][l.to.region] / 2
	s.after(way, func() {
		if l.to.dead {
			return
		}
		text, refusal := l.to.peers.AnswerProbe(question, s.time())
		if refusal != nil {
			tell(geo.ProbeOutcome{Err: errors.New(refusal.Message)})
			return
		}
		text = l.heard(text)
		s.after(way, func() {
			if !s.parted(d, l.to) {
				tell(geo.ProbeOutcome{Text: text, RoundTrip: l.trip(sentAt)})
			}
		})
	})
}

// heard is what arrives of an answer: where one of the two was upgraded, it names
// another major version; where an arm is blind to the wait at peers, there is none.
func (l *link) heard(text []byte) []byte {
	if l.d.major != l.to.major {
		text = bytes.Replace(text, []byte(`"v":"1.`), []byte(`"v":"2.`), 1)
	}
	if l.d.s.arm.blindTo != "wait" {
		return text
	}
	var answer map[string]any
	if json.Unmarshal(text, &answer) != nil {
		return text
	}
	if offers, ok := answer["models"].(map[string]any); ok {
		for _, one := range offers {
			if offer, ok := one.(map[string]any); ok {
				offer["queue_wait_ms"], offer["queued_new_tokens"] = 0, 0
			}
		}
	}
	text, _ = json.Marshal(answer) // of what was read
	return text
}

// trip is how long an answer took, none for an arm that is blind to it.
func (l *link) trip(sentAt float64) time.Duration {
	if l.d.s.arm.blindTo == "rtt" {
		return 0
	}
	return time.Duration((l.d.s.now - sentAt) * float64(time.Millisecond))
}

// Warm and Close are geo.Link's.
func (l *link) Warm(context.Context, time.Duration) error { return nil }

// Close has nothing to close.
func (l *link) Close() {}

// forward carries a request to a peer.
func (d *dispatcher) forward(v *visit, f *geo.Forward) {
	s, to := d.s, d.s.named(f.PeerID())
	v.state, v.forward, v.movedAt, v.answered = forwarded, f, s.now, false
	v.r.forwards++
	f.SetCarrier(v)
	f.Written()
	s.meter.forward(v.r, s.now)
	attempt := v.attempt
	s.link(d, to, func() {
		if v.attempt != attempt || !v.current() {
			return
		}
		var err error
		if to.dead {
			err = &engine.Error{Target: to.id, Phase: engine.PhaseConnect, Err: errSilent}
		} else if reject := to.receive(v); reject != "" {
			err = geo.RejectedError(reject)
		} else {
			return
		}
		s.link(to, d, func() { d.comesBack(v, attempt, err) })
	})
}

// Abort and Bytes are geo.Carrier's: the peer is lost.
func (v *visit) Abort() {
	attempt := v.attempt
	v.d.s.after(0, func() { v.d.comesBack(v, attempt, engine.ErrAborted) })
}

// Bytes is what the forward took there.
func (v *visit) Bytes() (out, in int64) { return requestBytes + bytesPerToken*int64(v.r.tokens), 0 }

// comesBack puts a forward that gave its client nothing into the own queue, at its
// old place, and ends what is left of it elsewhere.
func (d *dispatcher) comesBack(v *visit, attempt int, err error) {
	if v.attempt != attempt || v.state != forwarded || v.answered || d.dead {
		return
	}
	v.forward.Fail(err)
	v.r.attempt++
	v.attempt = v.r.attempt
	d.s.meter.count(&d.s.meter.fallbacks, d.s.now)
	for _, other := range v.r.visits {
		if other != v && other.state != over {
			d.s.link(d, other.d, func() {
				if other.state != over {
					other.d.abandon(other)
				}
			})
		}
	}
	d.enqueue(v, true)
}

// relayed takes a first token from a peer, which found so much of the prompt in a
// cache.
func (d *dispatcher) relayed(v *visit, cached int) {
	v.answered = true
	v.forward.AnswerBegun(false, cached)
}
