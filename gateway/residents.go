package gateway

import (
	"context"
	"time"

	"evenkeel/geo"
)

// room is what a decode rank of that region has for us: of slots and KV tokens,
// as much as a cautious owner uses; 0 slots: all (geo R35).
func (o *owners) room(region, rank string, slots int, kv int64) (int, int64) {
	if o == nil {
		return 0, kv
	}
	a := o.of(region)
	if a == nil {
		return 0, kv
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.cautious(time.Now()) {
		return 0, kv
	}
	limit := slots
	if !a.home {
		limit = int(a.share * float64(slots))
	}
	r := a.residents[rank]
	if kv > 0 {
		kv = max(1, kv-r.KVTokens)
	}
	return max(1, min(limit, slots-r.Requests)), kv
}

// cautious says whether others' requests may still run on the engines. Called
// with a.mu held.
func (a *area) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static: another may believe itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// scrapeResidents reads what runs on the area's ranks and is not ours.
func (o *owners) scrapeResidents(ctx context.Context, a *area) {
	ours := map[string]geo.Resident{}
	for _, r := range o.running(ctx, a.region) {
		ours[r.ID] = r
	}
	found := o.gw.residents(ctx, a.region)
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, r := range found {
		a.residents[id] = geo.Resident{ID: id, Requests: max(0, r.Requests-ours[id].Requests), KVTokens: max(0, r.KVTokens-ours[id].KVTokens)}
	}
}

// running is what our own requests hold of a region's ranks.
func (o *owners) running(ctx context.Context, region string) (list []geo.Resident) {
	for _, m := range o.gw.dispatcher.Status(ctx).Models {
		for _, w := range m.Workers {
			if w.Used > 0 && o.of(o.gw.fleet.regionOf(w.ID)) == o.areas[region] {
				list = append(list, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	return list
}
