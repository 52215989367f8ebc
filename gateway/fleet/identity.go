package fleet

import (
	"maps"
	"time"
)

// An engine is who answers at its host:port, and a process that comes back there
// is the same engine: its ranks keep their numbers and find their load. Only a
// source that knows better, as Kubernetes does, tells two engines apart that had
// one address after the other: by their incarnation. Then nothing of the first is
// the second's, least of all its KV.

// drop takes an engine out of the lists; its requests finish. dead: there is no
// such engine any more, and no KV of it. It is called with f.mu held.
func (f *Fleet) drop(in *instance, dead bool) {
	now := time.Now()
	delete(f.instances, in.key())
	f.abandon(in.key())
	f.distrust(in, dead)
	if in.incarnation == "" {
		return
	}
	for _, r := range ranksOf(in) {
		name := in.target(r).ID
		if id, ok := f.ids[name]; ok && in.decodes() {
			delete(f.ids, name)
			f.bygone[in.incarnation+" "+name] = bygone{id, now}
		}
	}
	if dead {
		f.dead[in.incarnation] = now.Add(f.host.Settings().Limits.ProbeTimeout + in.profile.KVHoldTimeout)
	}
	maps.DeleteFunc(f.bygone, func(_ string, b bygone) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(f.dead, func(_ string, until time.Time) bool { return now.After(until) })
}

// number is a rank's identity on the board. It is called with f.mu held.
func (f *Fleet) number(in *instance, rank string) int32 {
	id, ok := f.ids[rank]
	if !ok {
		was := in.incarnation + " " + rank
		b, back := f.bygone[was]
		if id = b.id; !back {
			id = f.numbers
			f.numbers++
		}
		delete(f.bygone, was)
		f.ids[rank] = id
	}
	return id
}
