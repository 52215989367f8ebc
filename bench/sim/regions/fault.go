package regions

import (
	"slices"

	"evenkeel/engine"
	"evenkeel/geo"
)

// link brings something from one dispatcher to another. Between two that are
// parted it waits, as TCP does; what a dead one sent before is not unsaid.
func (s *simulation) link(from, to *dispatcher, arrive func()) {
	if s.parted(from, to) {
		s.held = append(s.held, heldMessage{from, to, arrive})
		return
	}
	s.after(s.scenario.RTTMs[from.region][to.region]/2, arrive)
}

type heldMessage struct {
	from, to *dispatcher
	arrive   func()
}

func (s *simulation) parted(a, b *dispatcher) bool { return s.cut[pair(a.region, b.region)] }

func pair(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// plan lets a fault come and go. Under a central arm there is one dispatcher,
// and what happens to the others happens to nobody.
func (f *Fault) plan(s *simulation) {
	i := slices.IndexFunc(s.dispatchers, func(d *dispatcher) bool { return d.region == f.Region })
	if i < 0 {
		return
	}
	d := s.dispatchers[i]
	at := func(seconds float64, run func()) { s.after(1000*seconds, run) }
	switch f.Kind {
	case Dies:
		at(f.AtS, d.die)
		at(f.AtS+f.ForS, func() { s.start(d) })
	case Drains:
		at(f.AtS, func() { d.draining = true })
		at(f.AtS+f.ForS, func() { d.draining = false })
	case Upgrades:
		at(f.AtS, func() { d.major++ })
		at(f.AtS+f.ForS, func() { d.major-- })
	case Partition:
		other := f.Other
		at(f.AtS, func() { s.cut[pair(f.Region, other)] = true })
		at(f.AtS+f.ForS, func() {
			delete(s.cut, pair(f.Region, other))
			held := s.held
			s.held = nil
			for _, m := range held {
				s.link(m.from, m.to, m.arrive)
			}
		})
	}
}

// die takes all with it that the dispatcher had. Its engines stop what they did
// for it, and nobody else has them.
func (d *dispatcher) die() {
	d.dead = true
	for _, v := range slices.Clone(d.live) {
		if v.state == over {
			continue // ended with another
		}
		origin := v.from
		if origin == nil {
			d.s.end(v.r, failed)
			continue
		}
		d.abandon(v)
		attempt := v.attempt
		d.s.link(d, origin.d, func() {
			switch {
			case origin.attempt != attempt || origin.state != forwarded:
			case origin.answered:
				origin.forward.End(geo.OutcomeLost)
				d.s.end(origin.r, lost)
			default:
				origin.d.comesBack(origin, attempt, &engine.Error{Target: d.id, Phase: engine.PhaseHead, Sent: true, Err: errSilent})
			}
		})
	}
}
