package gateway

import (
	"context"
	"hash/fnv"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
)

// room is what a decode rank has for us: of its slots those that others do not
// hold who owned its group before, 0 being all, and the KV tokens of these. Of a
// rank that nobody has looked at yet it is one slot (geo R35).
func (s *groups) room(group, rank string, slots int) (limit int, others int64) {
	a := s.of(group)
	if a == nil || !a.cautious(time.Now()) {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	r, known := a.others[rank]
	if !known {
		return 1, 0
	}
	return max(1, slots-r.Requests), r.KVTokens
}

// cautious says whether others' requests may still run on the group's engines.
func (a *decodeGroup) cautious(now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.adopted.IsZero() && now.Before(a.adopted.Add(a.hold))
}

// countOthers reads what runs on the ranks of groups that were taken over of
// late, or are about to be, and is not ours.
func (s *groups) countOthers(ctx context.Context, now time.Time) {
	counted := false
	for name, a := range *s.all.Load() {
		if a.view.Load().Phase != lease.Starting && !a.cautious(now) {
			continue
		}
		found, silent := s.gw.others(ctx, func(in *instance) bool { return in.conf.Group == name }, s.running(ctx, name))
		a.mu.Lock()
		note(a.others, found, silent)
		a.mu.Unlock()
		counted = true
	}
	if counted {
		s.gw.fleet.publish()
	}
}

// running is what our own requests hold of a group's ranks.
func (s *groups) running(ctx context.Context, name string) (list []geo.Resident) {
	for _, m := range s.gw.dispatcher.Status(ctx).Models {
		for _, w := range m.Workers {
			if r := s.gw.fleet.rank(w.ID); w.Used > 0 && r != nil && r.area != nil && r.area.name == name {
				list = append(list, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	return list
}

// sumOf is a short sum of a name.
func sumOf(name string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails, by its documentation
	return h.Sum32()
}
